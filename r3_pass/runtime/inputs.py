"""What callers pass to a session, checked at the edge."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
from torch import Tensor

from r3_pass.runtime.segments import Segment, SegmentBatch
from r3_pass.runtime.slots import Slots


def count(name: str, value: object) -> int:
    """A number of things, at least one.

    Raises: ValueError if it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} is a whole number that counts from 1, got {name}={value!r}")
    return int(value)


def token_count(request_id: Hashable, num_tokens: object) -> int:
    """num_tokens of a request, both of them checked; how few it may be is the table's business."""
    check_id(request_id)
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int | np.integer):
        raise ValueError(f"request {request_id!r}: num_tokens is a whole number, got {num_tokens!r}")
    return int(num_tokens)


def first_position(request_id: Hashable, start: object, num_tokens: int) -> int:
    """Where the rows that a caller wants begin: 0 .. num_tokens - 1.

    Raises: ValueError if it is something else.
    """
    whole = isinstance(start, int | np.integer) and not isinstance(start, bool)
    if not whole or not 0 <= int(start) <= max(num_tokens - 1, 0):  # type: ignore[call-overload]
        raise ValueError(
            f"request {request_id!r}: start is a position of its {num_tokens - 1} rows, 0 to {num_tokens - 1}, got {start!r}"
        )
    return int(start)  # type: ignore[call-overload, no-any-return]


def check_id(request_id: object) -> None:
    try:
        hash(request_id)
    except TypeError as error:
        raise ValueError(f"a request id must be hashable, got {request_id!r}") from error


def batch_of(segments: object) -> SegmentBatch:
    """Segments as columns; None is none.

    Raises: ValueError if they are no segments, or a request id is not hashable.
    """
    batch = () if segments is None else segments
    if not isinstance(batch, SegmentBatch):
        if not isinstance(batch, Iterable) or isinstance(batch, Segment):
            raise ValueError(f"segments are Segment(request_id, start, length) in a list, got {segments!r}")
        listed = list(batch)
        wrong = next((s for s in listed if not isinstance(s, tuple | list) or len(s) != 3), None)
        if wrong is not None:
            raise ValueError(f"a segment is Segment(request_id, start, length), got {wrong!r}")
        batch = SegmentBatch.of(listed)
    check_id(batch.request_ids)
    return batch


def length(slots: object) -> int:
    """How many slots there are.

    Raises: ValueError if they are no vector.
    """
    given = slots if isinstance(slots, Tensor) else np.asarray(slots)
    if given.ndim != 1:
        raise ValueError(f"slots are a vector of integers, one a position, got {type(slots).__name__} {given!r}")
    return int(given.shape[0])


def without_padding(request_id: Hashable, start: int, slots: Slots) -> None:
    """Raises ValueError if one of the slots on the host that hold positions start, start + 1, ... is -1, which is no slot."""
    if isinstance(slots, Tensor) and slots.device.type != "cpu":
        return
    none = np.flatnonzero(np.asarray(slots) == -1)
    if none.size:
        first = int(none[0])
        raise ValueError(
            f"request {request_id!r}, position {start + first}: -1 is no slot and has no row (it is padding, in a mapping). "
            f"Give the slot of each position from {start} on, or of those alone that have KV, and forward the others."
        )


def distinct(slots: Slots) -> None:
    """Raises ValueError if a slot on the host stands twice among those that are written."""
    if isinstance(slots, Tensor) and slots.device.type != "cpu":
        return
    given = np.asarray(slots)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        return  # the buffer says what is wrong
    ordered = np.sort(given[given >= 0])
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise ValueError(
            f"slot {int(twice[0])} stands twice among the slots that are written: which row would it hold?"
        )
