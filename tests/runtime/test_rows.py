from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from r3_pass.runtime.rows import RowLog

ROW_SHAPE = (2, 3)


def block_of(num_rows: int, first_id: int = 0) -> np.ndarray:
    """int16[n, 2, 3], every row another one for the first billion."""
    ids = np.arange(first_id, first_id + num_rows)
    columns = [ids % 30_011, ids // 30_011, -ids % 7, ids % 11, ids % 13, ids % 17]
    return np.stack(columns, axis=1).astype(np.int16).reshape(num_rows, *ROW_SHAPE)


def log_with_chunks_of(num_rows: int) -> RowLog:
    return RowLog(ROW_SHAPE, chunk_bytes=num_rows * 12)


def test_append_and_take() -> None:
    log = log_with_chunks_of(8)
    assert log.append(block_of(5)) == 0
    assert log.append(block_of(20, 5)) == 5  # over several chunks
    numbers = np.array([24, 0, 7, 7, 8])
    rows = log.take(numbers)
    assert rows.dtype == np.int16 and rows.flags.c_contiguous and rows.flags.writeable
    assert np.array_equal(rows, block_of(25)[numbers])
    rows[:] = 0
    assert np.array_equal(log.take(numbers), block_of(25)[numbers])
    assert (log.live_rows, log.live_bytes) == (25, 300)
    log.check_integrity()


def test_nothing_at_all() -> None:
    log = log_with_chunks_of(8)
    assert log.reserve(0) == 0 and log.append(block_of(0)) == 0
    none = np.zeros(0, np.int64)
    assert log.take(none).shape == (0, 2, 3)
    log.free(none)
    log.check_integrity()
    assert log.held_bytes == 0


def test_a_row_that_has_not_arrived_cannot_be_taken() -> None:
    log = log_with_chunks_of(8)
    first, second = log.reserve(4), log.reserve(4)
    log.fill(second, block_of(4, 4))
    assert np.array_equal(log.take(np.arange(4, 8)), block_of(4, 4))
    with pytest.raises(AssertionError, match="not arrived"):
        log.take(np.array([5, 3]))
    log.fill(first, block_of(3))
    with pytest.raises(AssertionError, match="not arrived"):
        log.take(np.array([3]))
    log.fill(3, block_of(1, 3))
    assert np.array_equal(log.take(np.arange(8)), block_of(8))


@pytest.mark.parametrize("chunk_rows", [4, 64])
def test_a_row_arrives_once_and_only_where_reserved(chunk_rows: int) -> None:
    log = log_with_chunks_of(chunk_rows)
    log.append(block_of(10))
    for first, num_rows in ((9, 1), (0, 1), (8, 4), (10, 1), (-1, 1)):
        with pytest.raises(AssertionError):
            log.fill(first, block_of(num_rows))
    log.free(np.arange(8))
    for first in range(10):
        with pytest.raises(AssertionError):
            log.fill(first, block_of(1))
    assert np.array_equal(log.take(np.array([8, 9])), block_of(2, 8))


def test_a_block_of_another_layout() -> None:
    log = log_with_chunks_of(8)
    first = log.reserve(2)
    blocks: list[Any] = [np.zeros((2, 3, 2), np.int16), np.zeros((2, 2, 3), np.int32)]
    for block in blocks:
        with pytest.raises(AssertionError):
            log.fill(first, block)


@pytest.mark.parametrize("keep", [2, 9, 60])
def test_a_freed_number_never_reaches_another_row(keep: int) -> None:
    """Whatever compaction has done since: numbers are not given out again."""
    log = log_with_chunks_of(8)
    log.append(block_of(64))
    freed = np.setdiff1d(np.arange(64), np.arange(0, 64, 64 // keep)[:keep])
    log.free(freed)
    log.check_integrity()
    log.append(block_of(64, 64))
    for number in (*freed.tolist(), 128, 1000, -1):
        for call in (log.take, log.free):
            with pytest.raises((AssertionError, IndexError)):
                call(np.array([number]))
    with pytest.raises(AssertionError, match="twice"):
        log.free(np.array([0, 127, 0]))
    alive = np.setdiff1d(np.arange(128), freed)
    assert np.array_equal(log.take(alive), block_of(128)[alive])
    log.check_integrity()


@pytest.mark.parametrize("before", [0, 160])
def test_rows_freed_on_their_way_attach_to_nothing(before: int) -> None:
    """A request is aborted while its last copy is under way: its chunk waits for it, then goes."""
    log = log_with_chunks_of(4)
    log.append(block_of(before))
    first = log.reserve(8)
    last = log.append(block_of(3, 8))
    log.free(np.arange(first, first + 8))
    log.check_integrity()
    assert (log.live_rows, log.open_chunks) == (before + 3, 3)
    log.fill(first, block_of(8))
    log.check_integrity()
    assert (log.live_rows, log.open_chunks) == (before + 3, 1)
    assert log.held_bytes == before * log.row_bytes + log.chunk_bytes
    assert np.array_equal(log.take(np.arange(last, last + 3)), block_of(3, 8))


def test_stragglers_do_not_hold_a_chunk_each() -> None:
    """One long request among many short ones has a row in every chunk; they end up in a few chunks."""
    log = log_with_chunks_of(16)
    log.append(block_of(16 * 100))
    log.free(np.setdiff1d(np.arange(1600), np.arange(0, 1600, 16)))
    log.check_integrity()
    assert log.held_bytes <= 1.2 * log.live_bytes
    assert len(log._chunks) <= 100 // 4 + 1
    assert np.array_equal(log.take(np.arange(0, 1600, 16)), block_of(1600)[::16])


def test_rows_larger_than_a_chunk() -> None:
    log = RowLog(ROW_SHAPE, chunk_bytes=1)
    log.append(block_of(5))
    log.free(np.array([1, 3]))
    log.check_integrity()
    assert np.array_equal(log.take(np.array([0, 2, 4])), block_of(5)[::2])


@pytest.mark.parametrize("seed", range(4))
def test_a_long_life(seed: int) -> None:
    """Chunks that thin out at all rates, vanish, and are joined to neighbours while others wait for their turn."""
    rng = np.random.default_rng(seed)
    log = log_with_chunks_of(16)
    alive, given_out = np.zeros(0, np.int64), 0
    waiting: list[tuple[int, np.ndarray]] = []
    for _ in range(1500):
        num_rows = int(rng.integers(0, 40))
        first = log.reserve(num_rows)
        waiting.append((first, block_of(num_rows, given_out)))
        given_out += num_rows
        alive = np.append(alive, np.arange(first, given_out))
        while len(waiting) > rng.integers(0, 4):
            log.fill(*waiting.pop(int(rng.integers(len(waiting)))))
        odds = rng.choice([0.0, 0.05, 0.5, 1.0], size=given_out // 16 + 1, p=[0.6, 0.2, 0.1, 0.1])
        gone = rng.random(len(alive)) < odds[alive // 16]
        log.free(rng.permutation(alive[gone]))
        alive = alive[~gone]
        log.check_integrity()
        assert log.are_alive(alive)
        missing = [number for first, block in waiting for number in range(first, first + len(block))]
        arrived = np.setdiff1d(alive, missing)
        assert np.array_equal(log.take(arrived), block_of(given_out)[arrived])


class RowLogMachine(RuleBasedStateMachine):
    """Against a dict from number to row; blocks arrive in pieces and in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.log = log_with_chunks_of(16)
        self.rows: dict[int, np.ndarray] = {}  # alive
        self.to_arrive: list[tuple[int, np.ndarray]] = []
        self.given_out = 0

    @rule(num_rows=st.integers(0, 70), at_once=st.booleans(), cut=st.integers(0, 70))
    def reserve(self, num_rows: int, at_once: bool, cut: int) -> None:
        block = block_of(num_rows, self.given_out)
        if at_once:
            first = self.log.append(block)
        else:
            first = self.log.reserve(num_rows)
            self.to_arrive += [(first, block[:cut]), (first + len(block[:cut]), block[cut:])]
        assert first == self.given_out
        self.given_out += num_rows
        self.rows.update(zip(range(first, first + num_rows), block, strict=True))

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        if self.to_arrive:
            self.log.fill(*self.to_arrive.pop(data.draw(st.integers(0, len(self.to_arrive) - 1))))

    @rule(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.02, 0.3, 0.7, 0.97, 1.0]))
    def free_some(self, seed: int, share: float) -> None:
        rng = np.random.default_rng(seed)
        numbers = np.array([number for number in self.rows if rng.random() < share], dtype=np.int64)
        rng.shuffle(numbers)
        self.log.free(numbers)
        for number in numbers.tolist():
            del self.rows[number]

    @rule(seed=st.integers(0, 2**32 - 1), span=st.integers(1, 90))
    def free_neighbours(self, seed: int, span: int) -> None:
        first = int(np.random.default_rng(seed).integers(self.given_out + 1))
        numbers = [number for number in self.rows if first <= number < first + span]
        self.log.free(np.array(numbers, dtype=np.int64))
        for number in numbers:
            del self.rows[number]

    @rule(seed=st.integers(0, 2**32 - 1))
    def take(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        missing = {first + i for first, block in self.to_arrive for i in range(len(block))}
        numbers = np.array([number for number in self.rows if number not in missing], dtype=np.int64)
        rng.shuffle(numbers)
        expected = [self.rows[number] for number in numbers.tolist()]
        assert np.array_equal(self.log.take(numbers), np.array(expected, np.int16).reshape(-1, *ROW_SHAPE))

    @invariant()
    def holds(self) -> None:
        self.log.check_integrity()
        assert self.log.are_alive(np.array(list(self.rows), dtype=np.int64))
        waiting = {number // 16 for first, block in self.to_arrive for number in range(first, first + len(block))}
        assert self.log.open_chunks <= 1 + len(waiting)
        assert self.log.held_bytes <= 1.25 * self.log.live_bytes + self.log.chunk_bytes * (1 + len(waiting))


class TestRowLog(RowLogMachine.TestCase):  # type: ignore[misc, valid-type]
    settings: Any = settings(max_examples=80, stateful_step_count=40)
