"""Where a value comes from, as a selection sees it: from its ids, from its router's product, or from the token by another way."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from r3_pass.registry.dataflow import DataFlow, is_tensor, spelling, value
from r3_pass.registry.operators import REARRANGE, SELECTIONS
from r3_pass.registry.trace import Root

_UNCHANGED = REARRANGE | {"getitem", "cat", "stack", "gather", "roll", "flip", "index_select", "narrow", "select"}


class Origins:
    """Questions about what a value is made of.

    Args:
        ids: the selection's.
        roots: the router products behind it.

    Attributes:
        starts: the ids.
        first: where the router's product, or else the selection, stands in the graph.
    """

    def __init__(self, flow: DataFlow, ids: Sequence[fx.Node], roots: Sequence[Root]) -> None:
        self.flow = flow
        self.starts = set(ids)
        self.roots = {r.node for r in roots}
        self.first = min((flow.order[n] for n in (self.roots or self.starts) if n in flow.order), default=0)

    def is_choice(self, node: fx.Node) -> bool:
        """Whether a value is these ids, or some of them, as they were chosen."""
        stack, seen = [node], {node}
        while stack:
            top = stack.pop()
            if top in self.starts:
                return True
            if spelling(top) not in _UNCHANGED:
                continue
            for source in self.flow.inputs(top):
                if source not in seen and is_tensor(source) and not value(source).dtype.is_floating_point:
                    seen.add(source)
                    stack.append(source)
        return False

    def made_of_ids(self, node: fx.Node) -> bool:
        """Whether a value comes from these ids (and their scores) alone: a place in an expert's queue, say."""
        stack, seen, found = [node], {node}, False
        while stack:
            top = stack.pop()
            if top in self.starts or top in self.roots:
                found = True
                continue
            if self.flow.kind(top) != "data":
                continue
            if top.op == "placeholder" or self.flow.order[top] < self.first or spelling(top) in SELECTIONS:
                return False
            for source in self.flow.inputs(top):
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return found

    def depends(self, node: fx.Node) -> bool:
        """Whether a value depends on these ids."""
        stack, seen = [node], {node}
        while stack:
            top = stack.pop()
            if top in self.starts:
                return True
            for source in self.flow.inputs(top):
                if source not in seen and self.flow.order.get(source, 0) > self.first:
                    seen.add(source)
                    stack.append(source)
        return False

    def beyond(self, node: fx.Node) -> bool:
        """True if the value depends on the token by another way than the router's scores."""
        if self.flow.kind(node) != "data":
            return False
        stack, seen = [node], {node}
        while stack:
            top = stack.pop()
            if top in self.roots or self.flow.kind(top) != "data":
                continue
            if top.op == "placeholder" or self.flow.order[top] < self.first:
                if is_tensor(top) or top.op != "placeholder":
                    return True
                continue
            for source in self.flow.inputs(top):
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return False

    def scored(self, node: fx.Node) -> bool:
        """Whether a value comes from the router's product with no selection between."""
        stack, seen = [node], {node}
        while stack:
            top = stack.pop()
            if top in self.roots:
                return True
            if spelling(top) in SELECTIONS or top in self.starts or self.flow.order.get(top, 0) < self.first:
                continue
            for source in self.flow.inputs(top):
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return False


def others(flow: DataFlow, user: fx.Node, node: fx.Node) -> list[fx.Node]:
    """The tensors that an operator reads beside one of them."""
    return [n for n in flow.inputs(user) if n is not node and (is_tensor(n) or spelling(n) == "setitem")]
