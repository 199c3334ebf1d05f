"""Where tokens and choices stand in a value, dimension by dimension:

T  tokens, in their order       K  the chosen experts of a token      N  a dimension that was added (size 1, or expanded)
F  tokens and choices in one    P  in the order of experts, by a sort of these ids
"""

from __future__ import annotations

import dataclasses

from torch import fx

from r3_pass.registry.shapes import dims


@dataclasses.dataclass(frozen=True)
class Mark:
    """A number that is no expert's, in the place of some ids: of choices that were dropped, say."""

    number: int | float
    at: fx.Node
    condition: fx.Node
    holds: bool


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where tokens and choices stand in a value that holds ids.

    Attributes:
        tags: one letter for each dimension.
        columns: which of the selection's columns it holds, in order.
        offset: what was added to each id.
        scale: the ids were multiplied, to number slots.
        turned: a token's choices stand in another order than their weights.
        marks: numbers among them that are no expert's.
    """

    tags: tuple[str, ...]
    columns: tuple[int, ...]
    offset: int = 0
    scale: bool = False
    turned: bool = False
    marks: tuple[Mark, ...] = ()


class Changed(Exception):
    """Raised while layouts are read, and seen nowhere else: an operator is not known to keep the ids."""


def first_layout(ids: fx.Node, k_dim: int | None) -> Layout:
    """The layout of a selection's ids, whose dimension `k_dim` holds a token's choices; None if none does."""
    shape = dims(ids)
    if k_dim is None or not shape or not isinstance(shape[k_dim % len(shape)], int):
        return Layout(("T",) * len(shape), (0,))
    at = k_dim % len(shape)
    return Layout(tuple("K" if i == at else "T" for i in range(len(shape))), tuple(range(shape[at])))
