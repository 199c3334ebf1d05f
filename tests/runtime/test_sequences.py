from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from r3_pass.errors import MissingRoutes
from r3_pass.runtime.rows import RowLog
from r3_pass.runtime.segments import Segment, SegmentBatch
from r3_pass.runtime.sequences import SequenceTable

ROW_SHAPE = (2, 1)


def block_of(num_rows: int, first_id: int) -> np.ndarray:
    """int16[n, 2, 1], every row another one."""
    ids = np.arange(first_id, first_id + num_rows)
    return np.stack((ids % 30_011, ids // 30_011), axis=1).astype(np.int16).reshape(num_rows, *ROW_SHAPE)


class Recorder:
    """A table whose every row is another one, and what each position of each request should hold."""

    def __init__(self, chunk_rows: int = 16) -> None:
        self.table = SequenceTable(RowLog(ROW_SHAPE, chunk_bytes=chunk_rows * 4))
        self.next_id = 0

    def step(self, *segments: tuple[Any, int, int]) -> list[np.ndarray]:
        """One step whose rows arrive at once. Returns the rows of each segment."""
        batch = SegmentBatch.of([Segment(*segment) for segment in segments])
        self.table.check(batch)
        block = block_of(batch.num_tokens, self.next_id)
        self.next_id += batch.num_tokens
        self.table.rows.fill(self.table.extend(batch), block)
        self.table.check_integrity()
        return np.split(block, np.cumsum(batch.lengths)[:-1])


def test_prefill_then_decode() -> None:
    recorder = Recorder()
    prompt_a, prompt_b = recorder.step(("a", 0, 5), ("b", 0, 300))
    (a_5,) = recorder.step(("a", 5, 1))
    a_6, b_300 = recorder.step(("a", 6, 1), ("b", 300, 1))
    assert (recorder.table.end("a"), recorder.table.end("b"), recorder.table.end("c")) == (7, 301, 0)
    rows = recorder.table.finish("b", 302)
    assert np.array_equal(rows, np.concatenate((prompt_b, b_300)))
    rows = recorder.table.finish("a", 8)
    assert np.array_equal(rows, np.concatenate((prompt_a, a_5, a_6)))
    assert rows.dtype == np.int16 and rows.flags.c_contiguous and not rows.flags.writeable
    assert len(recorder.table) == 0 and recorder.table.rows.live_rows == 0
    recorder.table.check_integrity()


def test_order_of_requests_may_change_between_steps() -> None:
    """The last lookup is remembered: the same requests in another order are another question."""
    recorder = Recorder()
    first_a, first_b = recorder.step(("a", 0, 1), ("b", 0, 1))
    second_b, second_a = recorder.step(("b", 1, 1), ("a", 1, 1))
    assert np.array_equal(recorder.table.finish("a", 3), np.concatenate((first_a, second_a)))
    assert np.array_equal(recorder.table.finish("b", 3), np.concatenate((first_b, second_b)))


def test_a_name_used_again_is_another_request() -> None:
    recorder = Recorder()
    recorder.step(("a", 0, 3), ("b", 0, 3))
    recorder.table.finish("a", 4)
    with pytest.raises(MissingRoutes):
        recorder.step(("a", 3, 1), ("b", 3, 1))
    again, _ = recorder.step(("a", 0, 2), ("b", 3, 1))
    assert np.array_equal(recorder.table.finish("a", 3), again)


def test_a_gap_raises_and_changes_nothing() -> None:
    recorder = Recorder()
    prompt, _ = recorder.step(("a", 0, 5), ("b", 0, 5))
    for segments in ([("a", 5, 1), ("b", 7, 1)], [("a", 4, 1), ("b", 7, 1)], [("new", 0, 1), ("b", 7, 1)]):
        with pytest.raises(MissingRoutes, match=r"'b': position 5 comes next, the segment starts at 7.*prefix_hit"):
            recorder.step(*segments)
        batch = SegmentBatch.of([Segment(*segment) for segment in segments])
        with pytest.raises(MissingRoutes):
            recorder.table.extend(batch)
    with pytest.raises(MissingRoutes, match="'new': position 0 comes next, the segment starts at 1"):
        recorder.step(("new", 1, 1))
    recorder.table.check_integrity()
    assert recorder.table.rows.live_rows == 10 and "new" not in recorder.table
    assert np.array_equal(recorder.table.finish("a", 6), prompt)


def test_a_batch_that_was_checked_before_others_decoded() -> None:
    """What was found of it then is out of date: its segment starts before the request's end now."""
    recorder = Recorder()
    first_a, first_b = recorder.step(("a", 0, 1), ("b", 0, 1))
    later = SegmentBatch(("a",), [1], [1])
    recorder.table.check(later)
    _, second_b = recorder.step(("a", 1, 1), ("b", 1, 1))
    recorder.table.rows.fill(recorder.table.extend(later), block_of(1, 1000))
    recorder.table.check_integrity()
    assert np.array_equal(recorder.table.finish("a", 3), np.concatenate((first_a, block_of(1, 1000))))
    assert np.array_equal(recorder.table.finish("b", 3), np.concatenate((first_b, second_b)))


@pytest.mark.parametrize(
    "change", ["none", "end", "numbers", "read", "preempt", "truncate", "drop", "another", "again"]
)
def test_a_long_run_of_decodes(change: str) -> None:
    """Of the same requests, over several pages each, with something else in the middle; copies are two steps late."""
    table = SequenceTable(RowLog(ROW_SHAPE, chunk_bytes=1000 * 4))
    names = list(range(40))
    prompts = np.arange(1, 41)
    given = np.split(block_of(820, 0), np.cumsum(prompts)[:-1])
    table.rows.fill(table.extend(SegmentBatch(names, np.zeros(40, np.int64), prompts)), block_of(820, 0))
    rows = {name: [block] for name, block in zip(names, given, strict=True)}
    next_id, waiting = 820, []

    def step(batch: SegmentBatch) -> None:
        nonlocal next_id
        table.check(batch)
        block = block_of(batch.num_tokens, next_id)
        next_id += len(block)
        waiting.append((table.extend(batch), block))
        for name, row in zip(batch.request_ids, block, strict=True):
            assert isinstance(name, int)
            rows[name].append(row[None])
        if len(waiting) > 2:
            table.rows.fill(*waiting.pop(0))

    for number in range(700):
        step(SegmentBatch(names, [sum(map(len, rows[name])) for name in names], np.ones(len(names), np.int64)))
        if number == 350:
            end = sum(map(len, rows[7]))
            if change == "end":
                assert table.end(7) == end
            elif change == "numbers":
                assert len(table.numbers(7)) == end
            elif change == "read":
                assert np.array_equal(table.read([(7, end - 20, end - 5)]), np.concatenate(rows[7])[end - 20 : end - 5])
            elif change == "preempt":
                table.preempt(7, end)
            elif change == "truncate":
                table.truncate(7, end - 3)
                rows[7] = [np.concatenate(rows[7])[: end - 3]]
            elif change == "drop":
                table.drop(7)
                names.remove(7)
            elif change == "another":
                rows[99] = []
                step(SegmentBatch([99], [0], [1]))
            elif change == "again":
                rows[7] = [np.concatenate(rows[7])[:-1]]
                step(SegmentBatch([7], [end - 1], [1]))
    for late in waiting:
        table.rows.fill(*late)
    table.check_integrity()
    for name in (*names, *((99,) if change == "another" else ())):
        expected = np.concatenate(rows[name])
        assert np.array_equal(table.finish(name, len(expected) + 1), expected)
    table.check_integrity()


class Decoding:
    """Requests "a" and "b" in the middle of a run of decodes: 3 rows each, row n of the log is block_of(1, n)."""

    def __init__(self) -> None:
        self.table = SequenceTable(RowLog(ROW_SHAPE))
        for start in range(3):
            self.extend(("a", start, 1), ("b", start, 1))

    def extend(self, *segments: tuple[str, int, int]) -> SegmentBatch:
        batch = SegmentBatch.of([Segment(*segment) for segment in segments])
        self.put(batch)
        return batch

    def put(self, batch: SegmentBatch) -> None:
        first = self.table.extend(batch)
        self.table.rows.fill(first, block_of(batch.num_tokens, first))

    def check(self, **numbers: list[int]) -> None:
        """These are the requests' rows."""
        self.table.check_integrity()
        for name, expected in numbers.items():
            rows = np.concatenate([block_of(1, number) for number in expected])
            assert np.array_equal(self.table.finish(name, len(expected) + 1), rows)
        assert self.table.rows.live_rows == 0


class TestWhatEndsARun:
    """Each of these looks like the next decode to a table that does not look closely."""

    def test_nothing(self) -> None:
        Decoding().check(a=[0, 2, 4], b=[1, 3, 5])

    def test_more_tokens_each(self) -> None:
        decoding = Decoding()
        decoding.extend(("a", 3, 2), ("b", 3, 2))
        decoding.check(a=[0, 2, 4, 6, 7], b=[1, 3, 5, 8, 9])

    def test_other_requests(self) -> None:
        decoding = Decoding()
        decoding.extend(("b", 3, 1), ("a", 3, 1))
        decoding.check(a=[0, 2, 4, 7], b=[1, 3, 5, 6])

    def test_a_step_that_was_made(self) -> None:
        decoding = Decoding()
        decoding.put(decoding.extend(("a", 3, 1), ("b", 3, 1)))
        decoding.check(a=[0, 2, 4, 8], b=[1, 3, 5, 9])

    def test_another_step_than_was_checked(self) -> None:
        decoding = Decoding()
        decoding.table.check(SegmentBatch(("a", "b"), [3, 3], [1, 1]))
        decoding.extend(("a", 1, 1), ("b", 3, 1))
        decoding.check(a=[0, 6], b=[1, 3, 5, 7])

    @pytest.mark.parametrize(("start", "expected"), [(1, [0, 6, 7, 8]), (3, [0, 2, 4, 8])])
    def test_a_step_of_one_of_them(self, start: int, expected: list[int]) -> None:
        decoding = Decoding()
        decoding.extend(("a", start, 2))
        decoding.extend(("a", 3, 1), ("b", 3, 1))
        decoding.check(a=expected, b=[1, 3, 5, 9])

    @pytest.mark.parametrize("how", ["truncate", "drop"])
    def test_rows_that_are_gone(self, how: str) -> None:
        """The next decode would leave a gap."""
        decoding = Decoding()
        batch = SegmentBatch(("a", "b"), [3, 3], [1, 1])
        decoding.table.check(batch)
        if how == "truncate":
            decoding.table.truncate("a", 2)
        else:
            decoding.table.drop("a")
        for call in (decoding.table.check, decoding.table.extend):
            with pytest.raises(MissingRoutes, match="'a': position"):
                call(batch)
        decoding.check(**({"a": [0, 2]} if how == "truncate" else {}), b=[1, 3, 5])


def test_a_request_has_one_segment_in_a_step() -> None:
    recorder = Recorder()
    recorder.step(("a", 0, 5), ("b", 0, 5))
    for _ in range(2):
        with pytest.raises(ValueError, match="'a' has two segments"):
            recorder.step(("a", 5, 1), ("b", 5, 1), ("a", 6, 1))
    assert recorder.table.end("a") == 5


def test_rejected_drafts_are_replaced() -> None:
    recorder = Recorder()
    (prompt,) = recorder.step(("a", 0, 3))
    (drafts,) = recorder.step(("a", 3, 4))  # one accepted: 2 rows count
    (again,) = recorder.step(("a", 5, 4))
    assert recorder.table.end("a") == 9 and recorder.table.rows.live_rows == 9
    assert np.array_equal(recorder.table.finish("a", 9), np.concatenate((prompt, drafts[:2], again[:3])))


def test_a_chunk_run_again_ends_the_request_there() -> None:
    """What came after it was computed from other tokens or with other weights, so it is gone."""
    recorder = Recorder()
    recorder.step(("a", 0, 600))
    (again,) = recorder.step(("a", 0, 10))
    assert recorder.table.end("a") == recorder.table.rows.live_rows == 10
    with pytest.raises(MissingRoutes):
        recorder.step(("a", 11, 1))
    assert np.array_equal(recorder.table.finish("a", 11), again)


def test_preempt_keeps_the_rows_of_emitted_tokens() -> None:
    """Rows go with the log-probabilities that were handed out, not with those of the second run."""
    recorder = Recorder()
    (prompt,) = recorder.step(("a", 0, 4))
    (draft,) = recorder.step(("a", 4, 3))
    recorder.table.preempt("a", 6)  # 5 rows frozen; the last 2 belong to tokens that were not emitted
    recorder.step(("a", 0, 2))
    assert recorder.table.end("a") == recorder.table.rows.live_rows == 5
    (again,) = recorder.step(("a", 2, 6))
    assert recorder.table.end("a") == recorder.table.rows.live_rows == 8
    assert np.array_equal(recorder.table.finish("a", 9), np.concatenate((prompt, draft[:1], again[3:])))


def test_preempt_freezes_no_more_than_exists_and_never_thaws() -> None:
    recorder = Recorder()
    (prompt,) = recorder.step(("a", 0, 3))
    recorder.table.preempt("a", 100)
    recorder.table.preempt("a", 2)
    recorder.table.preempt("never seen", 5)
    assert "never seen" not in recorder.table
    (again,) = recorder.step(("a", 0, 5))
    assert np.array_equal(recorder.table.finish("a", 6), np.concatenate((prompt, again[3:])))


def test_finish_with_too_few_rows_loses_nothing() -> None:
    recorder = Recorder()
    (prompt,) = recorder.step(("a", 0, 3))
    with pytest.raises(MissingRoutes, match=r"'a' finishes with 5 tokens: 4 rows were expected, 3 exist. Position 3"):
        recorder.table.finish("a", 5)
    assert np.array_equal(recorder.table.abort("a", 5), prompt)
    with pytest.raises(MissingRoutes, match="'a' is unknown, 3 rows"):
        recorder.table.finish("a", 4)


def test_abort_returns_the_prefix() -> None:
    recorder = Recorder()
    rows = recorder.step(("a", 0, 300), ("b", 0, 3))[0]
    assert np.array_equal(recorder.table.abort("a", 290), rows[:289])
    assert recorder.table.abort("never seen", 7).shape == (0, 2, 1)
    assert recorder.table.abort("b", 1).shape == (0, 2, 1)
    assert recorder.table.rows.live_rows == 0


def test_rows_on_their_way_cannot_be_finished() -> None:
    recorder = Recorder()
    batch = SegmentBatch(("a", "b"), [0, 0], [2, 2])
    first = recorder.table.extend(batch)
    with pytest.raises(MissingRoutes, match=r"'a', position 0 \(2 of 2 rows\).*never arrived"):
        recorder.table.finish("a", 3)
    recorder.table.drop("b")
    recorder.table.check_integrity()
    recorder.table.rows.fill(first, block_of(4, 0))
    assert np.array_equal(recorder.table.finish("a", 3), block_of(2, 0))
    recorder.table.check_integrity()
    assert recorder.table.rows.live_rows == 0


def test_clear() -> None:
    recorder = Recorder()
    recorder.step(("a", 0, 300), ("b", 0, 3))
    recorder.table.drop("never seen")
    recorder.table.clear()
    recorder.table.check_integrity()
    assert len(recorder.table) == 0 and recorder.table.rows.live_rows == 0


def test_later_steps_made_higher_row_numbers() -> None:
    """What tells rows of one weight version from those of the next."""
    recorder = Recorder()
    recorder.step(("a", 0, 4), ("b", 0, 1))
    recorder.table.preempt("a", 3)
    boundary = recorder.table.rows.reserve(0)
    recorder.step(("a", 1, 5))
    assert (recorder.table.numbers("a") >= boundary).tolist() == [False] * 2 + [True] * 4
    assert recorder.table.numbers("never seen").tolist() == []


def test_num_tokens_counts_from_one() -> None:
    table = Recorder().table
    for call in (table.preempt, table.finish, table.abort):
        with pytest.raises(ValueError, match="num_tokens is 0"):
            call("a", 0)


def test_no_segments() -> None:
    recorder = Recorder()
    recorder.step(("a", 0, 1))
    empty = SegmentBatch.of([])
    recorder.table.check(empty)
    assert recorder.table.extend(empty) == 1 and empty.num_tokens == 0
    recorder.table.check_integrity()


class TestSegmentBatch:
    def test_of(self) -> None:
        batch = SegmentBatch.of([Segment("a", 3, 2), Segment(7, 0, 1)])
        assert batch.request_ids == ("a", 7) and batch.num_tokens == 3
        assert batch.starts.tolist() == [3, 0] and batch.stops.tolist() == [5, 1]
        assert SegmentBatch.of(batch) is batch

    def test_is_a_snapshot(self) -> None:
        """Engines rewrite their arrays in place while the step runs."""
        ids, starts, lengths = ["a"], np.array([3]), np.array([2])
        batch = SegmentBatch(ids, starts, lengths)
        ids[0], starts[0], lengths[0] = "b", 9, 9
        assert (batch.request_ids, batch.starts.tolist(), batch.lengths.tolist()) == (("a",), [3], [2])

    def test_cannot_change_after_it_was_checked(self) -> None:
        """The bug: after a step that failed, a batch that its caller moved was taken for what it had been when it was checked."""
        batch = SegmentBatch(["a"], [0], [2])
        SequenceTable(RowLog(ROW_SHAPE)).check(batch)
        for column in (batch.starts, batch.lengths, batch.stops):
            with pytest.raises(ValueError, match="read-only"):
                column += 1

    @pytest.mark.parametrize(
        ("starts", "lengths", "message"),
        [
            ([0, -1], [1, 1], r"starts\[1\] is -1"),
            ([0, 0], [1, 0], r"lengths\[1\] is 0"),
            ([0], [1, 1], r"starts has shape \(1,\), expected \(2,\)"),
            ([0, 0], [[1, 1]], "lengths has shape"),
            ([0.0, 1.0], [1, 1], "starts has dtype float64"),
            (np.array([0, 2**64 - 1], np.uint64), [1, 1], r"starts\[1\]"),
        ],
    )
    def test_impossible(self, starts: Any, lengths: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            SegmentBatch(("a", "b"), starts, lengths)


class SequenceMachine(RuleBasedStateMachine):
    """Against lists of rows by request: steps of many requests, copies that arrive late and in any order."""

    NAMES = tuple("abcdefgh")

    def __init__(self) -> None:
        super().__init__()
        self.table = SequenceTable(RowLog(ROW_SHAPE, chunk_bytes=32 * 4))
        self.model: dict[str, list[tuple[int, ...]]] = {}
        self.kept: dict[str, int] = {}
        self.to_arrive: list[tuple[int, np.ndarray]] = []
        self.next_id = 0

    @rule(data=st.data(), at_once=st.booleans())
    def step(self, data: st.DataObject, at_once: bool) -> None:
        names = data.draw(st.permutations(self.NAMES).map(tuple), label="order")
        names = names[: data.draw(st.integers(0, len(names)), label="requests")]
        short = st.integers(1, 5)
        lengths = [data.draw(st.just(1) | short | st.integers(1, 300), label="length") for _ in names]
        starts = [self.draw_start(data, len(self.model.get(name, ()))) for name in names]
        batch = SegmentBatch(names, starts, lengths)
        if any(start > len(self.model.get(name, ())) for name, start in zip(names, starts, strict=True)):
            for call in (self.table.check, self.table.extend):
                with pytest.raises(MissingRoutes):
                    call(batch)
            return
        self.run(batch, at_once)

    @rule(steps=st.integers(1, 20), at_once=st.booleans())
    def decode(self, steps: int, at_once: bool) -> None:
        """All requests that run, one token each: no two calls differ in more than the starts."""
        names = tuple(self.model)
        for _ in range(steps):
            starts = [len(self.model[name]) for name in names]
            self.run(SegmentBatch(names, starts, [1] * len(names)), at_once)

    def draw_start(self, data: st.DataObject, end: int) -> int:
        at_end, back, anywhere = st.just(end), st.integers(max(end - 4, 0), end), st.integers(0, end)
        return data.draw(at_end | back | anywhere | st.integers(0, end + 1), label="start")

    def run(self, batch: SegmentBatch, at_once: bool) -> None:
        block = block_of(batch.num_tokens, self.next_id)
        self.next_id += batch.num_tokens
        self.table.check(batch)
        first = self.table.extend(batch)
        if at_once:
            self.table.rows.fill(first, block)
        else:
            self.to_arrive.append((first, block))
        new = iter(block.reshape(-1, 2).tolist())
        for name, start, stop in zip(batch.request_ids, batch.starts.tolist(), batch.stops.tolist(), strict=True):
            assert isinstance(name, str)
            rows = self.model.setdefault(name, [])
            kept = self.kept.setdefault(name, 0)
            del rows[max(start, kept) :]
            for position in range(start, stop):
                row = tuple(next(new))
                if position >= kept:
                    assert len(rows) == position
                    rows.append(row)

    def arrive_all(self) -> None:
        for first, block in self.to_arrive:
            self.table.rows.fill(first, block)
        self.to_arrive.clear()

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        if self.to_arrive:
            self.table.rows.fill(*self.to_arrive.pop(data.draw(st.integers(0, len(self.to_arrive) - 1))))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), back=st.integers(0, 5))
    def preempt(self, data: st.DataObject, back: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        num_tokens = max(len(self.model[name]) + 2 - back, 1)
        self.table.preempt(name, num_tokens)
        self.kept[name] = max(self.kept[name], min(len(self.model[name]), num_tokens - 1))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), num_tokens=st.integers(-3, 2), how=st.sampled_from(["finish", "abort", "drop"]))
    def leave(self, data: st.DataObject, num_tokens: int, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        rows = self.model[name]
        num_tokens = max(len(rows) + num_tokens, 1)
        if how == "drop":
            self.table.drop(name)
        elif how == "finish" and num_tokens - 1 > len(rows):
            with pytest.raises(MissingRoutes):
                self.table.finish(name, num_tokens)
            return
        else:
            self.arrive_all()
            given = (self.table.finish if how == "finish" else self.table.abort)(name, num_tokens)
            assert given.reshape(-1, 2).tolist() == [list(row) for row in rows[: num_tokens - 1]]
        del self.model[name], self.kept[name]

    @rule(often=st.integers(0, 9))
    def clear(self, often: int) -> None:
        if often == 0:
            self.table.clear()
            self.model.clear()
            self.kept.clear()

    @invariant()
    def holds(self) -> None:
        self.table.check_integrity()
        assert len(self.table) == len(self.model)
        for name, rows in self.model.items():
            assert name in self.table and self.table.end(name) == len(rows)
        log = self.table.rows
        assert log.live_rows == sum(map(len, self.model.values()))
        waiting = {number // 32 for first, block in self.to_arrive for number in range(first, first + len(block))}
        assert log.held_bytes <= 1.25 * log.live_bytes + log.chunk_bytes * (1 + len(waiting))

    def teardown(self) -> None:
        """Whatever is left is right as well."""
        self.arrive_all()
        for name, rows in self.model.items():
            assert self.table.finish(name, len(rows) + 1).reshape(-1, 2).tolist() == [list(row) for row in rows]
        self.table.check_integrity()
        assert self.table.rows.held_bytes <= self.table.rows.chunk_bytes


class TestSequences(SequenceMachine.TestCase):  # type: ignore[misc, valid-type]
    settings: Any = settings(max_examples=80, stateful_step_count=30)


def test_rows_are_read_as_a_request_goes_on() -> None:
    table = SequenceTable(RowLog((1, 1)))
    block = np.arange(600, dtype=np.int16).reshape(-1, 1, 1)
    table.rows.fill(table.extend(SegmentBatch.of([Segment("a", 0, 300), Segment("b", 0, 300)])), block)
    rows = table.read([("b", 250, 260), ("a", 0, 2), ("b", 299, 300)])
    assert rows[:, 0, 0].tolist() == [*range(550, 560), 0, 1, 599]
    assert table.read([]).shape == (0, 1, 1) and table.end("a") == 300
