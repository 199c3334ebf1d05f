"""Where a choice is dropped: which values are 0 there, and do they still lie beside it?

Choices are dropped where a condition holds (an expert is full, or another rank's). Of every value that lies beside the choices, as
a condition or a weight does, it is said whether it is 0 for all that are dropped (False), or for none of them (True), or neither.

Legend: T tokens, K top-k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.laid import Laid
from r3_pass.registry.layout import Changed, Layout
from r3_pass.registry.numbers import is_zero
from r3_pass.registry.operators import CASTS, PIECES, argument, spelling
from r3_pass.registry.shapes import dims, is_tensor, value
from r3_pass.registry.writes import is_inplace

_MOVES = frozenset({
    "view", "contiguous", "clone", "detach", "alias", "transpose", "permute", "t", "T", "mT", "expand", "select", "narrow",
    "getitem", "index_select", "take",
})  # fmt: skip


class Zeroed(Laid):
    """Layouts of all values that lie beside a selection's choices, and what they are where these are dropped.

    Args:
        layouts: of the ids, and of the conditions that say which choices are dropped.
        known: False for those of these that are 0 for every choice that is dropped, True for those that are not 0 for any.
        functions: values that are a function of one id each.
        is_ids: whether a value is ids that experts see; an order in which weights are laid is a sort of these.
    """

    def __init__(
        self,
        flow: DataFlow,
        layouts: Mapping[fx.Node, Layout],
        known: Mapping[fx.Node, bool],
        functions: Mapping[fx.Node, bool | None],
        is_ids: Callable[[fx.Node], bool],
    ) -> None:
        super().__init__(flow, layouts, self._lies_beside, self._is_order)
        self.known: dict[fx.Node, bool | None] = dict(known)
        self.orders: set[fx.Node] = set()
        self._functions, self._is_ids = functions, is_ids

    def read(self, nodes: Sequence[fx.Node]) -> None:
        super().read([n for n in nodes if n not in self.layouts and is_tensor(n)])

    def zeroes(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether an operator makes 0 of all that is dropped, by one of its operands alone."""
        name = spelling(node)
        given = self._operands(node)
        if name == "mul":
            return self.known.get(source) is False and source in given
        if name == "masked_fill":
            return given[1] is source and self.known.get(source) is True and is_zero(argument(node, 2, "value"))
        if name == "where" and given[0] is source and self.known.get(source) is not None:
            taken = argument(node, 1, "input", "self") if self.known[source] else argument(node, 2, "other")
            return is_zero(taken)
        return False

    def _lies_beside(self, node: fx.Node) -> bool:
        return node in self.layouts

    def _operands(self, node: fx.Node) -> list[fx.Node | None]:
        given = list(node.args)
        if spelling(node) == "where" and node.op == "call_method":
            given = [given[1], given[0], *given[2:]]
        return [self._flow.operand(node, g) for g in given]

    def _through(self, node: fx.Node) -> Layout:
        if is_inplace(node):
            raise Changed("changes them in place")
        name = spelling(node)
        sources = [n for n in self._operands(node) if n in self.layouts]
        if node in self._functions:
            layout = super()._through(node) if name in _MOVES else self._joint(node, sources)
            self.known[node] = self._functions[node]
            return layout
        if self._operator(node) is not node and spelling(self._operator(node)) not in PIECES:
            raise Changed("does not keep them beside their choices")
        if name in _MOVES or name == "getattr":
            moved = super()._through(node)
            if name == "view" and len([t for t in moved.tags if t == "F"]) > 1:
                raise Changed("brings them into another order")
            self.known[node] = self.known.get(self._source(self._operator(node)))  # type: ignore[arg-type]  # laid, so there
            return moved
        found, telling = self._value(node, name, sources)
        layout = self._joint(node, telling)
        self.known[node] = found
        return layout

    def _value(self, node: fx.Node, name: str, sources: Sequence[Any]) -> tuple[bool | None, Sequence[Any]]:
        """What an operator's result is where a choice is dropped, and which operands tell it."""
        given = self._operands(node)
        if not sources:
            raise Changed("does not lie beside them")
        known = [None if n is None else self.known.get(n) for n in given]
        first = known[0]
        if name in (*CASTS, "bool") and first is not None:
            exact = not value(sources[0]).dtype.is_floating_point or value(node).dtype.is_floating_point
            return (first if exact or first is False else None), given[:1]
        if (
            name == "not"
            and first is not None
            and value(node).dtype == torch.bool
            and value(sources[0]).dtype == torch.bool
        ):
            return not first, given[:1]
        if name in ("eq", "ne") and first is not None and is_zero(argument(node, 1, "other")):
            return first if name == "ne" else not first, given[:1]
        if name in ("mul", "and") and False in known[:2]:
            return False, [given[known.index(False)]]
        if name == "or" and True in known[:2]:
            return True, [given[known.index(True)]]
        if (name, *known[:2]) in (("and", True, True), ("or", False, False)):
            return known[0], given[:2]
        if name in ("div", "masked_fill") and first is False and (name == "div" or is_zero(argument(node, 2, "value"))):
            return False, given[:1]
        if name in ("masked_fill", "where"):
            by = [n for n in sources if self.zeroes(node, n)]
            if by:
                return False, by
        raise Changed("does not keep what is 0")

    def _joint(self, node: fx.Node, sources: Sequence[Any]) -> Layout:
        """The layout of what is computed of several values element by element."""
        found = [_spread(self.layouts[n], dims(n), dims(node)) for n in sources]
        layouts = [layout for layout in found if layout is not None]
        if not layouts or len(layouts) != len(found) or any(other.columns != layouts[0].columns for other in layouts):
            raise Changed("does not keep them beside their choices")
        columns = list(zip(*(layout.tags for layout in layouts), strict=True))
        if any(len(set(tags) - {"N"}) > 1 for tags in columns):
            raise Changed("does not keep them beside their choices")
        return Layout(tuple(next((t for t in tags if t != "N"), "N") for tags in columns), layouts[0].columns)

    def _is_order(self, node: fx.Node) -> bool:
        if order_of(self._flow, node, self._is_ids) is None:
            return False
        self.orders.add(node)
        return True


def order_of(flow: DataFlow, node: fx.Node, is_ids: Callable[[fx.Node], bool]) -> fx.Node | None:
    """The sort of all ids whose order a value is."""
    operator = node
    if spelling(node) == "getitem" and node.args[1] == 1:
        operator = node.args[0]  # type: ignore[assignment]  # of a sort
    if spelling(operator) != ("argsort" if operator is node else "sort"):
        return None
    source = flow.operand(operator, argument(operator, 0, "input", "self"))
    while source is not None and not is_ids(source) and spelling(source) in ("view", "clone", "contiguous", "to"):
        source = flow.operand(source, source.args[0])
        if source is not None and len(dims(source)) > 1 and not is_ids(source):
            return None
    flat = len([size for size in dims(operator if is_tensor(operator) else node) if size != 1]) <= 1
    return operator if flat and source is not None and is_ids(source) else None


def aligned(layout: Layout, before: Sequence[Any], after: Sequence[Any]) -> Layout | None:
    """The layout of an operand [after] of what is laid out [before]: where it has one value for many, they share it."""
    missing = len(before) - len(after)
    if missing < 0 or any(old != new and new != 1 for old, new in zip(before[missing:], after, strict=True)):
        return None
    pairs = zip(layout.tags[missing:], before[missing:], after, strict=True)
    return dataclasses.replace(layout, tags=tuple(tag if old == new else "N" for tag, old, new in pairs))


def _spread(layout: Layout, before: Sequence[Any], after: Sequence[Any]) -> Layout | None:
    """The layout of what a value is broadcast to; None if a token or a choice would be repeated."""
    added = len(after) - len(before)
    if added < 0:
        return None
    fits = all(tag == "N" or old == new for tag, old, new in zip(layout.tags, before, after[added:], strict=True))
    return dataclasses.replace(layout, tags=("N",) * added + layout.tags) if fits else None
