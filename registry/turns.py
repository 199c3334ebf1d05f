"""Transpositions: which dimension was which."""

from __future__ import annotations

from typing import Any

from torch import fx

from r3_pass.registry.operators import argument

TURNS = frozenset({"transpose", "permute", "movedim", "t", "T", "mT", "numpy_T", "adjoint"})


def moved_order(node: fx.Node, name: str, rank: int) -> list[int] | None:
    """For each dimension of a transposition's result, which one it was; None if that is not understood."""
    order = list(range(rank))
    if name == "transpose":
        a, b = argument(node, 1, "dim0", "axis0"), argument(node, 2, "dim1", "axis1")
        if not isinstance(a, int) or not isinstance(b, int):
            return None
        order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
    elif name == "permute":
        given: Any = argument(node, 1, "dims")
        given = given if isinstance(given, tuple | list) else node.args[1:]
        if not all(isinstance(d, int) for d in given):
            return None
        order = [d % rank for d in given]
    elif name == "movedim":
        source, target = argument(node, 1, "source"), argument(node, 2, "destination")
        if not isinstance(source, int) or not isinstance(target, int):
            return None
        order.pop(source % rank)
        order.insert(target % rank, source % rank)
    elif name in ("mT", "adjoint"):
        order[-1], order[-2] = order[-2], order[-1]
    else:
        order.reverse()
    return order if len(order) == rank else None
