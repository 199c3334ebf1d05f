"""Rows of each running request, by position: gaps, overwrites, completeness, what preemption keeps.

    first = table.extend(batch)              # when a step was queued: its rows get numbers, positions point at them
    table.rows.fill(first, block)            # when its bytes have arrived, in any order of steps
    table.finish("request-7", 96)            # int16[95, M, K]

Each position 0 .. end - 1 of a request points at one row of a `RowLog`, and no two positions at the same one. The
pointers stand in pages of 256: that of position p of request r is `pointers[table[r, p // 256] + p % 256]`. A step is
a few numpy calls whatever the number of requests and their lengths. Decodes that follow one another are noted first,
and written to the pages together (`runs`).

Legend: T tokens in the step, L decoder layers, M stored (MoE) layers, K top-k, E experts, S slots.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import repeat

import numpy as np

from r3_pass.errors import MissingRoutes
from r3_pass.runtime.rows import Numbers, RowLog, Rows
from r3_pass.runtime.runs import Run
from r3_pass.runtime.segments import SegmentBatch

_PAGE_BITS = 8
_PAGE = 1 << _PAGE_BITS

# The pointer of a position without a row.
_NONE = -1

# Per-request state has a first entry that is nobody's and stays empty: a request never seen has its end, 0.
_NOBODY = 0

# Tokens of a run that are noted at most.
_RUN_TOKENS = 8192


class SequenceTable:
    """Request id -> rows by position. Gives out all numbers of its row log; whoever owns the copies fills them.

    Not thread-safe: the session calls it under its lock.
    """

    def __init__(self, rows: RowLog) -> None:
        self.rows = rows
        self._index: dict[Hashable, int] = {}  # request id -> r
        self._end = np.zeros(1, dtype=np.int64)  # of r: positions with a row
        self._kept = np.zeros(1, dtype=np.int64)  # of r: positions that preempt froze
        self._capacity = np.zeros(1, dtype=np.int64)  # of r: positions that its pages hold
        self._table = np.zeros((1, 1), dtype=np.int64)  # of r: where its pages begin; valid below its capacity
        self._free_indices: list[int] = []
        self._pointers = np.zeros(0, dtype=np.int64)  # row numbers; _NONE in free pages and past a request's end
        self._free_pages: list[int] = []
        self._resolved_ids: tuple[Hashable, ...] | None = None  # last question to _resolve, None when out of date
        self._resolved = np.zeros(0, dtype=np.int64)
        self._matched: tuple[SegmentBatch, Numbers, bool] | None = None  # last answer of _match, None when out of date
        self._run: Run | None = None  # if the last step may be the first of a run, or was one of it

    @property
    def host_bytes(self) -> int:
        """Bytes of the rows in memory, and of the arrays that say whose they are."""
        arrays = (self._end, self._kept, self._capacity, self._table, self._pointers)
        return self.rows.host_bytes + sum(array.nbytes for array in arrays)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._index

    def end(self, request_id: Hashable) -> int:
        """How many positions have a row; 0 for a request never seen."""
        self._write_run()
        return int(self._end[self._index.get(request_id, _NOBODY)])

    def numbers(self, request_id: Hashable) -> Numbers:
        """Row number of each position below the end, int64[end], a copy. Later steps made higher numbers."""
        self._write_run()
        index = self._index.get(request_id, _NOBODY)
        end = int(self._end[index])
        pages = self._table[index, : -(-end // _PAGE)] >> _PAGE_BITS
        pointers: Numbers = self._pointers.reshape(-1, _PAGE)[pages].reshape(-1)
        return pointers[:end]

    def read(self, ranges: Sequence[tuple[Hashable, int, int]]) -> Rows:
        """Rows of positions start .. stop - 1 of each (request, start, stop), one after the other; the requests keep them.

        Takes O(rows), whatever the requests' lengths. Each position must have a row that has arrived.

        Returns: int16 [sum of stop - start, M, K], a copy.
        """
        self._write_run()
        indices = np.array([self._index[request_id] for request_id, _, _ in ranges], dtype=np.int64)
        starts = np.array([start for _, start, _ in ranges], dtype=np.int64)
        lengths = np.array([stop - start for _, start, stop in ranges], dtype=np.int64)
        numbers = self._pointers[self._where(*_spread(indices, starts, lengths))]
        return self.rows.take(numbers)

    def check(self, batch: SegmentBatch) -> None:
        """Raise what `extend` would raise now, and change nothing.

        Raises:
            MissingRoutes: a segment starts past its request's end.
            ValueError: a request has two segments.
        """
        if self._run is None or not self._run.goes_on(batch):
            self._match(batch)

    def extend(self, batch: SegmentBatch) -> int:
        """Point the positions of the segments at new rows, one a token. Nothing is changed if it raises.

        A segment that starts before its request's end replaces the rows from there on, and the request then ends
        where the segment ends. Positions that `preempt` froze stay, with the row that they have.

        Returns: the number of the first token's row; the others follow, `batch.num_tokens` in all, to be filled.
        Raises: as `check`; OSError or MemoryError if there is no memory for the rows.
        """
        run = self._run
        if run is not None and run.goes_on(batch):
            if len(run.firsts) * batch.num_tokens >= _RUN_TOKENS:
                self._write_run()
            first = self.rows.reserve(batch.num_tokens)
            run.add(batch, first)
            self._matched = None
            return first
        indices, continues = self._match(batch)
        first = self.rows.reserve(batch.num_tokens)
        self._matched = self._run = None
        if np.minimum.reduce(indices, initial=_NOBODY + 1) == _NOBODY:
            self._register(batch.request_ids)
            indices = self._resolve(batch.request_ids)
        self._make_room(indices, batch.stops)
        numbers = np.arange(first, first + batch.num_tokens)
        owners, positions = indices, batch.starts
        if batch.num_tokens > len(indices):
            owners, positions = _spread(indices, batch.starts, batch.lengths)
        where = self._where(owners, positions)
        if continues:
            self._pointers[where] = numbers
            self._end[indices] = batch.stops
        else:
            self._replace(indices, batch, where, numbers)
        if continues and 0 < batch.num_tokens == len(indices):
            self._run = Run(batch, indices)
        return first

    def _write_run(self) -> None:
        """What the run's steps have noted comes into the pages, as `extend` would have written it step by step."""
        run = self._run
        if run is None or not run.firsts:
            return
        self._make_room(run.indices, run.ends)
        steps = np.arange(len(run.firsts))[:, None]
        positions = run.ends - len(run.firsts) + steps
        self._pointers[self._where(run.indices, positions)] = np.array(run.firsts)[:, None] + np.arange(
            len(run.indices)
        )
        self._end[run.indices] = run.ends
        run.firsts.clear()

    def preempt(self, request_id: Hashable, num_tokens: int) -> None:
        """Freeze the rows that exist of the first `num_tokens - 1` positions: later segments leave them as they are.

        A request never seen has none: nothing happens.
        """
        _check_num_tokens(request_id, num_tokens)
        self._write_run()
        index = self._index.get(request_id)
        if index is not None:
            self._kept[index] = max(int(self._kept[index]), min(int(self._end[index]), num_tokens - 1))

    def finish(
        self,
        request_id: Hashable,
        num_tokens: int,
        check: Callable[[Hashable, int, Rows], None] | None = None,
        start: int = 0,
    ) -> Rows:
        """Hand over the rows of the first `num_tokens - 1` positions, and forget the request.

        Args:
            check: looks at the rows before they leave, given the request, the first position and them; what it raises leaves the
                request as it is.
            start: first position that is handed over.

        Returns: int16[num_tokens - 1 - start, M, K], C-contiguous, read-only.
        Raises: MissingRoutes if the request is unknown, has fewer rows, or one of these never arrived: then it stays as it is.
        """
        _check_num_tokens(request_id, num_tokens)
        if request_id not in self._index:
            raise MissingRoutes(
                f"Request {request_id!r} is unknown, {num_tokens - 1} rows were expected: no step that succeeded had a segment "
                "of it, or it was finished, aborted or dropped before. Finish a request once, under the "
                "id that its segments had; pass segments with every step, and forward again what was in a step that failed."
            )
        end = self.end(request_id)
        if end < num_tokens - 1:
            raise MissingRoutes(
                f"Request {request_id!r} finishes with {num_tokens} tokens: {num_tokens - 1} rows were expected, {end} "
                f"exist. Position {end} was in no segment and no prefix_hit. The request stays registered: "
                "abort(request_id, num_tokens) returns the rows that exist."
            )
        numbers = self.numbers(request_id)[start : num_tokens - 1]
        lost = np.flatnonzero(~self.rows.arrived(numbers))
        if lost.size:
            raise MissingRoutes(
                f"Request {request_id!r}, position {start + int(lost[0])} ({lost.size} of {len(numbers)} rows): its row was "
                "recorded, and its copy from the device never arrived. The request stays registered: abort(request_id, "
                "num_tokens) returns the rows before it."
            )
        return self._hand_over(request_id, numbers, start, check)

    def abort(self, request_id: Hashable, num_tokens: int, start: int = 0) -> Rows:
        """As `finish`, with as many of those rows as exist: none of a request never seen."""
        _check_num_tokens(request_id, num_tokens)
        numbers = self.numbers(request_id)[start : num_tokens - 1]
        lost = np.flatnonzero(~self.rows.arrived(numbers))
        return self._hand_over(request_id, numbers[: int(lost[0])] if lost.size else numbers, start)

    def drop(self, request_id: Hashable) -> None:
        """Forget the request and its rows, if it is known. Rows on their way then attach to nothing."""
        index = self._index.get(request_id)
        if index is None:
            return
        self.rows.free(self.numbers(request_id))
        pages = self._table[index, : self._capacity[index] >> _PAGE_BITS] >> _PAGE_BITS
        self._pointers.reshape(-1, _PAGE)[pages] = _NONE
        self._free_pages += pages.tolist()
        self._end[index] = self._kept[index] = self._capacity[index] = 0
        self._free_indices.append(index)
        del self._index[request_id]
        self._resolved_ids = self._matched = self._run = None
        self._shrink()

    def clear(self) -> None:
        """Forget all requests."""
        for request_id in tuple(self._index):
            self.drop(request_id)

    def truncate(self, request_id: Hashable, end: int) -> None:
        """Forget the rows of positions from `end` on, but for those that preempt froze."""
        self._write_run()
        index = self._index.get(request_id)
        if index is None:
            return
        end = max(end, int(self._kept[index]))
        if end >= self._end[index]:
            return
        positions = np.arange(end, int(self._end[index]))
        where = self._where(np.full(len(positions), index), positions)
        self.rows.free(self._pointers[where])
        self._pointers[where] = _NONE
        self._end[index] = end
        self._matched = self._run = None

    def _hand_over(
        self,
        request_id: Hashable,
        numbers: Numbers,
        start: int,
        check: Callable[[Hashable, int, Rows], None] | None = None,
    ) -> Rows:
        rows = self.rows.take(numbers)
        if check is not None:
            check(request_id, start, rows)
        rows.flags.writeable = False
        self.drop(request_id)
        return rows

    def _resolve(self, request_ids: tuple[Hashable, ...]) -> Numbers:
        """The index of each request, _NOBODY if never seen. Decode steps ask for the same requests again and again."""
        if request_ids != self._resolved_ids:
            if len(set(request_ids)) < len(request_ids):
                twice = next(request_id for i, request_id in enumerate(request_ids) if request_id in request_ids[:i])
                raise ValueError(f"Request {twice!r} has two segments in one step, expected one of all its tokens.")
            found = map(self._index.get, request_ids, repeat(_NOBODY))
            self._resolved = np.fromiter(found, dtype=np.int64, count=len(request_ids))
            self._resolved_ids = request_ids
        return self._resolved

    def _match(self, batch: SegmentBatch) -> tuple[Numbers, bool]:
        """The index of each request, and whether every segment starts at its request's end. Raises as `check`.

        A step asks when it begins and, as a rule with nothing changed since, when it ends.
        """
        self._write_run()
        if self._matched is not None and self._matched[0] is batch:
            return self._matched[1:]
        indices = self._resolve(batch.request_ids)
        ends = self._end[indices]
        if batch.starts.tobytes() == ends.tobytes():
            self._matched = batch, indices, True
            return indices, True
        gaps = np.flatnonzero(batch.starts > ends)
        if len(gaps):
            i = int(gaps[0])
            raise MissingRoutes(
                f"Request {batch.request_ids[i]!r}: position {ends[i]} comes next, the segment starts at "
                f"{batch.starts[i]}. Report what a prefix cache skipped with prefix_hit(request_id, start, slots) "
                "before the step, from the first position that it skipped; forwards outside of session.step, and steps that "
                "failed, leave no rows: forward these tokens again."
            )
        self._matched = batch, indices, False
        return indices, False

    def _make_room(self, indices: Numbers, stops: Numbers) -> None:
        """Pages for the positions below `stops` of these requests."""
        short = stops > self._capacity[indices]
        if not np.count_nonzero(short):
            return
        indices, need = indices[short], -(-stops[short] // _PAGE)
        have = self._capacity[indices] >> _PAGE_BITS
        while int(need.max()) > self._table.shape[1]:
            self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
        count = int((need - have).sum())
        while count > len(self._free_pages):
            size = max(len(self._pointers), _PAGE)
            pointers = np.concatenate((self._pointers, np.full(size, _NONE)))
            self._free_pages += range(len(pointers) // _PAGE - 1, len(self._pointers) // _PAGE - 1, -1)
            self._pointers = pointers
        self._table[_spread(indices, have, need - have)] = np.multiply(self._free_pages[-count:], _PAGE)
        del self._free_pages[-count:]
        self._capacity[indices] = need * _PAGE

    def _where(self, owners: Numbers, positions: Numbers) -> Numbers:
        """Where the pointers of these positions of these requests stand."""
        begins: Numbers = self._table[owners, positions >> _PAGE_BITS]
        return begins + (positions & (_PAGE - 1))

    def _replace(self, indices: Numbers, batch: SegmentBatch, where: Numbers, numbers: Numbers) -> None:
        """`extend` where some segments start before their request's end."""
        kept = self._kept[indices]
        first = np.maximum(batch.starts, kept)
        old = self._where(*_spread(indices, first, np.maximum(self._end[indices] - first, 0)))
        self.rows.free(self._pointers[old])
        self._pointers[old] = _NONE
        # Whatever still has a row now is frozen.
        frozen = self._pointers[where] != _NONE
        self.rows.free(numbers[frozen])
        self._pointers[where[~frozen]] = numbers[~frozen]
        self._end[indices] = np.maximum(batch.stops, kept)

    def _register(self, request_ids: tuple[Hashable, ...]) -> None:
        for request_id in request_ids:
            if request_id in self._index:
                continue
            if not self._free_indices:
                size = len(self._end)
                self._free_indices += range(2 * size - 1, size - 1, -1)
                self._end, self._kept, self._capacity, self._table = (
                    np.concatenate((of, np.zeros_like(of)))
                    for of in (self._end, self._kept, self._capacity, self._table)
                )
            self._index[request_id] = self._free_indices.pop()
        self._resolved_ids = None

    def _shrink(self) -> None:
        """Lay the bookkeeping out anew once a third of it would do: what a crowd of requests took does not stay taken."""
        num_pages = len(self._pointers) // _PAGE
        used = num_pages - len(self._free_pages)
        size = 2 * (len(self._index) + 1)
        width = max(int(np.maximum.reduce(self._capacity)) >> _PAGE_BITS, 1)
        if 3 * (used + 1) > num_pages and 3 * size * width > self._table.size:
            return
        owners = np.array([_NOBODY, *self._index.values()])
        count = len(owners)
        table = np.zeros((size, width), dtype=np.int64)
        table[:count] = self._table[owners, :width]
        self._end, self._kept, self._capacity = (
            np.concatenate((of[owners], np.zeros(size - count, dtype=np.int64)))
            for of in (self._end, self._kept, self._capacity)
        )
        where = _spread(np.arange(count), np.zeros(count, dtype=np.int64), self._capacity[:count] >> _PAGE_BITS)
        pointers = np.full(2 * (used + 1) * _PAGE, _NONE)
        if used:
            pointers[: used * _PAGE] = self._pointers.reshape(-1, _PAGE)[table[where] >> _PAGE_BITS].reshape(-1)
        table[where] = np.arange(used) * _PAGE
        self._table, self._pointers = table, pointers
        self._free_pages = list(range(2 * used + 1, used - 1, -1))
        self._index = {request_id: index for index, request_id in enumerate(self._index, start=1)}
        self._free_indices = list(range(size - 1, count - 1, -1))

    def check_integrity(self) -> None:
        """Assert every invariant, those of the row log too. For tests: looks at all rows."""
        self.rows.check_integrity()
        if (run := self._run) is not None:
            assert (run.ends - len(run.firsts) == self._end[run.indices]).all()
            assert run.indices.tolist() == [self._index[request_id] for request_id in run.request_ids]
        self._write_run()
        indices = sorted(self._index.values())
        assert sorted([_NOBODY, *indices, *self._free_indices]) == list(range(len(self._end)))
        for unused in (_NOBODY, *self._free_indices):
            assert self._end[unused] == self._kept[unused] == self._capacity[unused] == 0
        pages = list(self._free_pages)
        numbers = []
        past_end = [self._pointers.reshape(-1, _PAGE)[pages].reshape(-1)]
        for request_id, index in self._index.items():
            end, capacity = int(self._end[index]), int(self._capacity[index])
            assert 0 <= self._kept[index] <= end <= capacity and capacity % _PAGE == 0
            begins = self._table[index, : capacity // _PAGE]
            assert not (begins % _PAGE).any()
            pages += (begins // _PAGE).tolist()
            pointers = self._pointers[self._where(np.full(capacity, index), np.arange(capacity))]
            assert np.array_equal(pointers[:end], self.numbers(request_id)) and (np.diff(pointers[:end]) > 0).all()
            numbers.append(pointers[:end])
            past_end.append(pointers[end:])
        assert sorted(pages) == list(range(len(self._pointers) // _PAGE))
        assert (np.concatenate(past_end) == _NONE).all()
        assert self.rows.are_alive(np.concatenate([np.zeros(0, dtype=np.int64), *numbers]))
        answers = [(self._resolved_ids, self._resolved)] if self._resolved_ids is not None else []
        if self._matched is not None:
            batch, found, continues = self._matched
            answers.append((batch.request_ids, found))
            assert continues == bool((batch.starts == self._end[found]).all())
        for request_ids, found in answers:
            assert found.tolist() == [self._index.get(request_id, _NOBODY) for request_id in request_ids]


def _spread(indices: Numbers, starts: Numbers, lengths: Numbers) -> tuple[Numbers, Numbers]:
    """Owner and position of each token: every position start .. start + length - 1 of each request in turn."""
    before = np.cumsum(lengths) - lengths
    positions = np.repeat(starts - before, lengths)
    positions += np.arange(len(positions))
    return np.repeat(indices, lengths), positions


def _check_num_tokens(request_id: Hashable, num_tokens: int) -> None:
    if num_tokens < 1:
        raise ValueError(f"Request {request_id!r}: num_tokens is {num_tokens}, expected at least 1.")
