"""One sequence out of the turns of a conversation, for callers that ask for the rows of each turn.

    first = Turn(tokens=prompt + answer, rows=session.finish("turn-1", n))
    second = Turn(tokens=prompt + answer + tool + answer_2, rows=session.finish("turn-2", m, start=n), start=n)
    rows = stitch([first, second])           # int16 [m - 1, num_layers, top_k], row n - 1 is -1

The last token of a turn was sampled and not forwarded: it has no row in that turn. The next turn's prefill forwards it; if that
turn's rows reach back to it, its row comes from there. If not, the row is -1, which leaves the token to the live router.

Where two turns have a row for one position, the earlier turn's stays: it goes with the log-probabilities that were handed out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from r3_pass.errors import BufferLayoutError, MissingRoutes, RefusedConfiguration

Rows = npt.NDArray[np.int16]


class Turn(NamedTuple):
    """A turn as the engine saw it.

    Attributes:
        tokens: int [n], all token ids from position 0 on: history, prompt and answer.
        rows: int16 [n - 1 - start, num_layers, top_k].
        start: position of the first row (`finish(..., start=)`).
    """

    tokens: npt.ArrayLike
    rows: npt.NDArray[np.int16]
    start: int = 0


def stitch(turns: Sequence[Turn]) -> Rows:
    """The rows of a conversation's tokens.

    Returns: int16 [n - 1, num_layers, top_k] for the n tokens of the last turn; -1 in the row of a turn's last token if the next
        turn's rows begin behind it.
    Raises:
        RefusedConfiguration: a turn does not go on with the tokens of the one before (edited, or tokenized anew).
        MissingRoutes: more than that one row is missing between two turns, or before the first.
        BufferLayoutError: rows of another shape or dtype, or another number of them than the tokens ask for.
        ValueError: no turns.
    """
    if not turns:
        raise ValueError("stitch needs at least one turn")
    wrong = next((turn for turn in turns if not isinstance(turn, Turn)), None)
    if wrong is not None:
        raise ValueError(f"stitch takes a list of Turn(tokens, rows, start), got a {type(wrong).__name__} in it")
    shape = np.asarray(turns[0].rows).shape[1:]
    checked = [_checked(number, turn, shape) for number, turn in enumerate(turns)]
    for number in range(1, len(checked)):
        _continues(number, checked[number - 1].tokens, checked[number].tokens)
    stitched = np.full((len(checked[-1].tokens) - 1, *shape), -1, dtype=np.int16)
    end = reach = 0  # of the rows so far, and where the next turn's may begin at the latest
    for number, (tokens, rows, start) in enumerate(checked):
        if start > reach:
            raise MissingRoutes(
                f"turn {number} has rows from position {start} on; position {reach} has none. Ask for it with "
                f"finish(..., start={reach}) or less."
            )
        stop = len(tokens) - 1
        taken = max(end, start)
        stitched[taken:stop] = rows[taken - start :]
        reach, end = stop + 1, stop
    return stitched


class _Checked(NamedTuple):
    tokens: npt.NDArray[np.int64]
    rows: Rows
    start: int


def _checked(number: int, turn: Turn, shape: tuple[int, ...]) -> _Checked:
    tokens = np.asarray(turn.tokens)
    if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
        raise BufferLayoutError(
            f"turn {number}: tokens are {tokens.dtype}{list(tokens.shape)}, expected int[n] with n at least 1."
        )
    rows = np.asarray(turn.rows)
    expected = (len(tokens) - 1 - turn.start, *shape)
    if len(shape) != 2 or rows.dtype != np.int16 or rows.shape != expected or turn.start < 0:
        raise BufferLayoutError(
            f"turn {number}: rows are {rows.dtype}{list(rows.shape)}, expected int16[{expected[0]}, num_layers, top_k] for "
            f"{len(tokens)} tokens from position {turn.start} on, of the shape of turn 0's."
        )
    return _Checked(tokens.astype(np.int64), rows, turn.start)


def _continues(number: int, before: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
    common = min(len(before), len(tokens))
    other = np.flatnonzero(before[:common] != tokens[:common])
    if other.size or len(tokens) < len(before):
        position = int(other[0]) if other.size else len(tokens)
        now = f"is token {int(tokens[position])}" if other.size else "is missing"
        raise RefusedConfiguration(
            f"turn {number} does not go on where turn {number - 1} ended: position {position} was token "
            f"{int(before[position])} and {now}. The history was edited or tokenized anew; train the two as two sequences."
        )
