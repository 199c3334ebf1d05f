"""One attachment: the steps of an engine in, `routed_experts` out.

The session decides nothing about bytes or graphs: `mapping` holds a step's slots, `slots` the buffer, `export` the copies on
their way, `sequences` the rows of each request, and the `Binding` is what compiled graphs see of all that.

Legend: T tokens in the step, L decoder layers, M stored (MoE) layers, K top-k, S slots.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterable, Iterator
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from r3_pass.binding import Binding
from r3_pass.errors import (
    BufferLayoutError,
    MissingRoutes,
    R3Error,
    RefusedConfiguration,
    StaleRoutes,
)
from r3_pass.passes.ops import ERROR_DUPLICATE, STATE_CALLS, STATE_ERRORS
from r3_pass.runtime.arrivals import Arrival, Arrivals, past_experts
from r3_pass.runtime.coverage import Reasons, check_coverage
from r3_pass.runtime.engines.base import EngineAdapter
from r3_pass.runtime.export import Exporter
from r3_pass.runtime.mapping import SlotMapping
from r3_pass.runtime.rows import RowLog
from r3_pass.runtime.saved import SavedRows, restore, save
from r3_pass.runtime.self_test import SelfTest, compare, probe, tokens_of
from r3_pass.runtime.sequences import Segment, SegmentBatch, SequenceTable
from r3_pass.runtime.slots import Geometry, SlotBuffer, Slots

Rows = npt.NDArray[np.int16]

_EMPTY = SegmentBatch((), (), ())


class Session:
    """Made by `r3_pass.runtime.attach`. All methods may be called from any thread; a lock orders them.

    Attributes:
        version: tag of the weights that make rows now (see `weights_changed`).
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        num_slots: int | None,
        max_tokens: int | None,
        num_layers: int | None = None,
        adapter: EngineAdapter | None = None,
        reasons: Reasons | None = None,
        call: Any = None,
    ) -> None:
        if num_slots is not None:
            num_slots, max_tokens = (
                count("num_slots", num_slots),
                count("max_tokens", num_slots if max_tokens is None else max_tokens),
            )
        if num_layers is not None:
            num_layers = count("num_layers", num_layers)
        self.version: Hashable = None
        self._lock = threading.RLock()
        self._num_layers = num_layers
        self._num_slots = num_slots
        self._device = device
        self._adapter = adapter
        self._reasons = reasons
        self._call = call
        self._buffer: SlotBuffer | None = None
        self._table: SequenceTable | None = None
        self._mapping: SlotMapping | None = None
        self._exporter = Exporter(device)
        self._arrivals = Arrivals()
        self._step: _Step | None = None
        self._steps = 0
        self._proved = False
        self._detached = False
        self._versions: list[tuple[int, Hashable]] = []  # number of the first row that each version of the weights made
        # What CUDA graphs of a released buffer still read: it tells them to write nothing.
        self._retired: list[tuple[object, ...]] = []
        self._binding = Binding(model, device, self._lay_out, num_layers=num_layers)
        self.loops_over_experts = self._binding.structure.separate_experts
        if num_slots is not None and max_tokens is not None:
            try:
                self._wake(num_slots, max_tokens)
                if (
                    num_layers is not None
                    and self._binding.structure.main_container is not None
                    and not self._binding.expected()
                ):
                    raise RefusedConfiguration(
                        f"num_layers={num_layers} leaves out every layer that holds experts, of which the first is "
                        f"{min(map(str, self._binding.structure.experts))}. Pass the number of all decoder layers."
                    )
            except BaseException:
                self._binding.release_weights()
                raise

    # ---- layout -------------------------------------------------------------------------------------------------
    @property
    def geometry(self) -> Geometry:
        """Shape and bytes of the slot buffer.

        Raises: RefusedConfiguration while they are not known: before the first graph has shown the router's top-k, or without
            a KV cache.
        """
        with self._lock:
            return self._laid_out().geometry

    def _laid_out(self) -> SlotBuffer:
        if self._buffer is None:
            why = (
                "the engine has no KV cache now (released, or not started)"
                if self._num_slots is None
                else "no routing graph has run yet, and the model's config does not say its top-k"
            )
            raise RefusedConfiguration(
                f"the slot buffer is not laid out: {why}. Run one step (all slots -1 will do), then ask again."
            )
        return self._buffer

    def _wake(self, num_slots: int, max_tokens: int) -> None:
        binding = self._binding
        self._mapping = SlotMapping(max_tokens, self._device)
        self._num_slots = num_slots
        binding.mapping = self._mapping.static
        layers = binding.layers or binding.expected()
        top_k = binding.top_k or binding.structure.top_k or 0
        if layers and top_k:
            self._lay_out(layers, top_k)

    def _lay_out(self, layers: tuple[int, ...], top_k: int) -> None:
        """Allocate the buffer for these stored layers, keeping rows that are there; called by the binding at a first graph too."""
        binding = self._binding
        if self._num_slots is None:
            binding.layers, binding.top_k = layers, top_k
            return
        if self._proved and (layers != binding.layers or top_k != binding.top_k):
            raise BufferLayoutError(
                f"a graph routes layers {sorted(set(layers) - set(binding.layers))} with top-k {top_k}; the "
                "buffer was laid out in the first "
                f"step for {len(binding.layers)} layers and top-k {binding.top_k}. Compile all of the model before its first step."
            )
        geometry = Geometry(self._num_slots, self._count_layers(layers), layers, top_k)
        fresh = SlotBuffer(geometry, self._device)
        with torch.inference_mode(False):
            state = torch.zeros(STATE_CALLS + len(layers), dtype=torch.int32, device=self._device)
        calls = [0] * len(layers)
        if self._buffer is not None:  # another layer of the first step: those before it were written already
            at = [layers.index(layer) for layer in self._buffer.geometry.stored]
            fresh.data[:, at, : self._buffer.geometry.top_k] = self._buffer.data
            state[STATE_ERRORS] = binding.state[STATE_ERRORS]
            for column, held in enumerate(at):
                state[STATE_CALLS + held] = binding.state[STATE_CALLS + column]
                calls[held] = binding.calls[column]
        first = self._buffer is None
        binding.layers, binding.top_k = layers, top_k
        binding.buffer, binding.state, binding.calls = fresh.data, state, calls
        self._buffer = fresh
        if first and binding.tokens and self._mapping is not None:
            self._flag_duplicates(self._mapping.slots(binding.tokens))
        if self._table is None or self._table.rows.row_shape != geometry.row_shape:
            self._table = SequenceTable(RowLog(geometry.row_shape))
            self._versions = [(0, self.version)]

    def _count_layers(self, layers: tuple[int, ...]) -> int:
        if self._num_layers is not None:
            return self._num_layers
        container = self._binding.container
        known = self._binding.count_layers(container) if container is not None else 0
        return max(known, layers[-1] + 1)

    # ---- steps --------------------------------------------------------------------------------------------------
    def step(self, slot_mapping: Slots, segments: SegmentBatch | Iterable[Segment] = _EMPTY) -> _Step:
        """Around exactly one forward of the model.

        Args:
            slot_mapping: int [T], KV slot of each token in flattened order, -1 for padding; on the host, or on the model's device.
            segments: which tokens are whose, one after the other from index 0; their rows go to their requests. What follows
                them in the mapping must be -1. None: rows stay in the buffer only.

        Raises, when entered: BufferLayoutError for a mapping that cannot be, MissingRoutes for a gap, and what an
        earlier step found
            out too late to raise itself; RefusedConfiguration inside `paused`. When left: PartialCapture or NoRouterFound if a
            layer was not written, RefusedConfiguration if a pause is still open. ValueError for segments that are none.
        """
        return _Step(self, slot_mapping, _batch_of(segments))

    def _enter(self, step: _Step) -> None:
        with self._lock:
            self._usable()
            if self._step is not None:
                raise RefusedConfiguration(
                    "a step is open already: it was entered twice, or the engine left a step in the middle without closing "
                    "its context. Use `with session.step(...)` around exactly one forward. If that step is gone for good: take "
                    "the rows that there are with abort(), then detach() and attach again."
                )
            self._collect(wait=False)
            self._arrivals.raise_failure()
            if self._mapping is None or self._num_slots is None:
                raise RefusedConfiguration(
                    "the session has no KV slots: the engine's cache was released or is not made yet (wake(num_slots) tells), or "
                    "the steps are yours to drive, which takes attach(..., num_slots=...)."
                )
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RefusedConfiguration(
                    "session.step was entered inside a CUDA graph capture, so its slot mapping would be baked into the graph. "
                    "Enter the step first (with all slots -1), then capture the forward inside it."
                )
            binding = self._binding
            if binding.paused:
                raise RefusedConfiguration(
                    "a step was entered while session.paused() is open, so its forward would not be recorded. Leave the pause "
                    "first (of every thread), or pause inside the step."
                )
            if binding.weights_replaced():
                binding.claim()
            checked = self._mapping.check(step.slots, self._num_slots, step.batch.num_tokens)
            if self._table is not None:
                self._table.check(step.batch)
            elif step.batch.num_tokens and int(step.batch.starts.max()) > 0:
                SequenceTable(RowLog((1, 1))).check(step.batch)
            step.taken = checked.clone() if isinstance(checked, Tensor) else checked
            self._mapping.put(checked)
            if isinstance(checked, Tensor):
                self._flag_duplicates(checked)
            binding.calls = [0] * len(binding.layers)
            binding.capturing = False
            binding.problems.clear()
            binding.refused.clear()
            binding.tokens = len(checked)
            if self._device.type == "cuda":
                binding.entered_on = torch.cuda.current_stream(self._device)
            self._step = step

    def _flag_duplicates(self, slots: Tensor) -> None:
        if self._buffer is None or slots.shape[0] < 2:
            return
        ordered = torch.sort(slots).values
        twice = ((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).any()
        self._binding.state[STATE_ERRORS] |= twice.to(torch.int32) * ERROR_DUPLICATE

    def _exit(self, step: _Step, failed: bool) -> None:
        with self._lock:
            self._step = None
            binding = self._binding
            tokens, binding.tokens = binding.tokens, None
            binding.settle()
            if binding.ran_on is not None and binding.ran_on != (now := torch.cuda.current_stream(self._device)):
                now.wait_stream(binding.ran_on)
            binding.entered_on = binding.ran_on = None
            if self._mapping is not None and (binding.captured or failed or binding.paused):
                self._mapping.close()
            if failed or binding.paused:
                self._give_up(tokens)
                if failed:
                    return
                raise RefusedConfiguration(
                    "a pause was open when the step ended (session.paused(), in this thread or another): what ran in it was not "
                    "recorded, so the step's rows are void. Leave the pause before the step ends, and pause in one thread only."
                )
            if tokens:
                try:
                    self._proved = check_coverage(binding, self._reasons) or self._proved
                except R3Error:
                    self._give_up(tokens)
                    raise
            if self._buffer is None:
                return
            self._steps += 1
            writes = int(bool(tokens) and not binding.capturing)
            if step.batch.num_tokens:
                assert self._table is not None and self._mapping is not None
                first = self._table.extend(step.batch)
                rows = self._buffer.gather(self._mapping.slots(step.batch.num_tokens))
            else:
                first, rows = -1, self._buffer.data[:0]
            pending = self._exporter.submit(rows, binding.state)
            self._arrivals.add(Arrival(pending, first, self._steps, writes, step.taken))
            binding.state.zero_()
            if self._device.type == "cpu":
                self._collect(wait=True)
                self._arrivals.raise_failure()

    def _give_up(self, tokens: int | None) -> None:
        """After a step that failed: slots of which only some layers were written are void, and the next step starts afresh."""
        binding = self._binding
        complete = bool(binding.calls) and all(binding.calls) and not binding.problems and not binding.refused
        complete = complete and not binding.paused
        written = binding.captured or any(binding.calls) or binding.paused > 0
        if tokens and self._buffer is not None and self._mapping is not None and written and not complete:
            self._buffer.void(self._mapping.slots(tokens))
        binding.state.zero_()
        binding.claim()  # had weights been replaced one by one, this finds them

    def _collect(self, wait: bool, up_to: int | None = None) -> None:
        log = self._table.rows if self._table is not None else None
        self._arrivals.collect(log, self._buffer, self._binding.layers, self._binding.named, wait, up_to)

    def _usable(self) -> None:
        if self._detached:
            raise RefusedConfiguration("this session is detached. Call r3_pass.runtime.attach again for a new one.")

    # ---- requests -----------------------------------------------------------------------------------------------
    def prefix_hit(self, request_id: Hashable, start: int, slots: Slots) -> None:
        """Take over the rows that a prefix-cache hit skipped, from the slots that hold its KV.

        Args:
            request_id: the request.
            start: first position that was skipped; the request has all before it.
            slots: int [n], slot of each skipped position, in order.

        Raises: MissingRoutes for a gap; StaleRoutes if a row is void: here on a CPU, by `finish` elsewhere.
        """
        with self._lock:
            self._usable()
            buffer = self._laid_out()
            assert self._table is not None
            length = _length(slots)
            if not length:
                return
            batch = _batch_of(SegmentBatch((request_id,), (start,), (length,)))
            self._table.check(batch)
            known, before = request_id in self._table, self._table.end(request_id)
            chunks = self._exporter.gather_chunks(buffer, slots)
            first = self._table.extend(batch)
            for pending in chunks:
                self._arrivals.add(Arrival(pending, first))
                first += pending.num_rows
                if self._device.type != "cpu":
                    self._collect(wait=False)
            if self._device.type == "cpu":
                self._collect(wait=True)
                rows = self._table.rows.take(self._table.numbers(request_id)[start:])
                void = np.flatnonzero((rows[:, :, 0] < 0).any(axis=1))
                if void.size:
                    position = start + int(void[0])
                    self._table.truncate(request_id, min(before, position))
                    if not known:
                        self._table.drop(request_id)
                    given = torch.as_tensor(slots)
                    raise StaleRoutes(
                        f"request {request_id!r}, position {position}: the row of slot "
                        f"{int(given[position - start])} is void: the slot was "
                        "assigned to a new owner, or its weights or KV came from outside, and no forward has written it since. "
                        "Forward these tokens again, or bring their rows with insert()."
                    )

    def assign(self, slots: Slots) -> None:
        """These slots were handed to a new owner: their rows are void until they are written again."""
        with self._lock:
            self._usable()
            if self._buffer is not None:
                self._buffer.void(slots)

    def move(self, src_slots: Slots, dst_slots: Slots) -> None:
        """KV was copied from the first to the second slots: the rows go along."""
        with self._lock:
            self._usable()
            _distinct(dst_slots)
            if self._buffer is not None:
                self._buffer.move(src_slots, dst_slots)

    def extract(self, slots: Slots) -> SavedRows:
        """The rows of these slots, to travel with KV that leaves the cache. Waits for the device."""
        with self._lock:
            self._usable()
            buffer = self._laid_out()
            return save(buffer, slots, self.version)

    def insert(self, slots: Slots, rows: object) -> None:
        """KV came back into these slots: its rows with it.

        Raises: RefusedConfiguration if the rows are of another layer map, top-k or weight version, or are damaged.
        """
        with self._lock:
            self._usable()
            _distinct(slots)
            restore(self._laid_out(), slots, rows, self.version)

    def preempt(self, request_id: Hashable, num_tokens: int) -> None:
        """The request will be forwarded again; rows of its first num_tokens - 1 positions that were exported stay what they are."""
        with self._lock:
            self._usable()
            num_tokens = _tokens(request_id, num_tokens)
            if self._table is not None:
                self._table.preempt(request_id, num_tokens)

    def finish(self, request_id: Hashable, num_tokens: int) -> Rows:
        """The routing of a finished request.

        Returns: int16 [num_tokens - 1, num_layers, top_k], read-only. Row t is the token at position t. The last token was
            sampled, not forwarded; rows past it (an engine's batch in flight) are cut.
        Raises: MissingRoutes if a row is missing or the request is unknown (nothing is lost: `abort` still returns what is there);
            StaleRoutes if a row came from a slot without an owner's row.
        """
        with self._lock:
            self._usable()
            num_tokens = _tokens(request_id, num_tokens)
            if self._table is None:
                raise MissingRoutes(
                    f"request {request_id!r} is unknown: no step has run. Pass segments with every step."
                )
            self._arrive(request_id, num_tokens - 1)
            self._arrivals.raise_failure()
            rows = self._table.finish(request_id, num_tokens, self._complete)
            return self._expand(rows)

    def abort(self, request_id: Hashable, num_tokens: int) -> Rows:
        """The rows that an aborted request has, from position 0 on without a gap, num_tokens - 1 at most; it is forgotten."""
        with self._lock:
            self._usable()
            num_tokens = _tokens(request_id, num_tokens)
            if self._table is None:
                geometry = self._buffer.geometry if self._buffer is not None else None
                return np.full(
                    (0, geometry.num_layers if geometry else 0, geometry.top_k if geometry else 0), -1, np.int16
                )
            self._arrive(request_id, num_tokens - 1)
            rows = self._table.abort(request_id, num_tokens)
            void = np.flatnonzero((rows[:, :, 0] < 0).any(axis=1))
            return self._expand(rows[: int(void[0])] if void.size else rows)

    def _arrive(self, request_id: Hashable, num_rows: int) -> None:
        """Take in the copies that hold these rows, and no later one: an engine may have a further batch in flight."""
        assert self._table is not None
        numbers = self._table.numbers(request_id)[: max(num_rows, 0)]
        self._collect(wait=bool(numbers.size), up_to=int(numbers.max()) if numbers.size else None)

    def _complete(self, request_id: Hashable, rows: Rows) -> None:
        """The last look before rows leave: every stored layer of every row was really written."""
        void = np.flatnonzero((rows[:, :, 0] < 0).any(axis=1))
        if void.size:
            raise StaleRoutes(
                f"request {request_id!r}, position {int(void[0])} ({void.size} of {len(rows)} rows): its row is "
                "void: it came from a slot that "
                "was assigned to a new owner and not written since, or from a step that failed. The request "
                "stays registered: abort "
                "it, or forward these tokens again."
            )

    def _expand(self, rows: Rows) -> Rows:
        expanded = self._geometry_of_rows().expand(rows)
        expanded.flags.writeable = False
        return expanded

    def _geometry_of_rows(self) -> Geometry:
        if self._buffer is not None:
            return self._buffer.geometry
        layers = self._binding.layers
        return Geometry(1, self._count_layers(layers), layers, self._binding.top_k)

    def read(self, slots: Slots) -> Rows:
        """The rows of these slots as they are now; waits for the device.

        Returns: int16 [len(slots), num_layers, top_k], -1 where nothing was captured.
        """
        with self._lock:
            self._usable()
            buffer = self._laid_out()
            rows = buffer.gather(slots).cpu().numpy()
            self._collect(wait=True)
            self._arrivals.raise_failure()
            if (error := past_experts(rows, self._binding.layers, self._binding.named)) is not None:
                raise error
            return buffer.geometry.expand(rows)

    def self_test(self, *args: Any, **kwargs: Any) -> SelfTest:
        """Record one batch, and compare it with what the uncompiled model chooses for the same batch.

            print(session.self_test())                  # or session.self_test(input_ids, use_cache=False)

        For start-up: the rows of slots 0, 1, ... are overwritten and void afterwards. Where an engine compiles the forward
        by itself, nothing is there to be called: test a compiled model of your own.

        Args:
            args, kwargs: what the compiled model is called with; by default, token ids for a model whose config has a vocabulary.

        Raises: RefusedConfiguration if a row is wrong, naming the layers (near-ties are no errors), if requests are running,
            or if no batch can be made.
        """
        with self._lock:
            self._usable()
            if self._call is None or self._num_slots is None:
                raise RefusedConfiguration(
                    "this session's engine compiles and calls the model by itself. Attach to a compiled model with num_slots= "
                    "and run self_test there."
                )
            if self._table is not None and len(self._table):
                raise RefusedConfiguration(
                    "self_test overwrites slots, and requests are running. Call it before the first request."
                )
            if not args and not kwargs:
                args = (probe(self._binding.model, self._num_slots, self._device),)
        slots = np.arange(tokens_of(args, kwargs))
        with torch.no_grad(), self.step(slots):
            self._call(*args, **kwargs)
        recorded = self.read(slots)
        self.assign(slots)
        binding = self._binding
        return compare(binding.model, binding.blocks(), binding.experts_shown(), recorded, args, kwargs)

    # ---- life cycle ---------------------------------------------------------------------------------------------
    def weights_changed(self, tag: Hashable) -> None:
        """New weights: every slot's row is void; rows that running requests have stay. `tag` names the new version."""
        with self._lock:
            self._usable()
            self._collect(wait=True)
            if self._buffer is not None:
                self._buffer.void_all()
            self._binding.claim()
            self.version = tag
            if self._table is not None:
                self._versions.append((self._table.rows.reserve(0), tag))

    def versions(self, request_id: Hashable) -> list[tuple[int, Hashable]]:
        """Which weights made the rows of a running request: (first position, tag of `weights_changed`) of each run of them."""
        with self._lock:
            self._usable()
            if self._table is None:
                return []
            starts, tags = zip(*self._versions, strict=True)
            made = np.searchsorted(starts, self._table.numbers(request_id), side="right") - 1
            firsts = np.flatnonzero(np.diff(made, prepend=-1))
            return [(int(position), tags[made[position]]) for position in firsts]

    def release(self) -> None:
        """The KV cache is freed: so is the buffer. Copies in flight are drained; requests that were running are dropped."""
        with self._lock:
            self._usable()
            self._between_steps("release")
            self._release()

    def _release(self) -> None:
        self._exporter.drain()
        self._arrivals.drop()
        if self._mapping is not None and self._binding.captured:
            self._retired.append((self._mapping, self._binding.state, *self._binding.columns()))
        self._table = None
        self._buffer = None
        self._mapping = None
        self._num_slots = None
        self._binding.buffer = None
        self._binding.captured = False

    def _between_steps(self, what: str) -> None:
        if self._step is not None:
            raise RefusedConfiguration(
                f"{what} was called inside an open step, whose forward may still write to the buffer. Leave the step first."
            )

    def wake(self, num_slots: int, max_tokens: int | None = None) -> None:
        """A KV cache of `num_slots` slots exists again, every row void; compiled graphs are bound to it without recompilation."""
        with self._lock:
            self._usable()
            self._between_steps("wake")
            num_slots = count("num_slots", num_slots)
            max_tokens = num_slots if max_tokens is None else count("max_tokens", max_tokens)
            self._release()
            self._proved = False
            try:
                self._wake(num_slots, max_tokens)
            except BaseException:
                self._release()
                raise

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Forwards inside write nothing: dummy runs, warm-up, a drafter that shares the target's graphs."""
        with self._lock:
            self._usable()
            binding = self._binding
            binding.paused += 1
            if binding.tokens is not None and binding.captured and self._mapping is not None:
                self._mapping.close()
        try:
            yield
        finally:
            with self._lock:
                binding.paused -= 1
                goes_on = not binding.paused and binding.tokens is not None
                if goes_on and binding.captured and self._mapping is not None:
                    self._mapping.open(binding.tokens or 0)

    def detach(self) -> None:
        """Restore everything: the engine's methods, the model's weights; the compiled model runs its plain graphs again."""
        if self._adapter is not None:
            self._adapter.uninstall()
        with self._lock:
            if self._detached:
                return
            self._binding.tokens = None
            self._release()
            self._binding.release_weights()
            self._detached = True

    def check_integrity(self) -> None:
        """Assert every invariant of the session's parts; for tests."""
        with self._lock:
            if self._buffer is not None:
                self._buffer.check_integrity()
                assert self._binding.buffer is self._buffer.data
                assert self._buffer.geometry.stored == self._binding.layers
            if self._table is not None:
                self._table.check_integrity()
            assert self._step is not None or self._binding.tokens is None


def count(name: str, value: object) -> int:
    """A number of things, at least one.

    Raises: ValueError if it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(
            f"num_slots, max_tokens and num_layers are whole numbers that count from 1, got {name}={value!r}"
        )
    return int(value)


def _tokens(request_id: Hashable, num_tokens: object) -> int:
    """num_tokens of a request, both of them checked; how few it may be is the table's business."""
    _check_id(request_id)
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int | np.integer):
        raise ValueError(f"request {request_id!r}: num_tokens is a whole number, got {num_tokens!r}")
    return int(num_tokens)


def _check_id(request_id: object) -> None:
    try:
        hash(request_id)
    except TypeError as error:
        raise ValueError(f"a request id must be hashable, got {request_id!r}") from error


def _batch_of(segments: object) -> SegmentBatch:
    """Segments as columns.

    Raises: ValueError if they are no segments, or a request id is not hashable.
    """
    batch = segments
    if not isinstance(batch, SegmentBatch):
        if not isinstance(segments, Iterable):
            raise ValueError(f"segments are Segment(request_id, start, length) in a list, got {segments!r}")
        listed = list(segments)
        wrong = next((s for s in listed if not isinstance(s, tuple | list) or len(s) != 3), None)
        if wrong is not None:
            raise ValueError(f"a segment is Segment(request_id, start, length), got {wrong!r}")
        batch = SegmentBatch.of(listed)
    _check_id(batch.request_ids)
    return batch


def _length(slots: object) -> int:
    """How many slots there are.

    Raises: ValueError if they are no vector.
    """
    given = slots if isinstance(slots, Tensor) else np.asarray(slots)
    if given.ndim != 1:
        raise ValueError(f"slots are a vector of integers, one a position, got {type(slots).__name__} {given!r}")
    return int(given.shape[0])


def _distinct(slots: Slots) -> None:
    """Raises ValueError if a slot on the host stands twice among those that are written."""
    if isinstance(slots, Tensor) and slots.device.type != "cpu":
        return
    given = np.asarray(slots)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        return  # the buffer says what is wrong
    ordered = np.sort(given[given >= 0])
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise ValueError(
            f"slot {int(twice[0])} stands twice among the slots that are written: which row would it hold?"
        )


class _Step:
    """The context of one step; see `Session.step`.

    A model that loops over its experts (`torch.where(ids == e)` for each) makes Dynamo give up the whole function, router included,
    unless operators with data-dependent sizes may be traced. For such models, what is compiled inside a step may.
    """

    __slots__ = ("_tracing", "batch", "session", "slots", "taken")

    def __init__(self, session: Session, slots: Slots, batch: SegmentBatch) -> None:
        self.session = session
        self.slots = slots
        self.batch = batch
        self.taken: Slots | None = None
        self._tracing: contextlib.AbstractContextManager[Any] | None = None

    def __enter__(self) -> Session:
        self.session._enter(self)
        if self.session.loops_over_experts:
            self._tracing = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
            self._tracing.__enter__()
        return self.session

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tracing is not None:
            self._tracing.__exit__(None, None, None)
        self.session._exit(self, failed=error is not None)
