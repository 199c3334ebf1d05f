"""Masks made of a choice: one-hots, memberships, dense weights. Do they still say who was chosen, or not chosen, or neither?

A mask is upright where it is zero (or -inf) for all that were not chosen, and inverse where for those that were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.dispatched import MASK
from r3_pass.registry.numbers import is_low, is_zero, number_of
from r3_pass.registry.operators import (
    CONTRACTIONS,
    CREATION,
    GROUPED,
    PICKS,
    REARRANGE,
    SELECTIONS,
    argument,
    is_opaque,
    spelling,
)
from r3_pass.registry.order import out_of_order
from r3_pass.registry.origins import Origins, others
from r3_pass.registry.shapes import dims, is_tensor, value

_JOINS = frozenset({"where", "or", "maximum", "add", "setitem", "masked_scatter", "scatter", "index_put"})
_KEEPS_MASKS = REARRANGE | {
    "getitem", "select", "narrow", "slice", "unbind", "chunk", "split", "tensor_split", "split_with_sizes", "cat", "stack",
    "movedim", "t", "T", "mT", "bool", "double", "short", "char", "int", "expand_as", "broadcast_to", "repeat_interleave", "sum",
    "amax", "max", "any", "mean", "cumsum", "bincount", "histc", "and", "or", "not", "mul", "div", "add", "sub", "eq", "ne", "gt",
    "ge", "lt", "le", "masked_fill", "where", "setitem", "index_put", "scatter", "scatter_add", "scatter_reduce", "index_add",
    "index_copy", "index_select", "gather", "take_along_dim", "embedding", "take", "nonzero", "argwhere", "masked_select",
    "softmax", "log", "relu", "clamp", "clamp_min", "clamp_max", "clip", "normalize", "dropout", "maximum", "minimum", "copy",
    "convert_element_type", "alias", "numel", "item", "tolist", *CONTRACTIONS,
}  # fmt: skip


NEVER = -50.0
"""A score below it has a sigmoid, and an exponential, of nothing that matters."""


class Masks:
    """What is known of the masks of one selection.

    Args:
        k_dim: the dimension of its ids that holds a token's choices; None if none does.
        experts: E, or None.
        labels: what each value is followed as (see `dispatch`), kept up to date by who follows.

    Attributes:
        low: masks that are -inf, or as good as that, for all that were not chosen.
        changes: masks that say something else than who was chosen, and how.
        made_of: for each of these, the masks it was made of.
    """

    def __init__(
        self, flow: DataFlow, origins: Origins, k_dim: int | None, experts: Any, labels: dict[fx.Node, set[str]]
    ) -> None:
        self.flow, self.origins, self.k_dim, self.experts, self.labels = flow, origins, k_dim, experts, labels
        self.low: set[fx.Node] = set()
        self.changes: dict[fx.Node, str] = {}
        self.made_of: dict[fx.Node, set[fx.Node]] = {}
        self.inverse: set[fx.Node] = set()
        self.upright: set[fx.Node] = set()
        self.shifted: set[fx.Node] = set()  # less a number

    def note(self, node: fx.Node, user: fx.Node, name: str) -> None:
        """Note how an operator changes what a mask says."""
        if node in self.low and name in REARRANGE:
            self.low.add(user)
        if how := self.change(node, user, name):
            self.changes[user] = f"{name} ({user.name}) {how}"
            self.made_of.setdefault(user, set()).add(node)

    def mark(self, mask: fx.Node, inverse: bool) -> None:
        """Note whether a MASK is zero (or -inf) where the ids are, rather than elsewhere."""
        (self.inverse if inverse else self.upright).add(mask)

    def left_out(self, mask: fx.Node) -> bool:
        return mask in self.inverse and mask not in self.upright

    def turns(self, node: fx.Node, user: fx.Node, name: str) -> bool:
        """Whether an operator makes of a mask the mask of everything else."""
        if name == "not":
            return True
        if name == "sub":
            return not isinstance(user.args[0], fx.Node)
        if name in ("eq", "lt", "le"):
            known = number_of(argument(user, 1, "other")) is not None
            return known and (name != "eq" or is_zero(argument(user, 1, "other")))
        place = {"masked_fill": (1, 2), "where": (0, 1), "setitem": (1, 2), "index_put": (1, 2)}.get(name)
        if place is None or (name == "where" and user.op == "call_method"):
            return False
        index = user.args[place[0]] if len(user.args) > place[0] else None
        masks = index if isinstance(index, tuple | list) else (index,)
        filled = argument(user, place[1], "value", "input", "values")
        return any(isinstance(m, fx.Node) and self.flow.operand(user, m) is node for m in masks) and (
            is_zero(filled) or is_low(filled)
        )

    def change(self, node: fx.Node, user: fx.Node, name: str) -> str:
        """How an operator makes of a mask one that says something else than who was chosen; "" if it is known not to."""
        if name in CREATION or is_opaque(user) or name in GROUPED or name in SELECTIONS:
            return ""
        if how := self._by_arithmetic(node, user, name) or self._as_condition(node, user, name):
            return how
        if name in ("sigmoid", "exp") and node in self.low:
            return ""
        if name in _JOINS and any(self.thresholded(n) for n in others(self.flow, user, node)):
            return "joins them with experts that a threshold chose"
        if out_of_order(self.flow, user) or self._shuffled(node, user, name):
            return "moves them to other tokens or experts"
        return "" if name in _KEEPS_MASKS else "is not known to keep who was chosen"

    def _by_arithmetic(self, node: fx.Node, user: fx.Node, name: str) -> str:
        first = self.flow.operand(user, user.args[0]) if user.args else None
        numbers = [number_of(a) for a in user.args[:2]]
        number = next((n for n in numbers if n is not None and not isinstance(n, bool)), None)
        if name == "sub":
            reverse = "rsub" in str(user.target)
            if reverse or (first is not None and first is not node and MASK not in self.labels.get(first, ())):
                return "takes those that were chosen away from the others"
            if number is not None and first is node:
                self.shifted.add(user)
        if node in self.shifted:
            if name in ("mul", "div", *REARRANGE):
                self.shifted.add(user)
            elif name not in ("add", "sub"):
                return "does not keep who was chosen"
        if name == "mul" and number is not None and number < 0:
            return "turns chosen and not chosen about"
        if name == "add" and number is not None and number > 0 and node not in self.shifted:
            return "gives weight to those that were not chosen"
        if name in ("clamp", "clamp_min", "clip") and argument(user, 1, "min") not in (None, 0):
            return "gives weight to those that were not chosen"
        if name in ("add", "sub") and argument(user, 2, "alpha", default=1) != 1:
            return "takes those that were chosen away from the others"
        if name == "ne" and not (len(user.args) > 1 and is_zero(user.args[1])):
            return "does not keep who was chosen"
        return ""

    def _as_condition(self, node: fx.Node, user: fx.Node, name: str) -> str:
        """A mask that picks, or that says where something is put."""
        given = [self.flow.operand(user, a) for a in user.args[:2]]
        beside = others(self.flow, user, node)
        source = given[0] if given and given[0] is not node else None
        looked_up = name == "getitem" and source is not None and self.flow.kind(source) != "data" and is_tensor(node)
        if looked_up and value(node).dtype != torch.bool:
            return "looks up another value for those that were chosen"
        if any(self.origins.beyond(n) for n in beside):
            return ""
        plain = any(is_zero(branch) or is_low(branch) for branch in user.args[1:3])
        if name == "where" and user.op != "call_method" and given and given[0] is node and beside and not plain:
            return "takes one or another value by them"
        known = number_of(argument(user, 2, "value", "values")) is not None
        if name in ("masked_fill", "setitem", "index_put") and node in given[1:] + self._index_of(user) and not known:
            return "writes another value over those that were chosen"
        return ""

    def _index_of(self, user: fx.Node) -> list[fx.Node | None]:
        index = user.args[1] if len(user.args) > 1 else None
        return [self.flow.operand(user, i) for i in index] if isinstance(index, tuple | list) else []

    def _shuffled(self, node: fx.Node, user: fx.Node, name: str) -> bool:
        """Whether a mask is indexed by what is not made of the ids: rows of other tokens, or columns of other experts."""
        cut = name in ("getitem", "select", "narrow") and is_tensor(node) and not others(self.flow, user, node)
        if cut and self._without_tokens(node, user):
            return True
        if name not in PICKS or self.flow.operand(user, user.args[0]) is not node:
            return name in ("cat", "stack") and self._crossed(user)
        if name == "getitem":
            index = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
            if any(isinstance(i, list) for i in index):
                return True
        indices = [n for n in self.flow.inputs(user) if n is not node and is_tensor(n)]
        return bool(indices) and not any(self.labels.get(n) for n in indices)

    def _without_tokens(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether a dimension of tokens is gone, or shorter."""
        tokens = {
            size
            for ids in self.origins.starts
            for at, size in enumerate(dims(ids))
            if self.k_dim is None or at != self.k_dim % len(dims(ids))
        }
        before, after = list(dims(node)), list(dims(user))
        return any(before.count(size) > after.count(size) for size in tokens - {1, self.experts})

    def adds_tokens_up(self, node: fx.Node) -> bool:
        """Whether a mask is counted over tokens."""
        source = self.flow.operand(node, node.args[0]) if node.args and spelling(node) == "sum" else None
        return source is not None and MASK in self.labels.get(source, ()) and self._without_tokens(source, node)

    def _crossed(self, user: fx.Node) -> bool:
        """Whether pieces of one value are joined in another order than they had."""
        parts = argument(user, 0, "tensors")
        pieces = [self.flow.operand(user, p) for p in parts] if isinstance(parts, tuple | list) else []
        cut = [p.args for p in pieces if p is not None and spelling(p) == "getitem" and not is_tensor(p.args[0])]
        whole = {source for source, *_ in cut}
        numbers = [number for _, number in cut]
        return len(cut) == len(pieces) > 1 and (len(whole) > 1 or numbers != sorted(numbers))  # type: ignore[type-var]

    def thresholded(self, node: fx.Node) -> bool:
        """Whether a value is made of scores by comparing them with something, without a selection between."""
        if MASK in self.labels.get(node, ()):
            return False
        stack, seen, compared = [node], {node}, False
        while stack:
            top = stack.pop()
            if self.flow.kind(top) != "data" or spelling(top) in SELECTIONS or top in self.origins.starts:
                continue
            if top in self.origins.roots or top.op == "placeholder" or self.flow.order[top] < self.origins.first:
                continue
            sources = self.flow.inputs(top)
            if spelling(top) in ("gt", "ge", "lt", "le") and any(
                is_tensor(n) and value(n).dtype.is_floating_point and self.origins.scored(n) for n in sources
            ):
                compared = True
            for source in sources:
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return compared
