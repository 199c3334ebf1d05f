"""The record op in its ATen form: what it writes, what it flags, what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from r3_pass.passes.ops import ERROR_SLOT, ERROR_TOKENS, HEADER, STATE_CALLS, STATE_ERRORS, record

S, M, K, T = 10, 3, 2, 4


class Step:
    """Buffer, state and mapping of a session, and one step's slots in them."""

    def __init__(self, slots: list[int], tokens: int | None = None, room: int = 8) -> None:
        self.buffer = torch.full((S + 1, M, K), -1, dtype=torch.int16)
        self.state = torch.zeros(STATE_CALLS + M, dtype=torch.int32)
        self.mapping = torch.full((HEADER + room,), -1)
        self.mapping[0] = len(slots) if tokens is None else tokens
        self.mapping[HEADER : HEADER + len(slots)] = torch.tensor(slots)

    def record(self, columns: list[int], ids: list[Tensor]) -> None:
        record(self.buffer, self.state, self.mapping, torch.tensor(columns), ids)

    @property
    def errors(self) -> int:
        return int(self.state[STATE_ERRORS])

    @property
    def calls(self) -> list[int]:
        return self.state[STATE_CALLS:].tolist()


def ids(k: int = K, tokens: int = T, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(100, (tokens, k), dtype=dtype)


def test_every_site_lands_in_its_column() -> None:
    """A column off by one shifts every layer (failure class 12)."""
    step, a, b, c = Step([7, 0, 3, 9]), ids(), ids(), ids()
    step.record([2, 0, 1], [a, b, c])
    assert torch.equal(step.buffer[[7, 0, 3, 9]], torch.stack([b, c, a], 1).to(torch.int16))
    assert step.errors == 0 and step.calls == [1, 1, 1]
    others = [s for s in range(S) if s not in (7, 0, 3, 9)]
    assert (step.buffer[others] == -1).all()


def test_padding_lands_in_the_spare_row() -> None:
    """Failure class 6: padding written to slot 0, or to the last slot by Python's negative index."""
    step = Step([5, -1, 6, -1])
    a = ids()
    step.record([0, 1, 2], [a, a, a])
    assert torch.equal(step.buffer[[5, 6], 0].long(), a[[0, 2]])
    assert (step.buffer[[s for s in range(S) if s not in (5, 6)]] == -1).all()
    assert step.errors == 0


def test_a_subset_of_columns_leaves_the_others() -> None:
    """Each graph of a model with breaks writes its own layers only."""
    step = Step([1, 2, 3, 4])
    a, b = ids(), ids()
    step.record([1], [a])
    step.record([2, 0], [b, b])
    assert torch.equal(step.buffer[[1, 2, 3, 4]].long(), torch.stack([b, a, b], 1))
    assert step.calls == [1, 1, 1]


def test_a_site_without_a_column_is_skipped() -> None:
    """A drafter's layer in the same graph has no column; as -1 it would write the last layer's."""
    step = Step([1, 2, 3, 4])
    a = ids()
    step.record([-1, 1], [ids(), a])
    assert torch.equal(step.buffer[[1, 2, 3, 4], 1].long(), a)
    assert (step.buffer[:, [0, 2]] == -1).all() and step.calls == [0, 1, 0]
    step.record([-1, -1], [a, a])
    assert step.calls == [0, 1, 0]


def test_a_narrower_layer_is_padded() -> None:
    """Columns past a layer's own top-k are -1, also where an older row had ids there."""
    step = Step([1, 2, 3, 4])
    step.record([0, 1, 2], [ids(), ids(), ids()])
    a = ids(k=1)
    step.record([0], [a])
    assert torch.equal(step.buffer[[1, 2, 3, 4], 0, 0].long(), a[:, 0])
    assert (step.buffer[[1, 2, 3, 4], 0, 1] == -1).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_dtypes_of_ids(dtype: torch.dtype) -> None:
    """Ids above 127 must not wrap on their way to int16 (failure class 14)."""
    step = Step([1, 2, 3, 4])
    a = torch.tensor([[255, 128]] * T, dtype=torch.int64).to(dtype)
    step.record([0, 1, 2], [a, a, a])
    assert (step.buffer[[1, 2, 3, 4]] == torch.tensor([255, 128])).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int8])
def test_narrow_layers_of_other_dtypes(dtype: torch.dtype) -> None:
    """Hash layers look ids up in a table of any dtype: unsigned ones hold no -1, and torch mixes few of them with others."""
    step, a, b = Step([1, 2, 3, 4]), ids(), ids(k=1)
    step.record([0, 1, 2], [a, b.to(dtype), a.to(dtype)])
    narrow = torch.cat([b, torch.full_like(b, -1)], 1)
    assert torch.equal(step.buffer[[1, 2, 3, 4]].long(), torch.stack([a, narrow, a], 1))


def test_strided_ids() -> None:
    """A slice of k + 1 ids is no contiguous [T, k]."""
    step, wide = Step([1, 2, 3, 4]), ids(k=3)
    step.record([0, 1, 2], [wide[:, :2], wide[:, 1:], wide.t().contiguous().t()[:, :2]])
    assert torch.equal(step.buffer[[1, 2, 3, 4], 0].long(), wide[:, :2])
    assert torch.equal(step.buffer[[1, 2, 3, 4], 1].long(), wide[:, 1:])
    assert torch.equal(step.buffer[[1, 2, 3, 4], 2].long(), wide[:, :2])


@pytest.mark.parametrize("expected", [T - 1, T + 1, 0])
def test_another_number_of_tokens_writes_nothing(expected: int) -> None:
    """Written anyway, tokens and slots would be shifted against each other."""
    step = Step([1, 2, 3, 4, 5], tokens=expected)
    step.record([0, 1, 2], [ids(), ids(), ids()])
    assert (step.buffer == -1).all() and step.errors == ERROR_TOKENS and step.calls == [0, 0, 0]


def test_outside_a_step_nothing_is_written_and_nothing_is_wrong() -> None:
    """A CUDA graph that is replayed outside of a step: the header says -1."""
    step = Step([1, 2, 3, 4], tokens=-1)
    step.record([0, 1, 2], [ids(), ids(), ids()])
    assert (step.buffer == -1).all() and step.errors == 0 and step.calls == [0, 0, 0]


@pytest.mark.parametrize("slot", [S, S + 5, -2, 2**40])
def test_a_slot_out_of_range_is_flagged_and_goes_nowhere(slot: int) -> None:
    """Row S is the spare one and S + 5 is somebody else's memory."""
    step = Step([1, slot, 3, 4])
    a = ids()
    step.record([0, 1, 2], [a, a, a])
    assert step.errors == ERROR_SLOT
    assert torch.equal(step.buffer[[1, 3, 4], 0].long(), a[[0, 2, 3]])
    assert (step.buffer[[0, 2, 5, 6, 7, 8, 9]] == -1).all()


def test_flags_add_up() -> None:
    """The second fault of a step must not hide the first."""
    step = Step([1, 99, 3, 4])
    step.record([0], [ids()])
    step.record([0], [ids(tokens=2)])
    assert step.errors == ERROR_SLOT | ERROR_TOKENS


def test_no_tokens_is_no_write() -> None:
    """An empty forward counted as a write would make the next step's count wrong, and unequal to the kernel's."""
    step = Step([])
    step.record([0, 1, 2], [ids(tokens=0)] * 3)
    assert step.errors == 0 and step.calls == [0, 0, 0]


def test_under_fake_tensors_it_does_nothing() -> None:
    """Tracing must not run the write, nor fail on symbolic sizes."""
    step = Step([1, 2, 3, 4])
    record(step.buffer.to("meta"), step.state.to("meta"), step.mapping.to("meta"), torch.empty(1, dtype=torch.int64, device="meta"),
           [ids().to("meta")])  # fmt: skip


def test_the_schema_says_what_is_mutated() -> None:
    """An op that mutates what its schema does not say is dropped as dead code, or reordered, by every compiler."""
    mutated = [a.name for a in record._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert mutated == ["buffer", "state"] and record._schema.returns == []
