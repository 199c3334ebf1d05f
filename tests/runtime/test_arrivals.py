"""What the device says of a step that the record kernel wrote to the host: each layer once, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from r3_pass import BufferLayoutError, PartialCapture, R3Error
from r3_pass.passes.ops import ERROR_SLOT, TURNS
from r3_pass.runtime.arrivals import Arrival, Arrivals
from r3_pass.runtime.export import Pending
from r3_pass.runtime.rows import RowLog

LAYERS = (1, 3, 4)


def take(flags: list[int], writes: int = 1, staged: bool = True) -> R3Error | None:
    """The fault of one step of two rows with these flags; its rows are void exactly if there is one."""
    log, arrivals = RowLog((len(LAYERS), 2)), Arrivals()
    first = log.reserve(2)
    rows = np.ones((2, len(LAYERS), 2), np.int16)
    arrivals.add_step(Arrival(Pending(rows, np.array(flags, np.int32)), first, 7, writes, staged=staged))
    arrivals.collect(log, None, LAYERS, {}, wait=True)
    assert (log.take(np.arange(first, first + 2)) == (1 if arrivals.failure is None else -1)).all()
    return arrivals.failure


@pytest.mark.parametrize("words", [[1, 1, 1], [1 << 24, 1 << 24, 1 << 24], [1, 256, 65536]])
def test_once_in_any_turn(words: list[int]) -> None:
    assert take([0, *words]) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([1, 0, 1], r"layers \[3\] were written \[0\] times, expected 1"),
        ([256, 256, 257], r"layers \[4\] were written \[2\] times"),
        ([0x01010101, 1, 1 + (1 << 24)], r"layers \[1, 4\] were written \[4, 2\] times"),
        ([0, 0, 0], r"layers \[1, 3, 4\] were written \[0, 0, 0\] times"),
    ],
)
def test_not_once(words: list[int], said: str) -> None:
    with pytest.raises(PartialCapture, match=said):
        raise take([0, *words]) or AssertionError


def test_in_a_capture() -> None:
    """Kernels of a captured forward do not run: a layer that was written anyhow is one forward too many."""
    assert take([0, 0, 0, 0], writes=0) is None
    assert isinstance(take([0, 1, 1, 1], writes=0), PartialCapture)


def test_an_error_beside_right_counts() -> None:
    assert isinstance(take([ERROR_SLOT, 1, 1, 1]), BufferLayoutError)


def test_counts_that_were_copied_are_numbers() -> None:
    """256 replays in one step are not once."""
    assert take([0, 1, 1, 1], staged=False) is None
    for times in (2, 1 << 8 * (TURNS - 1)):
        assert isinstance(take([0, times, 1, 1], staged=False), PartialCapture)
