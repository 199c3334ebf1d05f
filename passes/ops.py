"""The one operator that recording adds to a graph: `r3_pass::record`.

It writes the ids of all sites of a graph at once into the slot buffer, in place. Plain ATen on a CPU, one Triton kernel on a GPU
(`kernels.py`). What a step is (its slots, its token count) stands in tensors, so a captured CUDA graph replays any step.

Legend: T tokens, N sites in the graph, M stored (MoE) layers, K top-k, S slots.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HEADER = 4
"""Entries of the slot mapping before the first slot; the last one keeps the slots aligned."""
HEADER_TOKENS = 0
"""Tokens of the running step; -1 outside a step, in which nothing is written."""
HEADER_EXPORT = 1
"""Address of page-locked host memory for what the host wants of this step, 0 or less for none. On a GPU the kernel writes
there, and the host copies nothing: the errors below and M words of calls, int32 [1 + M], cleared by the host, then, from the
next multiple of 16 bytes on, rows int16 [rows, M, K]. Each write of a layer sets one of the four bytes of its word to 1, in turn:
adding to memory of the host would wait for the bus, layer by layer."""
HEADER_ROWS = 2
"""How many of the first tokens have a row there; those without a slot are left out."""
STATE_ERRORS = 0
"""state[0]: what the device found wrong in the running step, a sum of the ERROR_ bits; cleared by the host."""
STATE_CALLS = 1
"""state[1 + m]: how often stored layer m was written in the running step. The host expects once, and clears it. Where there is an
export, state[1 + M + m] instead, from wherever it stands: whose turn it is."""
TURNS = 4
"""Bytes of a layer's word in an export."""


def state_size(stored: int) -> int:
    """Entries of the state of `stored` layers."""
    return STATE_CALLS + 2 * stored


def rows_offset(stored: int) -> int:
    """Where the rows of `stored` layers begin behind an export's address, in bytes."""
    return -(-(STATE_CALLS + stored) * 4 // 16) * 16


ERROR_TOKENS = 1
"""A forward ran over another number of tokens than the slot mapping has."""
ERROR_SLOT = 2
"""A slot was out of range."""
ERROR_DUPLICATE = 4
"""A slot stood twice in one mapping."""

_library = torch.library.Library("r3_pass", "DEF")
_library.define("record(Tensor(a!) buffer, Tensor(b!) state, Tensor slots, Tensor columns, Tensor[] ids) -> ()")


def record_reference(buffer: Tensor, state: Tensor, slots: Tensor, columns: Tensor, ids: Sequence[Tensor]) -> None:
    """Write each site's expert ids into the slot buffer.

    Args:
        buffer: int16 [S + 1, M, K], mutated; the last row takes what has no slot.
        state: int32 [1 + 2 * M], mutated: see STATE_ERRORS, STATE_CALLS.
        slots: int64 [HEADER + max tokens]: the header, then a slot for each token; -1 marks padding. HEADER_EXPORT is for GPUs.
        columns: int64 [N], stored layer of each site; -1 for a site that is not stored.
        ids: N integer tensors [T, k], k <= K; columns past k are written as -1.
    """
    tokens = ids[0].shape[0]
    if tokens == 0:
        return
    expected = int(slots[HEADER_TOKENS])
    if expected != tokens:
        if expected >= 0:
            state[STATE_ERRORS] |= ERROR_TOKENS
        return
    spare, stored, top_k = buffer.shape[0] - 1, buffer.shape[1], buffer.shape[2]
    rows = slots[HEADER : HEADER + tokens]
    wrong = (rows < -1) | (rows >= spare)
    if bool(wrong.any()):
        state[STATE_ERRORS] |= ERROR_SLOT
    rows = torch.where(wrong | (rows < 0), spare, rows)
    kept = [n for n, column in enumerate(columns.tolist()) if column >= 0]
    if not kept:
        return
    signed = (i if i.dtype.is_signed else i.to(torch.int16) for i in (ids[n] for n in kept))  # others hold no -1
    padded = [
        i if i.shape[1] == top_k else torch.nn.functional.pad(i, (0, top_k - i.shape[1]), value=-1) for i in signed
    ]
    values = torch.stack(padded, 1).to(torch.int16)
    where = columns if len(kept) == len(ids) else columns[kept]
    if len(kept) == stored and torch.equal(where, torch.arange(stored, device=where.device)):
        buffer[rows] = values
    else:
        buffer[rows[:, None], where[None, :]] = values
    state.index_add_(0, where + STATE_CALLS, torch.ones_like(where, dtype=torch.int32))


@functools.cache
def _kernels() -> Any:
    from r3_pass.passes import kernels  # Triton is imported where there is a GPU only

    return kernels


def _record_cuda(buffer: Tensor, state: Tensor, slots: Tensor, columns: Tensor, ids: Sequence[Tensor]) -> None:
    _kernels().record(buffer, state, slots, columns, ids)


def write(buffer: Tensor, state: Tensor, slots: Tensor, columns: Tensor, ids: Sequence[Tensor]) -> None:
    """`record` where no graph is traced: straight to what computes it, for the dispatcher takes its time over a list of tensors."""
    (_record_cuda if columns.device.type == "cuda" else record_reference)(buffer, state, slots, columns, ids)


def _record_meta(buffer: Tensor, state: Tensor, slots: Tensor, columns: Tensor, ids: Sequence[Tensor]) -> None:
    return None


_library.impl("record", record_reference, "CPU")
_library.impl("record", _record_cuda, "CUDA")
_library.impl("record", _record_meta, "Meta")
record = torch.ops.r3_pass.record.default
