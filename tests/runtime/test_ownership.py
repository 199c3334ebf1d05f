"""Whose row a slot holds, through sleep, new weights, drafts, aborts and chunks, also while copies are in flight."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from decoder import decoder, prompt
from lagging import lag
from loop import SLOTS, Loop
from torch import Tensor

import r3_pass
from r3_pass import MissingRoutes, RefusedConfiguration, StaleRoutes
from r3_pass.runtime import Segment


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.session.check_integrity()
    made.session.detach()


def test_sleep_drops_what_is_in_flight(loop: Loop) -> None:
    """Copies are over before the buffer goes; a stale step's rows attach to nobody after waking, not to the same name either."""
    exporter = lag(loop.session)
    loop.step(("a", 0, prompt(4, 1), range(4)))
    loop.session.prefix_hit("b", 0, range(2))
    loop.session.release()
    assert all(copy.done() for copy in exporter.copies)
    assert loop.session.host_bytes == 0
    loop.session.check_integrity()
    loop.session.wake(SLOTS)
    other = prompt(3, 2)
    loop.step(("a", 0, other, range(10, 13)))
    with pytest.raises(MissingRoutes, match="3 exist"):
        loop.session.finish("a", 5)
    assert (loop.session.finish("a", 4) == loop.truth(other)).all()
    with pytest.raises(MissingRoutes, match="'b' is unknown"):
        loop.session.finish("b", 3)
    loop.session.prefix_hit("c", 0, range(4))
    with pytest.raises(StaleRoutes):
        loop.session.finish("c", 5)
    loop.goes_on()


def test_new_weights_with_copies_in_flight(loop: Loop) -> None:
    """Rows of the old weights that running requests have arrive and stay, tagged; what the slots hold is nobody's."""
    lag(loop.session)
    tokens = prompt(6, 1)
    old = loop.truth(tokens)
    loop.step(("a", 0, tokens[:, :3], range(3)))
    loop.session.prefix_hit("b", 0, range(3))
    loop.model.load_state_dict(decoder(seed=3, config=vars(loop.model.config)).state_dict())
    loop.session.weights_changed("v2")
    loop.session.prefix_hit("c", 0, range(3))
    loop.step(("a", 3, tokens[:, 3:], range(3, 6)))
    assert loop.session.versions("a") == [(0, None), (3, "v2")]
    assert (loop.session.finish("a", 7) == np.concatenate([old[:3], loop.truth(tokens)[3:]])).all()
    assert (loop.session.finish("b", 4) == old[:3]).all()
    with pytest.raises(StaleRoutes):
        loop.session.finish("c", 4)


def test_weights_do_not_change_in_a_step(loop: Loop) -> None:
    """Whose weights made its rows nobody could say."""
    loop.step(("a", 0, prompt(4), range(4)))
    with loop.session.step(range(4, 6), [Segment("a", 4, 2)]):
        with pytest.raises(RefusedConfiguration, match="weights_changed was called inside an open step"):
            loop.session.weights_changed("v2")
        loop.compiled(prompt(2, 1))
    assert (loop.session.finish("a", 7) == loop.truth(prompt(4), prompt(2, 1))).all()


def test_a_forward_that_went_another_way(loop: Loop) -> None:
    """It wrote KV and no row: what the slots held is of the tokens before."""
    loop.step(("a", 0, prompt(4, 1), range(4)))
    with pytest.raises(r3_pass.NoRouterFound), torch.no_grad(), loop.session.step([2, 3], [Segment("a", 2, 2)]):
        loop.model(prompt(2, 2))
    assert (loop.session.read([2, 3]) == -1).all() and (loop.session.read([0, 1]) >= 0).any()
    with pytest.raises(StaleRoutes):
        loop.session.prefix_hit("b", 0, range(4))


@pytest.mark.parametrize("when", ["before", "in", "after"])
def test_slots_handed_out_around_a_step(loop: Loop, when: str) -> None:
    """Before the forward writes to them they are void, then they have its rows; after it, nobody's."""
    loop.step((0, 0, prompt(4, 1), range(4)))
    tokens = prompt(4, 2)
    if when == "before":
        loop.session.assign([2, 3])
        loop.session.assign([4, 5])

    def call(ids: Tensor) -> None:
        if when == "in":
            loop.session.assign([2, 3])
        loop.compiled(ids)
        if when == "after":
            loop.session.assign([2, 3])

    loop.step((1, 0, tokens, range(2, 6)), call=call)
    rows = loop.session.read(range(2, 6))
    truth = loop.truth(tokens)
    assert (rows[2:] == truth[2:]).all()
    assert (rows[:2] == (-1 if when == "after" else truth[:2])).all()


def test_an_abort_that_is_short_says_so(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    tokens = prompt(5)
    loop.step(("a", 0, tokens, range(5)))
    loop.step(("b", 0, tokens, range(5)))
    with caplog.at_level(logging.INFO, logger="r3_pass"):
        assert len(loop.session.abort("a", 6)) == 5
        assert not caplog.text
        assert (loop.session.abort("b", 9, start=2) == loop.truth(tokens)[2:]).all()
    assert "request 'b' was aborted with 3 rows from position 2 on, of 9 tokens" in caplog.text


def test_a_middle_chunk_without_output(loop: Loop) -> None:
    """Its step hands nothing to anybody; its rows are there when the prefill's last chunk has run."""
    exporter = lag(loop.session)
    tokens = prompt(9, 1)
    for start in (0, 3, 6):
        loop.step(("a", start, tokens[:, start : start + 3], range(start, start + 3)))
        for copy in exporter.copies:
            copy.arrive()
    assert (loop.session.finish("a", 10) == loop.truth(tokens)).all()


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rejected_drafts_leave_no_rows(loop: Loop, accepted: int) -> None:
    """Verification of three drafted tokens; the next step starts behind the accepted ones, over the rejected ones' slots."""
    tokens = prompt(9, 1)
    loop.step(("a", 0, tokens[:, :4], range(4)))
    drafted = torch.cat([tokens[:, 4 : 5 + accepted], (tokens[:, 5 + accepted : 8] + 1) % 61], 1)
    loop.step(("a", 4, drafted, range(4, 8)))
    if accepted == 1:  # it may also end there
        assert (loop.session.finish("a", 7) == loop.truth(tokens)[:6]).all()
        return
    loop.step(("a", 5 + accepted, tokens[:, 5 + accepted :], range(5 + accepted, 9)))
    assert (loop.session.finish("a", 10) == loop.truth(tokens)).all()
    assert (loop.session.read(range(9)) == loop.truth(tokens)).all()


@pytest.mark.parametrize("shared", [True, False])
def test_a_drafter_never_writes(loop: Loop, shared: bool) -> None:
    """On the target's own graphs it runs paused; a drafter that is another MoE of the same backend has other weights."""
    tokens = prompt(4, 1)
    drafter = decoder(seed=9, config=vars(loop.model.config))
    drafts = loop.compiled if shared else torch.compile(drafter, backend=loop.backend, dynamic=True)

    def call(ids: Tensor) -> None:
        for _ in range(2):
            if shared:
                with loop.session.paused():
                    drafts(prompt(4, 8))
            else:
                drafts(prompt(4, 8))
        loop.compiled(ids)
        if not shared:
            drafts(ids)

    loop.step(("a", 0, tokens, range(4)), call=call)
    with torch.no_grad():
        drafts(tokens)
    assert (loop.session.read(range(4)) == loop.truth(tokens)).all()
    assert (loop.session.read(range(4, SLOTS)) == -1).all()
    assert (loop.session.finish("a", 5) == loop.truth(tokens)).all()


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_mapping_rewritten_right_after_the_step(loop: Loop, kind: str) -> None:
    """The snapshot of the rows was queued when the step ended, whenever it arrives."""
    lag(loop.session)
    tokens = prompt(3, 1)
    slots = np.array([1, 2, 3]) if kind == "array" else torch.tensor([1, 2, 3])
    starts, lengths = np.array([0]), np.array([3])
    with torch.no_grad(), loop.session.step(slots, r3_pass.runtime.SegmentBatch(("a",), starts, lengths)):
        loop.compiled(tokens)
    slots[:], starts[:], lengths[:] = 60, 7, 1
    loop.step(("b", 0, prompt(3, 5), [1, 2, 3]))
    assert (loop.session.finish("a", 4) == loop.truth(tokens)).all()
    assert (loop.session.finish("b", 4) == loop.truth(prompt(3, 5))).all()


def test_rows_from_a_position_on(loop: Loop) -> None:
    """A later turn, whose caller has the rows before it."""
    tokens = prompt(6, 1)
    for request in ("a", "b", "c"):
        loop.step((request, 0, tokens, range(6)))
    rows = loop.session.finish("a", 7, start=4)
    assert rows.shape == (2, 3, 2) and not rows.flags.writeable and (rows == loop.truth(tokens)[4:]).all()
    assert loop.session.finish("b", 7, start=6).shape == (0, 3, 2)
    for wrong in (-1, 7, 1.0, True, None):
        with pytest.raises(ValueError, match="start is a position of its 6 rows"):
            loop.session.finish("c", 7, start=wrong)  # type: ignore[arg-type]
    assert (loop.session.abort("c", 7, start=5) == loop.truth(tokens)[5:]).all()


@pytest.mark.parametrize("how", ["finish", "abort", "abort unknown"])
@pytest.mark.parametrize("late", [True, False])
def test_a_request_that_ends_while_a_step_runs(loop: Loop, how: str, late: bool) -> None:
    """An output thread finishes or cancels it with a further batch in flight: that batch's rows of it attach to nothing, and its
    neighbours have theirs."""
    loop.step(("b", 0, prompt(2, 4), [20, 21]))
    if late:
        lag(loop.session)
    tokens = prompt(6, 1)
    first = 0 if how == "abort unknown" else 4
    if first:
        loop.step(("a", 0, tokens[:, :4], range(4)))

    def call(ids: Tensor) -> None:
        loop.compiled(ids)
        end = loop.session.finish if how == "finish" else loop.session.abort
        assert (end("a", first + 1) == loop.truth(tokens)[:first]).all()

    part = tokens[:, first:]
    loop.step(("a", first, part, range(first, 6)), ("b", 2, prompt(1, 5), [22]), call=call)
    loop.session.check_integrity()
    assert "a" not in loop.session._delivery.table  # type: ignore[operator]
    assert (loop.session.read(range(first, 6)) == loop.truth(tokens)[first:]).all(), (
        "their slots have their rows all the same"
    )
    with pytest.raises(MissingRoutes, match="'a' is unknown"):
        loop.session.finish("a", 7)
    assert (loop.session.finish("b", 4) == loop.truth(prompt(2, 4), prompt(1, 5))).all()
    assert loop.session._delivery.table.rows.live_rows == 0  # type: ignore[union-attr]
    loop.step(("a", 0, prompt(3, 7), range(3)))
    assert (loop.session.finish("a", 4) == loop.truth(prompt(3, 7))).all(), "the name is free again"
