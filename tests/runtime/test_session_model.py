"""Whatever an engine does with a session, in any order: each row that comes back is the one that a model of a few dicts has there.

The decoder has no attention, so a row is its token's. The model keeps tokens: of each slot, and of each
position of each request.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from decoder import VOCAB, truth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lagging import LaggingExporter
from loop import Loop

from r3_pass import MissingRoutes, RefusedConfiguration, StaleRoutes
from r3_pass.runtime.export import Exporter

SLOTS, NAMES, MOST = 24, "abcde", 7
Tokens = list[int | None]


class Model:
    """What a session must know: a token where there is a row, None where it is void."""

    def __init__(self) -> None:
        self.slots: Tokens = [None] * SLOTS
        self.requests: dict[str, Tokens] = {}
        self.kept: dict[str, int] = {}

    def write(self, slots: list[int], tokens: Tokens) -> None:
        for slot, token in zip(slots, tokens, strict=True):
            self.slots[slot] = token

    def extend(self, name: str, start: int, tokens: Tokens) -> None:
        held, kept = self.requests.setdefault(name, []), self.kept.setdefault(name, 0)
        new = held[:start] + tokens
        self.requests[name] = held[:kept] + new[kept:]

    def forget(self, name: str) -> None:
        self.requests.pop(name, None), self.kept.pop(name, None)


class Engine:
    """Acts at random on a session and on the model, and compares what both say."""

    def __init__(self, loop: Loop, table: Any, draw: random.Random) -> None:
        self.loop, self.table, self.draw, self.model = loop, table, draw, Model()
        self.session = loop.session
        self.late = draw.random() < 0.8
        self.exporter = LaggingExporter(6 * 8) if self.late else Exporter("cpu", 6 * 8)
        self.session.release(), self.session.wake(SLOTS)
        self.session._delivery.exporter = self.exporter
        self.session.weights_changed(object())
        self.open: set[str] = set()  # requests of the step that is open
        self.ended: set[str] = set()  # while it is
        self.saved: list[tuple[Any, Tokens, object]] = []

    # ---- comparing ----------------------------------------------------------------------------------------------
    def same(self, rows: Any, tokens: Tokens) -> None:
        want = np.stack([np.full((3, 2), -1) if t is None else self.table[t] for t in tokens] or [np.zeros((0, 3, 2))])
        assert np.array_equal(rows, want.reshape(-1, 3, 2)), (rows[:, 1:].tolist(), tokens, want[:, 1:].tolist())

    @contextlib.contextmanager
    def expects(self, error: type[BaseException] | None) -> Iterator[None]:
        with pytest.raises(error) if error is not None else contextlib.nullcontext():
            yield

    # ---- drawing ------------------------------------------------------------------------------------------------
    def pick(self, count: int) -> list[int]:
        return self.draw.sample(range(SLOTS), count)

    def name(self) -> str:
        return self.draw.choice(NAMES)

    def start(self, name: str) -> int:
        """Mostly where the request ends; before it, or behind it, sometimes."""
        end = len(self.model.requests.get(name, []))
        return self.draw.choice([end, end, end, self.draw.randint(0, end), end + 1])

    # ---- acting -------------------------------------------------------------------------------------------------
    def step(self) -> None:
        draw, model = self.draw, self.model
        names = draw.sample(NAMES, draw.randint(0, 3))
        parts = [(n, self.start(n), [draw.randrange(VOCAB) for _ in range(draw.randint(1, MOST))]) for n in names]
        tokens = [t for _, _, of in parts for t in of] or [draw.randrange(VOCAB)]
        slots = self.pick(len(tokens))
        padding = draw.choice([0, 0, 3])
        gap = any(start > len(model.requests.get(n, [])) for n, start, _ in parts)
        how = draw.choice(["", "", "", "", "before", "after", "memory", "meddle", "meddle", "paused"])
        self.ended, self.open = set(), set(names)
        outcome: type[BaseException] | None = MissingRoutes if gap else None
        if not gap:
            no_memory = MissingRoutes if self.late else None
            outcome = {"before": ZeroDivisionError, "after": ZeroDivisionError, "memory": no_memory}.get(how)
        segments = [(n, start, len(of)) for n, start, of in parts]
        with self.expects(outcome), torch.no_grad(), self.session.step(slots + [-1] * padding, segments):
            if how == "before":
                raise ZeroDivisionError
            if how == "paused":
                with self.session.paused():
                    self.loop.compiled(torch.zeros(1, 5, dtype=torch.int64))
            if how == "meddle" and draw.random() < 0.5:
                self.meddle()
            self.loop.compiled(torch.tensor([tokens + [0] * padding]))
            if how == "after":
                raise ZeroDivisionError
            model.write(slots, tokens)
            if how == "meddle":
                self.meddle()
            if how == "memory" and self.late:
                self.exporter.fails = draw.choice([MemoryError(), OSError(12, "")])
        self.open = set()
        if self.late:
            self.exporter.fails = None
        if gap:
            return
        lost = how == "before" or (how == "memory" and self.late)
        model.write(slots, [None] * len(slots) if lost else tokens)
        if how not in ("before", "after"):
            for n, start, of in parts:
                if n not in self.ended:
                    model.extend(n, start, [None] * len(of) if lost else of)

    def meddle(self) -> None:
        """What another thread may do while a step is open."""
        self.draw.choice(
            [self.finish, self.finish, self.abort, self.preempt, self.arrive, self.refused, self.prefix_hit]
        )()

    def refused(self) -> None:
        call = self.draw.choice(
            [self.session.release, lambda: self.session.weights_changed(9), lambda: self.session.wake(4)]
        )
        with pytest.raises(RefusedConfiguration, match="open step"):
            call()

    def arrive(self) -> None:
        """Some copies arrive, in any order."""
        for copy in self.exporter.copies if self.late else ():
            if self.draw.random() < 0.5:
                copy.arrive()

    def prefix_hit(self) -> None:
        name, slots = self.name(), self.pick(self.draw.randint(1, 12))
        if name in self.open - self.ended:
            return  # its step says what comes next
        start, taken = self.start(name), [self.model.slots[s] for s in slots]
        end, kept = len(self.model.requests.get(name, [])), self.model.kept.get(name, 0)
        if start > end:
            with pytest.raises(MissingRoutes):
                self.session.prefix_hit(name, start, slots)
            return
        held = [*self.model.requests.get(name, [])[:kept], *([0] * len(slots))]
        seen = [held[p] if p < kept else t for p, t in enumerate(taken, start)]
        stale = not self.late and None in seen
        with self.expects(StaleRoutes if stale else None):
            self.session.prefix_hit(name, start, slots)
        if not stale:
            self.model.extend(name, start, taken)
        elif name in self.model.requests:
            self.model.requests[name] = self.model.requests[name][: max(start, kept)]

    def preempt(self) -> None:
        name, count = self.name(), self.draw.randint(1, 12)
        self.session.preempt(name, count)
        if name in self.model.requests:
            kept, end = self.model.kept[name], len(self.model.requests[name])
            self.model.kept[name] = max(kept, min(end, count - 1))

    def ends(self, call: Callable[..., Any], whole: bool) -> None:
        name = self.name()
        held = self.model.requests.get(name, [])
        count = self.draw.choice([len(held) + 1, len(held) + 1, self.draw.randint(1, len(held) + 3)])
        start = self.draw.choice([0, 0, self.draw.randint(0, count - 1)])
        rows = held[start : count - 1]
        if whole and (name not in self.model.requests or len(held) < count - 1):
            with pytest.raises(MissingRoutes):
                call(name, count, start=start)
        elif whole and None in rows:
            with pytest.raises(StaleRoutes):
                call(name, count, start=start)
        else:
            self.same(call(name, count, start=start), rows[: rows.index(None)] if None in rows else rows)
            self.model.forget(name)
            self.ended.add(name)

    def finish(self) -> None:
        self.ends(self.session.finish, True)

    def abort(self) -> None:
        self.ends(self.session.abort, False)

    def assign(self) -> None:
        slots = self.pick(self.draw.randint(0, 6))
        self.session.assign(slots)
        self.model.write(slots, [None] * len(slots))

    def move(self) -> None:
        count = self.draw.randint(0, 6)
        source, target = self.pick(count), self.pick(count)
        self.session.move(source, target)
        self.model.write(target, [self.model.slots[s] for s in source])

    def extract(self) -> None:
        slots = self.pick(self.draw.randint(1, 6))
        self.saved.append((self.session.extract(slots), [self.model.slots[s] for s in slots], self.session.version))

    def insert(self) -> None:
        if self.saved:
            saved, tokens, version = self.draw.choice(self.saved)
            slots = self.pick(len(tokens))
            with self.expects(None if version is self.session.version else RefusedConfiguration):
                self.session.insert(slots, saved)
                self.model.write(slots, tokens)

    def read(self) -> None:
        slots = self.pick(self.draw.randint(0, SLOTS))
        self.same(self.session.read(slots), [self.model.slots[s] for s in slots])

    def weights_changed(self) -> None:
        self.session.weights_changed(object())
        self.model.slots = [None] * SLOTS

    def sleep(self) -> None:
        self.session.release()
        with pytest.raises(RefusedConfiguration):
            self.session.read([0])
        self.session.wake(SLOTS)
        self.model = Model()

    def pause(self) -> None:
        with self.session.paused():
            with torch.no_grad():
                self.loop.compiled(torch.zeros(1, 4, dtype=torch.int64))
            with pytest.raises(RefusedConfiguration, match="paused"), self.session.step([0]):
                raise AssertionError("entered")

    def play(self, acts: int) -> None:
        often = [self.step] * 10 + [self.prefix_hit] * 3 + [self.finish, self.abort, self.arrive, self.move] * 2
        rare = [self.preempt, self.preempt, self.assign, self.extract, self.insert, self.read, self.pause]
        for _ in range(acts):
            seldom = self.draw.random() < 0.03
            (self.draw.choice([self.weights_changed, self.sleep]) if seldom else self.draw.choice(often + rare))()
            self.session.check_integrity()
        self.same(self.session.read(range(SLOTS)), self.model.slots)
        for name, held in list(self.model.requests.items()):
            rows = held[: held.index(None)] if None in held else held
            self.same(self.session.abort(name, len(held) + 1), rows)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    made.step(("first", 0, torch.tensor([[1, 2]]), [62, 63]))
    made.step(("first", 2, torch.tensor([[1, 2, 3]]), [0, 1, 2]))
    yield made
    made.session.detach()


@pytest.fixture(scope="module")
def table(loop: Loop) -> Any:
    """int16 [VOCAB, L, K]: the row of each token."""
    return truth(loop.model, torch.arange(VOCAB).view(1, -1))


@given(seed=st.integers(0, 2**32), acts=st.integers(1, 90))
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_every_row_is_the_models(loop: Loop, table: Any, seed: int, acts: int) -> None:
    """A run that fails is cut down to its shortest beginning that does."""
    Engine(loop, table, random.Random(seed)).play(acts)
