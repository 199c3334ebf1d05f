"""Bytes: known before anything is allocated, bounded while it runs."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from decoder import Moe, decoder
from loop import SLOTS, Loop
from torch.utils._python_dispatch import TorchDispatchMode

import r3_pass
from r3_pass import NoRouterFound, RefusedConfiguration
from r3_pass.runtime import SegmentBatch, plan
from r3_pass.runtime.export import Exporter
from r3_pass.runtime.rows import RowLog
from r3_pass.runtime.sequences import SequenceTable
from r3_pass.runtime.slots import Geometry, SlotBuffer

R1 = Geometry(num_slots=100_000, num_layers=61, stored=tuple(range(3, 61)), top_k=8)


def test_the_bytes_of_deepseek_r1() -> None:
    """58 of 61 layers, top 8, two bytes an id."""
    assert R1.bytes_per_slot == R1.spare_row_bytes == 928
    assert R1.bytes_per_block(16) == 16 * 928
    assert R1.nbytes == 100_000 // 16 * R1.bytes_per_block(16) + R1.spare_row_bytes


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"config": {"num_experts_per_tok": 2, "num_hidden_layers": 3}}, {}),
        ({"config": {"num_experts_per_tok": 2, "num_hidden_layers": 5}, "layers": 4, "dense": (0, 3)}, {}),
        ({"layers": 4, "dense": (1,), "config": {"num_experts_per_tok": 2}}, {"num_layers": 6}),
    ],
)
def test_the_plan_is_what_attach_allocates(options: dict[str, Any], given: dict[str, int]) -> None:
    """Before and after a step. An engine that planned with fewer bytes would run out of memory."""
    model = decoder(**options)
    planned = plan(model, SLOTS, **given)
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS, **given)
    assert session.geometry == planned
    with torch.no_grad(), session.step(range(3)):
        compiled(torch.zeros(1, 3, dtype=torch.int64))
    assert session.geometry == planned and session._store.buffer is not None
    assert session._store.buffer.data.nbytes == planned.nbytes
    session.detach()


def test_a_plan_that_cannot_be() -> None:
    with pytest.raises(NoRouterFound, match="dense"):
        plan(decoder(layers=2, dense=(0, 1)), 8)
    with pytest.raises(RefusedConfiguration, match=r"how many experts a token gets. Pass top_k="):
        plan(decoder(), 8)
    assert plan(decoder(), 8, top_k=2).row_shape == (2, 2)
    with pytest.raises(RefusedConfiguration, match="do not show which layers hold experts"):
        plan(Moe(), 8, top_k=2)
    for wrong in ({"num_slots": 0}, {"num_slots": 8, "top_k": 0}):
        with pytest.raises(ValueError, match="counts from 1"):
            plan(decoder(), **wrong)


@pytest.mark.parametrize("seed", range(3))
def test_the_host_holds_little_more_than_live_rows(seed: int) -> None:
    """A long run of requests that come and go, a crowd of them in the middle, rows of R1 (58 x 8).

    Held, with all bookkeeping, is at most 1.25 times the live rows and the chunk that is being written; and that is so again after
    the crowd has gone. Nothing knows how long a request might have become.
    """
    rng = np.random.default_rng(seed)
    table = SequenceTable(RowLog(R1.row_shape))
    running: deque[int] = deque()
    lengths: dict[int, int] = {}
    block = np.zeros((4096, *R1.row_shape), np.int16)
    born = worst = most = 0

    def bound() -> int:
        return int(1.25 * table.rows.live_bytes) + table.rows.open_chunks * table.rows.chunk_bytes + 2**16

    for step in range(400):
        crowd = 90 if 100 <= step < 200 else 6
        starts, ids, counts = [], [], []
        while len(running) < crowd:
            running.append(born)
            lengths[born] = 0
            ids.append(born), starts.append(0), counts.append(int(rng.integers(50, 400)))
            born += 1
        for request in [r for r in running if r not in ids]:
            ids.append(request), starts.append(lengths[request]), counts.append(int(rng.integers(1, 20)))
        for first in range(0, len(ids), 10):
            batch = SegmentBatch(ids[first : first + 10], starts[first : first + 10], counts[first : first + 10])
            table.rows.fill(table.extend(batch), block[: batch.num_tokens])
            assert table.host_bytes <= bound()
        for request, count in zip(ids, counts, strict=True):
            lengths[request] += count
        while len(running) > crowd or (running and rng.random() < 0.4) or (step == 200 and len(running) > 6):
            running.rotate(int(rng.integers(len(running))))
            request = running.popleft()
            table.finish(request, lengths.pop(request) + 1)
            assert table.host_bytes <= bound()
        worst, most = max(worst, table.host_bytes), max(most, table.rows.live_bytes)
        if step % 50 == 0:
            table.check_integrity()
    assert most > 10 * table.rows.chunk_bytes, "the run is too small to show anything"
    for request in tuple(running):
        table.finish(request, lengths[request] + 1)
    table.check_integrity()
    assert table.host_bytes <= table.rows.chunk_bytes + 2**16, "an empty table holds the chunk that it writes to"


def test_bookkeeping_of_a_crowd_does_not_stay() -> None:
    """A thousand short requests, then one; and one long request among short ones."""
    table = SequenceTable(RowLog((2, 1), chunk_bytes=64))
    for request in range(1000):
        table.rows.append(np.zeros((0, 2, 1), np.int16))
        table.rows.fill(table.extend(SegmentBatch((request,), (0,), (3,))), np.full((3, 2, 1), request, np.int16))
    grown = table.host_bytes
    table.rows.fill(table.extend(SegmentBatch(("long",), (0,), (70_000,))), np.zeros((70_000, 2, 1), np.int16))
    table.drop("long")
    table.check_integrity()
    assert table.host_bytes < 2 * grown
    for request in range(999):
        assert (table.finish(request, 4) == request).all()
        if request % 100 == 0:
            table.check_integrity()
    assert table.host_bytes < grown / 20
    assert (table.finish(999, 4) == 999).all()
    table.rows.fill(table.extend(SegmentBatch(("a", "b"), (0, 0), (300, 2))), np.ones((302, 2, 1), np.int16))
    assert table.finish("a", 301).shape == (300, 2, 1)
    table.check_integrity()


def test_the_session_counts_its_host_bytes() -> None:
    loop = Loop()
    assert loop.session.host_bytes < 2**16
    loop.step(("a", 0, torch.zeros(1, 4, dtype=torch.int64), range(4)))
    chunk = loop.session._delivery.table.rows.chunk_bytes  # type: ignore[union-attr]
    assert chunk <= loop.session.host_bytes < chunk + 2**21  # a byte or two of bookkeeping for each of its small rows
    loop.session.detach()


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, made.untyped_storage().nbytes())
        return result


def test_a_hit_of_100k_tokens_is_gathered_in_small_pieces() -> None:
    """61 x 8: no operation makes a tensor of more than a chunk, and two chunks at most are under way: below 16 MiB with all else.

    The slots of a hit are on the host; on a GPU `tests/test_cuda.py` measures the peak.
    """
    geometry = Geometry(num_slots=100_000, num_layers=61, stored=tuple(range(61)), top_k=8)
    buffer = SlotBuffer(geometry, "cpu")
    exporter = Exporter("cpu")
    slots = np.random.default_rng(0).permutation(100_000)
    watch = Largest()
    total = 0
    with watch:
        for pending in exporter.gather_chunks(buffer, slots):
            total += pending.num_rows
            pending.release()
    assert total == 100_000
    host_slots = slots.nbytes  # one copy of them, on the host
    assert max(watch.largest, host_slots) <= exporter.chunk_bytes
    assert 3 * exporter.chunk_bytes <= 16 * 2**20, "two under way and one being gathered"


def test_a_pinned_buffer_is_for_gpus() -> None:
    compiled = torch.compile(decoder(), backend=r3_pass.backend("eager"))
    with pytest.raises(RefusedConfiguration, match=r"for a model on a GPU.*on cpu"):
        r3_pass.runtime.attach(compiled, num_slots=8, placement="pinned")
    with pytest.raises(ValueError, match="'device' or 'pinned', got 'host'"):
        r3_pass.runtime.attach(compiled, num_slots=8, placement="host")  # type: ignore[arg-type]
    r3_pass.runtime.attach(compiled, num_slots=8).detach()
