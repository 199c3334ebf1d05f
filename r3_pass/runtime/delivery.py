"""From the slot buffer to requests: copies queued, taken in, and handed over only if they are whole.

Legend: M stored (MoE) layers, K top-k.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from r3_pass.errors import MissingRoutes, StaleRoutes
from r3_pass.runtime.arrivals import Arrival, Arrivals
from r3_pass.runtime.export import Exporter, Pending, Staged
from r3_pass.runtime.inputs import length as length_of
from r3_pass.runtime.rows import Numbers, RowLog
from r3_pass.runtime.segments import SegmentBatch
from r3_pass.runtime.sequences import SequenceTable
from r3_pass.runtime.slots import Geometry, SlotBuffer, Slots

Rows = npt.NDArray[np.int16]

logger = logging.getLogger(__name__)

# No memory for a copy: of the host (mmap, numpy) or of the device (a RuntimeError of torch).
_OUT_OF_MEMORY = (OSError, MemoryError, torch.OutOfMemoryError)


class Delivery:
    """Attributes:
    exporter: the copies' way.
    arrivals: those on it.
    table: rows of running requests; None until the layout is known, and without a KV cache.
    named: by layer, how many ids name an expert, where a router chooses among more.
    """

    def __init__(self, device: torch.device) -> None:
        self.exporter = Exporter(device)
        self.arrivals = Arrivals()
        self.table: SequenceTable | None = None
        self.named: Mapping[int, int] = {}
        self._versions: list[tuple[int, Hashable]] = []  # number of the first row that each version of the weights made
        self._steps = 0

    @property
    def host_bytes(self) -> int:
        return self.exporter.host_bytes + (self.table.host_bytes if self.table is not None else 0)

    def laid_out(self, geometry: Geometry, version: Hashable) -> None:
        """Rows of this shape come from now on, made by this version of the weights."""
        if self.table is None or self.table.rows.row_shape != geometry.row_shape:
            self.table = SequenceTable(RowLog(geometry.row_shape))
            self._versions = [(0, version)]

    def release(self) -> None:
        """Drain what is on its way, and drop it with all requests."""
        self.exporter.drain()
        self.arrivals.drop()
        self.table = None

    # ---- weights ------------------------------------------------------------------------------------------------
    def new_version(self, tag: Hashable) -> None:
        if self.table is not None:
            self._versions.append((self.table.rows.reserve(0), tag))

    def versions(self, request_id: Hashable) -> list[tuple[int, Hashable]]:
        """(first position, tag) of each run of a request's rows that one version of the weights made."""
        if self.table is None:
            return []
        starts, tags = zip(*self._versions, strict=True)
        made = np.searchsorted(starts, self.table.numbers(request_id), side="right") - 1
        firsts = np.flatnonzero(np.diff(made, prepend=-1))
        return [(int(position), tags[made[position]]) for position in firsts]

    # ---- in -----------------------------------------------------------------------------------------------------
    def check(self, batch: SegmentBatch) -> None:
        """Raises: MissingRoutes for a gap, ValueError for two segments of one request."""
        if self.table is not None:
            self.table.check(batch)
        elif batch.num_tokens and int(batch.starts.max()) > 0:
            SequenceTable(RowLog((1, 1))).check(batch)

    def send(
        self,
        buffer: SlotBuffer,
        slots: Tensor,
        checked: bool,
        batch: SegmentBatch,
        gone: set[Hashable],
        state: Tensor,
        writes: int,
    ) -> None:
        """Queue the copy of a step's rows, and of what the device says of the step.

        Args:
            slots: int64 of the tokens of the batch, on the device.
            checked: whether the host has seen that all of them are slots of the buffer.
            gone: requests that were finished or aborted while the step ran: their rows attach to nothing.
            state: errors and calls of `passes.ops.record`, int32 [1 + M].
            writes: how often each layer must have been written.

        Raises: MissingRoutes if there is no memory for it: the requests' rows are void then.
        """
        self._steps += 1
        try:
            first, pending = self._queue(buffer, slots, checked, batch, gone, state)
        except _OUT_OF_MEMORY as error:
            raise self._no_memory(batch, error) from error
        self.arrivals.add_step(Arrival(pending, first, self._steps, writes))

    def stage(self, entries: int, geometry: Geometry, num_rows: int) -> Staged | None:
        """See `Exporter.stage`; None also if there is no memory for it."""
        try:
            return self.exporter.stage(entries, geometry, num_rows)
        except _OUT_OF_MEMORY:
            return None

    def send_staged(self, staged: Staged, batch: SegmentBatch, gone: set[Hashable], writes: int) -> None:
        """As `send`, of a step whose rows the record kernel writes to the host.

        Raises: as `send`.
        """
        self._steps += 1
        pending = self.exporter.complete(staged)
        try:
            first = self._extend(batch, gone) if batch.num_tokens else -1
        except _OUT_OF_MEMORY as error:
            pending.release()
            raise self._no_memory(batch, error) from error
        self.arrivals.add_step(Arrival(pending, first, self._steps, writes, staged=True))

    def give_up(self, staged: Staged) -> None:
        """The step failed: wait for what it queued, and drop it."""
        self.exporter.complete(staged).release()

    def _no_memory(self, batch: SegmentBatch, error: Exception) -> MissingRoutes:
        return MissingRoutes(
            f"step {self._steps}: there is no memory for the copy of its {batch.num_tokens} rows ({error}). They are "
            "void; requests of this step cannot finish: abort them, or forward these tokens again."
        )

    def _extend(self, batch: SegmentBatch, gone: set[Hashable]) -> int:
        """Numbers for the rows of a batch; rows of requests that are gone are freed at once. Returns the first."""
        assert self.table is not None
        nobody: list[Hashable] = []
        if gone and (gone & set(batch.request_ids)):
            nobody = [object() if request_id in gone else None for request_id in batch.request_ids]
            ids = [new or request_id for new, request_id in zip(nobody, batch.request_ids, strict=True)]
            starts = np.where([new is not None for new in nobody], 0, batch.starts)
            batch = SegmentBatch(ids, starts, batch.lengths)
        first = self.table.extend(batch)
        for new in nobody:
            if new is not None:
                self.table.drop(new)
        return first

    def _queue(
        self, buffer: SlotBuffer, slots: Tensor, checked: bool, batch: SegmentBatch, gone: set[Hashable], state: Tensor
    ) -> tuple[int, Pending]:
        assert self.table is not None
        if not batch.num_tokens:
            return self.table.rows.reserve(0), self.exporter.submit(buffer.data[:0], state)
        first = self._extend(batch, gone)
        try:
            rows = buffer.snapshot(slots) if checked else buffer.gather(slots)
            return first, self.exporter.submit(rows, state)
        except BaseException:
            self._fill_void(first, batch.num_tokens)
            raise

    def take_over(self, buffer: SlotBuffer, batch: SegmentBatch, slots: Slots) -> None:
        """Queue the copies of a prefix's rows, one segment's, in pieces. If it raises, the request is as it was.

        Raises: MissingRoutes for a gap, or if there is no memory for the copies; StaleRoutes, where copies are over at once, for a
            void row.
        """
        assert self.table is not None
        self.table.check(batch)
        request_id, start = batch.request_ids[0], int(batch.starts[0])
        known, before = request_id in self.table, self.table.end(request_id)
        chunks = self.exporter.gather_chunks(buffer, slots)
        try:
            self._queue_pieces(buffer, chunks, batch)
            if self.exporter.at_once:
                self._check_taken_over(buffer, request_id, start, slots)
        except (StaleRoutes, MissingRoutes):
            self.table.truncate(request_id, min(before, start))
            if not known:
                self.table.drop(request_id)
            raise

    def _queue_pieces(self, buffer: SlotBuffer, chunks: Iterator[Pending], batch: SegmentBatch) -> None:
        """A piece that is there is taken in before the next one needs memory."""
        assert self.table is not None
        first = stop = 0
        try:
            first = self.table.extend(batch)
            stop = first + batch.num_tokens
            for pending in chunks:
                self.arrivals.add_piece(Arrival(pending, first))
                first += pending.num_rows
                self.collect(buffer, wait=False)
        except _OUT_OF_MEMORY as error:
            raise MissingRoutes(
                f"there is no memory for the copies of a prefix of {batch.num_tokens} rows ({error}). Forward these tokens again."
            ) from error
        finally:
            if first < stop:
                self._fill_void(first, stop - first)

    def _check_taken_over(self, buffer: SlotBuffer, request_id: Hashable, start: int, slots: Slots) -> None:
        assert self.table is not None
        self.collect(buffer, wait=True)
        for first, rows in self.table.rows.pieces(self.table.numbers(request_id)[start : start + length_of(slots)]):
            void = _void(rows)
            if void.size:
                position = first + int(void[0])
                raise StaleRoutes(
                    f"request {request_id!r}, position {start + position}: the row of slot "
                    f"{int(torch.as_tensor(slots)[position])} is void: the slot was "
                    "assigned to a new owner, or its weights or KV came from outside, and no forward has written it since. "
                    "Forward these tokens again, or bring their rows with insert()."
                )

    def _fill_void(self, first: int, num_rows: int) -> None:
        """Rows that will never arrive: filled in as void, without asking for memory."""
        assert self.table is not None
        rows = self.table.rows
        rows.fill(first, np.broadcast_to(np.int16(-1), (num_rows, *rows.row_shape)))

    def collect(self, buffer: SlotBuffer | None, wait: bool, numbers: Numbers | None = None) -> None:
        """Take in what has arrived; see `Arrivals.collect`."""
        log = self.table.rows if self.table is not None else None
        layers = buffer.geometry.stored if buffer is not None else ()
        self.arrivals.collect(log, buffer, layers, self.named, wait, numbers)

    # ---- out ----------------------------------------------------------------------------------------------------
    def _arrive(self, buffer: SlotBuffer | None, request_id: Hashable, num_tokens: int, start: int) -> None:
        """Take in the copies that hold these rows; of steps, no later one: an engine may have a further batch in flight."""
        assert self.table is not None
        numbers = self.table.numbers(request_id)[start : max(num_tokens - 1, 0)]
        self.collect(buffer, wait=True, numbers=numbers)

    def finish(self, buffer: SlotBuffer | None, request_id: Hashable, num_tokens: int, start: int) -> Rows:
        """int16 [num_tokens - 1 - start, M, K]. Raises as `Session.finish`."""
        if self.table is None:
            raise MissingRoutes(f"request {request_id!r} is unknown: no step has run. Pass segments with every step.")
        self._arrive(buffer, request_id, num_tokens, start)
        self.arrivals.raise_failure()
        return self.table.finish(request_id, num_tokens, _complete, start)

    def abort(self, buffer: SlotBuffer | None, request_id: Hashable, num_tokens: int, start: int) -> Rows:
        """int16 [n, M, K], n at most num_tokens - 1 - start; there is a table."""
        assert self.table is not None
        self._arrive(buffer, request_id, num_tokens, start)
        rows = self.table.abort(request_id, num_tokens, start)
        void = _void(rows)
        rows = rows[: int(void[0])] if void.size else rows
        if len(rows) < num_tokens - 1 - start:
            logger.info(
                "request %r was aborted with %d rows from position %d on, of %d tokens",
                request_id, len(rows), start, num_tokens,
            )  # fmt: skip
        return rows

    def check_integrity(self) -> None:
        """Assert every invariant; for tests."""
        if self.table is not None:
            self.table.check_integrity()


def _void(rows: Rows) -> npt.NDArray[np.intp]:
    """Indices of the rows of which some stored layer was not written."""
    return np.flatnonzero((rows[:, :, 0] < 0).any(axis=1))


def _complete(request_id: Hashable, start: int, rows: Rows) -> None:
    """The last look before rows leave: every stored layer of every row was really written."""
    void = _void(rows)
    if void.size:
        raise StaleRoutes(
            f"request {request_id!r}, position {start + int(void[0])} ({void.size} of {len(rows)} rows): its row is "
            "void: it came from a slot that "
            "was assigned to a new owner and not written since, or from a step that failed. The request "
            "stays registered: abort "
            "it, or forward these tokens again."
        )
