"""The Triton kernel equals the ATen form; here in Triton's interpreter, on a GPU in test_cuda.py.

The interpreter must be chosen before Triton is imported, so the cases run in a process of their own.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
import torch
from interpreter import inside, outside, run_in_the_interpreter

from r3_pass.passes.ops import HEADER, STATE_CALLS, TURNS, record_reference, rows_offset, state_size

S, M = 20, 3


@outside
def test_in_the_interpreter() -> None:
    """All other tests of this file; they are skipped outside of it."""
    run_in_the_interpreter(__file__)


def both(
    slots: list[int],
    ids: list[torch.Tensor],
    columns: list[int],
    top_k: int = 2,
    tokens: int | None = None,
    rounds: int = 1,
) -> Any:
    """Run kernel and reference on equal buffers; returns the buffer and the state, which are equal."""
    from r3_pass.passes import kernels

    mapping = torch.full((HEADER + 70,), -1)
    mapping[0] = len(slots) if tokens is None else tokens
    mapping[HEADER : HEADER + len(slots)] = torch.tensor(slots)
    found = []
    for run in (kernels.record, record_reference):
        buffer = torch.full((S + 1, M, top_k), 77, dtype=torch.int16)
        state = torch.zeros(state_size(M), dtype=torch.int32)
        for _ in range(rounds):
            run(buffer, state, mapping, torch.tensor(columns), ids)
        buffer[S] = 0  # what the spare row ends up with is nobody's business
        found.append((buffer, state))
    (ours, our_state), (theirs, their_state) = found
    assert torch.equal(ours, theirs), (ours - theirs).nonzero()
    assert torch.equal(our_state, their_state), (our_state, their_state)
    assert not our_state[STATE_CALLS + M :].any()
    return ours, our_state[: STATE_CALLS + M]


def random_ids(tokens: int, k: int = 2, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(200, (tokens, k), dtype=dtype)


@inside
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 17, 20])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
def test_sizes(tokens: int, top_k: int) -> None:
    """Blocks are powers of two, tokens and k are not: the edge must neither be lost nor written past."""
    slots = torch.randperm(S)[:tokens].tolist()
    both(slots, [random_ids(tokens, top_k) for _ in range(M)], [2, 0, 1], top_k)


@inside
def test_more_tokens_than_a_block() -> None:
    """Several programs for one site: the call is counted once, the fault flagged once."""
    slots = [-1] * 50 + list(range(15)) + [-1]
    _, state = both(slots, [random_ids(66, 64) for _ in range(M)], [0, 1, 2], top_k=64)
    assert state.tolist() == [0, 1, 1, 1]


@inside
def test_padding() -> None:
    """Padding lands in the spare row, every other row stays."""
    buffer, _ = both([3, -1, 5, -1], [random_ids(4)] * M, [0, 1, 2])
    assert (buffer[[0, 1, 2, 4]] == 77).all()


@inside
@pytest.mark.parametrize("expected", [-1, 0, 3, 5])
def test_another_number_of_tokens(expected: int) -> None:
    """Nothing is written; -1 is no fault but a graph that is replayed outside of a step."""
    buffer, state = both([0, 1, 2, 3], [random_ids(4)] * M, [0, 1, 2], tokens=expected)
    assert (buffer[:S] == 77).all() and bool(state[0]) is (expected >= 0)


@inside
@pytest.mark.parametrize("expected", [-1, 0, 4, 2**40])
def test_a_forward_longer_than_the_mapping(expected: int) -> None:
    """Nothing behind the mapping is read: here that is a page which nobody may touch."""
    from r3_pass.passes import kernels

    page, slots = mmap.PAGESIZE, [0, 1, 2, 3]
    memory = mmap.mmap(-1, 2 * page)
    address = np.frombuffer(memory, np.int64).ctypes.data
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + page), ctypes.c_size_t(page), 0) == 0
    mapping = torch.frombuffer(memory, dtype=torch.int64, count=page // 8)[-HEADER - len(slots) :]
    mapping.copy_(torch.tensor([expected, -1, 0, 0, *slots]))
    buffer = torch.full((S + 1, M, 2), 77, dtype=torch.int16)
    state = torch.zeros(state_size(M), dtype=torch.int32)
    kernels.record(buffer, state, mapping, torch.arange(M), [random_ids(3000)] * M)
    assert (buffer == 77).all() and state.tolist() == [int(expected >= 0), 0, 0, 0, 0, 0, 0]


@inside
@pytest.mark.parametrize("columns", [[0, 1, 2], [-1, 0, 1], [-1, -1, 2]])
def test_wrong_slots(columns: list[int]) -> None:
    """Flagged also where the first site is one that is not stored."""
    _, state = both([0, S, -2, 3], [random_ids(4)] * M, columns)
    assert state[0] == 2


@inside
@pytest.mark.parametrize("num_rows", [0, 3, 5])
def test_rows_for_the_host(num_rows: int) -> None:
    """Errors, calls and the first rows land where the header says, in no case behind them; the device keeps whose turn it is."""
    from r3_pass.passes import kernels

    slots, top_k = [7, -1, 3, 12, 5], 3
    ids = [random_ids(5, 3), random_ids(5, 2), random_ids(5, 3)]
    buffer = torch.full((S + 1, M, top_k), 77, dtype=torch.int16)
    state = torch.zeros(state_size(M), dtype=torch.int32)
    host = np.full(rows_offset(M) + (num_rows + 1) * M * top_k * 2, 55, np.uint8)
    host[: 4 * (STATE_CALLS + M)] = 0
    mapping = torch.tensor([5, host.ctypes.data, num_rows, 0, *slots])
    kernels.record(buffer, state, mapping, torch.tensor([2, 0, 1]), ids)
    assert state.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert host[: 4 * (STATE_CALLS + M)].view(np.int32).tolist() == [0, 1, 1, 1]
    rows = host[rows_offset(M) :].view(np.int16).reshape(num_rows + 1, M, top_k)
    untouched = np.int16(55 * 257)
    for token, slot in enumerate(slots[:num_rows]):
        assert (rows[token] == (untouched if slot < 0 else buffer[slot].numpy())).all()
    assert (rows[num_rows:] == untouched).all()
    mapping[HEADER] = S  # out of range
    kernels.record(buffer, state, mapping, torch.tensor([2, 0, 1]), ids)
    assert host[:4].view(np.int32).tolist() == [2] and not state[: STATE_CALLS + M].any()


@inside
@pytest.mark.parametrize("before", [0, 3, 2**31 - 2])
@pytest.mark.parametrize("writes", [1, 2, 4, 5])
def test_calls_for_the_host(before: int, writes: int) -> None:
    """Each write of a layer sets another byte of its word, wherever the turns stand: up to four are told apart."""
    from r3_pass.passes import kernels

    state = torch.zeros(state_size(M), dtype=torch.int32)
    state[STATE_CALLS + M :] = before
    host = np.zeros(rows_offset(M), np.uint8)
    mapping = torch.tensor([2, host.ctypes.data, 0, 0, 7, -1])
    buffer = torch.zeros(S + 1, M, 2, dtype=torch.int16)
    for _ in range(writes):
        kernels.record(buffer, state, mapping, torch.tensor([2, -1]), [random_ids(2), random_ids(2)])
    words = host[4 : 4 * (STATE_CALLS + M)].reshape(M, TURNS)
    assert words.sum(1).tolist() == [0, 0, min(writes, TURNS)] and not host[:4].any()
    assert words[2, before % TURNS] == 1  # the first one's place


@inside
def test_sites_that_are_not_stored() -> None:
    """Column -1 would be the last layer of the slot before."""
    buffer, state = both([4, 5, 6, 7], [random_ids(4)] * M, [-1, 1, -1])
    assert (buffer[:S, [0, 2]] == 77).all() and state.tolist() == [0, 0, 1, 0]


@inside
@pytest.mark.parametrize("export", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize(("sites", "top_k"), [(2, 8), (17, 8), (21, 6), (62, 1), (3, 70), (2, 200)])
def test_programs(sites: int, top_k: int, tokens: int, export: bool) -> None:
    """A program writes tokens of several sites: neither number fills the last ones, columns are in any order, one is not stored."""
    from r3_pass.passes import kernels

    stored, slots = sites + 1, torch.randperm(50)[:tokens]
    columns = torch.randperm(stored)[:sites]
    columns[sites // 2] = -1
    ids = [random_ids(tokens, top_k if n % 3 else max(top_k - 1, 1)) for n in range(sites)]
    host = np.zeros(rows_offset(stored) + tokens * stored * top_k * 2, np.uint8)
    mapping = torch.cat([torch.tensor([tokens, -1, tokens, 0]), slots])
    buffers = [torch.full((51, stored, top_k), 77, dtype=torch.int16) for _ in range(2)]
    states = [torch.zeros(state_size(stored), dtype=torch.int32) for _ in range(2)]
    record_reference(buffers[1], states[1], mapping, columns, ids)
    if export:
        mapping[1] = host.ctypes.data
    kernels.record(buffers[0], states[0], mapping, columns, ids)
    assert torch.equal(*buffers)
    if not export:
        assert torch.equal(*states)
        return
    calls = host[4 : 4 * (STATE_CALLS + stored)].reshape(stored, TURNS).sum(1)
    assert calls.tolist() == states[1][STATE_CALLS : STATE_CALLS + stored].tolist() and not host[:4].any()
    rows = torch.from_numpy(host[rows_offset(stored) :]).view(torch.int16).view(tokens, stored, top_k)
    written = columns[columns >= 0]
    assert torch.equal(rows[:, written], buffers[0][slots][:, written])
    missing = [n for n in range(stored) if n not in columns.tolist()]
    assert not rows[:, missing].any()


@inside
def test_one_form() -> None:
    """A launch inside a CUDA graph's capture may compile nothing: a layer of a model, by itself, takes the form that all took."""
    from r3_pass.passes import kernels

    mapping = torch.cat([torch.tensor([0, -1, 0, 0]), torch.arange(S)])
    forms = set()
    for sites in (M, 1):
        columns = torch.arange(sites)
        for tokens in (1, 3, S):
            mapping[0] = tokens
            buffer, state = torch.zeros(S + 1, M, 2, dtype=torch.int16), torch.zeros(state_size(M), dtype=torch.int32)
            kernels.record(buffer, state, mapping, columns, [random_ids(tokens) for _ in range(sites)])
        forms |= kernels.prepare(columns).compiled.keys()
    assert len(forms) == 1


@inside
def test_narrower_layers() -> None:
    """Each site has its own k, all in one launch."""
    both([4, 5, 6, 7], [random_ids(4, 1), random_ids(4, 3), random_ids(4, 2)], [0, 1, 2], top_k=3)


@inside
@pytest.mark.parametrize(
    "dtypes",
    [
        [torch.int32] * 3,
        [torch.int16] * 3,
        [torch.uint8] * 3,
        [torch.int64, torch.int32, torch.int16],
        [torch.int32, torch.int64, torch.int64],
    ],
)
def test_dtypes(dtypes: list[torch.dtype]) -> None:
    """The kernel reads either width in place; read as the other, every second id is 0."""
    both([4, 5, 6, 7], [random_ids(4, dtype=d) for d in dtypes], [0, 1, 2])


@inside
def test_strided_ids() -> None:
    """Rows of k + 1, columns in front, every second row: strides of both dimensions."""
    wide = random_ids(8, 3)
    both([4, 5, 6, 7], [wide[:4, :2], random_ids(4, 2).t().contiguous().t(), wide[::2, 1:]], [0, 1, 2])


@inside
def test_addresses_that_come_again() -> None:
    """Tables are kept by the addresses of the ids: new ids at the old place, and old ids in another order, must both be read."""
    from r3_pass.passes import kernels

    ids = [random_ids(4) for _ in range(2)]
    columns = torch.tensor([0, 1])
    mapping = torch.tensor([4, -1, 0, 0, 0, 1, 2, 3])
    for order in ([0, 1], [1, 0], [0, 1]):
        for tensor in ids:
            tensor.copy_(random_ids(4))
        ours, theirs = (torch.full((S + 1, 2, 2), -1, dtype=torch.int16) for _ in range(2))
        for run, buffer in ((kernels.record, ours), (record_reference, theirs)):
            run(buffer, torch.zeros(3, dtype=torch.int32), mapping, columns, [ids[n] for n in order])
        assert torch.equal(ours, theirs)


@inside
def test_many_addresses() -> None:
    """More different tables than are kept: the oldest go, none is mixed up."""
    from r3_pass.passes import kernels

    columns, mapping = torch.tensor([0]), torch.tensor([2, -1, 0, 0, 0, 1])
    pool = random_ids(400)
    for start in list(range(0, 300, 2)) * 2:
        buffer = torch.full((S + 1, 1, 2), -1, dtype=torch.int16)
        kernels.record(buffer, torch.zeros(2, dtype=torch.int32), mapping, columns, [pool[start : start + 2]])
        assert torch.equal(buffer[:2, 0].long(), pool[start : start + 2])


@inside
def test_no_tokens() -> None:
    """A launch over no program is an error on a GPU."""
    _, state = both([], [random_ids(0)] * M, [0, 1, 2])
    assert state.tolist() == [0, 0, 0, 0]
