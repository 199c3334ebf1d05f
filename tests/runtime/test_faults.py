"""Faults, one at a time: the outcome is a clear error or the right rows, and the next request is served as if nothing had been."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from decoder import prompt
from lagging import GARBAGE, lag
from loop import SLOTS, Loop
from torch import Tensor

from r3_pass import BufferLayoutError, MissingRoutes, R3Error, RefusedConfiguration, StaleRoutes
from r3_pass.passes.ops import ERROR_DUPLICATE, STATE_ERRORS
from r3_pass.pinned import pinned
from r3_pass.runtime import memory, rows


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    made.step(("first", 0, prompt(2), [62, 63]))
    made.session.abort("first", 3)
    yield made
    made.goes_on()
    made.session.check_integrity()
    made.session.detach()


# ---- copies ---------------------------------------------------------------------------------------------------------
def test_a_lost_patch(loop: Loop) -> None:
    """The copy of one step vanishes: its rows are no garbage, and the others of its request and of its neighbours are there."""
    lag(loop.session)
    a, b = prompt(6, 1), prompt(3, 2)
    loop.step(("a", 0, a[:, :4], range(4)))
    loop.step(("a", 4, a[:, 4:], [4, 5]), ("b", 0, b, range(10, 13)))
    loop.step(("b", 3, prompt(1, 3), [13]))
    del loop.session._delivery.arrivals._steps[1]
    with pytest.raises(MissingRoutes, match=r"'a', position 4 \(2 of 6 rows\).*never arrived"):
        loop.session.finish("a", 7)
    loop.session.check_integrity()
    assert (loop.session.abort("a", 7) == loop.truth(a)[:4]).all()
    with pytest.raises(MissingRoutes, match="'b', position 0"):
        loop.session.finish("b", 5)
    assert loop.session.abort("b", 5).shape == (0, 3, 2)


def test_a_lost_piece_of_a_prefix(loop: Loop) -> None:
    tokens = prompt(9, 1)
    loop.step(("a", 0, tokens, range(9)))
    lag(loop.session, chunk_bytes=3 * loop.session.geometry.bytes_per_slot)
    loop.session.prefix_hit("b", 0, range(9))
    loop.step(("b", 9, prompt(1, 2), [20]))
    loop.session._delivery.arrivals._pieces.clear()
    with pytest.raises(MissingRoutes, match=r"'b', position [36] \("):
        loop.session.finish("b", 11)
    loop.session.check_integrity()
    held = loop.session.abort("b", 11)
    assert (held == loop.truth(tokens)[: len(held)]).all()


def test_a_late_copy_is_waited_for(loop: Loop) -> None:
    """Its host memory holds another copy's rows until then."""
    exporter = lag(loop.session)
    tokens = prompt(4, 1)
    loop.step(("a", 0, tokens, range(4)))
    loop.step(("b", 0, prompt(2, 2), [8, 9]))
    assert (exporter.copies[0]._rows == GARBAGE).all() and not exporter.copies[0].done()  # type: ignore[union-attr]
    assert (loop.session.finish("a", 5) == loop.truth(tokens)).all()
    assert not exporter.copies[1].done(), "a batch in flight was waited for"
    assert (loop.session.finish("b", 3) == loop.truth(prompt(2, 2))).all()


def test_a_step_without_rows_is_not_waited_for(loop: Loop) -> None:
    """Dummy batches in flight behind a request's last step."""
    exporter = lag(loop.session)
    loop.step(("a", 0, prompt(4), range(4)))
    with torch.no_grad(), loop.session.step(np.full(4, -1)):
        loop.compiled(prompt(4))
    loop.session.finish("a", 5)
    assert [copy.done() for copy in exporter.copies] == [True, False]


def test_a_copy_stream_that_lags(loop: Loop) -> None:
    """Thirty steps in flight over slots that were handed on since, finished in another order."""
    lag(loop.session)
    want = {}
    for n in range(10):
        tokens = prompt(5, n)
        want[n] = loop.truth(tokens)
        slots = np.arange(5) + 5 * (n % 2)
        loop.session.assign(slots)
        loop.step((n, 0, tokens[:, :3], slots[:3]), padding=n % 3)
        loop.step((n, 3, tokens[:, 3:], slots[3:]), ("other", 2 * n, prompt(2, n), [40 + n, 50 + n]))
        slots[:] = 33
    loop.session.check_integrity()
    for n in (7, 0, 9, 3, 1, 2, 4, 8, 6, 5):
        assert (loop.session.finish(n, 6) == want[n]).all()
        loop.session.check_integrity()
    assert (loop.session.finish("other", 21) == loop.truth(*(prompt(2, n) for n in range(10)))).all()


def test_tokens_do_not_wait_behind_a_prefix(loop: Loop) -> None:
    """A long prefix hit of one request, and a neighbour that finishes in the same step."""
    tokens = prompt(30, 1)
    loop.step(("a", 0, tokens, range(30)))
    exporter = lag(loop.session, chunk_bytes=10 * loop.session.geometry.bytes_per_slot)
    loop.session.prefix_hit("hit", 0, range(30))
    pieces = exporter.copies.copy()
    loop.step(("hit", 30, prompt(1, 2), [40]), ("b", 0, prompt(3, 3), [41, 42, 43]))
    assert (loop.session.finish("b", 4) == loop.truth(prompt(3, 3))).all()
    assert len(pieces) == 3 and not pieces[-1].done()
    assert (loop.session.finish("hit", 32) == loop.truth(tokens, prompt(1, 2))).all()


def test_the_fault_of_a_step_reaches_what_was_taken_from_its_slots(loop: Loop) -> None:
    """The device finds a fault that the host hears of only after the slots were hit by a prefix, moved and extracted."""
    good = prompt(4, 3)
    loop.step(("good", 0, good, range(20, 24)))
    lag(loop.session)
    with torch.no_grad(), loop.session.step(range(4)):
        loop.compiled(prompt(4, 1))
        loop.session._binding.state[STATE_ERRORS] |= ERROR_DUPLICATE
    loop.session.move(range(4), range(30, 34))
    for request, slots in (("hit", range(4)), ("moved", range(30, 34))):
        loop.session.prefix_hit(request, 0, slots)
    with pytest.raises(BufferLayoutError, match="a slot stood twice"):
        loop.session.finish("hit", 5)
    for request in ("hit", "moved"):
        with pytest.raises(StaleRoutes):
            loop.session.finish(request, 5)
        assert loop.session.abort(request, 5).shape == (0, 3, 2)
    assert (loop.session.read(range(SLOTS)) == -1).all(), "nobody knows where that step wrote"
    assert (loop.session.finish("good", 5) == loop.truth(good)).all()


def test_rows_of_a_faulty_step_do_not_travel(loop: Loop) -> None:
    lag(loop.session)
    with torch.no_grad(), loop.session.step(range(4)):
        loop.compiled(prompt(4, 1))
        loop.session._binding.state[STATE_ERRORS] |= ERROR_DUPLICATE
    with pytest.raises(BufferLayoutError, match="twice"):
        loop.session.extract(range(4))


def test_slots_that_only_the_device_has_seen_in_a_step_that_failed(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: two tokens in one slot, found on the device, and lost with the step; a prefix hit then took the row of either."""
    monkeypatch.setattr(loop.session._store.mapping, "check", lambda slots, *_: torch.as_tensor(slots))
    with pytest.raises(ZeroDivisionError), torch.no_grad(), loop.session.step([5, 6, 6, 7]):
        loop.compiled(prompt(4, 1))
        assert int(loop.session._binding.state[STATE_ERRORS]) & ERROR_DUPLICATE
        raise ZeroDivisionError
    monkeypatch.undo()
    with pytest.raises(StaleRoutes):
        loop.session.prefix_hit("a", 0, [5, 6, 7])


# ---- exceptions and threads -----------------------------------------------------------------------------------------
def test_an_exception_in_a_step_with_copies_in_flight(loop: Loop) -> None:
    """The step that failed has no rows; those before it arrive; the request goes on where it was."""
    lag(loop.session)
    tokens = prompt(6, 1)
    loop.step(("a", 0, tokens[:, :4], range(4)))

    def fail(ids: Tensor) -> None:
        loop.compiled(ids)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop.step(("a", 4, prompt(2, 7), [4, 5]), call=fail)
    loop.session.check_integrity()
    with pytest.raises(MissingRoutes):
        loop.session.finish("a", 7)
    loop.step(("a", 4, tokens[:, 4:], [4, 5]))
    assert (loop.session.finish("a", 7) == loop.truth(tokens)).all()


@pytest.mark.parametrize("where", ["forward", "pause"])
def test_a_worker_thread_that_dies(loop: Loop, where: str) -> None:
    """The contexts that it was in are left by its exception; another thread goes on with its requests."""
    tokens = prompt(6, 1)
    loop.step(("a", 0, tokens[:, :4], range(4)))
    died: list[BaseException] = []

    def work() -> None:
        def fail(ids: Tensor) -> None:
            if where == "pause":
                with loop.session.paused():
                    raise SystemExit
            raise SystemExit

        try:
            loop.step(("a", 4, tokens[:, 4:], [4, 5]), call=fail)
        except SystemExit as error:
            died.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert died
    loop.session.check_integrity()
    loop.step(("a", 4, tokens[:, 4:], [4, 5]))
    assert (loop.session.finish("a", 7) == loop.truth(tokens)).all()


# ---- memory ---------------------------------------------------------------------------------------------------------
OUT_OF_MEMORY = [OSError(12, "Cannot allocate memory"), MemoryError(), torch.OutOfMemoryError("CUDA out of memory")]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_no_memory_for_the_copy_of_a_step(loop: Loop, error: Exception) -> None:
    """Neither rows nor the device's word on the step can be had: its rows are void, in the request and in the slots."""
    exporter = lag(loop.session)
    tokens = prompt(6, 1)
    loop.step(("a", 0, tokens[:, :4], range(4)))
    exporter.fails = error
    with pytest.raises(MissingRoutes, match="no memory for the copy of its 2 rows"):
        loop.step(("a", 4, tokens[:, 4:], [4, 5]))
    exporter.fails = None
    loop.session.check_integrity()
    assert (loop.session.read([4, 5]) == -1).all()
    with pytest.raises(StaleRoutes, match="position 4"):
        loop.session.finish("a", 7)
    loop.step(("a", 4, tokens[:, 4:], [4, 5]))
    assert (loop.session.finish("a", 7) == loop.truth(tokens)).all(), "forwarded again"


def test_no_memory_for_rows_on_the_host(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of rows needs its next chunk, and does not get it."""
    tokens = prompt(4, 1)
    log = loop.session._delivery.table.rows  # type: ignore[union-attr]
    assert log is not None
    held = log.reserve(log._chunk_rows - log._next % log._chunk_rows - 2)  # two rows from the end of its chunk

    def fail(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    before = log._next
    with monkeypatch.context() as patch:
        patch.setattr(rows, "_Chunk", fail)
        with pytest.raises(MissingRoutes, match="no memory for the copy of its 4 rows"):
            loop.step(("a", 0, tokens, range(4)))
    assert log._next == before and "a" not in loop.session._delivery.table  # type: ignore[operator]
    log.check_integrity()
    with pytest.raises(MissingRoutes, match="unknown"):
        loop.session.finish("a", 5)
    log.free(np.arange(held, before))  # what this test took
    log.fill(held, np.full((before - held, 2, 2), -1, np.int16))


@pytest.mark.parametrize("copied", [0, 2])
def test_no_memory_for_the_copies_of_a_prefix(loop: Loop, copied: int) -> None:
    """The request is as it was before the hit, and may forward these tokens itself."""
    tokens = prompt(12, 1)
    loop.step(("a", 0, tokens, range(12)))
    exporter = lag(loop.session, chunk_bytes=3 * loop.session.geometry.bytes_per_slot)
    loop.step(("b", 0, tokens[:, :1], [40]))
    submit, left = exporter._copy, iter([True] * copied)

    def some(*args: Any) -> Any:
        if not next(left, False):
            raise MemoryError
        return submit(*args)

    exporter._copy = some  # type: ignore[method-assign]
    with pytest.raises(MissingRoutes, match="prefix of 11 rows"):
        loop.session.prefix_hit("b", 1, range(1, 12))
    with pytest.raises(MissingRoutes, match="prefix of 12 rows"):
        loop.session.prefix_hit("c", 0, range(12))
    exporter._copy = submit  # type: ignore[method-assign]
    loop.session.check_integrity()
    assert "c" not in loop.session._delivery.table  # type: ignore[operator]
    loop.step(("b", 1, tokens[:, 1:], range(41, 52)))
    assert (loop.session.finish("b", 13) == loop.truth(tokens)).all()
    assert (loop.session.finish("a", 13) == loop.truth(tokens)).all()


def test_no_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload goes from pageable memory then, with the same bytes."""

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Tensor, "pin_memory", fail)
    host = torch.arange(3)
    assert pinned(host) is host


@pytest.mark.parametrize("how", ["free", "allocation"])
def test_a_buffer_that_does_not_fit(loop: Loop, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named with its bytes; the session is without a cache then, as after `release`, until a smaller one."""
    per_slot = loop.session.geometry.bytes_per_slot

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        if how == "free":
            patch.setattr(memory, "free_bytes", lambda device: 2000 * 8 + 32)  # enough for the mapping
        else:
            patch.setattr(memory, "free_bytes", lambda device: None)
            real: Callable[..., Tensor] = torch.empty
            patch.setattr(torch, "empty", lambda shape, **k: real(shape, **k) if len(shape) < 3 else fail())
        words = rf"slot buffer \(3000 slots of {per_slot} bytes and a spare row\) does not fit on cpu: {3001 * per_slot} bytes, "
        words += "16032 bytes are free" if how == "free" else "its allocation failed"
        with pytest.raises(RefusedConfiguration, match=words):
            loop.session.wake(3000, max_tokens=2000)
    loop.session.check_integrity()
    with pytest.raises(R3Error, match="wake"):
        loop.step(("a", 0, prompt(3), range(3)))
    loop.session.wake(SLOTS)
