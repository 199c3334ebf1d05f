"""Host store of the rows of running requests, in the order in which steps made them.

    first = rows.reserve(3)                  # three row numbers: first, first + 1, first + 2
    rows.fill(first, block)                  # int16[3, M, K], when the copy from the device has arrived
    rows.take(numbers)                       # int16[n, M, K], a copy
    rows.free(numbers)                       # nobody will ask for these again

A row number is given out once and names the same row until that row is freed: compaction moves bytes, never numbers,
so no index has to be told about it, and a stale number can only fail the check in `_Chunk.find`.

Legend: T tokens in the step, L decoder layers, M stored (MoE) layers, K top-k, E experts, S slots.
"""

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int16]
Numbers = npt.NDArray[np.int64]

CHUNK_BYTES = 4 * 2**20

# Settled chunks hold at most this many times their live rows. Bookkeeping here and in `sequences` adds about 20 bytes a
# row: for rows of 400 bytes and more the whole stays below 1.25 times.
SLACK = 1.2

# Where the system has it: a chunk's pages are made in one call, not by a fault each in the steps that write them (which
# took ten times as long as the copy itself).
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


class _Chunk:
    """The rows whose numbers lie between `start` and the start of the next chunk.

    Open until its last number is given out and its last row has arrived; settled from then on.

    rows: int16[h, M, K], what it holds now; numbers: int64[h], ascending (None: row i still has number start + i);
    alive: bool[h]; filled: bool[h] (None: all); live, unfilled: how many rows are alive, how many are still to arrive.
    """

    __slots__ = ("_memory", "_room", "alive", "filled", "live", "numbers", "rows", "start", "unfilled")

    def __init__(self, start: int, num_rows: int, row_shape: tuple[int, ...]) -> None:
        # Pages of our own: malloc's heap keeps the holes that arrays of mixed sizes leave in it (580 MiB resident for
        # 17 MiB of live rows, measured), and pages can be given back one by one.
        num_bytes = num_rows * int(np.prod(row_shape)) * 2
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _POPULATE)
        self._room: Rows = np.frombuffer(self._memory, dtype=np.int16).reshape(num_rows, *row_shape)
        self.start = start
        self.rows = self._room
        self.numbers: Numbers | None = None
        self.alive = np.zeros(num_rows, dtype=np.bool_)
        self.filled: npt.NDArray[np.bool_] | None = np.zeros(num_rows, dtype=np.bool_)
        self.live = 0
        self.unfilled = 0

    @property
    def settled(self) -> bool:
        return self.filled is None

    def find(self, numbers: Numbers) -> Numbers:
        """Where the rows with these numbers are in `rows`; all of them must be alive."""
        if self.numbers is None:
            where = numbers - self.start
        else:
            where = np.searchsorted(self.numbers, numbers)
            assert (self.numbers[where] == numbers).all(), "unknown row number"
        assert self.alive[where].all(), "a row that was freed"
        return where

    def compact(self) -> None:
        """Move the live rows to the front and give the pages behind them back to the system."""
        if self.live == len(self.rows):
            return
        keep = np.flatnonzero(self.alive)
        self._room[: self.live] = self.rows[keep]
        self._set_numbers(keep + self.start if self.numbers is None else self.numbers[keep])
        behind = -(-self.rows.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if behind < len(self._memory):
            self._memory.madvise(mmap.MADV_DONTNEED, behind, len(self._memory) - behind)

    def absorb(self, right: "_Chunk") -> None:
        """Append the rows of the next chunk. Both are compact."""
        assert self.numbers is not None and right.numbers is not None
        self._room[self.live : self.live + right.live] = right.rows
        self.live += right.live
        self._set_numbers(np.append(self.numbers, right.numbers))

    def _set_numbers(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.rows = self._room[: len(numbers)]
        self.alive = np.ones(len(numbers), dtype=np.bool_)


class RowLog:
    """Rows int16[M, K] by number. Nothing here is sized by a request's maximum length.

    Memory, after every call: `held_bytes` <= 1.2 * `live_bytes` + `open_chunks` * `chunk_bytes`. One chunk is open
    while it is being written, and older ones as long as a row of theirs has not arrived. Settled neighbours that fit
    into half a chunk are joined, so few rows never stand in many chunks.

    Not thread-safe: the session calls it under its lock.

    Args:
        row_shape: (M, K).
        chunk_bytes: upper limit of a chunk, unless one row is larger.
    """

    def __init__(self, row_shape: tuple[int, ...], chunk_bytes: int = CHUNK_BYTES) -> None:
        self.row_shape = tuple(row_shape)
        self.row_bytes = int(np.prod(self.row_shape)) * 2
        self._chunk_rows = max(chunk_bytes // self.row_bytes, 1)
        self._chunks: list[_Chunk] = []  # by start; the last one is open unless it is full
        self._starts: list[int] = []  # chunk.start of each
        self._next = 0  # the next number to give out
        self._live = 0
        self._open = 0  # chunks
        self._settled_live = 0  # rows
        self._settled_held = 0  # rows

    @property
    def chunk_bytes(self) -> int:
        """Bytes of rows of an open chunk."""
        return self._chunk_rows * self.row_bytes

    @property
    def open_chunks(self) -> int:
        """Chunks that are being written."""
        return self._open

    @property
    def live_rows(self) -> int:
        """Rows given out and not freed."""
        return self._live

    @property
    def live_bytes(self) -> int:
        return self._live * self.row_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of rows in memory. Bookkeeping adds up to 9 bytes a row."""
        return (self._settled_held + self._open * self._chunk_rows) * self.row_bytes

    @property
    def host_bytes(self) -> int:
        """`held_bytes` and the bookkeeping."""
        kept = (array for chunk in self._chunks for array in (chunk.numbers, chunk.alive, chunk.filled))
        return self.held_bytes + sum(array.nbytes for array in kept if array is not None)

    def reserve(self, num_rows: int) -> int:
        """Give out `num_rows` consecutive numbers, whose rows arrive later. Returns the first.

        Raises: OSError or MemoryError if there is no memory for them; nothing is changed then.
        """
        assert num_rows >= 0
        first = self._next
        stop = first + num_rows
        if self._chunks and first < stop <= self._chunks[-1].start + self._chunk_rows:
            self._give_out(self._chunks[-1], num_rows)
            return first
        starts = range(-(-first // self._chunk_rows) * self._chunk_rows, stop, self._chunk_rows)
        fresh = [_Chunk(start, self._chunk_rows, self.row_shape) for start in starts]
        begun = self._chunks[-1:] if first % self._chunk_rows else []
        self._chunks += fresh
        self._starts += starts
        self._open += len(fresh)
        for chunk in (*begun, *fresh):
            self._give_out(chunk, min(chunk.start + self._chunk_rows, stop) - self._next)
        return first

    def _give_out(self, chunk: _Chunk, count: int) -> None:
        offset = self._next - chunk.start
        chunk.alive[offset : offset + count] = True
        chunk.live += count
        chunk.unfilled += count
        self._live += count
        self._next += count

    def fill(self, first: int, block: Rows) -> None:
        """Store `block` int16[n, M, K] under the numbers from `first` on, once. Rows freed meanwhile stay freed."""
        assert block.dtype == np.int16 and block.shape[1:] == self.row_shape, (block.dtype, block.shape)
        assert 0 <= first <= self._next - len(block), "rows that were not reserved"
        done = 0
        while done < len(block):
            chunk = self._chunks[bisect_right(self._starts, first + done) - 1]
            offset = first + done - chunk.start
            assert chunk.filled is not None and 0 <= offset < self._chunk_rows, "rows filled twice"
            count = min(self._chunk_rows - offset, len(block) - done)
            filled = chunk.filled[offset : offset + count]
            assert not filled[filled.argmax()], "rows filled twice"
            chunk.rows[offset : offset + count] = block[done : done + count]
            filled.fill(True)
            chunk.unfilled -= count
            if chunk.unfilled == 0 and self._next >= chunk.start + self._chunk_rows:
                self._settle(chunk)
            done += count

    def append(self, block: Rows) -> int:
        """`reserve` and `fill` in one."""
        first = self.reserve(len(block))
        self.fill(first, block)
        return first

    def take(self, numbers: Numbers) -> Rows:
        """The rows with these numbers, int16[n, M, K], a copy. All of them must be alive and have arrived."""
        out = np.empty((len(numbers), *self.row_shape), dtype=np.int16)
        for chunk, start, stop in self._runs(numbers):
            where = chunk.find(numbers[start:stop])
            assert chunk.filled is None or chunk.filled[where].all(), "a row that has not arrived"
            # "clip" lets take() write straight into `out`; find() has checked the indices.
            np.take(chunk.rows, where, axis=0, out=out[start:stop], mode="clip")
        return out

    def pieces(self, numbers: Numbers) -> Iterator[tuple[int, Rows]]:
        """`take`, a chunk's worth of rows at a time, each with the index of its first."""
        for first in range(0, len(numbers), self._chunk_rows):
            yield first, self.take(numbers[first : first + self._chunk_rows])

    def arrived(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """bool[n]: which of the rows with these numbers, all alive, are there."""
        out = np.ones(len(numbers), dtype=np.bool_)
        for chunk, start, stop in self._runs(numbers):
            if chunk.filled is not None:
                out[start:stop] = chunk.filled[chunk.find(numbers[start:stop])]
        return out

    def free(self, numbers: Numbers) -> None:
        """Forget the rows with these numbers: each alive, each named once. They may still be on their way."""
        numbers = np.sort(numbers)
        assert (numbers[1:] != numbers[:-1]).all(), "a row freed twice"
        empty: list[_Chunk] = []
        for chunk, start, stop in self._runs(numbers):
            chunk.alive[chunk.find(numbers[start:stop])] = False
            chunk.live -= stop - start
            if chunk.settled:
                self._settled_live -= stop - start
                if chunk.live == 0:
                    empty.append(chunk)
        self._live -= len(numbers)
        for chunk in empty:
            self._reclaim(chunk)
        self._enforce_slack()

    def are_alive(self, numbers: Numbers) -> bool:
        """Whether these are all the rows that were given out and not freed, each once. For tests."""
        alive = [
            (np.arange(len(chunk.rows)) + chunk.start if chunk.numbers is None else chunk.numbers)[chunk.alive]
            for chunk in self._chunks
        ]
        return np.array_equal(np.concatenate([np.zeros(0, dtype=np.int64), *alive]), np.sort(numbers))

    def _runs(self, numbers: Numbers) -> Iterator[tuple[_Chunk, int, int]]:
        """Each run numbers[start:stop] that lies in one chunk. The numbers of a request ascend: few runs."""
        if len(numbers) == 0:
            return
        indices = np.searchsorted(self._starts, numbers, side="right") - 1
        assert indices.min() >= 0, "unknown row number"
        cuts = np.flatnonzero(indices[1:] != indices[:-1]) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(numbers)]):
            yield self._chunks[indices[start]], start, stop

    def _settle(self, chunk: _Chunk) -> None:
        chunk.filled = None
        self._open -= 1
        self._settled_live += chunk.live
        self._settled_held += len(chunk.rows)
        if chunk.live == 0:
            self._reclaim(chunk)
        self._enforce_slack()

    def _enforce_slack(self) -> None:
        """Compact the sparsest chunks until the bound holds: a row freed costs a few rows moved, no more."""
        if self._settled_held <= SLACK * self._settled_live:
            return
        settled = [chunk for chunk in self._chunks if chunk.settled]
        for chunk in sorted(settled, key=lambda chunk: chunk.live / len(chunk.rows)):
            self._reclaim(chunk)
            if self._settled_held <= SLACK * self._settled_live:
                return

    def _reclaim(self, chunk: _Chunk) -> None:
        """Give back the memory of a settled chunk's dead rows, and the chunk itself if that leaves little of it."""
        index = bisect_left(self._starts, chunk.start)
        if index == len(self._chunks) or self._chunks[index] is not chunk:
            return  # joined to a neighbour meanwhile
        self._settled_held -= len(chunk.rows) - chunk.live
        chunk.compact()
        if chunk.live == 0:
            del self._chunks[index], self._starts[index]
        self._join(index)
        self._join(index - 1)

    def _join(self, index: int) -> None:
        """Move the chunk after `index` into the one there, if both are settled and fit into half a chunk."""
        if not 0 <= index < len(self._chunks) - 1:
            return
        left, right = self._chunks[index : index + 2]
        if not (left.settled and right.settled and len(left.rows) + len(right.rows) <= self._chunk_rows // 2):
            return
        for chunk in (left, right):
            self._settled_held -= len(chunk.rows) - chunk.live
            chunk.compact()
        left.absorb(right)
        del self._chunks[index + 1], self._starts[index + 1]
        self._join(index)
        self._join(index - 1)

    def check_integrity(self) -> None:
        """Assert every invariant. For tests: looks at all rows."""
        assert self._starts == [chunk.start for chunk in self._chunks] == sorted(set(self._starts))
        for chunk in self._chunks:
            held = len(chunk.rows)
            assert len(chunk.alive) == held and chunk.live == np.count_nonzero(chunk.alive)
            if chunk.settled:
                assert chunk.unfilled == 0 < chunk.live
            else:
                given_out = min(self._next - chunk.start, self._chunk_rows)
                assert chunk.filled is not None and chunk.numbers is None and held == self._chunk_rows
                assert chunk.start % self._chunk_rows == 0 < given_out
                assert not chunk.alive[given_out:].any() and not chunk.filled[given_out:].any()
                assert chunk.unfilled == given_out - np.count_nonzero(chunk.filled)
                assert given_out < self._chunk_rows or chunk.unfilled > 0
            if chunk.numbers is not None:
                assert len(chunk.numbers) == held and (np.diff(chunk.numbers) > 0).all()
                assert chunk.start <= chunk.numbers[0]
        for left, right in pairwise(self._chunks):
            last = left.start + len(left.rows) - 1 if left.numbers is None else left.numbers[-1]
            assert last < right.start
            if left.settled and right.settled:
                assert len(left.rows) + len(right.rows) > self._chunk_rows // 2
        settled = [chunk for chunk in self._chunks if chunk.settled]
        assert self._live == sum(chunk.live for chunk in self._chunks)
        assert self._open == len(self._chunks) - len(settled)
        assert self._settled_live == sum(chunk.live for chunk in settled)
        assert self._settled_held == sum(len(chunk.rows) for chunk in settled)
        assert self.held_bytes == sum(chunk.rows.nbytes for chunk in self._chunks)
        assert self.held_bytes <= SLACK * self.live_bytes + self._open * self.chunk_bytes
