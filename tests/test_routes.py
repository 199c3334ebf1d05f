"""Rows on their way to a forward: padded, packed, split; a row never moves to another token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

import r3_pass
from r3_pass import routes

LIVE = -1


def rows(count: int, first: int = 0) -> npt.NDArray[np.int16]:
    """int16 [count, 2, 3]; each row says which one it is."""
    return np.broadcast_to(np.arange(first, first + count, dtype=np.int16)[:, None, None], (count, 2, 3)).copy()


def of(array: npt.NDArray[np.int16]) -> list[int]:
    """The number of each row."""
    assert (array == array[..., :1, :1]).all()
    return array[..., 0, 0].tolist()


def test_pad() -> None:
    assert of(routes.pad([rows(3), rows(2, 10)], 4)) == [[0, 1, 2, LIVE], [10, 11, LIVE, LIVE]]
    assert of(routes.pad([rows(3), rows(2, 10)], 4, offsets=[1, 2])) == [[LIVE, 0, 1, 2], [LIVE, LIVE, 10, 11]]
    assert of(routes.pad([rows(3), rows(2, 10)], 6, offsets=[1, 2]))[1] == [LIVE, LIVE, 10, 11, LIVE, LIVE]
    assert routes.pad([torch.from_numpy(rows(3))], 4).dtype == np.int16


def test_complete_then_pad_left() -> None:
    """A recorded request has no row for its last token: with padding on the left, that one comes last."""
    whole = [routes.complete(rows(3), 4), routes.complete(rows(1, 10), 2)]
    assert of(routes.pad(whole, 5, side="left")) == [[LIVE, 0, 1, 2, LIVE], [LIVE, LIVE, LIVE, 10, LIVE]]


def test_pack() -> None:
    packed = routes.pack([rows(2), rows(3, 10), rows(1, 20)], [0, 3, 6, 7])
    assert of(packed) == [0, 1, LIVE, 10, 11, 12, 20]
    assert of(routes.pack([rows(2)], torch.tensor([0, 3]))) == [0, 1, LIVE]


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_split_gives_every_row_to_one_rank(order: str) -> None:
    parts = [of(routes.split(rows(8), 8, rank, 2, order=order)) for rank in range(2)]  # type: ignore[arg-type]
    assert sorted(parts[0] + parts[1]) == list(range(8))
    assert parts[0] == ([0, 1, 2, 3] if order == "contiguous" else [0, 1, 6, 7])
    batch = np.stack([rows(8), rows(8, 10)])
    assert of(routes.split(batch, 8, 1, 2, axis=1, order=order))[1] == [n + 10 for n in parts[1]]  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("count", [9, 10, 11, 12])
def test_split_goes_by_tokens(count: int, order: str) -> None:
    """A rollout of 9 tokens has 8 rows, which four ranks could share; the tokens that they get are those of 12 or 16."""
    length = 12 if order == "contiguous" else 16
    ranks = 4 if order == "contiguous" else 2
    tokens = [*range(count - 1), *[LIVE] * (length - count + 1)]
    parts = [tokens[n : n + length // 4] for n in range(0, length, length // 4)]
    of_ranks = parts if order == "contiguous" else [parts[0] + parts[3], parts[1] + parts[2]]
    for rank, wanted in enumerate(of_ranks):
        given = routes.split(rows(count - 1), length, rank, ranks, order=order)  # type: ignore[arg-type]
        assert of(given) == wanted
        batch = routes.split(np.stack([rows(count - 1)] * 2), length, rank, ranks, axis=1, order=order)  # type: ignore[arg-type]
        assert of(batch) == [wanted] * 2


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: routes.pad([rows(5)], 4), "the batch is 4 wide"),
        (lambda: routes.pad([rows(2)], 4, offsets=[3]), "from column 3 on"),
        (lambda: routes.pad([routes.complete(rows(2), 3), rows(2)], 4, side="left"), "sequence 1 .* a token late"),
        (lambda: routes.pad([rows(2)], 4, offsets=[0, 1]), "2 offsets"),
        (lambda: routes.pad([rows(2), rows(2)[:, :1]], 4), "all are"),
        (lambda: routes.pad([rows(2), None], 4), "sequence 1 has no rows"),
        (lambda: routes.pad([rows(2).astype(np.uint8)], 4), "signed"),
        (lambda: routes.pad([rows(2).astype(np.float32)], 4), "signed"),
        (lambda: routes.pad([np.ma.masked_equal(rows(2), 1)], 4), r"masked array.*filled\(-1\)"),
        (lambda: routes.split(np.ma.masked_equal(rows(4), 1), 4, 0, 2), "masked array"),
        (lambda: routes.pack([rows(2)], [0, 4]), "2 rows for 4 tokens"),
        (lambda: routes.pack([rows(4)], [0, 3]), "4 rows for 3 tokens"),
        (lambda: routes.pack([rows(2)], [0, 3, 6]), "does not bound"),
        (lambda: routes.split(rows(6), 7, 0, 2), "cannot be cut in 2"),
        (lambda: routes.split(rows(9), 8, 0, 2), "9 rows for 8 tokens"),
        (lambda: routes.split(rows(6), 6, 0, 2, order="zigzag"), "cannot be cut in 4"),
    ],
)
def test_what_does_not_fit(call: object, reason: str) -> None:
    with pytest.raises(r3_pass.InvalidRoutes, match=reason):
        call()  # type: ignore[operator]


@pytest.mark.parametrize(
    "call",
    [
        lambda: routes.pad([], 4),
        lambda: routes.pad(rows(2), 4),  # type: ignore[arg-type]
        lambda: routes.pad([rows(1)], 4, side="middle"),  # type: ignore[arg-type]
        lambda: routes.split(rows(4), 4, 2, 2),
        lambda: routes.split(rows(4), 4, 0, 2, order="ring"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_make_no_sense(call: object) -> None:
    with pytest.raises(ValueError):
        call()  # type: ignore[operator]
