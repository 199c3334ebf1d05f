"""Snapshots of rows on their way to the host, without anybody waiting for them.

    pending = exporter.submit(buffer.gather(slots), flags)      # queued; the caller goes on
    if pending.done():
        rows, flags = pending.wait()                            # int16[n, M, K], valid until
        pending.release()                                       # its memory may carry the next copy

On CUDA the copy runs on a side stream into a pinned block that belongs to this one copy until it is released. On other
devices the copy is made at once.

Legend: T tokens in the step, L decoder layers, M stored (MoE) layers, K top-k, E experts, S slots.
"""

import logging
import mmap
import weakref
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from r3_pass.runtime.slots import SlotBuffer

logger = logging.getLogger(__name__)

# Temporary device memory of one piece of a prefix hit, in bytes.
PIECE_BYTES = 4 * 2**20

# A block's size is rounded up to a multiple of this, not to a power of two.
_BLOCK_STEP = 64 * 2**10


class Pending:
    """One snapshot on its way: rows int16[n, M, K] and flags int32[F], or None."""

    def __init__(
        self,
        rows: npt.NDArray[np.int16],
        flags: npt.NDArray[np.int32] | None,
        block: "_Block | None" = None,
        pool: "_Pool | None" = None,
    ) -> None:
        self.num_rows = len(rows)
        self._rows: npt.NDArray[np.int16] | None = rows
        self._flags = flags
        self._block = block
        self._pool = pool

    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._block is None or self._block.copied.query()

    def wait(self) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int32] | None]:
        """Rows and flags, once they have arrived. They are the block's memory: copy what outlives `release`."""
        assert self._rows is not None, "read after release"
        if self._block is not None:
            self._block.copied.synchronize()
        return self._rows, self._flags

    def release(self) -> None:
        """Give the memory back, arrived or not. Once released, more calls do nothing."""
        block, self._block, self._rows, self._flags = self._block, None, None, None
        if block is not None and self._pool is not None:
            self._pool.put(block)


class _Block:
    """Page-locked host memory for one copy at a time, and the event after which it is complete.

    Not torch's pinned allocator, which rounds up to powers of two and gives nothing back. Where locking fails the
    memory stays pageable: copies into it are complete when they are queued, so they are slow and right.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        memory = np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
        self.memory = torch.from_numpy(memory)
        self.copied = torch.cuda.Event()
        if _lock_pages(self.memory):
            # Dropped in flight, it must outlive the copy.
            weakref.finalize(self, _unlock_pages, self.memory, self.copied)


def _lock_pages(memory: torch.Tensor) -> bool:
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) != 0:
        logger.warning(
            "Cannot page-lock %d bytes of host memory (CUDA error %d): rows are copied from the device synchronously "
            "from here on. Raise the limit on locked memory (ulimit -l) to get asynchronous copies.",
            memory.nbytes,
            int(error),
        )
        return False
    return True


def _unlock_pages(memory: torch.Tensor, copied: torch.cuda.Event) -> None:
    copied.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class _Pool:
    """Blocks that carry no copy. At most as many blocks exist as copies were ever in flight together."""

    def __init__(self) -> None:
        self._free: list[_Block] = []

    def get(self, num_bytes: int) -> _Block:
        """The smallest free block that is large enough, else a new one in the place of the largest free one."""
        fitting = [block for block in self._free if block.num_bytes >= num_bytes]
        if fitting:
            block = min(fitting, key=lambda block: block.num_bytes)
            self._free.remove(block)
            return block
        if self._free:
            self._free.remove(max(self._free, key=lambda block: block.num_bytes))
        return _Block(-(-num_bytes // _BLOCK_STEP) * _BLOCK_STEP)

    def put(self, block: _Block) -> None:
        # Nobody may write into it before the copy that it still carries is over.
        block.copied.synchronize()
        assert block not in self._free
        self._free.append(block)
