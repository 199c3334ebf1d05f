"""Records what one `ContinuousBatchProcessor` of transformers runs: its forwards, and every move of its KV blocks.

The engine's thread calls, in this order, and a session must hear it in this order:

    clear_cancelled_requests     -> abort
    get_free_blocks              -> noted; `assign` before anything else touches these blocks
    offload_requests             -> preempt (soft reset: the same id comes back as a longer prompt), or extract (CPU offload)
    restore_scheduled_requests   -> insert, at the blocks that the request has now
    compute_batch                -> prefix_hit of requests that start past 0, then one step around the forward
    update_batch                 -> finish, in the order of delivery; then the copies of a fork -> move

With asynchronous batching, batch N + 1 is computed before batch N is updated: a finished request has one forward more, whose
row lies past its last token, and a cancelled one may still be delivered. Blocks that batch N's update frees are written first by
batch N + 2, on the same stream.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from r3_pass.errors import MissingRoutes, R3Error, StaleRoutes, UnsupportedEngine
from r3_pass.runtime.engines.base import RecordingSession, Rows, Slots, WrapPoints
from r3_pass.runtime.engines.transformers_blocks import BlockMoves
from r3_pass.runtime.engines.transformers_slots import find_slots
from r3_pass.runtime.segments import SegmentBatch

_USED = {
    "": ("cache", "scheduler", "offloading_manager", "model_runner", "inputs_and_outputs", "use_async_batching"),
    "scheduler": ("active_requests", "starved_requests", "clear_cancelled_requests"),
    "offloading_manager": ("offload_requests", "restore_scheduled_requests"),
    "model_runner": ("compute_batch", "warmup"),
    "cache": ("max_batch_tokens",),
}


class BatchRecorder:
    """One batch processor, seen by one session.

    Args:
        processor: the engine's; wrapped by `install`, restored through `wraps`.
        lock: held while a hook runs, so that `uninstall` waits for the step of the engine's thread.
    """

    def __init__(self, processor: Any, lock: threading.RLock) -> None:
        for part, names in _USED.items():
            owner = getattr(processor, part) if part else processor
            for name in names:
                if not hasattr(owner, name):
                    raise UnsupportedEngine(
                        f"{type(owner).__module__}.{type(owner).__name__} has no {name!r}; the adapter knows "
                        "transformers 5.17 to 5.24. Use one of these, or drive the steps yourself."
                    )
        self.processor = processor
        self.slots = find_slots(processor.cache, self._host_io().max_requests_per_batch)
        self.num_slots: int = self.slots.num_slots
        self.max_tokens: int = processor.cache.max_batch_tokens
        self.errors: list[R3Error] = []
        self._lock = lock
        self._session: RecordingSession | None = None
        self._running: dict[str, Any] = {}  # request id -> the RequestState whose forwards the session has seen
        self._refused: dict[str, R3Error] = {}  # running too, but its rows cannot be complete
        self._preempted: set[str] = set()  # waiting to run again; the session keeps their rows
        self._cancelled: tuple[list[Any], list[Any]] = ([], [])  # of this batch and of the one before, see _cancel
        self._blocks = BlockMoves(self.slots)
        self._warming = False
        self._checked = False

    def install(self, session: RecordingSession, wraps: WrapPoints) -> None:
        """Wrap the processor. Requests that are already past position 0 are refused: their first rows were never written."""
        processor, cache = self.processor, self.processor.cache
        with self._lock:
            self._session = session
            for state in processor.scheduler.active_requests.values():
                if state.position_offset > 0:
                    self._refused[state.request_id] = MissingRoutes(
                        f"Request {state.request_id!r} had already run {state.position_offset} tokens when the session was "
                        "attached. Attach before its first forward."
                    )
            wraps.wrap(processor.model_runner, "compute_batch", self._compute)
            wraps.wrap(processor.model_runner, "warmup", self._warm_up)
            wraps.wrap(processor.scheduler, "clear_cancelled_requests", self._cancel)
            wraps.wrap(processor.offloading_manager, "offload_requests", self._offload)
            wraps.wrap(processor.offloading_manager, "restore_scheduled_requests", self._restore)
            if hasattr(cache, "perform_cache_copy"):
                wraps.wrap(cache, "perform_cache_copy", self._copy)
                wraps.wrap(cache.pool, "get_free_blocks", self._blocks.allocate)
            else:
                wraps.wrap(cache, "copy_cache", self._copy)
                wraps.wrap(cache._block_manager, "get_free_blocks", self._blocks.allocate)

    def close(self) -> None:
        """No session any more: hooks that are still reached pass through."""
        self._session = None

    def reset(self) -> None:
        """The engine dropped all of its requests (it starts again)."""
        for request_id in [*self._running, *self._preempted]:
            self._drop(request_id)
        self._blocks.reset()
        self._cancelled = ([], [])

    def finish(self, request_id: str, num_tokens: int) -> Rows | None:
        """Rows of a request that the engine delivers as finished; None without a session. Raises R3Error."""
        if self._session is None:
            return None
        error = self._refused.get(request_id)
        if error is not None:
            self._drop(request_id)
            raise error
        state = self._running.get(request_id)
        if state is None or state.status.name != "FINISHED":
            raise MissingRoutes(f"Request {request_id!r} is finished, and no forward of it was recorded.")
        rows = self._session.finish(request_id, num_tokens)
        del self._running[request_id]
        return rows

    def abort(self, request_id: str, num_tokens: int) -> Rows | None:
        """What there is of a request that failed; None if nothing of it was recorded."""
        self._blocks.forget(request_id)
        return self._drop(request_id, num_tokens)

    # -- hooks: each gets the original method first ------------------------------------------------------------------------

    def _compute(self, compute: Callable[..., None], model: Any, batch_data: Any) -> None:
        """The batch that was just prepared runs inside a step."""
        with self._hook() as session:
            if session is None:
                return compute(model, batch_data)
            num_tokens = int(batch_data["input_ids"].shape[-1])
            try:
                with self._step(session, num_tokens), _room_to_compile():
                    return compute(model, batch_data)
            except R3Error as error:
                self.errors.append(error)
                raise

    def _step(self, session: RecordingSession, num_tokens: int) -> AbstractContextManager[Any]:
        mapping = np.full(num_tokens, -1, dtype=np.int64)
        if self._warming:
            return session.step(mapping)
        states = []
        lengths = []
        for future in self._host_io().requests_in_batch:
            # A prompt whose last token waits for a fork is scheduled with no token at all.
            if future.query_length:
                states.append(future.state)
                lengths.append(future.query_length)
        ids: tuple[str, ...] = tuple([state.request_id for state in states])
        sizes = np.array(lengths, dtype=np.int64)
        stops = np.array([state.position_offset for state in states], dtype=np.int64)
        starts = stops - sizes
        slots = self.slots.of_batch(ids, starts, stops)
        self._check(slots)
        self._blocks.assign_new(session)
        self._expire_cancelled()
        self._start_new(session, states, starts)
        mapping[: len(slots)] = self.slots.one_writer_each(slots)
        names: tuple[Hashable, ...] = ids
        if self._refused:
            names = tuple([_Unrecorded(i) if i in self._refused else i for i in ids])
            starts = np.where([i in self._refused for i in ids], 0, starts)
        return session.step(mapping, SegmentBatch(names, starts, sizes))

    def _start_new(self, session: RecordingSession, states: list[Any], starts: Slots) -> None:
        """Requests in their first forward: tell which rows a shared prefix or a fork skipped."""
        for i in [i for i, state in enumerate(states) if self._running.get(state.request_id) is not state]:
            state, start = states[i], int(starts[i])
            if state.request_id in self._running:
                self._drop(state.request_id)  # a cancelled request whose id came back
            self._running[state.request_id] = state
            self._preempted.discard(state.request_id)
            if start == 0 or state.request_id in self._refused:
                continue
            prefix = self.slots.of_request(state.request_id, 0, start)
            try:
                if prefix is None:
                    raise MissingRoutes(
                        f"Request {state.request_id!r} starts at position {start}, and the model has no full-attention "
                        "layer, so no block that it shares still names its tokens. Use num_return_sequences=1."
                    )
                session.prefix_hit(state.request_id, 0, prefix)
            except (MissingRoutes, StaleRoutes) as error:
                # It runs on, so that blocks which it shares keep their rows; its output will carry the error.
                self._refused[state.request_id] = error

    def _warm_up(self, warmup: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Dummy batches: -1 everywhere. The engine turns what they raise into a warning; our errors are raised again."""
        if self._session is None:
            return warmup(*args, **kwargs)
        seen = len(self.errors)
        self._warming = True
        try:
            result = warmup(*args, **kwargs)
        finally:
            self._warming = False
        if len(self.errors) > seen:
            raise self.errors[seen]
        return result

    def _cancel(self, clear: Callable[[], list[Any]]) -> list[Any]:
        states = clear()
        with self._hook() as session:
            if session is not None:
                for state in states:
                    request_id: str = state.request_id
                    self._blocks.forget(request_id)
                    if request_id not in self._running:
                        self._drop(request_id)
                    elif self._running[request_id] is state:
                        self._cancelled[0].append(state)
                if not self.processor.use_async_batching:
                    self._expire_cancelled()
                    self._expire_cancelled()
        return states

    def _expire_cancelled(self) -> None:
        """Abort what was cancelled before the last batch. With asynchronous batching a cancelled request is still in flight in
        one batch, whose update may find that it has just finished and deliver it."""
        for state in self._cancelled[1]:
            request_id: str = state.request_id
            if self._running.get(request_id) is state:
                self._drop(request_id)
        self._cancelled = ([], self._cancelled[0])

    def _offload(self, offload: Callable[[], Any]) -> Any:
        """Requests that were starved and are not active any more lost their blocks. Their tables are read before."""
        scheduler = self.processor.scheduler
        with self._hook() as session:
            if session is None:
                return offload()
            starved = [
                (state, self.slots.of_request(state.request_id, 0, state.position_offset))
                for state, _ in scheduler.starved_requests
            ]
            result = offload()
            for state, slots in starved:
                request_id = state.request_id
                if request_id in scheduler.active_requests:
                    continue
                if state.is_cpu_offloaded:
                    # The position may have been set back by one: that token is forwarded again.
                    if slots is not None:
                        self._blocks.offloaded(session, request_id, slots[: state.position_offset])
                elif request_id in self._refused:
                    error = self._refused[request_id]
                    self._drop(request_id)
                    self._refused[request_id] = error  # what it emitted came from forwards that nobody saw
                elif self._running.pop(request_id, None) is not None:
                    self._preempted.add(request_id)
                    session.preempt(request_id, len(state.initial_tokens) + len(state.generated_tokens))
            return result

    def _restore(self, restore: Callable[[Any], None], requests_in_batch: Any) -> None:
        with self._hook() as session:
            if session is None:
                return restore(requests_in_batch)
            back = [future.state.request_id for future in requests_in_batch if future.state.is_cpu_offloaded]
            restore(requests_in_batch)
            if back:
                self._blocks.restored(session, back)

    def _copy(self, copy: Callable[..., None], *args: Any) -> None:
        copy(*args)
        with self._hook() as session:
            if session is not None:
                self._blocks.copied(session, *args)

    # -- helpers -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _hook(self) -> Iterator[RecordingSession | None]:
        """The session, with the engine's stream current: all that the session queues lies between the engine's own work."""
        with self._lock:
            stream = self.processor.inputs_and_outputs.compute_stream
            with nullcontext() if stream is None else torch.get_device_module(stream.device).stream(stream):
                yield self._session

    def _host_io(self) -> Any:
        io = self.processor.inputs_and_outputs
        return io.io_pairs[io.current_pair].host_io if hasattr(io, "io_pairs") else io

    def _check(self, slots: Slots) -> None:
        """Once: what the block tables say is what the engine prepared to write."""
        io = self._host_io()
        if not self._checked and not io.use_block_table and io.write_index_storage.device.type == "cpu":
            self.slots.check(io, slots)
            self._checked = True

    def _drop(self, request_id: str, num_tokens: int = 1) -> Rows | None:
        """Forget a request that will not be delivered as finished. Returns what the session has of it."""
        seen = self._running.pop(request_id, None) is not None or request_id in self._preempted
        refused = self._refused.pop(request_id, None) is not None
        self._preempted.discard(request_id)
        if self._session is None or not seen:
            return None
        rows = self._session.abort(_Unrecorded(request_id) if refused else request_id, num_tokens)
        return None if refused else rows


class _Unrecorded(str):
    """The name under which a refused request's tokens pass through a step; never equal to a request's own id."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unrecorded) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(("unrecorded", str(self)))


# The attention cache breaks the graph at every layer, and one decorated function around all of transformers' masks and
# embeddings is compiled for each of them: Dynamo's default limit of 8 is reached by an ordinary run, and what is past it
# would run eagerly, unrecorded.
_RECOMPILATIONS = 64


def _room_to_compile() -> AbstractContextManager[Any]:
    """Dynamo's recompilation limit, raised for the length of one forward."""
    config = torch._dynamo.config
    patched: AbstractContextManager[Any] = config.patch(recompile_limit=max(config.recompile_limit, _RECOMPILATIONS))
    return patched
