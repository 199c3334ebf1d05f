"""The Triton form of `summary.summarise`, which it equals.

One launch reads given routes, converts them, lays them out by layer, and summarises them; the host waits for it when it first asks.

Legend: R rows, L layers, K columns, P programs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from r3_pass.pinned import pinned
from r3_pass.summary import Summary, nothing

_PROGRAMS = 32
"""P, at most: what they found is put together on the host."""
_LANES = 1024
"""Ids that a program reads at a time."""
_COUNTS = 4
"""Numbers of a layer before its columns: rows with ids, fewest, most, broken rows."""

_BEFORE = tl.constexpr(_COUNTS)
_LOWEST = tl.constexpr(torch.iinfo(torch.int32).min)
_HIGHEST = tl.constexpr(torch.iinfo(torch.int32).max)


@triton.jit(do_not_specialize=["rows"])
def summary_kernel(  # type: ignore[no-untyped-def]
    given, routes, found, rows, layers, columns, BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program takes each P-th block of rows of one layer. given: [R, L, K]; routes: [L, R, K]; found: [P, L, 4 + 2 K]."""
    layer = tl.program_id(1)
    k = tl.arange(0, K_BLOCK)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    step = tl.num_programs(0) * BLOCK
    valid = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    most = tl.zeros([BLOCK], tl.int32)
    fewest = tl.zeros([BLOCK], tl.int32) + (columns + 1)
    low = tl.zeros([BLOCK, K_BLOCK], tl.int32) + _HIGHEST
    high = tl.zeros([BLOCK, K_BLOCK], tl.int32) + _LOWEST
    for _ in range(0, tl.cdiv(rows, step)):
        inside = row < rows
        mask = inside[:, None] & (k < columns)[None, :]
        start = (row * layers + layer) * columns
        ids = tl.load(given + start[:, None] + k[None, :], mask=mask, other=-1).to(tl.int32)
        tl.store(routes + ((layer.to(tl.int64) * rows + row) * columns)[:, None] + k[None, :], ids, mask=mask)
        bad = ids < -1
        for j in range(0, columns - 1):
            other = tl.load(given + start + j, mask=inside, other=-1).to(tl.int32)[:, None]
            behind = (k > j)[None, :] & (ids >= 0)
            bad = bad | (behind & ((ids == other) | ((k == j + 1)[None, :] & (other < 0))))
        count = tl.sum((ids >= 0).to(tl.int32), 1)
        some = count > 0
        valid += some.to(tl.int32)
        broken += tl.max(bad.to(tl.int32), 1)
        most = tl.maximum(most, count)
        fewest = tl.minimum(fewest, tl.where(some, count, columns + 1))
        low = tl.minimum(low, tl.where(some[:, None], ids, _HIGHEST))
        high = tl.maximum(high, tl.where(some[:, None], ids, _LOWEST))
        row += step
    target = found + (tl.program_id(0) * layers + layer).to(tl.int64) * (_BEFORE + 2 * columns)
    tl.store(target, tl.sum(valid, 0))
    tl.store(target + 1, tl.min(fewest, 0))
    tl.store(target + 2, tl.max(most, 0))
    tl.store(target + 3, tl.sum(broken, 0))
    tl.store(target + _BEFORE + k, tl.min(low, 0), mask=k < columns)
    tl.store(target + _BEFORE + columns + k, tl.max(high, 0), mask=k < columns)


def start(given: Tensor) -> tuple[Tensor, Callable[[], Summary]]:
    """Launch the kernel on the current stream and device.

    Args:
        given: signed integers of up to 32 bits, [R, L, K], contiguous.

    Returns: int32 [L, R, K]; and what waits for the summary, to be called once.
    """
    rows, layers, columns = given.shape
    routes = given.new_empty((layers, rows, columns), dtype=torch.int32)
    if not rows:
        return routes, lambda: nothing(layers, columns)
    k_block = triton.next_power_of_2(columns)
    block = max(1, _LANES // k_block)
    programs = min(_PROGRAMS, triton.cdiv(rows, block))
    found = given.new_empty((programs, layers, _COUNTS + 2 * columns), dtype=torch.int32)
    summary_kernel[(programs, layers)](given, routes, found, rows, layers, columns, BLOCK=block, K_BLOCK=k_block)
    if not found.is_cuda:  # Triton's interpreter
        return routes, lambda: _read(found)
    host = pinned(torch.empty(found.shape, dtype=torch.int32, device="cpu")).copy_(found, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def finish() -> Summary:
        done.synchronize()
        return _read(host)

    return routes, finish


def _read(found: Tensor) -> Summary:
    """Put together what the programs found: int32 [P, L, 4 + 2 K] on the host."""
    numbers = found.numpy()
    columns = (numbers.shape[2] - _COUNTS) // 2
    low = numbers[..., _COUNTS : _COUNTS + columns].min(0)
    high = numbers[..., _COUNTS + columns :].max(0)
    return Summary(
        largest=high.max(1).clip(min=0).tolist(),
        valid=numbers[..., 0].sum(0).tolist(),
        fewest=numbers[..., 1].min(0).tolist(),
        most=numbers[..., 2].max(0).tolist(),
        equal=(low == high).all(1).tolist(),
        broken=numbers[..., 3].sum(0).tolist(),
    )
