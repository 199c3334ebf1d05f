"""The Triton form of `r3_pass::record`: one launch for all layers, ids cast in the register.

The kernel reads where each site's ids lie from a small table on the device. The allocator hands a model the same addresses
step after step, so tables are kept by their addresses: outside CUDA graphs almost every step finds its table and copies nothing;
inside a capture the table is copied from pinned memory by the graph itself.

Legend: T tokens, N sites, M stored layers, K top-k, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from r3_pass import streams
from r3_pass.passes.ops import (
    ERROR_SLOT,
    ERROR_TOKENS,
    HEADER,
    HEADER_EXPORT,
    HEADER_ROWS,
    HEADER_TOKENS,
    STATE_CALLS,
    STATE_ERRORS,
    TURNS,
    rows_offset,
)

_KEPT_TABLES = 64
_ROW = 128
"""Ids of a token that one program writes, of several sites. Whatever their number: a launch inside a capture may compile nothing,
so there is one form of the kernel for a model's top-k, and a graph of one site leaves most of it idle."""
_PROGRAM = 1024
"""Ids that one program writes in all."""

_HEADER = tl.constexpr(HEADER)
_TOKENS = tl.constexpr(HEADER_TOKENS)
_EXPORT = tl.constexpr(HEADER_EXPORT)
_ROWS = tl.constexpr(HEADER_ROWS)
_ERRORS = tl.constexpr(STATE_ERRORS)
_CALLS = tl.constexpr(STATE_CALLS)
_TURNS = tl.constexpr(TURNS)  # a power of two
_WRONG_TOKENS = tl.constexpr(ERROR_TOKENS)
_WRONG_SLOT = tl.constexpr(ERROR_SLOT)


# Nothing is specialised: there is one compiled kernel for given constants, which `record` may then launch itself.
@triton.jit(do_not_specialize=list(range(12)))
def record_kernel(  # type: ignore[no-untyped-def]
    table, buffer, state, slots, columns, tokens, room, num_slots, stored, top_k, offset, sites,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, SITES: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes BLOCK tokens of SITES sites, whose columns lie side by side in a row where the graph has layers in order:
    what goes over the bus goes in pieces as long as a warp writes at once.

    table: int64 [N, 3] of address, row stride in ids, k; room: entries of `slots` behind the header; offset: `rows_offset`.
    """
    place = tl.arange(0, SITES * K_BLOCK)
    k = place % K_BLOCK
    site = tl.program_id(1) * SITES + place // K_BLOCK
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # All of it at once: a forward of many graphs waits for each of their record kernels, and these for their loads.
    expected = tl.load(slots + _TOKENS)
    export = tl.load(slots + _EXPORT)
    exported = tl.load(slots + _ROWS)
    column = tl.load(columns + site, mask=site < sites, other=-1)
    address = tl.load(table + site * 3, mask=site < sites, other=0)
    stride = tl.load(table + site * 3 + 1, mask=site < sites, other=0)
    width = tl.load(table + site * 3 + 2, mask=site < sites, other=0)
    inside = token < tokens
    slot = tl.load(slots + _HEADER + token, mask=inside & (token < room), other=-1)
    errors = state + _ERRORS
    if export > 0:
        errors = export.to(tl.pointer_type(tl.int32)) + _ERRORS
    first = tl.program_id(0) == 0
    # The host looks at what is counted when the kernel is over, so no write here has to wait for another: "relaxed".
    if expected != tokens:
        if first & (tl.program_id(1) == 0) & (expected >= 0):
            tl.atomic_or(errors, _WRONG_TOKENS, sem="relaxed", scope="sys")
    else:
        wrong = (slot < -1) | (slot >= num_slots)
        if tl.program_id(1) == 0:
            found = tl.max(wrong.to(tl.int32), 0)
            if found > 0:
                tl.atomic_or(errors, _WRONG_SLOT, sem="relaxed", scope="sys")
        row = tl.where(wrong | (slot < 0), num_slots, slot).to(tl.int64)
        held = (column >= 0) & (k < top_k)
        given = address[None, :]
        offsets = token.to(tl.int64)[:, None] * stride[None, :] + k[None, :]
        mask = inside[:, None] & (held & (k < width))[None, :]
        # "Contiguous" tells the compiler which way to lay its threads: along a row. It cannot know by itself what was loaded.
        if WIDE:
            source = tl.max_contiguous(given.to(tl.pointer_type(tl.int64)) + offsets, [1, K_BLOCK])
            ids = tl.load(source, mask=mask, other=-1).to(tl.int16)
        else:
            narrow = tl.max_contiguous(given.to(tl.pointer_type(tl.int32)) + offsets, [1, K_BLOCK])
            ids = tl.load(narrow, mask=mask, other=-1).to(tl.int16)
        behind = (column * top_k + k)[None, :]
        target = tl.max_contiguous(buffer + row[:, None] * (stored * top_k) + behind, [1, K_BLOCK])
        tl.store(target, ids, mask=inside[:, None] & held[None, :])
        if export > 0:
            kept = (slot >= 0) & (token < exported)
            rows = (export + offset).to(tl.pointer_type(tl.int16))
            there = tl.max_contiguous(rows + token.to(tl.int64)[:, None] * (stored * top_k) + behind, [1, K_BLOCK])
            tl.store(there, ids, mask=kept[:, None] & held[None, :])
        if first:
            counted = (column >= 0) & (k == 0)
            if export > 0:
                turn = tl.atomic_add(state + _CALLS + stored + column, 1, mask=counted, sem="relaxed")
                byte = (export + 4 * (_CALLS + column) + (turn & _TURNS - 1)).to(tl.pointer_type(tl.int8))
                tl.store(byte, tl.full([SITES * K_BLOCK], 1, tl.int8), mask=counted)
            else:
                tl.atomic_add(state + _CALLS + column, 1, mask=counted, sem="relaxed")


class PointerTables:
    """Tables of id addresses on the device, by the addresses they hold.

    An attribute of the `columns` tensor of one graph and binding: they live as long as it does. Their memory is allocated when they
    are made: a CUDA graph's own pool must hold nothing that outlives a replay, and nothing can be allocated while one is captured.
    """

    def __init__(self, sites: int, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._resident = torch.empty(_KEPT_TABLES, sites * 3, dtype=torch.int64, device=device)
        self._rows: dict[tuple[int, ...], Tensor] = {}
        self._of_graphs = torch.empty(_KEPT_TABLES, sites * 3, dtype=torch.int64, device=device)
        self._staged = torch.empty(_KEPT_TABLES, sites * 3, dtype=torch.int64, device="cpu", pin_memory=self._pinned)
        self._older: list[tuple[Tensor, Tensor]] = []
        self._used = 0
        self.compiled: dict[tuple[int, bool, int, int, int], Any] = {}
        """Kernels by current device and constants: Triton's own look-up takes the host as long as all the rest of it."""
        self.beside = torch.cuda.Stream(device) if self._pinned else None
        """Fills tables of graphs that are being captured; whoever replays one waits for it once (`Binding.settle`)."""

    def table(self, numbers: list[int]) -> Tensor:
        """int64 [N * 3] on the device: address, row stride, k of each site's ids."""
        if self._pinned and torch.cuda.is_current_stream_capturing():
            return self._for_graph(numbers)
        # A table is read on the stream that copied it: another stream might run ahead of the copy.
        stream = streams.current(self._resident.device) if self._pinned else 0
        key = (stream, *numbers)
        known = self._rows.get(key)
        if known is not None:
            return known
        host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=self._pinned)
        if len(self._rows) == _KEPT_TABLES:
            return torch.empty_like(host, device=self._resident.device).copy_(host, non_blocking=True)
        row = self._rows[key] = self._resident[len(self._rows)]
        return row.copy_(host, non_blocking=True)

    def _for_graph(self, numbers: list[int]) -> Tensor:
        """A table that a graph may read at every replay: filled now, on a stream that is not captured, and never used again.

        A copy inside the graph would do as well, and costs each replay as much as the record kernel itself. It is what is left when
        one capture needs more tables than there is room for.
        """
        if self._used == len(self._staged):
            host = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=True)
            self._older.append((host, host))
            return torch.empty_like(host, device=self._resident.device).copy_(host, non_blocking=True)
        host, row = self._staged[self._used], self._of_graphs[self._used]
        self._used += 1
        host.copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        with torch.cuda.stream(self.beside):
            row.copy_(host, non_blocking=True)
        return row

    def make_room(self) -> None:
        """Have room for the graphs to come; never while one is captured or warmed up."""
        if self._used > len(self._staged) // 2:
            self._older.append((self._staged, self._of_graphs))
            self._staged = torch.empty_like(self._staged, pin_memory=self._pinned)
            self._of_graphs = torch.empty_like(self._of_graphs)
            self._used = 0


def prepare(columns: Tensor) -> PointerTables:
    """The tables that belong to one graph and binding, made with their `columns`, before the graph first runs."""
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
    wide = ids[0].dtype is torch.int64
    dtype = torch.int64 if wide else torch.int32
    numbers: list[int] = []
    converted: list[Tensor] = []  # alive until the kernel that reads them is queued
    for chosen in ids:  # outside of CUDA graphs this loop is most of what recording takes of the host
        row, column = chosen.stride()
        if column != 1 or chosen.dtype is not dtype:
            chosen = chosen.to(dtype).contiguous()
            converted.append(chosen)
            row = chosen.stride(0)
        numbers += (chosen.data_ptr(), row, chosen.shape[1])
    tables = prepare(columns)
    table = tables.table(numbers)
    top_k = buffer.shape[2]
    k_block = triton.next_power_of_2(top_k)
    together = max(1, _ROW // k_block)
    block = max(1, _PROGRAM // (together * k_block))
    constants = wide, block, together, k_block
    grid = triton.cdiv(tokens, block), triton.cdiv(len(ids), together), 1
    arguments = (
        table, buffer, state, slots, columns, tokens, slots.shape[0] - HEADER, buffer.shape[0] - 1, buffer.shape[1],
        top_k, rows_offset(buffer.shape[1]), len(ids), *constants,
    )  # fmt: skip
    kernel = (torch.cuda.current_device() if columns.device.type == "cuda" else -1, *constants)
    compiled = tables.compiled.get(kernel)
    if compiled is None:
        tables.compiled[kernel] = record_kernel[grid](*arguments)  # None where it is interpreted
    else:
        compiled[grid](*arguments)
