"""Pipeline parallel: each stage records the decoder layers that it has, and a request's rows are merged where its output is built.

    part = session.finish(request_id, num_tokens)        # on every stage: a StageRows, which travels
    merge_stages(parts)                                  # int16 [num_tokens - 1, L, K], of all stages or not at all

Legend: L decoder layers, M stored (MoE) layers of a stage, K top-k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable

import numpy as np
import numpy.typing as npt

from r3_pass.description import Tag
from r3_pass.errors import MissingRoutes, NoRouterFound, RefusedConfiguration

Rows = npt.NDArray[np.int16]


@dataclasses.dataclass(frozen=True, eq=False)
class StageRows:
    """What one pipeline stage has of a request.

    Attributes:
        request_id, num_tokens, start: as `finish` was asked.
        stage, num_stages: which stage, of how many.
        owned: decoder layers that this stage runs, those that do not route included.
        num_layers: L, of all stages.
        layers: decoder layer of each of the M columns.
        rows: int16 [n, M, K]; n = num_tokens - 1 - start, or fewer of an aborted request.
        finished: whether `finish` handed it out, so that no row is missing; `abort` hands out what there is.
        weights: tag of the weights that this stage has now.
    """

    request_id: Hashable
    num_tokens: int
    start: int
    stage: int
    num_stages: int
    owned: tuple[int, ...]
    num_layers: int
    layers: tuple[int, ...]
    rows: Rows
    finished: bool
    weights: Tag


def merge_stages(parts: Iterable[StageRows]) -> Rows:
    """One request's rows out of those of all stages, in any order.

    Returns: int16 [num_tokens - 1 - start, L, K], read-only, -1 in layers that do not route; of an aborted request, the rows
        that every stage has.
    Raises:
        MissingRoutes: a stage is missing, or handed out other than all rows of a finished request.
        RefusedConfiguration: parts of different requests, models or weights, or stages whose layers are not each decoder
            layer once.
        NoRouterFound: no stage has a layer that routes.
    """
    parts = sorted(_checked(parts), key=lambda part: part.stage)
    first = parts[0]
    _check_alike(parts)
    _check_layers(parts)
    num_rows = min(len(part.rows) for part in parts)
    if all(part.finished for part in parts):
        expected = first.num_tokens - 1 - first.start
        short = [part for part in parts if len(part.rows) != expected]
        if short:
            counts = ", ".join(f"stage {part.stage} has {len(part.rows)}" for part in short)
            raise MissingRoutes(
                f"request {first.request_id!r}: {expected} rows were expected of each stage; {counts}. Hand over what "
                "`finish` returned, uncut."
            )
    merged = np.full((num_rows, first.num_layers, max(part.rows.shape[2] for part in parts)), -1, np.int16)
    for part in parts:
        merged[:, list(part.layers), : part.rows.shape[2]] = part.rows[:num_rows]
    merged.flags.writeable = False
    return merged


def _checked(parts: Iterable[StageRows]) -> list[StageRows]:
    """Every stage once."""
    listed = list(parts)
    wrong = [type(part).__name__ for part in listed if not isinstance(part, StageRows)]
    if wrong:
        raise RefusedConfiguration(
            f"merge_stages takes what `finish` or `abort` returned on each stage, got {wrong[0]}. A stage that raised has no "
            "rows: abort the request on all of them."
        )
    if not listed:
        raise MissingRoutes("merge_stages got no part. Hand over one of each stage.")
    for part in listed:
        if part.rows.ndim != 3 or part.rows.dtype != np.int16 or part.rows.shape[1] != len(part.layers):
            raise RefusedConfiguration(
                f"stage {part.stage}: rows are {part.rows.dtype}{list(part.rows.shape)}, expected int16 [n, "
                f"{len(part.layers)}, K]. Hand over what `finish` returned, unchanged."
            )
    num_stages = listed[0].num_stages
    given = sorted(part.stage for part in listed)
    if given != list(range(num_stages)):
        raise MissingRoutes(
            f"request {listed[0].request_id!r}: parts of the stages {given} are there, expected one of each of {num_stages}. "
            "A stage that lags or died has not handed over its rows: wait for it, or run the request again."
        )
    return listed


def _check_alike(parts: list[StageRows]) -> None:
    first = parts[0]
    for name in ("request_id", "num_tokens", "start", "num_stages", "num_layers", "weights"):
        for part in parts[1:]:
            mine, theirs = getattr(first, name), getattr(part, name)
            if mine != theirs:
                raise RefusedConfiguration(
                    f"stages 0 and {part.stage} have different {name}: {mine!r} and {theirs!r}. Rows of one request, one model "
                    "and one version of the weights are expected" + _NEXT.get(name, ".")
                )


_NEXT = {
    "num_layers": "; if a stage cannot see how many decoder layers there are, pass num_layers= to attach.",
    "weights": "; call weights_changed on every stage between the same two steps.",
}


def _check_layers(parts: list[StageRows]) -> None:
    num_layers = parts[0].num_layers
    owned = sorted(layer for part in parts for layer in part.owned)
    if owned != list(range(num_layers)):
        listed = ", ".join(f"stage {part.stage} has {list(part.owned)}" for part in parts)
        raise RefusedConfiguration(
            f"each of {num_layers} decoder layers belongs to one stage, but {listed}. Correct stage_layers of the "
            "adapters' Deployment."
        )
    if not any(part.layers for part in parts):
        raise NoRouterFound(f"request {parts[0].request_id!r}: no stage has a layer that routes. The model is dense.")
    for part in parts:
        if not set(part.layers) <= set(part.owned):
            raise RefusedConfiguration(
                f"stage {part.stage} has rows of layers {list(part.layers)}, and owns {list(part.owned)}. Hand over what "
                "`finish` returned, unchanged."
            )
