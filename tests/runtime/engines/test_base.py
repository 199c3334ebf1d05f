"""The adapter contract, shown to be enough for an engine of one's own; and the wrapping that adapters rest on.

The engine is hand-written: paged slots, prefix reuse, chunked prefill, padded batches, and outputs that come one step late. Its
adapter is thirty lines, and nothing in the engine knows of it. The decoder has no attention, so a request's truth is that of
its tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from decoder import VOCAB, decoder, truth

import r3_pass
from r3_pass import MissingRoutes, NoRouterFound, R3Error, RefusedConfiguration, StaleRoutes, UnsupportedEngine
from r3_pass.runtime import SegmentBatch, Session
from r3_pass.runtime.engines.base import EngineAdapter, RecordingSession, WrapPoints

PAGE, BLOCKS, BATCH = 4, 16, 6


# ---- an engine ------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(eq=False)
class Request:
    name: str
    prompt: list[int]
    new: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    blocks: list[int] = dataclasses.field(default_factory=list)
    position: int = 0
    error: Exception | None = None
    routed_experts: Any = None


class Batch(NamedTuple):
    """`parts` are (request, first position, number of tokens); tokens and slots are padded, the latter with the bin, slot 0."""

    parts: list[tuple[Request, int, int]]
    tokens: list[int]
    slots: list[int]


class Engine:
    """Greedy decoding. Block 0 is the bin of padded tokens; a full block can be found by the tokens up to its end."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.compiled = torch.compile(model, backend=r3_pass.backend("eager"), dynamic=True)
        self.free = deque(range(1, BLOCKS))
        self.owners: Counter[int] = Counter()
        self.prefixes: dict[tuple[int, ...], int] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished: list[Request] = []  # by the step before this one
        self.outputs: dict[str, Request] = {}
        self.reused = self.chunks = 0

    def generate(self, prompts: dict[str, list[int]], new: int = 6) -> dict[str, Request]:
        self.outputs = {}
        self.waiting.extend(Request(name, tokens, new, list(tokens)) for name, tokens in prompts.items())
        while self.waiting or self.running:
            self.iterate()
        return self.outputs

    def iterate(self) -> None:
        """One step. Who is finished is seen a step late, so that it was forwarded once more than needed."""
        late, room = self.finished, BATCH
        while self.waiting and len(self.running) < 3 and self.admit(self.waiting[0]):
            request = self.waiting.popleft()
            self.running.append(request)
            if request.error:
                self.leave(request)
        parts = []
        for request in self.running:
            length = min(len(request.tokens) - request.position, room)
            room -= length
            if length:
                parts.append((request, request.position, length))
        places = [(r, p) for r, start, n in parts for p in range(start, start + n)]
        tokens = [r.tokens[p] for r, p in places] + [0] * room
        slots = [r.blocks[p // PAGE] * PAGE + p % PAGE for r, p in places] + [0] * room
        sampled = self.forward(Batch(parts, tokens, slots))
        at = 0
        for request, start, length in parts:
            at += length
            request.position = start + length
            self.chunks += request.position < len(request.prompt)
            for end in range(PAGE, request.position + 1, PAGE):
                self.prefixes.setdefault(tuple(request.tokens[:end]), request.blocks[end // PAGE - 1])
            if request.position == len(request.tokens):
                request.tokens.append(sampled[at - 1])
        for request in late:
            request.tokens = request.tokens[: len(request.prompt) + request.new]
            self.leave(request)
        self.finished = [r for r in self.running if len(r.tokens) >= len(r.prompt) + r.new]

    def admit(self, request: Request) -> bool:
        """Blocks for all that the request may grow to; those of a known prefix are shared."""
        shared: list[int] = []
        while (end := (len(shared) + 1) * PAGE) < len(request.prompt) and tuple(request.prompt[:end]) in self.prefixes:
            shared.append(self.prefixes[tuple(request.prompt[:end])])
        missing = -(-(len(request.prompt) + request.new + 1) // PAGE) - len(shared)
        if len(set(self.free) - set(shared)) < missing:
            return False
        self.free = deque(b for b in self.free if b not in shared)
        request.blocks = shared + self.allocate(missing)
        self.owners.update(request.blocks)
        request.position = len(shared) * PAGE
        self.reused += len(shared)
        return True

    def allocate(self, number: int) -> list[int]:
        blocks = [self.free.popleft() for _ in range(number)]
        self.prefixes = {tokens: block for tokens, block in self.prefixes.items() if block not in blocks}
        return blocks

    @torch.no_grad()
    def forward(self, batch: Batch) -> list[int]:
        return self.compiled(torch.tensor([batch.tokens]))[0].argmax(-1).tolist()

    def leave(self, request: Request) -> None:
        """To the user: finished, or with its error."""
        self.running.remove(request)
        self.owners.subtract(request.blocks)
        self.free.extend(b for b in request.blocks if not self.owners[b])
        self.outputs[request.name] = request


# ---- and its adapter --------------------------------------------------------------------------------------------------
class Adapter(EngineAdapter):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    @classmethod
    def accepts(cls, engine: object) -> bool:
        return isinstance(engine, Engine)

    model = property(lambda self: self.engine.model)
    num_slots = property(lambda self: BLOCKS * PAGE)
    max_tokens = property(lambda self: BATCH)

    def install(self, session: RecordingSession) -> None:
        self.session = session
        for name in ("allocate", "admit", "forward", "leave"):
            self.wraps.wrap(self.engine, name, getattr(self, f"_{name}"))

    def uninstall(self) -> None:
        self.wraps.restore()

    def _allocate(self, allocate: Callable[..., list[int]], number: int) -> list[int]:
        blocks = allocate(number)
        self.session.assign(slots_of(blocks))
        return blocks

    def _admit(self, admit: Callable[..., bool], request: Request) -> bool:
        admitted = admit(request)
        if admitted and request.position:
            try:
                self.session.prefix_hit(request.name, 0, slots_of(request.blocks)[: request.position])
            except StaleRoutes as error:
                request.error = error
        return admitted

    def _forward(self, forward: Callable[..., list[int]], batch: Batch) -> list[int]:
        mapping = np.array(batch.slots)
        mapping[sum(n for _, _, n in batch.parts) :] = -1
        segments = [(r.name, start, n) for r, start, n in batch.parts]
        with self.session.step(mapping, SegmentBatch(*zip(*segments, strict=True)) if segments else ()):
            return forward(batch)

    def _leave(self, leave: Callable[..., None], request: Request) -> None:
        try:
            if request.error is None:
                request.routed_experts = self.session.finish(request.name, len(request.tokens))
        except R3Error as error:
            request.error = error
        leave(request)


def slots_of(blocks: list[int]) -> np.ndarray:
    return (np.array(blocks, np.int64)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)


# ---- it records -------------------------------------------------------------------------------------------------------
SYSTEM = [5, 9, 2, 44, 7, 31, 12, 3, 18]


def conversation(seed: int) -> dict[str, list[int]]:
    """Prompts with a common beginning, longer than a batch; more requests than the cache holds at once."""
    draw = np.random.default_rng(seed)
    own = [draw.integers(1, VOCAB, n).tolist() for n in (3, 14, 1, 7, 9, 2)]
    return {f"{seed}.{i}": (SYSTEM if i % 3 else []) + tokens for i, tokens in enumerate(own)}


@pytest.fixture
def engine() -> Engine:
    return Engine(decoder(config={"num_experts_per_tok": 2, "num_hidden_layers": 3}))


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    made = r3_pass.runtime.attach(Adapter(engine))
    yield made
    made.check_integrity()
    made.detach()


def assert_rows(engine: Engine, outputs: dict[str, Request]) -> None:
    for request in outputs.values():
        assert request.error is None, request.error
        rows = request.routed_experts
        assert rows.dtype == np.int16 and rows.shape == (len(request.prompt) + request.new - 1, 3, 2)
        assert (rows == truth(engine.model, torch.tensor([request.tokens]))[:-1]).all(), request.name


def test_an_engine_of_ones_own(engine: Engine, session: Session) -> None:
    """Every row of every request, over prefixes that are shared, evicted and found again."""
    for seed in (1, 2, 1):
        outputs = engine.generate(conversation(seed))
        assert len(outputs) == 6
        assert_rows(engine, outputs)
    assert engine.reused > 6 and engine.chunks > 6
    assert session.geometry.num_slots == BLOCKS * PAGE


def test_outputs_do_not_change(engine: Engine) -> None:
    """Recorded, and after detach, the engine says what it said before; and it is the engine that it was."""
    before = {name: r.tokens for name, r in engine.generate(conversation(1)).items()}
    methods = {name for name, value in vars(engine).items() if callable(value)}
    with_session = r3_pass.runtime.attach(Adapter(engine))
    engine.prefixes.clear()
    recorded = engine.generate(conversation(1))
    assert_rows(engine, recorded)
    with_session.detach()
    with_session.detach()
    assert {name for name, value in vars(engine).items() if callable(value)} == methods
    after = engine.generate(conversation(1))
    assert {name: r.tokens for name, r in recorded.items()} == before == {name: r.tokens for name, r in after.items()}
    assert all(r.routed_experts is None for r in after.values())
    again = r3_pass.runtime.attach(Adapter(engine))
    engine.prefixes.clear()
    assert_rows(engine, engine.generate(conversation(2)))
    again.detach()


def test_a_prefix_from_before_the_attachment(engine: Engine) -> None:
    """Its blocks hold KV and no rows: that request fails with the reason, its neighbours are served."""
    engine.generate({"early": [*SYSTEM, 1]})
    session = r3_pass.runtime.attach(Adapter(engine))
    outputs = engine.generate({"shares": [*SYSTEM, 2], "own": [8, 8, 8, 1, 2], "also": [4, 3, 2, 1, 4, 3, 2]})
    failed = outputs.pop("shares")
    assert isinstance(failed.error, StaleRoutes) and "'shares', position 0" in str(failed.error)
    assert_rows(engine, outputs)
    session.check_integrity()
    session.detach()


class Forgets(Adapter):
    """Says nothing about prefixes."""

    def _admit(self, admit: Callable[..., bool], request: Request) -> bool:
        return admit(request)


class Shifts(Adapter):
    """Reads block tables a token too late."""

    def _admit(self, admit: Callable[..., bool], request: Request) -> bool:
        admitted = admit(request)
        if admitted and request.position:
            self.session.prefix_hit(request.name, 0, slots_of(request.blocks)[1 : request.position + 1])
        return admitted


class Keeps(Adapter):
    """Forwards the bin's slot for padding."""

    def _forward(self, forward: Callable[..., list[int]], batch: Batch) -> list[int]:
        parts = [(r.name, start, n) for r, start, n in batch.parts]
        with self.session.step(np.array(batch.slots), SegmentBatch(*zip(*parts, strict=True))):
            return forward(batch)


@pytest.mark.parametrize(
    ("adapter", "error", "words"),
    [
        (Forgets, MissingRoutes, "position"),
        (Shifts, StaleRoutes, "void"),
        (Keeps, R3Error, "slot"),
    ],
)
def test_adapters_that_are_wrong(engine: Engine, adapter: type[Adapter], error: type[R3Error], words: str) -> None:
    """What the contract says not to do is found out, never turned into rows."""
    session = r3_pass.runtime.attach(adapter(engine))
    with pytest.raises(error, match=words):
        engine.generate({"a": [*SYSTEM, 1]})
        engine.generate({"b": [*SYSTEM, 2]})
    session.detach()
    assert engine.forward.__func__ is Engine.forward  # type: ignore[attr-defined]


def test_a_cache_that_comes_later(engine: Engine) -> None:
    """num_slots is None until the engine has a cache: the adapter wakes the session, and puts it to sleep again."""

    class Late(Adapter):
        num_slots = property(lambda self: None)
        max_tokens = property(lambda self: None)

    adapter = Late(engine)
    session = r3_pass.runtime.attach(adapter)
    with pytest.raises(RefusedConfiguration, match="wake"):
        engine.generate({"early": [1, 2, 3]})
    engine.__init__(engine.model)  # type: ignore[misc]
    for seed in (1, 2):
        adapter.session.wake(BLOCKS * PAGE, BATCH)
        engine.prefixes.clear()
        assert_rows(engine, engine.generate(conversation(seed)))
        adapter.session.release()
    session.detach()


def test_an_attachment_that_fails_leaves_nothing(engine: Engine) -> None:
    """`install` fails half-way: no method stays wrapped, and the model is free for the next session."""

    class Fails(Adapter):
        def install(self, session: RecordingSession) -> None:
            super().install(session)
            raise UnsupportedEngine("this engine's emit is not known here")

    with pytest.raises(UnsupportedEngine, match="emit"):
        r3_pass.runtime.attach(Fails(engine))
    assert not [name for name, value in vars(engine).items() if getattr(value, "__name__", "") == "wrapped"]
    session = r3_pass.runtime.attach(Adapter(engine))
    with pytest.raises(RefusedConfiguration, match="session"):
        r3_pass.runtime.attach(Adapter(engine))
    assert_rows(engine, engine.generate(conversation(1)))
    session.detach()


def test_a_dense_engine() -> None:
    """Refused before a method is wrapped."""
    engine = Engine(decoder(layers=2, dense=(0, 1)))
    with pytest.raises(NoRouterFound, match="dense"):
        r3_pass.runtime.attach(Adapter(engine))
    assert not [name for name, value in vars(engine).items() if getattr(value, "__name__", "") == "wrapped"]


def test_an_engine_that_nobody_knows(engine: Engine) -> None:
    """The message names the way out: an adapter like the one above."""
    with pytest.raises(UnsupportedEngine, match=r"EngineAdapter.*attach"):
        r3_pass.runtime.attach(object())
    with pytest.raises(TypeError, match="abstract"):
        EngineAdapter()  # type: ignore[abstract]


# ---- WrapPoints -------------------------------------------------------------------------------------------------------
class Adder:
    def add(self, x: int, by: int = 1) -> int:
        return x + by


def times(factor: int) -> Callable[..., int]:
    return lambda original, *args, **kwargs: factor * original(*args, **kwargs)


def test_wraps_nest_and_come_off() -> None:
    """The last wrap is outermost; restoring gives back the class's method, with nothing on the instance."""
    adder, other, wraps = Adder(), Adder(), WrapPoints()
    wraps.wrap(adder, "add", times(10))
    wraps.wrap(adder, "add", lambda original, *args, **kwargs: 1 + original(*args, **kwargs))
    assert adder.add(1, by=2) == 31 and other.add(1) == 2
    wraps.restore()
    assert adder.add(1) == 2 and vars(adder) == {}
    wraps.restore()
    wraps.wrap(adder, "add", times(2))
    assert adder.add(1) == 4
    wraps.restore()


def test_an_attribute_of_the_instance_comes_back() -> None:
    """An engine that had already replaced its own method, or a callback that is data."""
    adder, wraps = Adder(), WrapPoints()
    adder.add = mine = lambda x: x - 1  # type: ignore[method-assign, assignment, misc]
    wraps.wrap(adder, "add", times(10))
    assert adder.add(3) == 20
    wraps.restore()
    assert vars(adder)["add"] is mine


def test_a_wrap_over_ours_stays() -> None:
    """Whoever wrapped after us keeps their wrap; it reaches our hook, which must pass through then."""
    adder, ours, theirs = Adder(), WrapPoints(), WrapPoints()
    recording: list[Any] = [True]
    ours.wrap(adder, "add", lambda original, x: original(x) + 100 * len(recording))
    theirs.wrap(adder, "add", times(2))
    assert adder.add(1) == 204
    ours.restore()
    recording.clear()
    assert adder.add(1) == 4
    theirs.restore()
    assert adder.add(1) == 2


def test_errors_go_through_a_wrap() -> None:
    """The engine's exceptions are its own; and a name that is not there is told at once, with nothing wrapped."""
    adder, wraps = Adder(), WrapPoints()
    wraps.wrap(adder, "add", times(1))
    with pytest.raises(TypeError, match="concatenate"):
        adder.add("1")  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="remove"):
        wraps.wrap(adder, "remove", times(1))
    wraps.restore()
    assert vars(adder) == {}
