"""What experts' work looks like: which weights hold several experts, and which values several of them, or one, have made."""

from __future__ import annotations

from typing import Any

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.operators import CONTRACTIONS, SELECTIONS, is_opaque, spelling
from r3_pass.registry.shapes import dims, is_tensor
from r3_pass.registry.walk import walk

_SCORING = frozenset({
    "softmax", "log_softmax", "sigmoid", "add", "mul", "div", "to", "float", "view", "masked_fill", "tanh", "exp", "getitem",
    "where", "contiguous", "type_as", "transpose",
})  # fmt: skip


class Experts:
    """Questions about the experts of a selection.

    Args:
        number: E, an int; None if not known.
        first: where the router's product stands in the graph; experts work behind it.
    """

    def __init__(self, flow: DataFlow, number: Any, first: int) -> None:
        self.flow, self.number, self.first = flow, number, first

    def counts(self, size: Any) -> bool:
        """Whether a size can be the number of experts: what was chosen among, or less where the router's weight is padded."""
        if size == self.number:
            return True
        return isinstance(size, int) and isinstance(self.number, int) and 2 <= size < self.number <= 2 * size

    def is_bank(self, weight: fx.Node) -> bool:
        """Whether a weight holds all experts' parameters."""
        shape = dims(weight)
        return len(shape) >= 3 and (self.number in shape or self.counts(shape[0]))

    def made_together(self, node: fx.Node) -> bool:
        """True if parameters with an expert dimension, or several experts stacked, are contracted on the way to this value."""
        for top in walk(node, self._since_the_router, most=400):
            sources = self.flow.inputs(top)
            joined = spelling(top) in ("stack", "cat") and len(sources) >= 2
            if joined and (self.number is None or self.counts(len(sources))):
                return True
            banks = (n for n in sources if self.flow.kind(n) == "weight" and self.is_bank(n))
            if (spelling(top) in CONTRACTIONS or is_opaque(top)) and next(banks, None) is not None:
                return True
        return False

    def made_by_one(self, partner: fx.Node) -> bool:
        """True if the value is what one expert makes of the token: contracted with a weight since the router."""
        return any(
            spelling(top) in CONTRACTIONS and any(self.flow.kind(n) == "weight" for n in self.flow.inputs(top))
            for top in walk(partner, self._since_the_router, most=60)
        )

    def _since_the_router(self, top: fx.Node) -> list[fx.Node]:
        later = [n for n in self.flow.inputs(top) if self.flow.order.get(n, 0) > self.first]
        return [n for n in later if self.flow.kind(n) == "data"]


def scores_a_choice(flow: DataFlow, node: fx.Node) -> bool:
    """Whether a product is scores of a further selection (a second level of routing), rather than an expert's work."""
    stack, seen = [node], {node}
    while stack and len(seen) < 40:
        for user in flow.users(stack.pop()):
            if (spelling(user) in SELECTIONS and spelling(user) not in ("max", "min")) or picks_along_a_dimension(user):
                return True
            if user in seen or spelling(user) in CONTRACTIONS or is_opaque(user) or user.op == "output":
                continue
            if spelling(user) in _SCORING:
                seen.add(user)
                stack.append(user)
    return False


def picks_along_a_dimension(node: fx.Node) -> bool:
    """`max(dim)` or `min(dim)`, which return indices as well."""
    return spelling(node) in ("max", "min") and not is_tensor(node)
