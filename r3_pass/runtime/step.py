"""One forward of the model: what must be so when it begins, and what is held against it when it ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from r3_pass import streams
from r3_pass.errors import MissingRoutes, R3Error, RefusedConfiguration
from r3_pass.passes.ops import STATE_CALLS
from r3_pass.runtime.coverage import Reasons, check_coverage
from r3_pass.runtime.delivery import Delivery
from r3_pass.runtime.export import Staged
from r3_pass.runtime.segments import SegmentBatch
from r3_pass.runtime.slots import Slots
from r3_pass.runtime.store import SlotStore

# With more record ops than these in a forward none of them writes to the host: each would wait for the bus, and one gather of all
# their rows costs less. (12 MoE blocks on an H200, 256 tokens, an earlier kernel: 14 us more.)
_FEW_RECORDS = 4


class Step:
    """The context of one step; see `Session.step`.

    A model that loops over its experts (`torch.where(ids == e)` for each) makes Dynamo give up the whole function, router included,
    unless operators with data-dependent sizes may be traced. For such models, what is compiled inside a step may: where
    experts are modules, that is. Others may hold code (`nonzero().tolist()`) that Dynamo leaves to eager as things are, and fails
    to compile once such operators are traced.

    Attributes:
        gone: requests that were finished or aborted while the step is open.
        staged: where the record kernel writes the step's rows to the host, if it does.
        checked: whether the host has seen every slot, not only the device.
    """

    __slots__ = ("_steps", "_tracing", "batch", "checked", "gone", "slots", "staged")

    def __init__(self, steps: Steps, slots: Slots, batch: SegmentBatch) -> None:
        self.slots = slots
        self.batch = batch
        self.gone: set[Hashable] = set()
        self.staged: Staged | None = None
        self.checked = False
        self._steps = steps
        self._tracing: contextlib.AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        self._steps.enter(self)
        if self._steps.loops_over_experts:
            self._tracing = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
            self._tracing.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tracing is not None:
            self._tracing.__exit__(None, None, None)
        self._steps.exit(self, failed=error is not None)


class Steps:
    """The steps of a session, one at a time.

    Attributes:
        open: the step that is running.
    """

    def __init__(
        self, lock: threading.RLock, device: torch.device, store: SlotStore, delivery: Delivery, reasons: Reasons
    ) -> None:
        self.open: Step | None = None
        self.detached = False
        self.loops_over_experts = store.binding.structure.separate_experts
        self._lock = lock
        self._device = device
        self._store = store
        self._delivery = delivery
        self._reasons = reasons
        self._most_records = 0  # in a step so far; a CUDA graph's were seen when it was captured

    def none_open(self, what: str) -> None:
        """Raises: RefusedConfiguration if a step is."""
        if self.open is not None:
            raise RefusedConfiguration(
                f"{what} was called inside an open step, whose forward may still write to the buffer. Leave the step first."
            )

    def usable(self) -> None:
        """Raises: RefusedConfiguration of a session that was detached."""
        if self.detached:
            raise RefusedConfiguration("this session is detached. Call r3_pass.runtime.attach again for a new one.")

    def forget(self, request_id: Hashable) -> None:
        """The request was finished or aborted: rows of it that a running step still makes attach to nothing."""
        if self.open is not None:
            self.open.gone.add(request_id)

    def enter(self, step: Step) -> None:
        with self._lock:
            if self.detached:
                self.usable()
            if self.open is not None:
                raise RefusedConfiguration(
                    "a step is open already: it was entered twice, or the engine left a step in the middle without closing "
                    "its context. Use `with session.step(...)` around exactly one forward. If that step is gone for good: take "
                    "the rows that there are with abort(), then detach() and attach again."
                )
            store, binding = self._store, self._store.binding
            self._delivery.collect(store.buffer, wait=False)
            if self._delivery.arrivals.failure is not None:
                self._delivery.arrivals.raise_failure()
            if store.mapping is None or store.num_slots is None:
                raise RefusedConfiguration(
                    "the session has no KV slots: the engine's cache was released or is not made yet (wake(num_slots) tells), or "
                    "the steps are yours to drive, which takes attach(..., num_slots=...)."
                )
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RefusedConfiguration(
                    "session.step was entered inside a CUDA graph capture, so its slot mapping would be baked into the graph. "
                    "Enter the step first (with all slots -1), then capture the forward inside it."
                )
            if binding.paused:
                raise RefusedConfiguration(
                    "a step was entered while session.paused() is open, so its forward would not be recorded. Leave the pause "
                    "first (of every thread), or pause inside the step."
                )
            checked = store.mapping.check(step.slots, store.num_slots, step.batch.num_tokens)
            self._delivery.check(step.batch)
            if store.buffer is not None:
                store.buffer.settle()
            if step.gone:  # of a context that is entered once more
                step.gone = set()
            step.staged = None
            self._put(step, checked)
            binding.start(len(checked))
            self.open = step

    def _put(self, step: Step, slots: npt.NDArray[np.int64] | Tensor) -> None:
        """Queue the slot mapping, and with it where the rows go on the host if the kernel can write them there."""
        store = self._store
        assert store.mapping is not None
        step.checked = not isinstance(slots, Tensor)
        if isinstance(slots, Tensor):
            store.mapping.put(slots)
            store.flag_duplicates(slots)
            return
        buffer = store.buffer
        if buffer is not None and store.proved and self._most_records <= _FEW_RECORDS:  # its layout changes no more
            step.staged = self._delivery.stage(
                store.mapping.entries(len(slots)), buffer.geometry, step.batch.num_tokens
            )
        if step.staged is None:
            store.mapping.put(slots)
        else:
            store.mapping.put_staged(slots, step.staged)

    def exit(self, step: Step, failed: bool) -> None:
        with self._lock:
            self.open = None
            store, binding = self._store, self._store.binding
            tokens = binding.stop()
            self._most_records = max(self._most_records, binding.records)
            binding.settle()
            if binding.ran_on is not None:
                streams.order(streams.current(self._device), binding.ran_on, self._device)
            binding.entered_on = binding.ran_on = None
            if store.mapping is not None and (binding.captured or failed or binding.paused):
                store.mapping.close()
            if failed or binding.paused:
                self._give_up(step, tokens)
                if failed:
                    return
                raise RefusedConfiguration(
                    "a pause was open when the step ended (session.paused(), in this thread or another): what ran in it was not "
                    "recorded, so the step's rows are void. Leave the pause before the step ends, and pause in one thread only."
                )
            if tokens:
                try:
                    store.proved = check_coverage(binding, self._reasons) or store.proved
                except R3Error:
                    self._give_up(step, tokens)
                    raise
            if store.buffer is not None and store.mapping is not None:
                self._send(step, tokens)

    def _send(self, step: Step, tokens: int | None) -> None:
        store, binding = self._store, self._store.binding
        assert store.buffer is not None and store.mapping is not None
        writes = int(bool(tokens) and not binding.capturing)
        try:
            if step.staged is not None:
                self._delivery.send_staged(step.staged, step.batch, step.gone, writes)
                return
            slots = store.mapping.slots(step.batch.num_tokens)
            said = binding.state[: STATE_CALLS + len(binding.calls)]
            self._delivery.send(store.buffer, slots, step.checked, step.batch, step.gone, said, writes)
        except MissingRoutes:
            store.void(tokens)  # what the device says of the step is lost with the copy: its rows are not proved
            raise
        finally:
            if step.staged is None:
                binding.state.zero_()
        if self._delivery.exporter.at_once:
            self._delivery.collect(store.buffer, wait=True)
            self._delivery.arrivals.raise_failure()

    def _give_up(self, step: Step, tokens: int | None) -> None:
        """After a step that failed: slots that were not seen to be written whole are void, and the next step starts afresh.

        So are those of which nothing was written: the forward may have gone another way, and left their KV behind. And those that
        only the device has seen: what it says of them is dropped here.
        """
        binding = self._store.binding
        complete = bool(binding.calls) and all(binding.calls) and not binding.problems and not binding.refused
        if binding.paused or not complete or not step.checked:
            self._store.void(tokens)
        if step.staged is not None:
            self._delivery.give_up(step.staged)
        binding.state.zero_()
        binding.claim()  # had weights been replaced one by one, this finds them
