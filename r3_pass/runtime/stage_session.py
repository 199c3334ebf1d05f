"""The sessions of pipeline stages: each records the layers that its stage has, and hands out parts of rows (`stages`).

Legend: L decoder layers, M stored (MoE) layers of a stage, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from r3_pass.description import describe_tag
from r3_pass.errors import RefusedConfiguration
from r3_pass.report import GraphRecord
from r3_pass.runtime.engines.base import EngineAdapter
from r3_pass.runtime.idle import IdleSession
from r3_pass.runtime.inputs import first_position, token_count
from r3_pass.runtime.memory import Placement
from r3_pass.runtime.refusals import Deployment
from r3_pass.runtime.session import Session
from r3_pass.runtime.slots import Geometry
from r3_pass.runtime.stages import Rows, StageRows
from r3_pass.structure import inspect


class StageSession(Session):
    """A session whose `finish` and `abort` return a `StageRows`: the rows of this stage's layers, for `merge_stages`."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        num_layers: int | None,
        adapter: EngineAdapter,
        placement: Placement,
        graphs: Callable[[], Iterable[GraphRecord]],
    ) -> None:
        check_stage(model, adapter.deployment)
        super().__init__(
            model,
            device,
            adapter.num_slots,
            adapter.max_tokens,
            num_layers,
            adapter,
            placement=placement,
            graphs=graphs,
        )
        self._deployment = adapter.deployment

    def finish(self, request_id: Hashable, num_tokens: int, start: int = 0) -> Any:
        """Returns: a `StageRows`. Raises as `Session.finish`."""
        with self._lock:
            return self._part(request_id, num_tokens, start, super().finish(request_id, num_tokens, start), True)

    def abort(self, request_id: Hashable, num_tokens: int, start: int = 0) -> Any:
        """Returns: a `StageRows` of the rows that there are."""
        with self._lock:
            return self._part(request_id, num_tokens, start, super().abort(request_id, num_tokens, start), False)

    def _part(self, request_id: Hashable, num_tokens: int, start: int, rows: Rows, finished: bool) -> StageRows:
        geometry = self._store.geometry
        layers = geometry.stored if rows.shape[1] else ()
        part = rows[:, list(layers)]
        part.flags.writeable = False
        return StageRows(
            request_id, num_tokens, start, self._deployment.pipeline_rank, self._deployment.pipeline_parallel,
            self._deployment.stage_layers, geometry.num_layers, layers, part, finished, describe_tag(self.version),
        )  # fmt: skip


class DenseStageSession(IdleSession):
    """The session of a stage none of whose layers routes: nothing to record, and a part without columns to hand out."""

    def __init__(self, model: nn.Module, device: torch.device, num_layers: int | None, adapter: EngineAdapter) -> None:
        check_stage(model, adapter.deployment)
        super().__init__(model, device, adapter.num_slots, num_layers, adapter)
        self._deployment = deployment = adapter.deployment
        self._rank = (
            f"pipeline stage {deployment.pipeline_rank} of {deployment.pipeline_parallel}, whose layers do not route"
        )
        structure = inspect(model)
        known = [structure.num_layers(container) for container in structure.blocks]
        self._count = num_layers or max([*known, max(deployment.stage_layers) + 1])

    @property
    def geometry(self) -> Geometry:
        """Raises: RefusedConfiguration: there is no slot buffer, and nothing to charge to a KV budget."""
        raise RefusedConfiguration(f"{self._rank}: it has no slot buffer. Ask the session of another stage.")

    def self_test(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("self_test")

    def finish(self, request_id: Hashable, num_tokens: int, start: int = 0) -> Any:
        """Returns: a `StageRows` without columns."""
        return self._part(request_id, num_tokens, start, True)

    def abort(self, request_id: Hashable, num_tokens: int, start: int = 0) -> Any:
        """Returns: a `StageRows` without columns; how many rows there are, the other stages say."""
        return self._part(request_id, num_tokens, start, False)

    def _part(self, request_id: Hashable, num_tokens: int, start: int, finished: bool) -> StageRows:
        self._usable()
        num_tokens = token_count(request_id, num_tokens)
        start = first_position(request_id, start, num_tokens)
        deployment = self._deployment
        rows = np.empty((num_tokens - 1 - start, 0, 0), np.int16)
        return StageRows(
            request_id, num_tokens, start, deployment.pipeline_rank, deployment.pipeline_parallel, deployment.stage_layers,
            self._count, (), rows, finished, describe_tag(self.version),
        )  # fmt: skip

    def _refuse(self, what: str) -> Any:
        self._usable()
        raise RefusedConfiguration(f"{what}: this is {self._rank}. Ask the session of another stage.")


def check_stage(model: nn.Module, deployment: Deployment) -> None:
    """Raises: RefusedConfiguration if the model holds experts in layers that the stage does not own."""
    others = [b for b in inspect(model).experts if b.index not in deployment.stage_layers]
    if others:
        raise RefusedConfiguration(
            f"pipeline stage {deployment.pipeline_rank} owns the decoder layers {list(deployment.stage_layers)}, but {others[0]} "
            "of its model holds experts. Attach the stage's own part of the model, whose layers keep their numbers in the "
            "whole model (layers.24 is decoder layer 24), or correct stage_layers."
        )


def routes(model: nn.Module) -> bool:
    """Whether a stage's part of the model may hold a router."""
    return inspect(model).may_route
