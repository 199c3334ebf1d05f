"""The session of a rank that exports nothing: of tensor-parallel ranks, which all route alike, the first records for all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from r3_pass.errors import RefusedConfiguration
from r3_pass.marks import owner_of
from r3_pass.runtime.agreement import check_group
from r3_pass.runtime.engines.base import EngineAdapter
from r3_pass.runtime.plan import plan
from r3_pass.runtime.segments import Segment, SegmentBatch
from r3_pass.runtime.self_test import SelfTest
from r3_pass.runtime.session import Session
from r3_pass.runtime.slots import Geometry, Slots


class IdleSession(Session):
    """A session as far as an adapter is concerned, so that the same adapter runs on every rank; nothing is recorded.

    Nothing is allocated and no graph is bound, but while `self_test` runs: compiled code runs its plain graphs, in steps too.
    `geometry` is that of the recording rank, so that every rank charges the same bytes to its KV budget. What tells a session
    something is taken and forgotten; `finish`, `abort` and `extract` return None; what would look at rows raises
    RefusedConfiguration.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        num_slots: int | None,
        num_layers: int | None,
        adapter: EngineAdapter,
    ) -> None:
        self.version = None
        self._lock = threading.RLock()
        self._model = model
        self._device = device
        self._num_slots = num_slots
        self._num_layers = num_layers
        self._adapter = adapter
        deployment = adapter.deployment
        self._rank = f"tensor-parallel rank {deployment.tensor_parallel_rank} of {deployment.tensor_parallel}"
        self._detached = False

    # ---- what it knows ------------------------------------------------------------------------------------------
    @property
    def geometry(self) -> Geometry:
        """Shape and bytes of the slot buffer that the recording rank has, and that this rank charges too; from modules and config.

        Raises: RefusedConfiguration without a KV cache, and as `plan`.
        """
        if self._num_slots is None:
            raise RefusedConfiguration("the engine has no KV cache now (released, or not started).")
        return plan(self._model, self._num_slots, num_layers=self._num_layers)

    @property
    def host_bytes(self) -> int:
        """0"""
        return 0

    # ---- what an adapter tells ----------------------------------------------------------------------------------
    def step(self, slot_mapping: Slots, segments: SegmentBatch | Iterable[Segment] | None = None) -> Any:
        """A context in which the forward is not recorded."""
        self._usable()
        return contextlib.nullcontext()

    def prefix_hit(self, request_id: Hashable, start: int, slots: Slots) -> None:
        self._usable()

    def assign(self, slots: Slots) -> None:
        self._usable()

    def move(self, src_slots: Slots, dst_slots: Slots) -> None:
        self._usable()

    def extract(self, slots: Slots) -> Any:
        """None, which `insert` takes."""
        self._usable()

    def insert(self, slots: Slots, rows: object) -> None:
        self._usable()

    def preempt(self, request_id: Hashable, num_tokens: int) -> None:
        self._usable()

    def finish(self, request_id: Hashable, num_tokens: int, start: int = 0) -> Any:
        """None: the recording rank has the rows."""
        self._usable()

    def abort(self, request_id: Hashable, num_tokens: int, start: int = 0) -> Any:
        """None: the recording rank has the rows."""
        self._usable()

    def weights_changed(self, tag: Hashable) -> None:
        self._usable()
        self.version = tag

    def release(self) -> None:
        self._usable()
        self._num_slots = None

    def wake(self, num_slots: int, max_tokens: int | None = None) -> None:
        self._usable()
        self._num_slots = num_slots

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._usable()
        yield

    def detach(self) -> None:
        """Restore the engine's methods."""
        assert self._adapter is not None
        self._adapter.uninstall()
        self._detached = True

    def self_test(self, *args: Any, **kwargs: Any) -> SelfTest:
        """As the recording rank's, at the same time: this rank records too, for this one batch, and the rows are compared.

        A slot buffer is allocated for as long; then nothing is bound again.
        """
        self._usable()
        adapter = self._adapter
        assert adapter is not None
        check_group(adapter.deployment, adapter.group)
        if self._num_slots is None:
            raise RefusedConfiguration("the engine has no KV cache now (released, or not started).")
        recording = Session(self._model, self._device, self._num_slots, adapter.max_tokens, num_layers=self._num_layers)
        try:
            return recording._self_test(adapter, args, kwargs)
        finally:
            recording.detach()

    # ---- what only the recording rank can answer ----------------------------------------------------------------
    def describe(self) -> NoReturn:
        self._refuse("describe")

    def versions(self, request_id: Hashable) -> NoReturn:
        self._refuse("versions")

    def report(self) -> NoReturn:
        self._refuse("report")

    def hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("hook")

    @property
    def written(self) -> tuple[int, ...]:
        """None."""
        return ()

    def read(self, slots: Slots) -> NoReturn:
        self._refuse("read")

    def _refuse(self, what: str) -> NoReturn:
        self._usable()
        raise RefusedConfiguration(
            f"{what}: this is {self._rank}, which routes as rank 0 does and records nothing. Ask the session of rank 0."
        )

    def _usable(self) -> None:
        if self._detached:
            raise RefusedConfiguration("this session is detached. Call r3_pass.runtime.attach again for a new one.")

    def check_integrity(self) -> None:
        """Assert that no weight is bound to anything; for tests."""
        assert not any(owner_of(weight) for weight in self._model.parameters())
