"""Where a value comes from, as a selection sees it: from its ids, from its router's product, or from the token by another way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.operators import REARRANGE, SELECTIONS, spelling
from r3_pass.registry.shapes import is_tensor, value
from r3_pass.registry.trace import Root
from r3_pass.registry.walk import walk

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

        def unchanged(top: fx.Node) -> list[fx.Node]:
            if spelling(top) not in _UNCHANGED:
                return []
            return [n for n in self.flow.inputs(top) if is_tensor(n) and not value(n).dtype.is_floating_point]

        return any(top in self.starts for top in walk(node, unchanged))

    def made_of_ids(self, node: fx.Node) -> bool:
        """Whether a value comes from these ids (and their scores) alone: a place in an expert's queue, say."""
        found = False
        for top in walk(node, self._data):
            if top in self.starts or top in self.roots:
                found = True
            elif self.flow.kind(top) == "data" and (self._before(top) or spelling(top) in SELECTIONS):
                return False
        return found

    def depends(self, node: fx.Node) -> bool:
        """Whether a value depends on these ids."""

        def behind(top: fx.Node) -> list[fx.Node]:
            return [n for n in self.flow.inputs(top) if n in self.starts or self.flow.order.get(n, 0) > self.first]

        return any(top in self.starts for top in walk(node, behind))

    def beyond(self, node: fx.Node) -> bool:
        """True if the value depends on the token by another way than the router's scores."""
        if self.flow.kind(node) != "data":
            return False

        def further(top: fx.Node) -> Iterable[fx.Node]:
            ends = top in self.roots or self.flow.kind(top) != "data" or self._before(top)
            return () if ends else self.flow.inputs(top)

        return any(
            top not in self.roots
            and self.flow.kind(top) == "data"
            and self._before(top)
            and (is_tensor(top) or top.op != "placeholder")
            for top in walk(node, further)
        )

    def scored(self, node: fx.Node) -> bool:
        """Whether a value comes from the router's product with no selection between."""

        def further(top: fx.Node) -> Iterable[fx.Node]:
            ends = spelling(top) in SELECTIONS or top in self.starts or self.flow.order.get(top, 0) < self.first
            return () if ends else self.flow.inputs(top)

        return any(top in self.roots for top in walk(node, further))

    def _data(self, top: fx.Node) -> Iterable[fx.Node]:
        """What a value was made of, up to the ids and the router's products."""
        ends = top in self.starts or top in self.roots or self.flow.kind(top) != "data"
        return () if ends else self.flow.inputs(top)

    def _before(self, node: fx.Node) -> bool:
        """Whether a value was there before the router."""
        return node.op == "placeholder" or self.flow.order[node] < self.first


def others(flow: DataFlow, user: fx.Node, node: fx.Node) -> list[fx.Node]:
    """The tensors that an operator reads beside one of them."""
    return [n for n in flow.inputs(user) if n is not node and (is_tensor(n) or spelling(n) == "setitem")]
