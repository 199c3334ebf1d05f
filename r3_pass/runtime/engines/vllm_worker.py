"""The half that runs in vLLM's worker: a step around each forward, and its rows into the model's own output.

    execute_model(scheduler_output)      what is scheduled is kept for ...
      _model_forward()                   ... assign, move, then one step around the forward; then the rows of prefix hits
    sample_tokens() -> output            output.r3_pass = StepRows: the new rows of this step, by request

The slot mapping is the one that attention writes its KV by (the forward context's), so what is recorded lies where the KV does.
Rows of a prefix hit are read after the forward: vLLM shares blocks that the same step fills. Dummy forwards run outside of a step
and write nothing, but for those that a CUDA graph is captured of: these run in a step whose slots are all -1.

A step that cannot be recorded costs its own requests their rows, and nobody else: the row of every slot is void then, so that none
of another time is taken for one of this, and the engine serves on. It stops where that would not be true: where slots are not what
the adapter takes them for, and where the forward itself did not come to its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from r3_pass.errors import (
    BufferLayoutError,
    MissingRoutes,
    R3Error,
    RefusedConfiguration,
    StaleRoutes,
    UnsupportedEngine,
)
from r3_pass.runtime.engines.base import RecordingSession, Rows, WrapPoints
from r3_pass.runtime.engines.vllm_slots import BlockSlots, Slots
from r3_pass.runtime.segments import SegmentBatch

OUTPUT = "r3_pass"
"""Attribute of a ModelRunnerOutput: the StepRows of its step."""

HOOKS = (
    "execute_model",
    "sample_tokens",
    "_model_forward",
    "_dummy_run",
    "input_batch",
    "query_start_loc",
    "kv_cache_config",
)
"""What is wrapped or read on the model runner."""


@dataclasses.dataclass
class Hit:
    """A prefix that a request took over from cached blocks: its rows [0, start), or why there are none."""

    request_id: str
    rows: Rows | None
    error: str = ""


@dataclasses.dataclass
class StepRows:
    """What a worker sends with a step's output.

    Attributes:
        request_ids: in the order of the batch.
        starts, lengths: int64, first position and number of tokens of each.
        rows: int16 [sum of lengths, num_layers, top_k]; None if the step could not be recorded.
        hits: of requests that began past position 0.
        error: why there are no rows.
    """

    request_ids: tuple[str, ...]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    rows: Rows | None
    hits: list[Hit]
    error: str = ""


class _Step(NamedTuple):
    """The name in the session of all that a step forwards."""

    number: int

    def __repr__(self) -> str:
        return f"(all of step {self.number})"


class _HitOf(NamedTuple):
    """The name in the session of a prefix that a request took over."""

    request_id: str
    step: int

    def __repr__(self) -> str:
        return repr(self.request_id)


class _Launched:
    """A step whose forward was launched; `collect` waits for its rows."""

    def __init__(self, number: int, ids: tuple[str, ...], starts: Slots, lengths: Slots) -> None:
        self.key = _Step(number)
        self.ids, self.starts, self.lengths = ids, starts, lengths
        self.hits: list[Hit] = []
        self.waiting: list[tuple[_HitOf, int]] = []  # hits on their way, and how many rows
        self.error = ""

    def fail(self, session: RecordingSession, error: R3Error) -> None:
        """The step has no rows."""
        self.error = f"{type(error).__name__}: {error}"
        for name in (self.key, *(name for name, _ in self.waiting)):
            _drop(session, name)
        self.hits, self.waiting = [], []

    def collect(self, session: RecordingSession) -> StepRows:
        rows = None
        if not self.error:
            try:
                rows = session.finish(self.key, int(self.lengths.sum()) + 1)
            except R3Error as error:
                self.fail(session, error)
        for name, length in self.waiting:
            try:
                self.hits.append(Hit(name.request_id, session.finish(name, length + 1)))
            except R3Error as error:
                _drop(session, name)
                self.hits.append(_failed(name.request_id, error))
        return StepRows(self.ids, self.starts, self.lengths, rows, self.hits, self.error)


class StepRecorder:
    """One model runner, seen by one session.

    Args:
        runner: vLLM's V1 model runner, with its KV cache.
        context: returns vLLM's forward context.
        lock: held while a step is begun, so that `uninstall` waits for it.
    """

    def __init__(self, runner: Any, slots: BlockSlots, context: Callable[[], Any], lock: threading.RLock) -> None:
        for name in HOOKS:
            if not hasattr(runner, name):
                raise UnsupportedEngine(
                    f"{type(runner).__module__}.{type(runner).__name__} has no {name!r}: not a model runner that the adapter knows."
                )
        self.runner = runner
        self.slots = slots
        self._context = context
        self._lock = lock
        self._session: RecordingSession | None = None
        self._scheduled: Any = None
        self._launched: _Launched | None = None
        self._steps = 0
        self._checked = False

    def install(self, session: RecordingSession, wraps: WrapPoints) -> None:
        self._session = session
        wraps.wrap(self.runner, "execute_model", self._execute)
        wraps.wrap(self.runner, "sample_tokens", self._sample)
        wraps.wrap(self.runner, "_model_forward", self._forward)
        wraps.wrap(self.runner, "_dummy_run", self._dummy)

    def close(self) -> None:
        """No session any more: hooks that are still reached pass through. Waits for a forward that runs in another thread."""
        with self._lock:
            self._session = None
            self._launched = None

    # ---- hooks: each gets the original first --------------------------------------------------------------------
    def _execute(self, execute: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._scheduled = scheduler_output if self._session is not None else None
            try:
                return execute(scheduler_output, *args, **kwargs)
            finally:
                self._scheduled = None

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        session, scheduled = self._session, self._scheduled
        if session is None or scheduled is None:
            return forward(*args, **kwargs)
        inputs = kwargs.get("input_ids")
        tokens = int((inputs if inputs is not None else kwargs["inputs_embeds"]).shape[0])
        new = scheduled.total_num_scheduled_tokens
        begun = self._begun(scheduled)
        self._launched = launched = self._batch()
        mapping = self._mapping(tokens, new)
        if not self._checked and begun:
            self._check(mapping, launched, begun)
        entered = left = False
        result = None
        try:
            self._hand_over(session, scheduled, begun)
            with session.step(mapping, SegmentBatch((launched.key,), (0,), (new,))):
                entered = True
                result = forward(*args, **kwargs)
                left = True
        except R3Error as error:
            if entered and not left:
                raise type(error)(f"{error}\n{_STOPS}") from error
            session.assign(np.arange(self.slots.num_slots))
            launched.fail(session, error)
            return result if left else forward(*args, **kwargs)  # outside of a step, which writes nothing
        for request_id, blocks, start in begun:
            if start:
                self._hit(session, launched, request_id, self.slots.of(blocks)[:start])
        return result

    def _sample(self, sample: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        session, launched = self._session, self._launched
        self._launched = None
        if session is None or launched is None:
            return output
        if hasattr(output, "get_output"):  # asynchronous: whoever waits for the tokens waits for the rows
            get_output = output.get_output
            output.get_output = lambda: _with_rows(get_output(), launched, session)
            return output
        return _with_rows(output, launched, session)

    def _dummy(self, dummy: Callable[..., Any], num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        mode = kwargs.get("cudagraph_runtime_mode")
        captures = kwargs.get("is_graph_capturing") and mode is not None and mode.name != "NONE"
        if self._session is None or not captures:
            return dummy(num_tokens, *args, **kwargs)
        with self._session.step(np.full(num_tokens, -1, np.int64)):
            return dummy(num_tokens, *args, **kwargs)

    # ---- helpers ------------------------------------------------------------------------------------------------
    def _begun(self, scheduled: Any) -> list[tuple[str, list[int], int]]:
        """Requests that begin in this step, anew or again: their blocks in the group, and the tokens that these hold already."""
        group = self.slots.group
        found = [(r.req_id, r.block_ids[group], r.num_computed_tokens) for r in scheduled.scheduled_new_reqs]
        cached = scheduled.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids) if cached.resumed_req_ids else ():
            if request_id in cached.resumed_req_ids:
                found.append((request_id, cached.new_block_ids[i][group], cached.num_computed_tokens[i]))
        return found

    def _hand_over(self, session: RecordingSession, scheduled: Any, begun: list[tuple[str, list[int], int]]) -> None:
        """Blocks with a new owner are void; blocks that were copied take their rows along."""
        group, size = self.slots.group, self.slots.block_size
        fresh = [b for _, blocks, start in begun for b in blocks[start // size :]]
        cached = scheduled.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks is not None and request_id not in cached.resumed_req_ids:
                fresh += blocks[group]
        if fresh:
            session.assign(self.slots.of(fresh))
        copies = scheduled.kv_cache_block_copies
        if copies:
            session.move(self.slots.of([c[0] for c in copies]), self.slots.of([c[1] for c in copies]))

    def _batch(self) -> _Launched:
        runner, self._steps = self.runner, self._steps + 1
        number = runner.input_batch.num_reqs
        starts = runner.input_batch.num_computed_tokens_cpu[:number].astype(np.int64)
        lengths = np.diff(runner.query_start_loc.np[: number + 1]).astype(np.int64)
        return _Launched(self._steps, tuple(runner.input_batch.req_ids[:number]), starts, lengths)

    def _mapping(self, tokens: int, new: int) -> Any:
        """The slot of each token as attention has it; -1 for the padding behind the step's own tokens."""
        slots = self._context().slot_mapping[self.slots.layer]
        if slots.device.type == "cpu":
            mapping = np.full(tokens, -1, np.int64)
            mapping[:new] = slots[:new].numpy()
            return mapping
        mapping = slots.new_full((tokens,), -1)
        mapping[:new] = slots[:new]
        return mapping

    def _check(self, mapping: Any, launched: _Launched, begun: list[tuple[str, list[int], int]]) -> None:
        """Once, on a CPU: what the blocks of a request say is what attention writes."""
        if not isinstance(mapping, np.ndarray):
            self._checked = True
            return
        request_id, blocks, start = begun[0]
        at = launched.ids.index(request_id)
        first, length = int(launched.lengths[:at].sum()), int(launched.lengths[at])
        wanted = self.slots.of(blocks)[start : start + length]
        if not np.array_equal(mapping[first : first + length], wanted):
            raise BufferLayoutError(
                f"request {request_id!r}: its blocks in KV cache group {self.slots.group} are slots {wanted[:4]}..., attention "
                f"writes {mapping[first : first + 4]}...: this version of vLLM numbers slots in another way. No row of any step "
                "could be proved, so the engine stops. Serve without r3_pass, or with a version of vLLM that it was tested with."
            )
        self._checked = True

    def _hit(self, session: RecordingSession, launched: _Launched, request_id: str, slots: Slots) -> None:
        name = _HitOf(request_id, self._steps)
        try:
            session.prefix_hit(name, 0, slots)
        except R3Error as error:
            _drop(session, name)
            launched.hits.append(_failed(request_id, error))
        else:
            launched.waiting.append((name, len(slots)))


_STOPS = (
    "This stopped the model's forward in the middle: there are no outputs for the requests of this step, and what a second forward "
    "would find of the first cannot be told. So the engine stops. Start it again; without r3_pass, if this comes again."
)


def _drop(session: RecordingSession, name: Hashable) -> None:
    with contextlib.suppress(RefusedConfiguration):  # detached while the step was under way: it holds nothing
        session.abort(name, 1)


def _with_rows(output: Any, launched: _Launched, session: RecordingSession) -> Any:
    setattr(output, OUTPUT, launched.collect(session))
    return output


def _failed(request_id: str, error: R3Error) -> Hit:
    if isinstance(error, StaleRoutes | MissingRoutes):
        why = "its prefix is in cached blocks without rows (cached before attach, under other weights, or in a step that was not "
        why += "recorded); the engine's reset_prefix_cache() clears them. "
    else:
        why = ""
    return Hit(request_id, None, f"{type(error).__name__}: {why}{error}")
