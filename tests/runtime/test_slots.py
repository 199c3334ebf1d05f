from typing import Any

import numpy as np
import pytest
import torch

from r3_pass.errors import BufferLayoutError
from r3_pass.runtime.slots import Geometry, SlotBuffer

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def buffer(device: str) -> SlotBuffer:
    """6 slots of 2 layers x 2 ids; slot s holds [[10 s, 10 s + 1], [10 s + 2, 10 s + 3]], the spare row 99."""
    buffer = SlotBuffer(Geometry(num_slots=6, num_layers=3, stored=(1, 2), top_k=2), device)
    buffer.write(range(6), rows_of(range(6)))
    buffer.data[6] = 99
    return buffer


def rows_of(slots: range | list[int]) -> np.ndarray:
    return np.array(
        [[[10 * s, 10 * s + 1], [10 * s + 2, 10 * s + 3]] if s >= 0 else [[-1] * 2] * 2 for s in slots], "i2"
    )


def test_bytes_are_known_before_allocation() -> None:
    """DeepSeek-R1: 58 MoE layers x 8 ids x 2 bytes."""
    geometry = Geometry(num_slots=1000, num_layers=61, stored=tuple(range(3, 61)), top_k=8)
    assert geometry.row_shape == (58, 8)
    assert geometry.bytes_per_slot == geometry.spare_row_bytes == 928
    assert geometry.nbytes == 1001 * 928 == SlotBuffer(geometry, "cpu").data.nbytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_slots": 0}, "num_slots=0"),
        ({"top_k": 0}, "top_k=0"),
        ({"stored": ()}, "at least one"),
        ({"stored": (2, 1)}, "ascending"),
        ({"stored": (1, 1)}, "ascending"),
        ({"stored": (-1, 1)}, "0 to 3"),
        ({"stored": (1, 4)}, "4 decoder layers"),
    ],
)
def test_impossible_geometry(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BufferLayoutError, match=message):
        Geometry(**{"num_slots": 8, "num_layers": 4, "stored": (1, 3), "top_k": 2, **arguments})


@pytest.mark.parametrize("stored", [(0, 1, 2, 3, 4), (2, 3), (0, 2, 4), (1,)])
def test_expand_puts_columns_at_their_layers(stored: tuple[int, ...]) -> None:
    geometry = Geometry(num_slots=1, num_layers=5, stored=stored, top_k=2)
    rows = np.arange(3 * len(stored) * 2, dtype=np.int16).reshape(3, len(stored), 2)
    rows.flags.writeable = False
    expanded = geometry.expand(rows)
    assert expanded.dtype == np.int16 and expanded.shape == (3, 5, 2) and expanded.flags.c_contiguous
    for layer in range(5):
        expected = rows[:, stored.index(layer)] if layer in stored else -1
        assert (expanded[:, layer] == expected).all()
    assert geometry.expand(rows[:0]).shape == (0, 5, 2)


def test_expand_refuses_other_rows() -> None:
    geometry = Geometry(num_slots=1, num_layers=5, stored=(1, 2), top_k=2)
    with pytest.raises(BufferLayoutError, match=r"int16\[3, 3, 2\], expected int16\[n, 2, 2\]"):
        geometry.expand(np.zeros((3, 3, 2), np.int16))
    with pytest.raises(BufferLayoutError, match="int32"):
        geometry.expand(np.zeros((3, 2, 2), np.int32))


def test_a_new_buffer_is_void(device: str) -> None:
    buffer = SlotBuffer(Geometry(num_slots=6, num_layers=3, stored=(1, 2), top_k=2), device)
    buffer.check_integrity()
    assert (buffer.data == -1).all()


def test_gather_is_a_snapshot_and_never_shows_the_spare_row(buffer: SlotBuffer) -> None:
    """-1 indexes the last row in torch: padding would read what other padding wrote."""
    slots = [4, -1, 0, 4]
    rows = buffer.gather(slots)
    buffer.data.fill_(7)
    assert np.array_equal(rows.cpu().numpy(), rows_of(slots))


@pytest.mark.parametrize("kind", ["list", "int32", "tensor", "device"])
def test_slots_come_in_many_forms(buffer: SlotBuffer, kind: str) -> None:
    slots = [5, -1, 2]
    given: Any = {
        "list": slots,
        "int32": np.array(slots, np.int32),
        "tensor": torch.tensor(slots),
        "device": torch.tensor(slots, device=buffer.device, dtype=torch.int32),
    }[kind]
    assert np.array_equal(buffer.gather(given).cpu().numpy(), rows_of(slots))


def test_no_slots(buffer: SlotBuffer) -> None:
    before = buffer.data.clone()
    assert buffer.gather([]).shape == (0, 2, 2)
    buffer.void([])
    buffer.write([], np.zeros((0, 2, 2), np.int16))
    buffer.move([], [])
    assert torch.equal(buffer.data, before)


def test_void(buffer: SlotBuffer) -> None:
    buffer.void([1, -1, 3])
    buffer.settle()
    assert np.array_equal(buffer.data[:6].cpu().numpy(), rows_of([0, -1, 2, -1, 4, 5]))
    for others in (np.array([0, 1, 2, 3, 5, 5]), np.array([5, 4, 3, 1, 2, 2]), np.arange(5)):
        buffer.write([0, 4], rows_of([0, 4]))
        buffer.void(others)
        buffer.settle()
        assert (buffer.data[4] == -1).all() == (4 in others) and (buffer.data[0] == -1).all() == (0 in others)
    buffer.write([0, 4], rows_of([0, 4]))
    buffer.void(np.arange(6))
    assert (buffer.data[:6] == -1).all()
    buffer.void([5])
    buffer.void_all()
    assert (buffer.data == -1).all()
    buffer.write([5], rows_of([5]))
    assert np.array_equal(buffer.gather([5]).cpu().numpy(), rows_of([5])), "nothing of before is left to be done"


@pytest.mark.parametrize("where", ["on the host", "on the device"])
def test_whoever_uses_the_buffer_finds_void_what_was(buffer: SlotBuffer, where: str) -> None:
    def void(slots: list[int]) -> None:
        buffer.void(torch.tensor(slots, device=buffer.device) if where == "on the device" else slots)

    taken = np.array([0, 4])
    buffer.void(taken)
    taken[:] = 2  # the caller's array is its own again
    assert np.array_equal(buffer.gather([0, 1, 2, 4]).cpu().numpy(), rows_of([-1, 1, 2, -1]))
    void([1])
    void([2])
    buffer.write([2, 3], rows_of([8, 9]))
    assert np.array_equal(buffer.data[:6].cpu().numpy(), rows_of([-1, -1, 8, 9, -1, 5]))
    void([3])
    buffer.move([2, 3], [5, 1])
    assert np.array_equal(buffer.data[:6].cpu().numpy(), rows_of([-1, -1, 8, -1, -1, 8]))


def test_a_fill_without_memory_is_still_to_be_done(buffer: SlotBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    buffer.void([1, 3])
    with monkeypatch.context() as patched:
        patched.setattr(buffer, "_sent", none)
        with pytest.raises(torch.OutOfMemoryError):
            buffer.settle()
    assert np.array_equal(buffer.gather([0, 1, 2, 3]).cpu().numpy(), rows_of([0, -1, 2, -1]))


def test_one_fill_for_many(buffer: SlotBuffer) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for slot in range(5):
            buffer.void([slot])
        buffer.settle()
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::index_fill_") == 1
    assert np.array_equal(buffer.data[:6].cpu().numpy(), rows_of([-1] * 5 + [5]))


def test_write_takes_read_only_arrays_and_tensors(buffer: SlotBuffer) -> None:
    """What `finish` returned can be inserted as it is; padding goes to the spare row."""
    rows = rows_of([7, 8, 9])
    rows.flags.writeable = False
    buffer.write([0, -1, 5], rows)
    buffer.write(np.array([1]), torch.from_numpy(rows_of([6])).to(buffer.device))
    assert np.array_equal(buffer.data[:6].cpu().numpy(), rows_of([7, 6, 2, 3, 4, 9]))


def test_write_refuses_other_rows(buffer: SlotBuffer) -> None:
    before = buffer.data.clone()
    with pytest.raises(BufferLayoutError, match="one a slot"):
        buffer.write([0, 1], rows_of([0]))
    with pytest.raises(BufferLayoutError, match="int32"):
        buffer.write([0], torch.zeros((1, 2, 2), dtype=torch.int32))
    with pytest.raises(BufferLayoutError, match="one a slot"):
        buffer.move([0, 1], [2])
    assert torch.equal(buffer.data, before)


def test_move_may_overlap(buffer: SlotBuffer) -> None:
    """Slot by slot, the row of 0 would end up in 1, 2 and 3."""
    buffer.move([0, 1, 2, -1], [1, 2, 3, 4])
    assert np.array_equal(buffer.data[:6].cpu().numpy(), rows_of([0, 0, 1, 2, -1, 5]))


@pytest.mark.parametrize("slots", [[6], [0, -2], [[0]], [0.0], torch.ones(1), np.array([2**64 - 1], np.uint64)])
def test_impossible_slots_on_the_host_raise(buffer: SlotBuffer, slots: Any) -> None:
    before = buffer.data.clone()
    for call in (buffer.gather, buffer.void):
        with pytest.raises(ValueError, match=r"[Ss]lot"):
            call(slots)
    assert torch.equal(buffer.data, before)


def test_made_under_inference_mode_and_written_outside(device: str) -> None:
    """Engines attach wherever they are; torch refuses in-place writes to tensors made under inference_mode."""
    with torch.inference_mode():
        buffer = SlotBuffer(Geometry(num_slots=2, num_layers=1, stored=(0,), top_k=1), device)
        buffer.void([0])
    buffer.write([1], np.ones((1, 1, 1), np.int16))
    buffer.check_integrity()


@pytest.mark.cuda
class TestOnCuda:
    @pytest.fixture
    def device(self) -> str:
        return "cuda"

    def test_impossible_slots_on_the_device_are_masked(self, buffer: SlotBuffer) -> None:
        """An index out of range in a kernel would end the process; raising would need the host to wait."""
        slots = torch.tensor([0, 6, 7, 2**40, -2, -(2**40), 5], device="cuda")
        assert np.array_equal(buffer.gather(slots).cpu().numpy(), rows_of([0, -1, -1, -1, -1, -1, 5]))
        buffer.void(slots[1:6])
        buffer.write(slots[1:6], torch.full((5, 2, 2), 7, dtype=torch.int16, device="cuda"))
        assert np.array_equal(buffer.data[:6].cpu().numpy(), rows_of(range(6)))

    def test_nothing_waits_for_the_device(self, buffer: SlotBuffer) -> None:
        rows = torch.zeros((2, 2, 2), dtype=torch.int16, device="cuda")
        on_device = torch.tensor([0, 1], device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for slots in ([0, 1], on_device):
                buffer.gather(slots)
                buffer.void(slots)
                buffer.write(slots, rows)
                buffer.move(slots, slots)
            buffer.void_all()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()

    def test_host_slots_may_change_after_the_call(self, buffer: SlotBuffer) -> None:
        """The upload is asynchronous: it must not read the caller's array later."""
        slots = np.array([3, 4])
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        rows = buffer.gather(slots)
        slots[:] = 0
        assert np.array_equal(rows.cpu().numpy(), rows_of([3, 4]))
