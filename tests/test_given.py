"""Given routes are judged alike by torch operators and by the Triton kernel; here in Triton's interpreter, and on a GPU.

The interpreter must be chosen before Triton is imported, so those cases run in a process of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from forced import random_ids
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from interpreter import INTERPRETED, inside, outside, run_in_the_interpreter
from torch import Tensor

from r3_pass import InvalidRoutes
from r3_pass.given import Given
from r3_pass.summary import holes, summarise, twice

E = 32


@outside
def test_in_the_interpreter() -> None:
    """The tests of this file that are skipped outside of it."""
    run_in_the_interpreter(__file__)


def by_kernel(routes: Tensor, on_bad_row: Any = "error") -> Given:
    """Routes on the CPU, by the kernel all the same."""
    from r3_pass import summary_kernel

    class ByKernel(Given):
        def _bring(self, given: Tensor, *where: Any) -> Any:
            return summary_kernel.start(given.contiguous())

    return ByKernel(routes, on_bad_row)


def random_routes(rows: int, layers: int, columns: int, experts: int, seed: int) -> Tensor:
    """int64 [R, L, K]: rows of all kinds, most of them right."""
    random = np.random.default_rng(seed)
    routes = np.stack(
        [random.permuted(np.tile(np.arange(max(experts, columns)), (layers, 1)), axis=1)[:, :columns] for _ in range(rows)]
    ) if rows else np.empty((0, layers, columns), np.int64)  # fmt: skip
    for _ in range(random.integers(8) if rows else 0):
        row, layer, column = (random.integers(n) for n in routes.shape)
        what = random.integers(7)
        if what == 0:
            routes[row, layer] = -1
        elif what == 1:
            routes[row, layer, column:] = -1
        elif what == 2:
            routes[row, layer, column] = random.choice([-1, -2, -(1 << 15), experts, (1 << 15) - 1])
        elif what == 3:
            routes[row, layer, column] = routes[row, layer, random.integers(columns)]
        elif what == 4:
            routes[:, layer] = -1
        elif what == 5:
            routes[:, layer] = routes[row, layer]
        else:
            routes[row:, layer] = -1
    return torch.from_numpy(routes)


@inside
@settings(max_examples=60)
@drawn(
    rows=st.sampled_from([0, 1, 2, 63, 1000]),
    layers=st.integers(1, 4),
    columns=st.integers(1, 16),
    experts=st.sampled_from([1, 8, 256]),
    seed=st.integers(0, 1 << 30),
    dtype=st.sampled_from([torch.int16, torch.int32]),
)
def test_the_kernel_equals_torch(
    rows: int, layers: int, columns: int, experts: int, seed: int, dtype: torch.dtype
) -> None:
    from r3_pass import summary_kernel

    routes = random_routes(rows, layers, columns, experts, seed).to(dtype)
    want = routes.to(torch.int32).movedim(1, 0).contiguous()
    got, finish = summary_kernel.start(routes)
    assert got.dtype == torch.int32 and torch.equal(got, want)
    assert finish() == summarise(want)


@inside
def test_more_rows_than_the_programs_take_at_once() -> None:
    from r3_pass import summary_kernel

    good = random_routes(2100, 1, 16, E, 1)
    for fault in (0, 2048):
        routes = good.clone()
        routes[fault] = 7
        got, finish = summary_kernel.start(routes.to(torch.int16))
        want = routes.to(torch.int32).movedim(1, 0).contiguous()
        assert torch.equal(got, want) and finish() == summarise(want)


@inside
def test_ids_of_32_bits() -> None:
    """The smallest and largest are no fill values, and wrap nowhere."""
    from r3_pass import summary_kernel

    low, high = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    for row in ([high, high - 1], [low, low], [low, high], [-1, high], [high, -1], [high, high]):
        routes = torch.tensor(row, dtype=torch.int32).expand(5, 1, 2).contiguous()
        _, finish = summary_kernel.start(routes)
        assert finish() == summarise(routes.movedim(1, 0).contiguous())


# ---- one judgement ---------------------------------------------------------------------------------------------------
def good() -> Tensor:
    return torch.stack([random_ids(9, E, 3, seed=n, live=0) for n in range(2)], 1)


def changed(row: int, ids: list[int]) -> Callable[[], Tensor]:
    def make() -> Tensor:
        routes = good()
        routes[row, 1] = torch.tensor(ids)
        return routes

    return make


def constant(ids: list[int]) -> Callable[[], Tensor]:
    def make() -> Tensor:
        routes = good()
        routes[:, 1] = torch.tensor(ids)
        return routes

    return make


REFUSED: list[tuple[Callable[[], Tensor], str]] = [
    (changed(4, [0, E, 1]), rf"row 4 has an expert that does not exist \(there are {E}\)"),
    (changed(0, [5, 6, 5]), "row 0 has an expert twice"),
    (changed(8, [-1, 4, 5]), "row 8 has -1 before an expert"),
    (changed(3, [4, -1, 5]), "row 3 has -1 before an expert"),
    (changed(3, [4, 5, -2]), "row 3 has .*below -1"),
    (changed(2, [4, 5, -1]), "row 2 has other than 3 experts"),
    (constant([0, 0, 0]), r"all 9 rows are \[0, 0, 0\].* empty capture"),
    (constant([3, 1, 2]), "empty capture"),
    (constant([-1, 1, 2]), "empty capture"),
    (lambda: good()[..., :2], "chooses 3 experts for a token, the routes have 2 columns"),
]


def outcome(make: Callable[..., Given], routes: Tensor, on_bad_row: str, experts: int = E, top_k: int = 3) -> Any:
    """What comes of checking every layer: the error's text, or all that is known afterwards."""
    given = make(routes, on_bad_row)
    try:
        for layer in range(given.layers):
            given.check(layer, layer, experts, top_k)
        laid = given.laid(given.rows, torch.device("cpu"))
    except InvalidRoutes as error:
        return str(error)
    return given.fallback, given.summary, laid.tolist(), given.laid(given.rows + 1, torch.device("cpu")).tolist()


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("nested", lambda: torch.nested.nested_tensor([good()[:4], good()], layout=torch.jagged)),
        ("torch.sparse_coo", lambda: good().to_sparse()),
        ("meta", lambda: good().to("meta")),
    ],
)
def test_tensors_without_a_row_for_each_token(kind: str, make: Callable[[], Tensor]) -> None:
    with pytest.raises(InvalidRoutes, match=f"got one that is {kind}.*routes.pad"):
        Given(make())


def test_masked_routes() -> None:
    """Its mask is lost in every conversion: what it hides would be replayed."""
    with pytest.raises(InvalidRoutes, match=r"masked array.*filled\(-1\)"):
        Given(np.ma.masked_less(good().numpy(), 1))


@pytest.mark.parametrize("on_bad_row", ["error", "live"])
def test_refusals(on_bad_row: str) -> None:
    """With the interpreter, by the kernel as well: the same words, the same rows dropped."""
    for make, reason in REFUSED:
        routes = make()
        found = outcome(Given, routes, on_bad_row)
        whole = isinstance(found, str) and ("empty capture" in reason or "columns" in reason)
        if on_bad_row == "error" or whole:
            with pytest.raises(InvalidRoutes, match=reason):
                raise InvalidRoutes(found)
        else:
            assert found[0] == {1: 1} and found[1].valid == [9, 8] and found[1].broken == [0, 0]
        if INTERPRETED:
            assert outcome(by_kernel, routes, on_bad_row) == found


@inside
@settings(max_examples=40)
@drawn(
    rows=st.sampled_from([0, 1, 5, 200]),
    columns=st.integers(1, 8),
    spare=st.sampled_from([0, 0, 1]),
    seed=st.integers(0, 1 << 30),
    on_bad_row=st.sampled_from(["error", "live"]),
)
def test_one_judgement(rows: int, columns: int, spare: int, seed: int, on_bad_row: str) -> None:
    routes = random_routes(rows, 3, columns, E, seed).to(torch.int16)
    top_k = max(1, columns - spare)
    assert outcome(by_kernel, routes, on_bad_row, E, top_k) == outcome(Given, routes, on_bad_row, E, top_k)


@outside
def test_masks() -> None:
    rows = torch.tensor([[1, 2, 3], [1, 2, 1], [-1, -1, -1], [2, -1, -1], [-1, 2, 3], [2, -1, 3], [2, 3, -2]]).int()
    assert twice(rows).tolist() == [False, True, *[False] * 5]
    assert holes(rows).tolist() == [False] * 4 + [True] * 3
    assert holes(rows[:, :1]).tolist() == [False] * 7 and not twice(rows[:, :1]).any()


# ---- conversions -----------------------------------------------------------------------------------------------------
@outside
@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        (dtype, number)
        for number in ((1 << 32) + 5, (1 << 31) + 5, 5 - (1 << 32))
        for dtype in ("int64", "uint32", "uint64")
        if np.iinfo(dtype).min <= number <= np.iinfo(dtype).max
    ],
)
def test_wide_ids_do_not_wrap(dtype: str, number: int) -> None:
    """Cut to 32 bits, they would be expert 5 or a -1."""
    routes = np.full((3, 2, 2), number, dtype)
    for given in (routes, torch.from_numpy(routes)):
        with pytest.raises(InvalidRoutes, match=rf"hold the id {number}"):
            Given(given)


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i2", ">i8"]
)
def test_every_integer_type_is_copied(dtype: str) -> None:
    """Neither the caller's array nor what hangs on it is written to or read later."""
    numbers = np.arange(24).reshape(3, 4, 2)
    read_only = numbers.astype(dtype)
    read_only.flags.writeable = False
    forms: list[Any] = [numbers.astype(dtype), numbers[::-1].astype(dtype)[::-1], read_only]
    if not dtype.startswith(">"):
        forms.append(torch.from_numpy(numbers.astype(dtype)))
    for form in forms:
        given = Given(form)
        if form is not read_only:
            form[0] = 99
        assert given.routes.dtype == torch.int32
        assert (given.routes.movedim(1, 0).numpy() == numbers).all()


def test_another_default_device() -> None:
    """Programs that set one (a GPU, mostly) have their routes on the host all the same."""
    routes = changed(0, [5, 6, 5])()
    want = outcome(Given, routes, "live")
    with torch.device("meta"):
        assert outcome(Given, routes, "live") == want
        assert outcome(Given, routes.numpy(), "live") == want


# ---- on a GPU --------------------------------------------------------------------------------------------------------
@pytest.mark.cuda
@pytest.mark.parametrize("where", ["cpu", "pinned", "cuda"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("columns", [1, 3, 8])
def test_on_a_gpu(where: str, dtype: torch.dtype, columns: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for rows in (0, 1, 63, 8192, 40001):
        routes = random_routes(rows, 3, columns, 128, rows)
        routes = routes.clamp(min=0 if dtype == torch.uint8 else -(1 << 15), max=200).to(dtype)
        want = outcome(Given, routes, "live", 128, columns)
        held = routes.pin_memory() if where == "pinned" else routes.to(where)
        stream = torch.cuda.Stream()

        def make(ids: Tensor, on_bad_row: Any, stream: torch.cuda.Stream = stream) -> Given:
            return Given(ids, on_bad_row, device, stream)

        def busy(ids: Tensor, on_bad_row: Any, stream: torch.cuda.Stream = stream) -> Given:
            """The caller's array is theirs again at once, though the GPU is far behind."""
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
            copy = ids.clone().pin_memory() if ids.is_pinned() else ids.clone()
            made = Given(copy, on_bad_row, device, stream)
            copy.fill_(0)
            return made

        assert outcome(make, held, "live", 128, columns) == want
        assert outcome(busy, held, "live", 128, columns) == want
        with torch.device(device):
            assert outcome(make, held, "live", 128, columns) == want
        on_gpu = make(held, "live")
        assert not rows or not on_gpu.same(make(torch.full_like(held, 3), "live"))
        assert on_gpu.same(busy(held, "live")) and busy(held, "live").same(Given(routes, "live"))
        assert on_gpu.routes.is_cuda and on_gpu.summary == Given(routes).summary


@pytest.mark.cuda
def test_nothing_is_waited_for_on_a_gpu() -> None:
    """Rows from the host: neither to be queued nor to be checked do they wait for what runs already."""
    device = torch.device("cuda", torch.cuda.current_device())
    beside = torch.cuda.Stream()
    routes = random_routes(512, 3, 8, 128, 0).clamp(-1, 127).to(torch.int16)
    _ = Given(routes, "live", device, beside).summary  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    done = torch.cuda.Event()
    done.record()
    given = Given(routes, "live", device, beside)
    assert given.summary == Given(routes).summary
    assert not done.query()
    torch.cuda.synchronize()


def test_rows_of_a_router_that_chooses_more() -> None:
    """Another model's routes: not one bad row, and so not told as one."""
    routes = torch.stack([random_ids(9, E, 4, seed=n, live=0) for n in range(2)], 1)
    told = "layer 0 .*chooses 3 experts for a token, and each row there has 4 or more"
    with pytest.raises(InvalidRoutes, match=told):
        Given(routes).check(0, 0, E, 3)
