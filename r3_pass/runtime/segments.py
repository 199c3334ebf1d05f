"""Whose tokens a step forwards, and at which positions.

Legend: T tokens in the step.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

_INT64 = np.dtype(np.int64)


class Segment(NamedTuple):
    """`length` tokens of one request in a step, from position `start` on."""

    request_id: Hashable
    start: int
    length: int


class SegmentBatch:
    """The segments of a step as columns; the tokens of each follow those of the one before it.

    A snapshot: the caller may reuse its arrays at once, and the columns here are read-only. Steps that pass the same
    requests in the same order are cheapest.

    Args:
        request_ids: each at most once (checked by `SequenceTable`).
        starts: int[n], first position of each.
        lengths: int[n], number of tokens of each.

    Raises: ValueError if the columns differ in length, are not integers, a start is negative or a length below 1.
    """

    __slots__ = ("lengths", "num_tokens", "request_ids", "starts", "stops")

    def __init__(self, request_ids: Sequence[Hashable], starts: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        self.request_ids = tuple(request_ids)
        count = len(self.request_ids)
        self.starts = _column("starts", starts, count, minimum=0)
        self.lengths = _column("lengths", lengths, count, minimum=1)
        self.stops = self.starts + self.lengths
        self.stops.setflags(write=False)
        decodes = count > 0 and self.lengths.item(self.lengths.argmax()) == 1
        self.num_tokens = count if decodes else int(np.add.reduce(self.lengths))

    @classmethod
    def of(cls, segments: "SegmentBatch | Iterable[Segment]") -> "SegmentBatch":
        """From segments, or a batch as it is."""
        if isinstance(segments, SegmentBatch):
            return segments
        columns = tuple(zip(*segments, strict=True))
        return cls(*columns) if columns else cls((), (), ())


def _column(name: str, values: npt.ArrayLike, count: int, minimum: int) -> Numbers:
    """A copy, read-only: `SequenceTable` remembers what it found of a batch."""
    column = np.array(values)
    if column.shape != (count,):
        raise ValueError(f"Segments: {name} has shape {column.shape}, expected ({count},), one entry a request.")
    if column.dtype is not _INT64:
        if count and column.dtype.kind not in "iu":
            raise ValueError(f"Segments: {name} has dtype {column.dtype}, expected integers.")
        column = column.astype(np.int64)
    if count:
        least = column.argmin()  # takes a fifth of what min() does, of so few
        if column.item(least) < minimum:
            raise ValueError(f"Segments: {name}[{least}] is {column[least]}, expected at least {minimum}.")
    column.setflags(write=False)
    return column
