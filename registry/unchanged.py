"""Are a selection's ids still its ids, each with its token and in its column, when they reach the experts?

Beside the operators that move them, arithmetic with one number may shift or scale all of them, and a number may take the place of
some: one that is no expert's marks them; one that is an expert's takes their place only if their weights are 0 (see `dropped`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.laid import Laid
from r3_pass.registry.layout import Changed, Layout, Mark, first_layout
from r3_pass.registry.numbers import number_of
from r3_pass.registry.operators import argument, is_opaque, spelling
from r3_pass.registry.shapes import dims, is_tensor, value

_ARITHMETIC = frozenset({
    "add", "sub", "mul", "mod", "floordiv", "div", "rshift", "and", "clamp", "clamp_min", "clamp_max", "clip",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Drop:
    """Some ids were replaced by an expert's number. That changes nothing if their weights are 0, which is still to be proved.

    Attributes:
        node: the ids with experts' numbers in them.
        at: the ids that were replaced by a number first, in the layout of the condition; `node`, or before it.
        condition, holds: they are replaced where the condition is `holds`; None if by their own number (a clamp).
        how: what was done, if the weights stay.
    """

    node: fx.Node
    at: fx.Node
    condition: fx.Node | None
    holds: bool
    how: str


class Unchanged(Laid):
    """Layouts of all values that hold a selection's ids.

    Args:
        ids: the selection's values.
        k_dim: which of their dimensions holds the choices; None if none does.
        experts: E, or None.
        holds: whether a value is followed as ids.
        sorted_by: whether an integer value is an order (or positions) made of these ids.
    """

    def __init__(
        self,
        flow: DataFlow,
        ids: Sequence[fx.Node],
        k_dim: int | None,
        experts: Any,
        holds: Callable[[fx.Node], bool],
        sorted_by: Callable[[fx.Node], bool],
    ) -> None:
        super().__init__(flow, {n: first_layout(n, k_dim) for n in ids}, holds, sorted_by)
        self._experts = experts
        self.drops: list[Drop] = []

    def _through(self, node: fx.Node) -> Layout:
        name = self._name(node)
        if self._operator(node) is node and not is_opaque(node):
            if name == "where":
                return self._replaced(node)
            if name in ("masked_fill", "setitem", "index_put"):
                return self._written(node, name)
            if name in _ARITHMETIC:
                return self._counted(node, name)
            if name == "copy":
                return self._copied(node)
            if name == "fill" and self._outside(argument(node, 1, "value"), layout := self._known(self._source(node))):
                return layout
        return super()._through(node)

    def _looked_up(self, node: fx.Node) -> Layout:
        layout = super()._looked_up(node)
        self.indexes(node, next(n for n in self._flow.inputs(node) if self._held(n)))
        return dataclasses.replace(layout, marks=())

    def _counted(self, node: fx.Node, name: str) -> Layout:
        """Arithmetic with a number: a rank's offset, the slots of an expert."""
        given = [argument(node, 0, "input", "self"), argument(node, 1, "other")]
        sources = [self._flow.operand(node, g) for g in given]
        ours = [i for i, n in enumerate(sources) if n is not None and self._held(n)]
        if name in ("clamp", "clamp_min", "clamp_max", "clip"):
            return self._clamped(node, name)
        if len(ours) != 1 and not (ours and self._known(sources[0]).scale and name == "add"):
            raise Changed("mixes them with others of them")
        at = ours[0]
        layout = self._known(sources[at])
        other, by = sources[1 - at], given[1 - at]
        number = by if isinstance(by, int) and not isinstance(by, bool) else None
        single = other is not None and self._flow.kind(other) != "data" and all(size == 1 for size in dims(other))
        if layout.scale and name == "add" and other is not None and dims(other) == dims(node):
            return layout  # the place in the expert's queue
        if number is None and not single:
            raise Changed("changes each of them by a value of its own")
        if argument(node, 2, "alpha", default=1) != 1 or (
            name in ("sub", "mod", "floordiv", "div", "rshift") and at == 1
        ):
            raise Changed("does not keep their numbers")
        if name in ("add", "sub"):
            step = 0 if number is None else number if name == "add" else -number
            moved = dataclasses.replace(layout, offset=layout.offset + step)
            return self._marked(node, moved, lambda seen: None if number is None else seen + step)
        layout = self._marked(node, layout, lambda seen: seen if name == "mul" and seen < 0 else None)
        if name == "mul":
            if other is not None and isinstance(value(other), torch.SymInt):  # a capacity that depends on the tokens
                return dataclasses.replace(layout, scale=True)
            if not number or number < 0:
                raise Changed("does not keep their numbers")
            return dataclasses.replace(layout, scale=layout.scale or number > 1)
        if layout.scale:
            raise Changed("makes fewer of them")
        if name == "mod" and isinstance(number, int) and isinstance(self._experts, int) and number >= self._experts:
            return layout
        if name in ("floordiv", "mod", "div", "rshift", "and") and self._both_parts(sources[at], name):
            return layout
        raise Changed("makes one of several of them")

    def _both_parts(self, ids: fx.Node | None, name: str) -> bool:
        """Whether quotient and remainder are both used: a group, and a place in it."""
        quotient, remainder = ("floordiv", "div", "rshift"), ("mod", "and")
        wanted = remainder if name in quotient else quotient
        return ids is not None and any(spelling(n) in wanted for n in self._flow.users(ids))

    def _clamped(self, node: fx.Node, name: str) -> Layout:
        source = self._source(node)
        layout = self._known(source)
        low = argument(node, 1, "min") if name != "clamp_max" else None
        high = (
            argument(node, 1, "max")
            if name == "clamp_max"
            else argument(node, 2, "max")
            if name != "clamp_min"
            else None
        )
        experts = self._experts
        if any(isinstance(bound, fx.Node) for bound in (low, high)):
            raise Changed("bounds them by another value")
        harmless = (low is None or (low <= 0 and layout.offset >= 0)) and (
            high is None or (isinstance(experts, int) and high >= experts - 1 + layout.offset)
        )
        if not harmless:
            how = "makes one of several of them, and their weights stay"
            self.drops.append(Drop(node, node, None, True, how))
        return self._marked(node, layout, lambda number: _clamp(number, low, high))

    def _marked(self, node: fx.Node, layout: Layout, new: Callable[[Any], Any]) -> Layout:
        """What an operator makes of the numbers that are no expert's: others that are none, or an expert's (None: not known)."""
        kept = []
        for mark in layout.marks:
            number = new(mark.number)
            if number is not None and self._outside(number, layout):
                kept.append(dataclasses.replace(mark, number=number))
            else:
                how = "makes an expert of what marks some of them, and their weights stay"
                self.drops.append(Drop(node, mark.at, mark.condition, mark.holds, how))
        return dataclasses.replace(layout, marks=tuple(kept))

    def indexes(self, node: fx.Node, ids: fx.Node) -> None:
        """`source[ids]`, where a number below 0 counts from the end: an expert's."""
        if (layout := self.layouts.get(ids)) is not None and spelling(node) == "getitem":
            self._marked(ids, layout, lambda number: None if number < 0 else number)

    def _replaced(self, node: fx.Node) -> Layout:
        """`where`: some ids are replaced with a number."""
        method = node.op == "call_method"
        condition = self._flow.operand(node, node.args[1] if method else argument(node, 0, "condition"))
        given = [node.args[0] if method else argument(node, 1, "input", "self"), argument(node, 2, "other")]
        held = [n for g in given if (n := self._flow.operand(node, g)) is not None and self._held(n)]
        if len(held) != 1 or condition is None:
            raise Changed("takes one or another of them")
        rest = [g for g in given if self._flow.operand(node, g) is not held[0]]
        if dims(node) != dims(held[0]) or len(rest) != 1:
            raise Changed("takes another value for some of them")
        return self._filled(node, held[0], condition, rest[0] is given[0], rest[0])

    def _filled(self, node: fx.Node, source: fx.Node, condition: fx.Node, holds: bool, given: Any) -> Layout:
        """Some ids are replaced with a number: it is no expert's, or their weights have to be 0."""
        layout, fill = self._known(source), number_of(given)
        if layout.scale and isinstance(given, fx.Node) and isinstance(value(given), torch.SymInt):
            return layout  # the slot of what was dropped, behind those of all experts
        if fill is None:
            raise Changed("takes another value for some of them")
        tested = self._source(condition)
        one = holds and spelling(condition) == "eq" and isinstance(argument(condition, 1, "other"), int)
        beside = tested is not None and self._beside(tested, layout)
        renumbered = one and beside and self._free(fill, layout)
        if not renumbered and not self._outside(fill, layout):  # one id may get a number that no other has
            how = f"puts expert {fill} in the place of some of them"
            self.drops.append(Drop(node, node, condition, holds, how))
        elif not renumbered:
            return dataclasses.replace(layout, marks=(*layout.marks, Mark(fill, node, condition, holds)))
        return layout

    def _beside(self, ids: fx.Node, layout: Layout) -> bool:
        known = self.layouts.get(ids)
        return known is not None and (known.tags, known.columns) == (layout.tags, layout.columns)

    def _free(self, fill: int | float, layout: Layout) -> bool:
        return isinstance(self._experts, int) and not layout.offset <= fill < layout.offset + self._experts

    def _outside(self, fill: Any, layout: Layout) -> bool:
        """Whether a number is no expert's: it marks what was dropped, or a shared expert."""
        if not isinstance(fill, int | float) or not isinstance(self._experts, int):
            return False
        return not 0 <= fill < self._experts and (layout.scale or not 0 <= fill - layout.offset < self._experts)

    def _written(self, node: fx.Node, name: str) -> Layout:
        target = self._source(node)
        if target is None or not self._held(target):
            raise Changed("writes them among others")
        index, filled = argument(node, 1, "mask"), argument(node, 2, "value", "values")
        index = index[0] if isinstance(index, tuple | list) and len(index) == 1 else index
        condition = self._flow.operand(node, index)
        if condition is None or not is_tensor(condition) or value(condition).dtype != torch.bool:
            raise Changed("writes over some of them")
        return self._filled(node, target, condition, True, filled)

    def _copied(self, node: fx.Node) -> Layout:
        source = self._source(node, 1, "src", "other")
        if source is None or dims(source) != dims(node):
            raise Changed("writes over them")
        return self._known(source)


def _clamp(number: Any, low: Any, high: Any) -> Any:
    number = number if low is None else max(number, low)
    return number if high is None else min(number, high)
