"""Rows of routed experts on their way from rollouts to a forward: padded, packed, split over ranks.

    rows = [output.routed_experts for output in outputs]             # int16 [seq_len - 1, layers, top_k] each
    with backend.replay(r3_pass.routes.pad(rows, input_ids.shape[1], side="right")):
        ...

All take and return numpy arrays of the rows' own dtype (-1 needs a signed one); -1 is a row for the live router. Rows are never
shifted: row t stays the token at position t. Turns of a conversation become one sequence with `r3_pass.stitch`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from r3_pass.errors import InvalidRoutes

Rows = npt.NDArray[np.signedinteger[Any]]


def pad(rows: Sequence[Any], length: int, *, side: Literal["right", "left"] = "right", offsets: Any = None) -> Rows:
    """One padded batch [B, length, L, K] of B sequences' rows; what no row is for is -1.

    Args:
        rows: for each sequence [n, L, K]: one row for each token, or for all but the last.
        length: S of the forward's input ids [B, S].
        side: where the padding tokens are. With "left", the first row's place follows from the last one's: rows must end in the
            -1 of the last token (see `complete`); for rows of every token, that one's too, give `offsets`.
        offsets: int [B], the column of each sequence's first token, in place of `side`: prompts padded left, completions right.

    Raises: InvalidRoutes if a sequence does not fit, or may lack the row of its last token where the padding is on the left.
    """
    if side not in ("right", "left"):
        raise ValueError(f"side is 'right' or 'left', got {side!r}")
    arrays = _arrays(rows)
    starts = (
        [0 if side == "right" else length - len(a) for a in arrays] if offsets is None else [int(o) for o in offsets]
    )
    if len(starts) != len(arrays):
        raise InvalidRoutes(f"{len(arrays)} sequences, {len(starts)} offsets")
    batch = np.full((len(arrays), length, *arrays[0].shape[1:]), -1, arrays[0].dtype)
    for number, (array, start) in enumerate(zip(arrays, starts, strict=True)):
        if offsets is None and side == "left" and (array[-1:] != -1).any():
            raise InvalidRoutes(
                f"sequence {number} has {len(array)} rows, and whether the last one is its last token's is not known: recorded "
                "rows lack that one, and with padding on the left all would be a token late. Give "
                "complete(rows, how many tokens it has), or offsets=, the column of each sequence's first token."
            )
        if start < 0 or start + len(array) > length:
            raise InvalidRoutes(
                f"sequence {number} has {len(array)} rows from column {start} on; the batch is {length} wide. Truncate its rows "
                "as its tokens were truncated."
            )
        batch[number, start : start + len(array)] = array
    return batch


def complete(rows: Any, length: int) -> Rows:
    """One sequence's rows with -1 for its last tokens that have none, [length, L, K]."""
    row: Rows = pad([rows], length)[0]
    return row


def pack(rows: Sequence[Any], cu_seqlens: Any) -> Rows:
    """Packed rows [T, L, K] of sequences that lie one after the other, -1 where a sequence's last tokens have no row.

    Args:
        cu_seqlens: int [B + 1], where each sequence begins in the packed tokens, and T at the end.

    Raises: InvalidRoutes if a sequence has more rows than tokens, or lacks more than one.
    """
    arrays = _arrays(rows)
    bounds = [int(b) for b in cu_seqlens]
    if len(bounds) != len(arrays) + 1 or bounds[0] != 0 or any(b < a for a, b in itertools.pairwise(bounds)):
        raise InvalidRoutes(f"cu_seqlens {bounds} does not bound {len(arrays)} sequences: 0, the end of each in order")
    packed = np.full((bounds[-1], *arrays[0].shape[1:]), -1, arrays[0].dtype)
    for number, (array, start, end) in enumerate(zip(arrays, bounds, bounds[1:], strict=False)):
        if len(array) not in (end - start, end - start - 1):
            raise InvalidRoutes(
                f"sequence {number} has {len(array)} rows for {end - start} tokens: one for each token, or for all but "
                "the last. Use complete(rows, length) where more are to be live."
            )
        packed[start : start + len(array)] = array
    return packed


def split(
    routes: Any,
    length: int,
    rank: int,
    world_size: int,
    *,
    axis: int = 0,
    order: Literal["contiguous", "zigzag"] = "contiguous",
) -> Rows:
    """The rows of one rank of a context- or sequence-parallel group: one for each of the rank's tokens.

    Args:
        routes: [tokens, L, K] (axis 0), or padded [batch, seq, L, K] (axis 1).
        length: how many tokens lie on the axis as they are split, padding included. The last ones may have no row, and get -1: a
            rank that is given one row less than it has tokens would otherwise take it for that of its own last token.
        order: "contiguous" cuts the axis in `world_size` parts; "zigzag" in twice as many, of which rank r takes parts r and
            2 * world_size - 1 - r, which balances causal attention.

    Raises: InvalidRoutes if there are more rows than tokens, or these cannot be cut evenly: pad the tokens first.
    """
    if order not in ("contiguous", "zigzag"):
        raise ValueError(f"order is 'contiguous' or 'zigzag', got {order!r}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is 0 to {world_size - 1}, got {rank}")
    array = _array(routes)
    parts = world_size if order == "contiguous" else 2 * world_size
    if array.shape[axis] > length:
        raise InvalidRoutes(
            f"{array.shape[axis]} rows for {length} tokens: truncate rows as their tokens were truncated"
        )
    if length % parts:
        raise InvalidRoutes(
            f"{length} tokens cannot be cut in {parts} equal parts ({order}, {world_size} ranks). Pad the tokens first, and "
            "say how many there are then."
        )
    missing = [(0, 0)] * array.ndim
    missing[axis] = 0, length - array.shape[axis]
    cut = np.split(np.pad(array, missing, constant_values=-1), parts, axis)
    taken = [cut[rank]] if order == "contiguous" else [cut[rank], cut[parts - 1 - rank]]
    return np.concatenate(taken, axis)


def refuse_masked(rows: Any) -> None:
    """Raises: InvalidRoutes for a masked array, whose mask every conversion would drop."""
    if isinstance(rows, np.ma.MaskedArray):
        raise InvalidRoutes(
            "rows are a masked array, and what its mask hides would be replayed. Give rows.filled(-1): -1 is the live router"
        )


def _array(rows: Any) -> Rows:
    refuse_masked(rows)
    array = rows.detach().cpu().numpy() if hasattr(rows, "detach") else np.asarray(rows)
    if array.dtype.kind != "i":
        raise InvalidRoutes(f"rows are signed integers, so that -1 can stand for the live router; got {array.dtype}")
    return array


def _arrays(rows: Sequence[Any]) -> list[Rows]:
    if getattr(rows, "ndim", 4) < 4:
        raise ValueError(f"rows are a list, [n, layers, top_k] of each sequence, got one {type(rows).__name__}")
    rows = list(rows)
    without = next((number for number, r in enumerate(rows) if r is None), None)
    if without is not None:
        raise InvalidRoutes(
            f"sequence {without} has no rows (None), as a request that failed: leave it out of the batch, or give it rows of -1, "
            "which leave its tokens to the live router"
        )
    arrays = [_array(r) for r in rows]
    if not arrays:
        raise ValueError("no sequences were given")
    for number, array in enumerate(arrays):
        if array.ndim != 3 or array.shape[1:] != arrays[0].shape[1:] or array.dtype != arrays[0].dtype:
            raise InvalidRoutes(
                f"sequence {number} has rows {array.dtype}{list(array.shape)}, the first one {arrays[0].dtype}"
                f"{list(arrays[0].shape)}: all are [n, layers, top_k] of one model"
            )
    return arrays
