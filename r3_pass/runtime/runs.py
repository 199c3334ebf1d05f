"""Decodes that follow one another, as a batch of requests makes them between two arrivals: noted step by step, written together."""

import numpy as np
import numpy.typing as npt

from r3_pass.runtime.segments import SegmentBatch

Numbers = npt.NDArray[np.int64]


class Run:
    """Steps of the same requests, one token each, every one where its request ended: noted, and not in the pages yet.

    request_ids, indices: the requests, in the order of the steps; firsts: the first row number of each step;
    ends: int64[n], where the requests end with these steps; next: a batch that was seen to go on from there.
    """

    __slots__ = ("ends", "firsts", "indices", "next", "request_ids")

    def __init__(self, batch: SegmentBatch, indices: Numbers) -> None:
        self.request_ids = batch.request_ids
        self.indices = indices
        self.firsts: list[int] = []
        self.ends = batch.stops
        self.next: SegmentBatch | None = None

    def goes_on(self, batch: SegmentBatch) -> bool:
        """Whether the batch is the run's next step."""
        if self.next is not batch:
            count = len(self.request_ids)  # as many tokens: each segment has one
            if batch.num_tokens != count or batch.request_ids != self.request_ids:
                return False
            if batch.starts.tobytes() != self.ends.tobytes():  # as `(starts == ends).all()`, in a tenth of the time
                return False
            self.next = batch
        return True

    def add(self, batch: SegmentBatch, first: int) -> None:
        self.firsts.append(first)
        self.ends = batch.stops
        self.next = None
