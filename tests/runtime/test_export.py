import gc
import logging

import numpy as np
import pytest
import torch

from r3_pass.runtime import export
from r3_pass.runtime.export import Exporter
from r3_pass.runtime.slots import Geometry, SlotBuffer

# Cycles for which the device does nothing else: a good 20 ms.
BUSY = 50_000_000


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def numbered(num_rows: int, device: str, first: int = 0) -> torch.Tensor:
    """int16[n, 3, 2], all ids different as long as they fit."""
    return (torch.arange(num_rows * 6, device=device) + first).to(torch.int16).view(num_rows, 3, 2)


def numbered_buffer(num_slots: int, device: str) -> SlotBuffer:
    buffer = SlotBuffer(Geometry(num_slots, num_layers=3, stored=(0, 1, 2), top_k=2), device)
    buffer.write(np.arange(num_slots), numbered(num_slots, device))
    return buffer


def test_rows_and_flags_arrive(device: str) -> None:
    exporter = Exporter(device)
    for num_rows in (5, 1, 0, 700):
        rows = numbered(num_rows, device)
        expected = rows.cpu().numpy().copy()
        pending = exporter.submit(rows, torch.tensor([3, num_rows], dtype=torch.int32, device=device))
        assert pending.num_rows == num_rows
        arrived, flags = pending.wait()
        assert pending.done()
        assert arrived.dtype == np.int16 and np.array_equal(arrived, expected)
        assert flags is not None and flags.dtype == np.int32 and flags.tolist() == [3, num_rows]
        pending.release()
        without_flags = exporter.submit(numbered(1, device))
        assert without_flags.wait()[1] is None
        without_flags.release()
    exporter.drain()


def test_flags_are_a_snapshot(device: str) -> None:
    """The kernel's flags live in one tensor that every step rewrites."""
    flags = torch.tensor([1], dtype=torch.int32, device=device)
    pending = Exporter(device).submit(numbered(1, device), flags)
    flags.fill_(2)
    arrived = pending.wait()[1]
    assert arrived is not None and arrived.tolist() == [1]


def test_nothing_is_read_after_release(device: str) -> None:
    pending = Exporter(device).submit(numbered(2, device))
    pending.release()
    pending.release()
    assert pending.done()
    with pytest.raises(AssertionError, match="after release"):
        pending.wait()


@pytest.mark.parametrize("form", ["host", "device"])
def test_prefix_hits_come_in_bounded_chunks(device: str, form: str) -> None:
    """Also: the slots are those of the call, although the iterator starts later."""
    buffer = numbered_buffer(50, device)
    rng = np.random.default_rng(0)
    order = rng.permutation(np.append(np.arange(50), -1))
    slots = order.copy() if form == "host" else torch.from_numpy(order).to(device, copy=True)
    exporter = Exporter(device, chunk_bytes=8 * buffer.geometry.bytes_per_slot + 5)
    chunks = exporter.gather_chunks(buffer, slots)
    slots[:] = 0
    sizes, arrived = [], []
    for pending in chunks:
        sizes.append(pending.num_rows)
        arrived.append(pending.wait()[0].copy())
        pending.release()
    assert sizes == [8] * 6 + [3]
    assert np.array_equal(np.concatenate(arrived), buffer.gather(order).cpu().numpy())
    assert list(exporter.gather_chunks(buffer, [])) == []


def test_impossible_slots_of_a_prefix_hit_raise_at_the_call(device: str) -> None:
    """Not at the chunk that holds them: by then the request has been given rows that would never arrive."""
    with pytest.raises(ValueError, match="Slot 50"):
        Exporter(device, chunk_bytes=1).gather_chunks(numbered_buffer(50, device), np.arange(51))


def test_chunks_may_all_be_in_flight(device: str) -> None:
    """The iterator bounds device memory by waiting for older chunks, whether or not somebody has read them."""
    buffer = numbered_buffer(50, device)
    exporter = Exporter(device, chunk_bytes=1)
    pendings = list(exporter.gather_chunks(buffer, np.arange(50)))
    assert len(pendings) == 50
    assert np.array_equal(np.concatenate([pending.wait()[0] for pending in pendings]), numbered(50, "cpu").numpy())


class FakeEvent:
    def synchronize(self) -> None:
        pass


class FakeBlock:
    """As `_Block`, on machines without CUDA."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.copied = FakeEvent()


def test_pool_reuses_blocks_and_never_shares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks grow with what is asked for; there are never more than were in use together."""
    monkeypatch.setattr(export, "_Block", FakeBlock)
    step = 64 * 2**10
    pool = export._Pool()
    small, large = pool.get(1), pool.get(5 * step + 1)
    assert small is not large
    assert (small.num_bytes, large.num_bytes) == (step, 6 * step)
    pool.put(small)
    pool.put(large)
    assert pool.num_bytes == 7 * step
    assert pool.get(100) is small
    assert pool.get(100) is large
    larger = pool.get(100)
    assert larger is not small and larger is not large
    for block in (small, large, larger):
        pool.put(block)
    del small, large, larger, block
    # In the place of the largest, which is too small for it.
    huge = pool.get(7 * step)
    gc.collect()
    assert huge.num_bytes == 7 * step and pool.num_bytes == (1 + 1 + 7) * step
    pool.put(huge)
    with pytest.raises(AssertionError):
        pool.put(huge)


@pytest.mark.cuda
class TestOnCuda:
    def test_the_host_does_not_wait(self) -> None:
        exporter = Exporter("cuda")
        exporter.submit(numbered(64, "cuda")).release()
        rows = numbered(64, "cuda")
        flags = torch.zeros(2, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
            pending = exporter.submit(rows, flags)
            assert not pending.done()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert np.array_equal(pending.wait()[0], numbered(64, "cpu").numpy())

    def test_the_buffer_may_be_overwritten_behind_the_snapshot(self) -> None:
        """Rows, flags and the snapshot's own memory are reused at once by what comes next on the compute stream."""
        buffer = numbered_buffer(4096, "cuda")
        exporter = Exporter("cuda")
        flags = torch.zeros(1, dtype=torch.int32, device="cuda")
        pendings = []
        for step in range(20):
            torch.cuda._sleep(BUSY // 50)  # type: ignore[no-untyped-call]
            buffer.data.fill_(step)
            flags.fill_(step)
            pendings.append(exporter.submit(buffer.gather(np.arange(4096)), flags))
            buffer.void_all()
            flags.fill_(-7)
            garbage = [torch.full((4096, 3, 2), 77, dtype=torch.int16, device="cuda") for _ in range(3)]
            del garbage
        for step, pending in enumerate(pendings):
            rows, arrived = pending.wait()
            assert (rows == step).all()
            assert arrived is not None and arrived.tolist() == [step]

    def test_a_block_carries_one_copy_at_a_time(self) -> None:
        """A lagging copy stream, and a release while the copy is under way."""
        exporter = Exporter("cuda")
        stream = exporter._token_stream
        assert stream is not None
        for round_ in range(3):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
            pendings = [exporter.submit(numbered(100 + i, "cuda", first=round_ + i)) for i in range(4)]
            pendings.pop(0).release()
            pendings.append(exporter.submit(numbered(104, "cuda", first=round_ + 4)))
            for i, pending in enumerate(pendings, start=1):
                assert np.array_equal(pending.wait()[0], numbered(100 + i, "cpu", first=round_ + i).numpy())
            for pending in pendings:
                pending.release()
        assert exporter.host_bytes == 4 * 64 * 2**10

    def test_dropped_in_flight(self) -> None:
        """An exception between `submit` and `release`: the pages stay locked until the device has written them."""
        exporter = Exporter("cuda")
        torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
        pending = exporter.submit(numbered(1000, "cuda"))
        del pending
        gc.collect()
        assert exporter.host_bytes == 0
        assert np.array_equal(exporter.submit(numbered(10, "cuda")).wait()[0], numbered(10, "cpu").numpy())

    def test_a_long_prefix_hit_stays_below_16_mib_and_does_not_hold_up_tokens(self) -> None:
        """100,000 tokens of 61 x 8."""
        geometry = Geometry(num_slots=100_000, num_layers=61, stored=tuple(range(61)), top_k=8)
        buffer = SlotBuffer(geometry, "cuda")
        ids = torch.arange(100_000, device="cuda")
        buffer.data[:-1] = (ids % 30_000).to(torch.int16).view(-1, 1, 1)
        exporter = Exporter("cuda")
        slots = np.random.default_rng(0).permutation(100_000)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        position = 0
        for pending in exporter.gather_chunks(buffer, slots):
            rows = pending.wait()[0]
            assert (rows == (slots[position : position + len(rows)] % 30_000)[:, None, None]).all()
            position += len(rows)
            pending.release()
        assert position == 100_000
        assert torch.cuda.max_memory_allocated() - before < 16 * 2**20

        torch.cuda.reset_peak_memory_stats()
        pendings = list(exporter.gather_chunks(buffer, slots))
        assert torch.cuda.max_memory_allocated() - before < 16 * 2**20
        for pending in pendings:
            pending.release()

        assert exporter._prefix_stream is not None
        with torch.cuda.stream(exporter._prefix_stream):
            torch.cuda._sleep(10 * BUSY)  # type: ignore[no-untyped-call]
        prefix = next(exporter.gather_chunks(buffer, slots))
        tokens = exporter.submit(buffer.gather([5, 6]))
        assert (tokens.wait()[0] == np.array([5, 6])[:, None, None]).all()
        assert not prefix.done()
        exporter.drain()
        assert prefix.done()

    def test_without_page_locked_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Slow, and right."""
        monkeypatch.setattr(export, "_lock_pages", lambda memory: False)
        exporter = Exporter("cuda")
        pendings = [exporter.submit(numbered(100, "cuda", first=i)) for i in range(4)]
        for i, pending in enumerate(pendings):
            assert np.array_equal(pending.wait()[0], numbered(100, "cpu", first=i).numpy())

    def test_a_failure_to_lock_pages_does_not_reach_the_next_kernel(self, caplog: pytest.LogCaptureFixture) -> None:
        """CUDA reports it again at the next launch, wherever that is."""
        block = export._Block(64 * 2**10)
        with caplog.at_level(logging.WARNING):
            assert not export._lock_pages(block.memory)
        assert "page-lock 65536 bytes" in caplog.text
        assert torch.ones(3, device="cuda").sum().item() == 3
