"""The start-up self-test: recorded ids beside those of the uncompiled model.

The oracle knows nothing of graphs, forms or routers: it runs the model eagerly, watches every operator that selects something
(a dispatch mode) while a decoder layer runs (hooks), and asks whether one of the layer's selections among its experts returned
exactly what was recorded for it. A row that differs only in choices whose scores all but tie is told apart from one that is wrong.

Legend: T tokens of the probe, E experts, K top-k.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from r3_pass.errors import RefusedConfiguration
from r3_pass.structure import text_config

_SELECTIONS = {
    "topk",
    "max",
    "min",
    "argmax",
    "argmin",
    "sort",
    "argsort",
    "multinomial",
    "embedding",
    "index",
    "gather",
}

NEAR_TIE = 1e-4
"""A gap between two scores, relative to the spread of the row's scores, below which the one in place of the other is no error."""


@dataclasses.dataclass(frozen=True)
class LayerResult:
    """One stored layer of the probe.

    Attributes:
        rows, equal: tokens, and those whose recorded ids are the eager model's, in its order where that promises one (not
            `topk(sorted=False)`).
        near_ties: rows that differ, but in experts whose scores all but tie with those of the eager model's.
        selection: the operator whose choice it was, as the oracle saw it; "" if none fits.
        margin: smallest relative gap between the last chosen and the next score over all rows; nan if no scores were seen.
    """

    layer: int
    rows: int
    equal: int
    near_ties: int
    selection: str
    margin: float

    @property
    def ok(self) -> bool:
        return self.equal + self.near_ties == self.rows


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """Results by layer; `print` it for a table."""

    layers: tuple[LayerResult, ...]

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.layers)

    def __str__(self) -> str:
        lines = [
            f"layer {r.layer}: {r.equal} of {r.rows} rows equal"
            + (f", {r.near_ties} near-ties" if r.near_ties else "")
            + (f" ({r.selection}, smallest margin {r.margin:.1e})" if r.selection else " (no selection in it fits)")
            for r in self.layers
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """One selection: what it ran over (None if no scores), among how many, what it returned, and whether its order counts."""

    name: str
    scores: Tensor | None
    among: int | None
    ids: Tensor
    ordered: bool = True


class _Watch(TorchDispatchMode):
    """Collects what every selection returned, by the decoder layer that was running."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.running: list[int] = []
        self.choices: dict[int, list[_Choice]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        custom = namespace not in ("aten", "prims")
        if self.running and (custom or name in _SELECTIONS):
            scores = next((a for a in args if isinstance(a, Tensor)), None)
            scores = scores if scores is not None and scores.is_floating_point() and scores.dim() else None
            among = scores.shape[_dimension(name, args, kwargs or {})] if scores is not None and not custom else None
            ordered = name != "topk" or (kwargs or {}).get("sorted", args[4] if len(args) > 4 else True) is not False
            for ids in result if isinstance(result, tuple | list) else [result]:
                if isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dtype != torch.bool:
                    known_as = f"{namespace}::{name}" if custom else name
                    found = _Choice(known_as, scores, among, ids.detach().clone(), ordered)
                    self.choices.setdefault(self.running[-1], []).append(found)
        return result


def _dimension(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Which dimension a selection runs along."""
    place = 2 if name == "topk" else 1
    given = kwargs.get("dim", args[place] if len(args) > place else -1)
    return given if isinstance(given, int) and name not in ("multinomial", "embedding", "index", "gather") else -1


@contextlib.contextmanager
def _watching(layers: dict[int, nn.Module]) -> Iterator[_Watch]:
    watch = _Watch()
    handles = []
    for index, block in layers.items():

        def enter(*_: Any, index: int = index) -> None:
            watch.running.append(index)

        def leave(*_: Any) -> None:
            watch.running.pop()

        handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), watch:
            yield watch
    finally:
        for handle in handles:
            handle.remove()


def compare(
    layers: dict[int, nn.Module],
    experts: Mapping[int, int],
    recorded: npt.NDArray[np.int16],
    call: Callable[[], Any],
) -> SelfTest:
    """Run the model eagerly and hold the recorded rows against what its layers chose.

    Args:
        layers: decoder layer to its block, for each stored layer.
        experts: how many experts the modules of a layer show, where they do: a selection among fewer, or more than twice as many,
            is not its router's.
        recorded: int16 [T, num_layers, top_k], of the same batch.
        call: runs the model on the batch; what is compiled in it runs uncompiled.

    Raises: RefusedConfiguration if a row is wrong.
    """
    with _watching(layers) as watch:
        call()
    result = SelfTest(
        tuple(_judge(i, recorded[:, i], _among(watch.choices.get(i, []), experts.get(i))) for i in sorted(layers))
    )
    if not result.ok:
        raise RefusedConfiguration(
            f"the self-test failed: recorded ids differ from the uncompiled model's.\n{result}\nDo not train on these "
            "routes; r3_pass.explain(model, ...).dump(folder) has the graphs to look at."
        )
    return result


def probe(model: nn.Module, num_slots: int, device: torch.device) -> Tensor:
    """int64 [2, 8] token ids, the same in every process; fewer where there are fewer slots."""
    vocabulary = getattr(text_config(model), "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise RefusedConfiguration(
            "the model has no config with a vocab_size to make a batch from. Pass one: session.self_test(inputs)."
        )
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (2, max(1, min(8, num_slots // 2))), generator=generator).to(device)


def tokens_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """T of a batch: the elements of its first integer tensor, or the rows of its first one of floats [..., hidden]."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if not tensors:
        raise RefusedConfiguration("a batch for self_test needs a tensor: token ids, or hidden states [..., hidden].")
    ids = next((t for t in tensors if not t.is_floating_point()), None)
    return int(ids.numel()) if ids is not None else int(tensors[0].shape[:-1].numel())


def _among(choices: list[_Choice], experts: int | None) -> list[_Choice]:
    """Selections that can be among a layer's experts, zero experts or padding included."""
    if experts is None:
        return choices
    return [c for c in choices if c.among is None or experts <= c.among <= 2 * experts]


def _judge(layer: int, rows: npt.NDArray[np.int16], choices: list[_Choice]) -> LayerResult:
    """The choice that explains most rows, and what is wrong with the others."""
    width = int((rows >= 0).any(axis=0).sum())
    got = torch.from_numpy(rows[:, :width].astype(np.int64))
    best = LayerResult(layer, len(rows), 0, 0, "", float("nan"))
    for choice, ids in _candidates(choices, len(rows), width):
        ours, theirs = (got, ids) if choice.ordered else (_by_score(choice, got), _by_score(choice, ids))
        same = (ours == theirs).all(-1)
        ties = int((~same & _tied(choice, ours, theirs)).sum())
        gaps = _margins(choice, len(rows), width)
        margin = float(gaps.min()) if gaps is not None else float("nan")
        result = LayerResult(layer, len(rows), int(same.sum()), ties, choice.name, margin)
        if result.equal > best.equal or not best.selection:
            best = result
    return best


def _candidates(choices: list[_Choice], rows: int, width: int) -> Iterator[tuple[_Choice, Tensor]]:
    """int64 [T, width] of each selection that could be a router's: enough columns, or so many single choices in a row."""
    single: list[tuple[_Choice, Tensor]] = []
    for choice in choices:
        ids = choice.ids.cpu().long()
        if ids.numel() == rows:
            single.append((choice, ids.reshape(rows, 1)))
        if ids.dim() >= 1 and ids.shape[-1] >= width and ids.numel() == rows * ids.shape[-1]:
            yield choice, ids.reshape(rows, -1)[:, :width]
    for first in range(len(single) - width + 1):
        run = single[first : first + width]
        yield run[0][0], torch.cat([ids for _, ids in run], 1)


def _by_score(choice: _Choice, ids: Tensor) -> Tensor:
    """Each row's ids from the best score to the least, of equal ones the lowest id first; by id alone if there are no scores."""
    ids = ids.sort(-1).values
    if choice.scores is None or choice.scores.numel() % len(ids):
        return ids
    scores = choice.scores.detach().float().cpu().reshape(len(ids), -1)
    if not scores.shape[1] > int(ids.max()) or int(ids.min()) < 0:
        return ids
    return ids.gather(1, scores.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices)


def _tied(choice: _Choice, got: Tensor, ids: Tensor) -> Tensor:
    """bool [T]: the recorded ids are other experts, or in another order, but each scores as much as the one in its place."""
    none = torch.zeros(len(got), dtype=torch.bool)
    if choice.scores is None or choice.scores.numel() % len(got):
        return none
    scores = choice.scores.detach().float().cpu().reshape(len(got), -1)
    if not scores.shape[1] > int(torch.maximum(got, ids).max()) or int(got.min()) < 0:
        return none
    finite = torch.where(torch.isfinite(scores), scores, torch.zeros_like(scores))
    apart = (scores.gather(1, got) - scores.gather(1, ids)).abs()
    once = (got.sort(-1).values.diff(dim=-1) != 0).all(-1)
    return once & (apart <= NEAR_TIE * finite.std(-1, keepdim=True)).all(-1)


def _margins(choice: _Choice, rows: int, width: int) -> Tensor | None:
    """float [T]: smallest gap among the chosen scores and the next one, relative to the spread of the row."""
    if choice.scores is None or choice.scores.shape[-1] <= width or choice.scores.numel() % rows:
        return None
    scores = choice.scores.detach().float().cpu().reshape(rows, -1)
    ordered = scores.sort(-1, descending=True).values
    gaps = torch.nan_to_num(ordered[:, :width] - ordered[:, 1 : width + 1], posinf=1e9).amin(-1)
    finite = torch.where(torch.isfinite(scores), scores, torch.zeros_like(scores))
    return gaps / finite.std(-1).clamp_min(1e-12)
