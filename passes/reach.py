"""What a site's router decides, and what depends on the tokens through its scores alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from r3_pass.passes.site import Accepted
from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.operators import CONTRACTIONS, CREATION, is_opaque, spelling
from r3_pass.registry.shapes import dims, is_tensor, value

_PICKS = frozenset({"gather", "take_along_dim", "getitem", "index_select"})


class Reach:
    """The neighbourhood of one site.

    Args:
        open_end: the graph ends in a graph break, so that what it returns may yet become a weight.

    Attributes:
        members: the site's selections; roots: the products that score.
        between: what the selections read, back to products.
        local: what depends on hidden states only through the router's scores, and all that makes those.
        decided: of `between`, what is discrete while what it is made of is not: a selection's ids, a comparison.
        tainted: what is made of that, before the selections.
        ids: the chosen ids, and what is made of them while it stays integer.
    """

    def __init__(self, flow: DataFlow, site: Accepted, open_end: bool) -> None:
        self.flow = flow
        self.open_end = open_end
        self.members = {selection.node for selection, _ in site.choices}
        self.roots = set(site.roots)
        self._hidden: dict[fx.Node, bool] = {}
        # All that a selection reads: an in-place change of a view of the scores is one more input of it.
        self.between = self._behind([n for member in self.members for n in flow.inputs(member)])
        self.local = self._router_only()
        self.decided = {n for n in self.between if self._decides(n)}
        self.ids = self._integers([i for s, _ in site.choices for i in s.ids])
        picks = {n for i in self.ids for n in flow.users(i) if self.at_ids(n)}
        self.tainted = self.forward(self.decided, self.members | picks)

    def at_ids(self, user: fx.Node) -> bool:
        """Whether an operator picks from its first argument at the chosen ids."""
        return spelling(user) in _PICKS and any(n in self.ids for n in self.flow.inputs(user)[1:])

    def in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.flow.order.__getitem__)

    def forward(self, starts: set[fx.Node], stop: set[fx.Node]) -> set[fx.Node]:
        found, stack = set(starts), list(starts)
        while stack:
            for user in self.flow.users(stack.pop()):
                if user not in found and user not in stop and (user in self.local or user in self.between):
                    found.add(user)
                    stack.append(user)
        return found

    def becomes_a_weight(self, node: fx.Node) -> bool:
        """Whether a value reaches something with tokens in it other than by a sum over all of them."""
        stack, seen = [node], {node}
        while stack:
            top = stack.pop()
            if self.open_end and top in self.flow.outputs and dims(top):
                return True
            for user in self.flow.users(top):
                if user in seen or user.op == "output" or is_scalar(user) or user in self.members:
                    continue
                if user not in self.local or spelling(user) in CONTRACTIONS or is_opaque(user):
                    return True
                seen.add(user)
                stack.append(user)
        return False

    def _router_only(self) -> set[fx.Node]:
        """What depends on hidden states only through the router's scores, and all that makes those."""
        found = self.roots | self._down
        stack = list(found)
        while stack:
            for user in self.flow.users(stack.pop()):
                if user in found or user.op == "output":
                    continue
                if all(n in found or not self._of_hidden_states(n) for n in self.flow.inputs(user)):
                    found.add(user)
                    stack.append(user)
        return found

    def _of_hidden_states(self, node: fx.Node) -> bool:
        """Whether a value depends on floating-point data: not only on weights, token ids or a mask of padding."""
        known = self._hidden.get(node)
        if known is None:
            seen = value(node)
            known = self.flow.kind(node) == "data" and (
                (isinstance(seen, torch.Tensor) and seen.dtype.is_floating_point)
                or any(self._of_hidden_states(n) for n in self.flow.inputs(node))
            )
            self._hidden[node] = known
        return known

    def _behind(self, starts: Sequence[fx.Node]) -> set[fx.Node]:
        """What the scores that are selected over are made of, back to products: the router's, or others'.

        Sets `_down`, the part of it that the router's products lead to.
        """
        last = max((self.flow.order[n] for n in starts), default=0)
        down, stack = set(self.roots), list(self.roots)
        while stack:
            for user in self.flow.users(stack.pop()):
                if user not in down and user.op != "output" and self.flow.order[user] <= last:
                    down.add(user)
                    stack.append(user)
        tokens = {n for root in self.roots for n in self.flow.inputs(root)}
        found, stack = set(starts), list(starts)
        while stack:
            top = stack.pop()
            if top in self.roots or top in tokens or (spelling(top) in CONTRACTIONS and top not in down):
                continue
            for source in self.flow.inputs(top):
                if source not in found and source not in self.members and self.flow.kind(source) == "data":
                    found.add(source)
                    stack.append(source)
        self._down = down & found
        return found

    def _decides(self, node: fx.Node) -> bool:
        """Whether a value is discrete while what it is made of is not: a selection's ids, a comparison."""
        seen = value(node)
        if not isinstance(seen, torch.Tensor) or seen.dtype.is_floating_point or spelling(node) in CREATION:
            return False
        sources = [value(n) for n in self.flow.inputs(node) if self.flow.kind(n) == "data"]
        floats = any(not isinstance(s, torch.Tensor) or s.dtype.is_floating_point for s in sources)
        return floats and not self._own(node)

    def _own(self, node: fx.Node) -> bool:
        return any(n in self.members for n in self.flow.inputs(node)) or node in self.members

    def _integers(self, starts: Sequence[fx.Node]) -> set[fx.Node]:
        """The ids, and what is made of them while it stays integer."""
        found, stack = set(starts), list(starts)
        while stack:
            for user in self.flow.users(stack.pop()):
                seen = value(user)
                if user in found or not isinstance(seen, torch.Tensor) or seen.dtype.is_floating_point:
                    continue
                found.add(user)
                stack.append(user)
        return found


def is_scalar(node: fx.Node) -> bool:
    return is_tensor(node) and dims(node) == ()
