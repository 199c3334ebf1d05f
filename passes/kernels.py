"""The Triton form of `r3_pass::record`: one launch for all layers, ids cast in the register.

The kernel reads where each site's ids lie from a small table on the device. The allocator hands a model the same addresses
step after step, so tables are kept by their addresses: outside CUDA graphs almost every step finds its table and copies nothing;
inside a capture the table is copied from pinned memory by the graph itself.

Legend: T tokens, N sites, M stored layers, K top-k, S slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from r3_pass.passes.ops import ERROR_SLOT, ERROR_TOKENS, HEADER, STATE_CALLS, STATE_ERRORS

_KEPT_TABLES = 64
_ARENA_ROWS = 64

_HEADER = tl.constexpr(HEADER)
_ERRORS = tl.constexpr(STATE_ERRORS)
_CALLS = tl.constexpr(STATE_CALLS)
_WRONG_TOKENS = tl.constexpr(ERROR_TOKENS)
_WRONG_SLOT = tl.constexpr(ERROR_SLOT)


@triton.jit  # type: ignore[untyped-decorator]
def record_kernel(  # type: ignore[no-untyped-def]
    table, buffer, state, slots, columns, tokens, num_slots, stored, top_k,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes BLOCK tokens of one site. table: int64 [N, 3] of address, row stride in ids, k."""
    site = tl.program_id(1)
    column = tl.load(columns + site)
    expected = tl.load(slots)
    first = tl.program_id(0) == 0
    if expected != tokens:
        if first & (site == 0) & (expected >= 0):
            tl.atomic_or(state + _ERRORS, _WRONG_TOKENS)
    elif (column >= 0) | (site == 0):
        address = tl.load(table + site * 3)
        stride = tl.load(table + site * 3 + 1)
        width = tl.load(table + site * 3 + 2)
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = (token < tokens) & (column >= 0)
        slot = tl.load(slots + _HEADER + token, mask=token < tokens, other=-1)
        wrong = (slot < -1) | (slot >= num_slots)
        if site == 0:
            found = tl.max(wrong.to(tl.int32), 0)
            if found > 0:
                tl.atomic_or(state + _ERRORS, _WRONG_SLOT)
        row = tl.where(wrong | (slot < 0), num_slots, slot).to(tl.int64)
        k = tl.arange(0, K_BLOCK)
        offsets = token.to(tl.int64)[:, None] * stride + k[None, :]
        mask = inside[:, None] & (k < width)[None, :]
        if WIDE:
            ids = tl.load(address.to(tl.pointer_type(tl.int64)) + offsets, mask=mask, other=-1).to(tl.int16)
        else:
            ids = tl.load(address.to(tl.pointer_type(tl.int32)) + offsets, mask=mask, other=-1).to(tl.int16)
        target = buffer + row[:, None] * (stored * top_k) + column * top_k + k[None, :]
        tl.store(target, ids, mask=inside[:, None] & (k < top_k)[None, :])
        if first & (column >= 0):
            tl.atomic_add(state + _CALLS + column, 1)


class PointerTables:
    """Tables of id addresses on the device, by the addresses they hold.

    Kept as an attribute of the `columns` tensor of one graph and binding: they live as long as it does. A table that a CUDA graph
    copies in from pinned memory keeps its pinned row for good, since the graph may be replayed at any time.
    """

    def __init__(self, sites: int, device: torch.device) -> None:
        self.sites = sites
        self.device = device
        self.resident: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self.pinned = device.type == "cuda"
        self.arena = torch.empty(_ARENA_ROWS, sites * 3, dtype=torch.int64, pin_memory=self.pinned)
        self.filled: list[Tensor] = [self.arena]
        self.next = 0

    def table(self, ids: Sequence[Tensor]) -> Tensor:
        """int64 [N, 3] on the device: address, row stride, k of each site's ids."""
        key = tuple(number for i in ids for number in (i.data_ptr(), i.stride(0), i.shape[1]))
        capturing = self.pinned and torch.cuda.is_current_stream_capturing()
        if not capturing and key in self.resident:
            self.resident.move_to_end(key)
            return self.resident[key]
        if capturing:
            host = self._row()
            host.copy_(torch.tensor(key, dtype=torch.int64))
            device = torch.empty(self.sites * 3, dtype=torch.int64, device=self.device)
            device.copy_(host, non_blocking=True)
            return device
        host = torch.tensor(key, dtype=torch.int64, pin_memory=self.pinned)
        device = torch.empty(self.sites * 3, dtype=torch.int64, device=self.device)
        device.copy_(host, non_blocking=True)
        self.resident[key] = device
        if len(self.resident) > _KEPT_TABLES:
            self.resident.popitem(last=False)
        return device

    def _row(self) -> Tensor:
        if self.next == self.arena.shape[0]:
            self.arena = torch.empty(2 * self.arena.shape[0], self.sites * 3, dtype=torch.int64, pin_memory=self.pinned)
            self.filled.append(self.arena)
            self.next = 0
        self.next += 1
        return self.arena[self.next - 1]


def tables_of(columns: Tensor) -> PointerTables:
    """The tables that belong to one graph and binding, made with their `columns`."""
    found: PointerTables | None = getattr(columns, "_r3_tables", None)
    if found is None:
        found = PointerTables(columns.shape[0], columns.device)
        columns._r3_tables = found  # type: ignore[attr-defined]
    return found


def record(buffer: Tensor, state: Tensor, slots: Tensor, columns: Tensor, ids: Sequence[Tensor]) -> None:
    """See `ops.record_reference`, which this equals."""
    tokens = ids[0].shape[0]
    if tokens == 0:
        return
    wide = ids[0].dtype == torch.int64
    dtype = torch.int64 if wide else torch.int32
    flat = [i if i.dtype == dtype and i.stride(1) == 1 else i.to(dtype).contiguous() for i in ids]
    table = tables_of(columns).table(flat)
    top_k = buffer.shape[2]
    k_block = triton.next_power_of_2(top_k)
    block = max(1, min(triton.next_power_of_2(tokens), 1024 // k_block))
    record_kernel[(triton.cdiv(tokens, block), len(ids))](
        table, buffer, state, slots, columns, tokens, buffer.shape[0] - 1, buffer.shape[1], top_k,
        WIDE=wide, BLOCK=block, K_BLOCK=k_block,
    )  # fmt: skip
