"""Snapshots of rows on their way to the host, without anybody waiting for them.

    pending = exporter.submit(buffer.gather(slots), flags)      # queued; the caller goes on
    if pending.done():
        rows, flags = pending.wait()                            # int16[n, M, K], valid until
        pending.release()                                       # its memory may carry the next copy

On CUDA the copy runs on a side stream into a page-locked block that belongs to this one copy until it is released. On
other devices the copy is made at once. A step of few rows needs no copy: the record kernel writes into the block (`stage`).

Legend: T tokens in the step, L decoder layers, M stored (MoE) layers, K top-k, E experts, S slots.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from r3_pass import streams
from r3_pass.passes.ops import STATE_CALLS, rows_offset
from r3_pass.runtime.slots import Geometry, SlotBuffer, Slots

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 2**20

# Chunks of one prefix hit that are on the device at a time: one is copied while the next is gathered.
_CHUNKS_IN_FLIGHT = 2

# A block's size is a multiple of this, not a power of two.
_BLOCK_STEP = 64 * 2**10

# So many bytes of rows the record kernel writes to the host itself; more are gathered, and copied beside the next step.
_DIRECT_BYTES = 2**20


class Pending:
    """One snapshot on its way to the host: `num_rows` rows, and flags if there were any."""

    __slots__ = ("_block", "_flags", "_over", "_pool", "_rows", "num_rows")

    def __init__(
        self,
        rows: npt.NDArray[np.int16],
        flags: npt.NDArray[np.int32] | None,
        block: _Block | None = None,
        pool: _Pool | None = None,
    ) -> None:
        self.num_rows = len(rows)
        self._rows: npt.NDArray[np.int16] | None = rows
        self._flags = flags
        self._block = block
        self._pool = pool
        self._over = block is None

    def done(self) -> bool:
        """Whether `wait` returns at once."""
        if not self._over and self._block is not None:
            self._over = bool(self._block.copied.query())
        return self._over

    def wait(self) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int32] | None]:
        """Rows int16[n, M, K] and flags int32[F] (or None), once they have arrived. Copy what outlives `release`."""
        assert self._rows is not None, "read after release"
        self.arrive()
        return self._rows, self._flags

    def arrive(self) -> None:
        """Wait until the copy is over. It is, once released."""
        if not self._over and self._block is not None:
            self._block.copied.synchronize()
            self._over = True

    def release(self) -> None:
        """Give the memory back; waits for the copy if it is still under way. Further calls do nothing."""
        self.arrive()
        block, self._block, self._rows, self._flags = self._block, None, None, None
        if block is not None and self._pool is not None:
            self._pool.put(block)


class Staged:
    """Page-locked memory of one step: the slot mapping on its way down, and the state and the rows that the record kernel writes.

    Attributes:
        mapping: int64 [entries], for the host to fill.
        address: what the header's HEADER_EXPORT is to say.
        num_rows: rows that there is room for.
    """

    __slots__ = ("_block", "_layout", "_pool", "address", "mapping", "num_rows")

    def __init__(self, block: _Block, pool: _Pool, entries: int, geometry: Geometry, num_rows: int) -> None:
        self._block = block
        self._pool = pool
        self._layout = layout = block.laid_out(entries, geometry.row_shape, num_rows)
        layout.flags.fill(0)
        self.mapping = layout.mapping
        self.address = layout.address
        self.num_rows = num_rows

    def upload(self, static: torch.Tensor) -> None:
        """Queue the copy of the mapping into `static`, int64 [entries] on the device."""
        static.copy_(self._layout.longs, non_blocking=True)

    def complete(self, stream: torch.cuda.Stream) -> Pending:
        """The kernel's writes are queued on this stream: what there is once they are done."""
        self._block.copied.record(stream)
        return Pending(self._layout.rows, self._layout.flags, self._block, self._pool)


class Exporter:
    """Copies snapshots from one device to the host.

    Device memory: a snapshot lives until its copy is over; prefix hits hold at most 2 * `chunk_bytes` of them.
    Host memory: blocks of the size that copies needed, as many as there were copies in flight at the same time.

    Not thread-safe: the session calls it under its lock.
    """

    def __init__(self, device: torch.device | str, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.device = torch.device(device)
        self.chunk_bytes = chunk_bytes
        self._pool = _Pool()
        self._streams: dict[streams.Raw, torch.cuda.Stream] = {}
        self._token_stream: torch.cuda.Stream | None = None
        self._prefix_stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._token_stream = torch.cuda.Stream(self.device)
            self._prefix_stream = torch.cuda.Stream(self.device)

    @property
    def at_once(self) -> bool:
        """Whether every copy is over when `submit` returns."""
        return self._token_stream is None

    @property
    def host_bytes(self) -> int:
        """Page-locked memory, in use or ready for use."""
        return self._pool.num_bytes

    def submit(self, rows: torch.Tensor, flags: torch.Tensor | None = None) -> Pending:
        """Start the copy of a snapshot that the current stream makes.

        Args:
            rows: int16[n, M, K], contiguous, on the exporter's device. A new tensor that nobody writes any more.
            flags: int32[F] on the same device, as they are when the current stream gets here. May be rewritten.
        """
        return self._copy(rows, flags, self._token_stream)

    def stage(self, entries: int, geometry: Geometry, num_rows: int) -> Staged | None:
        """Memory for a step in which the record kernel writes rows to the host itself; None where it does not.

        Args:
            entries: of the slot mapping, header included.
            num_rows: of the step's requests.

        Raises: OSError or MemoryError if there is no memory.
        """
        row_bytes = num_rows * geometry.bytes_per_slot
        if self._token_stream is None or row_bytes > _DIRECT_BYTES:
            return None
        nbytes = (entries + 2) * 8 + rows_offset(len(geometry.stored)) + row_bytes
        block = self._pool.get(nbytes)
        if not block.locked:
            self._pool.put(block)
            return None
        return Staged(block, self._pool, entries, geometry, num_rows)

    def complete(self, staged: Staged) -> Pending:
        """The kernels that write to it are queued on the current stream: what there is once they are done."""
        handle = streams.current(self.device)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = streams.stream(handle, self.device)
        return staged.complete(stream)

    def gather_chunks(self, buffer: SlotBuffer, slots: Slots) -> Iterator[Pending]:
        """The rows of `slots` (a prefix hit, of any length) in pieces of at most `chunk_bytes`, in order.

        Each piece is gathered on the current stream when the iterator reaches it, so it is in order with all that
        other calls do to the buffer: exhaust the iterator before these slots get another owner. The copies have a
        stream of their own, for token copies must not wait behind them. The iterator itself waits if the piece before
        the last one is still on the device.

        Raises: ValueError as `SlotBuffer.gather`; at the call, before anything is queued.
        """
        # Now, not when the iterator is first asked: the caller may reuse its array.
        return self._gather_chunks(buffer, buffer.checked(slots).clone())

    def drain(self) -> None:
        """Wait until every copy is over."""
        if self._token_stream is not None and self._prefix_stream is not None:
            self._token_stream.synchronize()
            self._prefix_stream.synchronize()

    def _gather_chunks(self, buffer: SlotBuffer, slots: torch.Tensor) -> Iterator[Pending]:
        num_rows = max(self.chunk_bytes // buffer.geometry.bytes_per_slot, 1)
        started: list[Pending] = []
        for first in range(0, len(slots), num_rows):
            if len(started) == _CHUNKS_IN_FLIGHT:
                started.pop(0).arrive()
            pending = self._copy(buffer.gather(slots[first : first + num_rows]), None, self._prefix_stream)
            started.append(pending)
            yield pending

    def _copy(self, rows: torch.Tensor, flags: torch.Tensor | None, stream: torch.cuda.Stream | None) -> Pending:
        assert rows.dtype == torch.int16 and rows.is_contiguous() and rows.device.type == self.device.type
        assert flags is None or (flags.dtype == torch.int32 and flags.dim() == 1)
        if stream is None:
            return Pending(rows.cpu().numpy(), None if flags is None else flags.to("cpu", copy=True).numpy())
        num_flags = 0 if flags is None else len(flags)
        offset = -(-rows.nbytes // 4) * 4  # of the flags, behind the rows
        block = self._pool.get(offset + num_flags * 4)
        host_rows = block.memory[: rows.nbytes].view(torch.int16).view(rows.shape)
        host_flags = block.memory[offset : offset + num_flags * 4].view(torch.int32)
        if flags is not None:
            flags = flags.clone()  # on the current stream, before a later step rewrites them
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            host_rows.copy_(rows, non_blocking=True)
            if flags is not None:
                host_flags.copy_(flags, non_blocking=True)
            block.copied.record(stream)
        # The allocator must not hand their memory to the current stream again before the copies have read it.
        rows.record_stream(stream)
        if flags is not None:
            flags.record_stream(stream)
        return Pending(host_rows.numpy(), None if flags is None else host_flags.numpy(), block, self._pool)


class _Block:
    """Page-locked host memory for one copy at a time, and the event after which it is complete.

    Not from torch's pinned allocator, which rounds up to powers of two and gives nothing back. Where locking fails the
    memory stays pageable: a copy into it is complete once it is queued, which is slow and right.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        memory = np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
        self.array = memory
        self.address = memory.ctypes.data
        self.memory = torch.from_numpy(memory)
        self.copied = torch.cuda.Event()
        self._layout: _Layout | None = None
        self.locked = _lock_pages(self.memory)
        if self.locked:
            # Whoever drops a block with a copy under way waits for it here: the device writes to these pages.
            weakref.finalize(self, _unlock_pages, self.memory, self.copied)

    def laid_out(self, entries: int, row_shape: tuple[int, int], num_rows: int) -> _Layout:
        """What a step finds where in it. Steps ask for the same again and again."""
        if self._layout is None or self._layout.shape != (entries, row_shape, num_rows):
            self._layout = _Layout(self.array, self.memory, self.address, (entries, row_shape, num_rows))
        return self._layout


class _Layout:
    """A step's part of a block, views of it: `mapping` int64 [entries], and as a tensor `longs`; behind them, at `address`, `flags`
    int32 [1 + M] and `rows` int16 [num_rows, M, K], as the record kernel writes them.

    Args:
        shape: entries, (M, K), num_rows.
    """

    __slots__ = ("address", "flags", "longs", "mapping", "rows", "shape")

    def __init__(
        self,
        array: npt.NDArray[np.uint8],
        memory: torch.Tensor,
        address: int,
        shape: tuple[int, tuple[int, int], int],
    ) -> None:
        entries, (stored, top_k), num_rows = self.shape = shape
        behind = -(-entries * 8 // 16) * 16
        first = behind + rows_offset(stored)
        self.mapping: npt.NDArray[np.int64] = array[: entries * 8].view(np.int64)
        self.longs = memory[: entries * 8].view(torch.int64)
        self.address = address + behind
        self.flags: npt.NDArray[np.int32] = array[behind : behind + (STATE_CALLS + stored) * 4].view(np.int32)
        rows = array[first : first + num_rows * stored * top_k * 2].view(np.int16)
        self.rows: npt.NDArray[np.int16] = rows.reshape(num_rows, stored, top_k)


class _Pool:
    """The blocks of an exporter: none serves two copies at a time."""

    def __init__(self) -> None:
        self._free: list[_Block] = []
        self._all: weakref.WeakSet[_Block] = weakref.WeakSet()

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self._all)

    def get(self, num_bytes: int) -> _Block:
        """The smallest free block that is large enough, else a new one, which replaces the largest free one."""
        found: _Block | None = None
        for block in self._free:
            if block.num_bytes >= num_bytes and (found is None or block.num_bytes < found.num_bytes):
                found = block
        if found is not None:
            self._free.remove(found)
            return found
        if self._free:
            self._free.remove(max(self._free, key=_size))
        made = _Block(max(-(-num_bytes // _BLOCK_STEP), 1) * _BLOCK_STEP)
        self._all.add(made)
        return made

    def put(self, block: _Block) -> None:
        """No copy into or out of it is under way."""
        assert block not in self._free
        self._free.append(block)


def _size(block: _Block) -> int:
    return block.num_bytes


def _lock_pages(memory: torch.Tensor) -> bool:
    """Page-lock the memory, or warn and leave it pageable."""
    cudart = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error == 0:
        return True
    with contextlib.suppress(RuntimeError):
        # CUDA reports the failure once more at the next kernel launch: let it be this one.
        torch.ones(1, device="cuda")
    logger.warning(
        "Cannot page-lock %d bytes of host memory (CUDA error %d): the rows of some steps are copied synchronously. "
        "Raise the limit on locked memory (ulimit -l).",
        memory.nbytes,
        error,
    )
    return False


def _unlock_pages(memory: torch.Tensor, copied: torch.cuda.Event) -> None:
    copied.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
