"""The adapter contract: what an engine's adapter gives to a session, and what it tells it.

An engine that keeps a paged KV cache records its routing once three things are known: which KV slot each token of a
forward writes, which request each token belongs to, and when a slot changes its owner. An adapter knows its engine well
enough to say so. It reads the engine's own bookkeeping, wraps a few bound methods and edits nothing:

    class MyAdapter(EngineAdapter):
        def __init__(self, engine):
            super().__init__()
            self.engine = engine

        model = property(lambda self: self.engine.model)
        num_slots = property(lambda self: self.engine.kv.num_blocks * self.engine.kv.block_size)
        max_tokens = property(lambda self: self.engine.max_batch_tokens)

        def install(self, session):
            self.session = session
            self.wraps.wrap(self.engine, "forward", self._forward)       # engine.forward is now self._forward
            self.wraps.wrap(self.engine, "emit", self._emit)

        def uninstall(self):
            self.wraps.restore()

        def _forward(self, forward, batch):                             # the original comes first
            with self.session.step(batch.slot_mapping, [Segment(s.id, s.start, s.length) for s in batch.sequences]):
                return forward(batch)

        def _emit(self, emit, result):
            result.routed_experts = self.session.finish(result.id, len(result.prompt) + len(result.tokens))
            return emit(result)

    session = r3_pass.runtime.attach(MyAdapter(engine))

What an adapter must get right, each of which some recorder got wrong before:

1. **The slot of position p is read where the engine reads it**, at the forward, from its block table: a table read later may
   already be rewritten by de-duplication or belong to the next owner.
2. **Padding is -1**, never the slot that the engine uses as its bin.
3. **Order.** `preempt` as soon as a request is to start over, its sampled tokens counted; `assign` when blocks leave the free list
   (never for shared ones); then `move` and `insert` (fork, restore); then `prefix_hit` of requests whose first forward starts past
   position 0; then the `step`. All of it on the stream that the forward runs on: the session queues device work on the stream
   that is current. These calls are taken on trust: a slot that is passed on without `assign` keeps its old owner's row, tokens
   that are forwarded again without `preempt` get new rows, and rows of new weights look like the others without
   `weights_changed`.
4. **Forwards that are no step** (warm-up, dummy batches) run in a step whose mapping is all -1, so that a graph captured there
   is the graph that serves later; drafters run under `session.paused()`.
5. **One request's trouble is one request's.** `StaleRoutes` or `MissingRoutes` from `prefix_hit` and `finish` fail that
   request through the engine's own error channel. What `step` raises stops the engine, or costs the step's requests their rows:
   then the forward still has to come to its end, and the row of every slot is made void (`assign`) before the next step.
6. **What cannot be recorded is said, not tried**: `deployment` states how the engine runs (pipeline parallel, KV offload, ...),
   and `attach` refuses by it. On tensor-parallel ranks other than 0 the session is idle: the same adapter runs there, and
   `finish`, `abort` and `extract` return None. Ranks must stay in lockstep: a prefix hit that raises on rank 0 fails the request
   on all of them. With a `probe`, `session.self_test()` compares their choices at start-up. On a pipeline stage `finish` and
   `abort` return that stage's `StageRows`, which the adapter sends to where the output is built, for `merge_stages`.
7. **`uninstall` leaves the engine as it was**, also while its thread runs. A session calls it without holding its own lock.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import nn

from r3_pass.errors import RefusedConfiguration
from r3_pass.runtime.refusals import Deployment

if TYPE_CHECKING:
    from r3_pass.runtime.segments import SegmentBatch

Slots = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int16]

NO_PROBE = (
    "this session's engine compiles and calls the model by itself. Attach to a compiled model with num_slots= and run self_test "
    "there, or give the engine's adapter a `probe`."
)


class RecordingSession(Protocol):
    """What an adapter calls on a session. Slots are int64 on the host; -1 is padding, in `slot_mapping` only."""

    def step(self, slot_mapping: Slots, segments: "SegmentBatch | tuple[()]" = ()) -> AbstractContextManager[Any]:
        """Around exactly one forward. `slot_mapping` [tokens forwarded, padding included]; `segments` cover it from 0."""

    def prefix_hit(self, request_id: Hashable, start: int, slots: Slots) -> None:
        """Positions start, start + 1, ... of the request were not run: their rows are in `slots`, written before."""

    def assign(self, slots: Slots) -> None:
        """These slots left the free list for a new owner: their rows are void until a step writes them."""

    def move(self, src_slots: Slots, dst_slots: Slots) -> None:
        """The engine copied KV from `src_slots` to `dst_slots`."""

    def extract(self, slots: Slots) -> object:
        """The rows of `slots`, for KV that the engine copies out of its cache. Opaque; given back to `insert`."""

    def insert(self, slots: Slots, rows: object) -> None:
        """The engine copied KV back into its cache: what `extract` returned now belongs to `slots` (as many)."""

    def preempt(self, request_id: Hashable, num_tokens: int) -> None:
        """The request's KV is gone and its num_tokens tokens (those of a forward under way included) will be forwarded again;
        exported rows stay."""

    def finish(self, request_id: Hashable, num_tokens: int, start: int = 0) -> Rows:
        """int16 [num_tokens - 1 - start, num_layers, top_k]; None on a rank that does not export. Raises MissingRoutes if a row
        is missing."""

    def abort(self, request_id: Hashable, num_tokens: int, start: int = 0) -> Rows:
        """As many of these rows as the request has, without a gap."""

    def wake(self, num_slots: int, max_tokens: int) -> None:
        """A KV cache of num_slots slots and steps of up to max_tokens tokens now exist; every row is void."""

    def release(self) -> None:
        """The KV cache is gone: device memory may go, until `wake`."""


class EngineAdapter(ABC):
    """One engine, seen by one session. Pass an instance to `attach`; for engines that r3_pass knows, `attach(engine)` makes one of
    the class that accepts it.

    The constructor may raise `UnsupportedEngine` or `RefusedConfiguration` and must not change the engine in a way that
    `uninstall` does not undo.
    """

    def __init__(self) -> None:
        self.wraps = WrapPoints()

    @classmethod
    def accepts(cls, engine: object) -> bool:
        """Whether this adapter knows such objects: looks at the object, imports no engine. Not asked if an instance is passed."""
        return False

    @classmethod
    def connect(cls, engine: Any) -> Any:
        """A session of this engine that is there already: made as the engine started, or in another process of it. `attach` returns
        it as it is. None: `attach` makes one."""
        return None

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The module whose routers are recorded, with its parameters: not a drafter."""

    @property
    @abstractmethod
    def num_slots(self) -> int | None:
        """KV slots of the cache. None while the engine has no cache yet: the adapter calls `session.wake` when it has."""

    @property
    @abstractmethod
    def max_tokens(self) -> int | None:
        """Tokens of the largest forward, padding included. None as above."""

    @property
    def experts(self) -> Mapping[str, int] | None:
        """Name of a weight of each layer's experts, and how many they are, where the engine knows; None: found in the modules."""
        return None

    @property
    def backends(self) -> tuple[object, ...]:
        """The Dynamo backends (objects or registered names) that the engine itself compiles with, as far as known: for errors and
        reports before the first step, after which the graphs that ran tell."""
        return ()

    @property
    def deployment(self) -> Deployment:
        """The facts of the engine that decide whether it can be recorded; `attach` refuses by them. By default: one process."""
        return Deployment()

    @property
    def group(self) -> Any:
        """The torch.distributed group of the tensor-parallel ranks, in their order; None: the default group. For `self_test`."""
        return None

    def probe(self) -> AbstractContextManager[tuple[Slots, Callable[[], Any]]]:
        """A batch for `self_test`, the same on every rank: a KV slot of nobody for each of its tokens, none of them padding, and
        a call that forwards it once through the compiled model, no step entered. The slots are nobody's again afterwards.

        Raises: RefusedConfiguration while requests run; by default, since an engine has to be known for this.
        """
        raise RefusedConfiguration(NO_PROBE)

    @abstractmethod
    def install(self, session: RecordingSession) -> None:
        """Wrap the engine's methods; from here on its forwards run in steps of `session`."""

    @abstractmethod
    def uninstall(self) -> None:
        """Restore every wrapped method. Waits for a forward that is running in another thread. Called twice: no effect."""


class WrapPoints:
    """The instance attributes that an adapter put over an engine's bound methods, and the way back.

    >>> class Engine:
    ...     def run(self, x): return x + 1
    >>> engine, wraps = Engine(), WrapPoints()
    >>> wraps.wrap(engine, "run", lambda run, x: 10 * run(x))
    >>> engine.run(1)
    20
    >>> wraps.restore(); engine.run(1), vars(engine)
    (2, {})
    """

    def __init__(self) -> None:
        self._points: list[tuple[object, str, object, object]] = []

    def wrap(self, owner: object, name: str, hook: Callable[..., Any]) -> None:
        """Before: `owner.name(*args)`.   After: the same call runs `hook(original, *args)`."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        self._points.append((owner, name, vars(owner).get(name, _ABSENT), wrapped))
        setattr(owner, name, wrapped)

    def restore(self) -> None:
        """Put everything back, last first. A wrap that someone else put over ours stays, and still reaches ours: hooks must
        pass calls through once their adapter has no session."""
        while self._points:
            owner, name, previous, wrapped = self._points.pop()
            if vars(owner).get(name) is not wrapped:
                continue
            if previous is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)


_ABSENT = object()
