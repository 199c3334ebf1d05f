"""Turns of a conversation joined into one sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from r3_pass import BufferLayoutError, MissingRoutes, RefusedConfiguration
from r3_pass.stitch import Turn, stitch

L, K = 3, 2


def turn(length: int, mark: int, start: int = 0, tokens: Any = None) -> Turn:
    """A turn over the first tokens of 100, 101, ...; each id of its rows is its mark."""
    rows = np.full((length - 1 - start, L, K), mark, np.int16)
    return Turn(np.arange(100, 100 + length) if tokens is None else tokens, rows, start)


def marks(rows: np.ndarray) -> list[int]:
    assert rows.dtype == np.int16 and rows.shape[1:] == (L, K)
    assert (rows == rows[:, :1, :1]).all()
    return rows[:, 0, 0].tolist()


@pytest.mark.parametrize(
    ("turns", "want"),
    [
        ([turn(4, 1)], [1, 1, 1]),
        # The whole history again: the first turn's rows go with its log-probabilities, the boundary's comes from the second.
        ([turn(4, 1), turn(8, 2)], [1, 1, 1, 2, 2, 2, 2]),
        # From the boundary on, and from behind it.
        ([turn(4, 1), turn(8, 2, start=3)], [1, 1, 1, 2, 2, 2, 2]),
        ([turn(4, 1), turn(8, 2, start=4)], [1, 1, 1, -1, 2, 2, 2]),
        ([turn(4, 1), turn(6, 2, start=4), turn(9, 3, start=6)], [1, 1, 1, -1, 2, -1, 3, 3]),
        ([turn(4, 1), turn(6, 2, start=4), turn(9, 3)], [1, 1, 1, -1, 2, 3, 3, 3]),
        # A turn that adds one token, or none.
        ([turn(4, 1), turn(5, 2, start=4)], [1, 1, 1, -1]),
        ([turn(4, 1), turn(4, 2)], [1, 1, 1]),
        ([turn(1, 1), turn(3, 2)], [2, 2]),
        ([turn(1, 1), turn(3, 2, start=1)], [-1, 2]),
    ],
)
def test_rows_by_turn(turns: list[Turn], want: list[int]) -> None:
    assert marks(stitch(turns)) == want


def test_turns_are_not_changed() -> None:
    first, second = turn(4, 1), turn(6, 2)
    for one in (first, second):
        one.rows.flags.writeable = False
    joined = stitch([first, second])
    joined[:] = 9
    assert (first.rows == 1).all() and (second.rows == 2).all()


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([turn(4, 1, start=1)], r"turn 0 has rows from position 1 on; position 0 has none.*start=0"),
        ([turn(4, 1), turn(8, 2, start=5)], r"turn 1 has rows from position 5 on; position 4 has none.*start=4"),
    ],
)
def test_a_gap(turns: list[Turn], words: str) -> None:
    """Only the row of the token that was never forwarded may be missing."""
    with pytest.raises(MissingRoutes, match=words):
        stitch(turns)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([100, 101, 7, 103, 104], "position 2 was token 102 and is token 7"),
        ([100, 101, 102, 9, 104], "position 3 was token 103 and is token 9"),
        ([100, 101], "position 2 was token 102 and is missing"),
    ],
)
def test_a_history_that_was_edited(tokens: list[int], words: str) -> None:
    """Rows would be shifted against their tokens: a chat template that drops an answer's thoughts, text tokenized anew."""
    with pytest.raises(RefusedConfiguration, match=words):
        stitch([turn(4, 1), turn(len(tokens), 2, tokens=tokens)])


@pytest.mark.parametrize(
    "wrong",
    [
        Turn([1, 2, 3], np.zeros((3, L, K), np.int16)),
        Turn([1, 2, 3], np.zeros((2, L, K + 1), np.int16)),
        Turn([1, 2, 3], np.zeros((2, L, K), np.int32)),
        Turn([1, 2, 3], np.zeros((2, L), np.int16)),
        Turn([1, 2, 3], np.zeros((2, L, K), np.int16), 1),
        Turn([1, 2, 3], np.zeros((3, L, K), np.int16), -1),
        Turn([], np.zeros((0, L, K), np.int16)),
        Turn([[1, 2]], np.zeros((1, L, K), np.int16)),
        Turn([1.0, 2.0], np.zeros((1, L, K), np.int16)),
    ],
)
def test_rows_and_tokens_that_do_not_fit(wrong: Turn) -> None:
    with pytest.raises(BufferLayoutError, match="turn 1: "):
        stitch([Turn([1], np.zeros((0, L, K), np.int16)), wrong])


def test_turns_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"list of Turn.*got a tuple"):
        stitch([([1, 2], np.zeros((1, L, K), np.int16))])  # type: ignore[list-item]


def test_no_turns() -> None:
    with pytest.raises(ValueError, match="at least one turn"):
        stitch([])
