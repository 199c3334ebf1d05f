"""Are a selection's ids still its ids, each with its token and in its column, when they reach the experts?

What is not known to keep them is taken to change them: every operator on the way has to be one of the few that are read here. A
layout is kept for each value that holds ids, dimension by dimension:

    T  tokens, in their order       K  the chosen experts of a token      N  a dimension that was added (size 1, or expanded)
    F  tokens and choices in one    P  in the order of experts, by a sort of these ids
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from r3_pass.registry.dataflow import DataFlow, argument, dims, fills, is_opaque, is_tensor, spelling, value
from r3_pass.registry.numbers import number_of

_SAME = frozenset({
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int", "short", "char", "contiguous", "clone",
    "detach", "cpu", "cuda", "alias", "pin_memory", "convert_element_type",
})  # fmt: skip
_TURNS = frozenset({"transpose", "permute", "movedim", "t", "T", "mT", "numpy_T", "adjoint"})
PIECES = frozenset({"chunk", "split", "tensor_split", "split_with_sizes", "unbind"})
_SORTS = frozenset({"sort", "msort"})


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


class Changed(Exception):
    """Raised inside this module alone: an operator is not known to keep the ids."""


class Unchanged:
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
        self._flow, self._starts, self._experts = flow, set(ids), experts
        self._holds, self._sorted_by = holds, sorted_by
        self.layouts: dict[fx.Node, Layout] = {n: first_layout(n, k_dim) for n in ids}
        self.changes: dict[fx.Node, str] = {}
        self.drops: list[Drop] = []

    def read(self, nodes: Sequence[fx.Node]) -> None:
        """Give each value its layout, or note how it was changed; in graph order."""
        for node in sorted(nodes, key=self._flow.order.__getitem__):
            if node in self._starts:
                continue
            try:
                self.layouts[node] = self._through(node)
            except Changed as how:
                self.changes[node] = f"{spelling(self._operator(node))} ({node.name}) {how}"

    def _operator(self, node: fx.Node) -> fx.Node:
        source = node.args[0] if spelling(node) in ("getitem", "getattr") and node.args else None
        return (
            source if isinstance(source, fx.Node) and not is_tensor(source) and spelling(source) != "setitem" else node
        )

    def _source(self, node: fx.Node, position: int = 0, *names: str) -> fx.Node | None:
        return self._flow.operand(node, argument(node, position, *(names or ("input", "self"))))

    def _known(self, node: fx.Node | None) -> Layout:
        if node is None or not (self._holds(node) or node in self._starts):
            raise Changed("makes something else of them")
        if node not in self.layouts:
            raise Changed("uses them as they were changed before")
        return self.layouts[node]

    # ---- one operator -------------------------------------------------------------------------------------------
    def _through(self, node: fx.Node) -> Layout:
        operator = self._operator(node)
        name = spelling(operator)
        if name == "getattr" and isinstance(node.args[1], str):
            name = node.args[1]
        if operator is not node:
            return self._piece(node, operator, name)
        if is_opaque(node):
            return self._by_custom(node, node)
        if name in ("cat", "stack"):
            return self._joined(node, name)
        if name in ("getitem", "index_select", "gather", "take_along_dim", "embedding", "take"):
            return self._picked(node, name)
        if name == "where":
            return self._replaced(node)
        if name in ("masked_fill", "setitem", "index_put"):
            return self._written(node, name)
        first = self._source(node)
        if name in (
            "add",
            "sub",
            "mul",
            "mod",
            "floordiv",
            "div",
            "rshift",
            "and",
            "clamp",
            "clamp_min",
            "clamp_max",
            "clip",
        ):
            return self._counted(node, name)
        if name == "copy":
            return self._copied(node)
        layout = self._known(first)
        assert first is not None
        if name in _SAME:
            return layout
        if name == "fill" and self._outside(argument(node, 1, "value"), layout):
            return layout
        if name == "view":
            return self._viewed(node, first, layout)
        if name == "expand" or (name == "expand_as"):
            return self._expanded(node, first, layout)
        if name in _TURNS:
            return self._turned(node, name, first, layout)
        if name in ("select", "narrow", "slice"):
            return self._cut(node, name, first, layout)
        if name in _SORTS:
            return self._sorted(operator, first, layout)
        raise Changed("is not known to keep them")

    def _piece(self, node: fx.Node, operator: fx.Node, name: str) -> Layout:
        """One result of an operator that has several."""
        first = self._source(operator, 0, "input", "self", "tensor")
        if is_opaque(operator):
            return self._by_custom(node, operator)
        layout = self._known(first)
        assert first is not None
        if name == "sort":
            return self._sorted(operator, first, layout)
        if name in ("unique", "unique_consecutive"):
            return Layout(("P",) * len(dims(node)), layout.columns, marks=layout.marks)
        if name not in PIECES:
            raise Changed("is not known to keep them")
        axis = argument(operator, 1 if name == "unbind" else 2, "dim", "axis", default=0)
        number = node.args[1]
        if not isinstance(axis, int) or not isinstance(number, int):
            raise Changed("cuts them")
        at = axis % len(layout.tags)
        if layout.tags[at] != "K":
            raise Changed("moves them to other tokens, or drops some")
        if name == "unbind":
            held = layout.columns[number]
            return dataclasses.replace(layout, tags=_without(layout.tags, at), columns=(held,))
        width = dims(node)[at]
        whole = argument(operator, 1, "split_size_or_sections", "split_size", "chunks")
        if isinstance(whole, tuple | list):
            start = sum(whole[:number])
        elif name == "split" and isinstance(whole, int):
            start = whole * number
        elif name == "chunk" and isinstance(whole, int):
            start = -(-len(layout.columns) // whole) * number
        else:
            raise Changed("cuts them")
        if not all(isinstance(s, int) for s in (width, start)):
            raise Changed("cuts them")
        return dataclasses.replace(layout, columns=layout.columns[start : start + width])

    def _by_custom(self, node: fx.Node, operator: fx.Node) -> Layout:
        """A custom operator may bring ids into the order of experts; as many in the same shape may be any others."""
        held = [n for n in self._flow.inputs(operator) if self._holds(n) or n in self._starts]
        if fills(operator) is not None or any(dims(n) == dims(node) for n in held):
            raise Changed("makes others of them, inside of a custom operator")
        return Layout(("P",) * len(dims(node)), ())

    def _sorted(self, operator: fx.Node, first: fx.Node, layout: Layout) -> Layout:
        axis = argument(operator, 1, "dim", default=-1)
        at = axis % len(layout.tags) if isinstance(axis, int) and not isinstance(axis, bool) else -1
        tag = layout.tags[at]
        if tag == "K":
            return dataclasses.replace(layout, turned=True)
        if len([n for n, size in enumerate(dims(first)) if size != 1]) <= 1:
            return dataclasses.replace(layout, tags=tuple("P" for _ in layout.tags))
        raise Changed("moves them to other tokens")

    def _viewed(self, node: fx.Node, first: fx.Node, layout: Layout) -> Layout:
        if not is_tensor(first) or value(node).dtype is not value(first).dtype:
            raise Changed("reads their bits as other numbers")
        before, after = dims(first), dims(node)
        kept = [(tag, size) for tag, size in zip(layout.tags, before, strict=True) if size != 1]
        if [size for _, size in kept] == [size for size in after if size != 1]:
            rest, ones = iter(kept), [tag for tag, size in zip(layout.tags, before, strict=True) if size == 1]
            one = "K" if "K" in ones and after and after[-1] == 1 else "N"
            tags = [next(rest)[0] if size != 1 else "N" for size in after]
            if one == "K":
                tags[-1] = "K"
            return dataclasses.replace(layout, tags=tuple(tags))
        letters = "".join(tag for tag, _ in kept)
        if "N" in letters or "P" in letters or "K" in letters[:-1]:
            raise Changed("brings them into another order")
        many = len(layout.columns)
        whole = [i for i, size in enumerate(after) if size != 1]
        if letters.endswith(("K", "F")) and many > 1:
            if after and after[whole[-1]] == many and len(whole) > 1:
                tags = ["K" if i == whole[-1] else "T" if i in whole else "N" for i in range(len(after))]
                return dataclasses.replace(layout, tags=tuple(tags))
            return dataclasses.replace(layout, tags=("F",) * len(after))
        return dataclasses.replace(layout, tags=tuple("T" if i in whole else "N" for i in range(len(after))))

    def _expanded(self, node: fx.Node, first: fx.Node, layout: Layout) -> Layout:
        before, after = dims(first), dims(node)
        added = len(after) - len(before)
        for tag, old, new in zip(layout.tags, before, after[added:], strict=True):
            if old != new and tag != "N":
                raise Changed("repeats one " + ("choice" if tag == "K" else "token's choices"))
        return dataclasses.replace(layout, tags=("N",) * added + layout.tags)

    def _turned(self, node: fx.Node, name: str, first: fx.Node, layout: Layout) -> Layout:
        order = moved_order(node, name, len(dims(first)))
        if order is None:
            raise Changed("turns them in a way that is not understood")
        return dataclasses.replace(layout, tags=tuple(layout.tags[i] for i in order))

    def _cut(self, node: fx.Node, name: str, first: fx.Node, layout: Layout) -> Layout:
        axis, start = argument(node, 1, "dim"), argument(node, 2, "start", "index")
        if not isinstance(axis, int) or not isinstance(start, int):
            raise Changed("cuts them")
        at = axis % len(layout.tags)
        if name == "select":
            return self._index(layout, dims(first), at, start)
        if dims(node) == dims(first):
            return layout
        width = dims(node)[at]
        if (
            layout.tags[at] != "K"
            or not isinstance(width, int)
            or (name == "slice" and argument(node, 4) not in (None, 1))
        ):
            raise Changed("moves them to other tokens, or drops some")
        start %= len(layout.columns)
        return dataclasses.replace(layout, columns=layout.columns[start : start + width])

    def _index(self, layout: Layout, shape: Sequence[Any], at: int, number: int) -> Layout:
        tag = layout.tags[at]
        if tag == "K":
            return dataclasses.replace(layout, tags=_without(layout.tags, at), columns=(layout.columns[number],))
        if tag == "N" or shape[at] == 1:
            return dataclasses.replace(layout, tags=_without(layout.tags, at))
        raise Changed("takes one token's, or one place's, for all")

    def _picked(self, node: fx.Node, name: str) -> Layout:
        """Ids that are indexed, or that index a table of integers."""
        at = 1 if name == "embedding" else 0
        source = self._source(node, at, "weight" if name == "embedding" else "input", "self")
        if source is not None and (self._holds(source) or source in self._starts):
            return self._taken(node, name, source, self._known(source))
        indices = [n for n in self._flow.inputs(node) if self._holds(n) or n in self._starts]
        if len(indices) != 1:
            raise Changed("looks them up by several of them at once")
        layout = self._known(indices[0])
        if len(dims(node)) < len(layout.tags):
            raise Changed("makes something else of them")
        self.indexes(node, indices[0])
        tags = layout.tags + ("N",) * (len(dims(node)) - len(layout.tags))
        return dataclasses.replace(layout, tags=tags, offset=0, marks=())

    def _taken(self, node: fx.Node, name: str, source: fx.Node, layout: Layout) -> Layout:
        indices = [n for n in self._flow.inputs(node) if n is not source and is_tensor(n)]
        if name in ("index_select", "gather", "take_along_dim", "take") or indices:
            if not indices or not all(self._sorted_by(n) for n in indices):
                raise Changed("picks some of them by an index that is not their own order")
            axis = argument(node, 2 if name == "take_along_dim" else 1, "dim")
            if name == "gather" and isinstance(axis, int) and layout.tags[axis % len(layout.tags)] == "K":
                return dataclasses.replace(layout, turned=True)
            return dataclasses.replace(layout, tags=("P",) * len(dims(node)))
        index = node.args[1] if isinstance(node.args[1], tuple | list) else (node.args[1],)
        shape, tags, columns = dims(source), [], layout.columns
        used = sum(1 for i in index if i is not None and i is not Ellipsis)
        at = 0
        after = dims(node)
        for item in (*index, *([] if Ellipsis in [i for i in index if not isinstance(i, fx.Node)] else [Ellipsis])):
            if item is None:
                tags.append("N")
            elif item is Ellipsis:
                count = len(shape) - used
                tags.extend(layout.tags[at : at + count])
                at += count
            elif isinstance(item, slice):
                tag = layout.tags[at]
                size = after[len(tags)]
                if tag == "K" and all(isinstance(i, int | None) for i in (item.start, item.stop, item.step)):
                    columns = columns[item]
                elif size != shape[at] or item.step not in (None, 1):
                    raise Changed("moves them to other tokens, or drops some")
                tags.append(tag)
                at += 1
            elif isinstance(item, int):
                chosen = self._index(dataclasses.replace(layout, columns=columns), shape, at, item)
                columns = chosen.columns
                at += 1
            else:
                raise Changed("picks some of them by a number that is not fixed")
        return dataclasses.replace(layout, tags=tuple(tags), columns=columns)

    def _joined(self, node: fx.Node, name: str) -> Layout:
        given = argument(node, 0, "tensors")
        axis = argument(node, 1, "dim", "axis", default=0)
        if not isinstance(given, tuple | list) or not isinstance(axis, int):
            raise Changed("joins them in a way that is not understood")
        parts = [self._flow.operand(node, part) for part in given]
        held = [(n, self._known(n)) for n in parts if n is not None and (self._holds(n) or n in self._starts)]
        rank = len(dims(node))
        at = axis % rank
        columns = tuple(c for _, layout in held for c in layout.columns)
        if len(set(columns)) != len(columns):
            raise Changed("repeats a choice")
        marks = tuple(dict.fromkeys(mark for _, layout in held for mark in layout.marks))
        first = dataclasses.replace(held[0][1], marks=marks)
        if name == "stack":
            if any(layout.tags != first.tags for _, layout in held) or "K" in first.tags or "P" in first.tags:
                raise Changed("joins what does not belong to the same tokens")
            return dataclasses.replace(first, tags=(*first.tags[:at], "K", *first.tags[at:]), columns=columns)
        if any(layout.tags != first.tags for _, layout in held) or first.tags[at] not in ("K", "N"):
            raise Changed("joins them along their tokens")
        return dataclasses.replace(
            first, tags=tuple("K" if i == at else t for i, t in enumerate(first.tags)), columns=columns
        )

    # ---- values that change ------------------------------------------------------------------------------------
    def _counted(self, node: fx.Node, name: str) -> Layout:
        """Arithmetic with a number: a rank's offset, the slots of an expert."""
        given = [argument(node, 0, "input", "self"), argument(node, 1, "other")]
        sources = [self._flow.operand(node, g) for g in given]
        ours = [i for i, n in enumerate(sources) if n is not None and (self._holds(n) or n in self._starts)]
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
        held = [
            n for g in given if (n := self._flow.operand(node, g)) is not None and (self._holds(n) or n in self._starts)
        ]
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
        if target is None or not (self._holds(target) or target in self._starts):
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


def first_layout(ids: fx.Node, k_dim: int | None) -> Layout:
    """The layout of a selection's ids, whose dimension `k_dim` holds a token's choices; None if none does."""
    shape = dims(ids)
    if k_dim is None or not shape or not isinstance(shape[k_dim % len(shape)], int):
        return Layout(("T",) * len(shape), (0,))
    at = k_dim % len(shape)
    return Layout(tuple("K" if i == at else "T" for i in range(len(shape))), tuple(range(shape[at])))


def _clamp(number: Any, low: Any, high: Any) -> Any:
    number = number if low is None else max(number, low)
    return number if high is None else min(number, high)


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


def _without(tags: tuple[str, ...], at: int) -> tuple[str, ...]:
    return tags[:at] + tags[at + 1 :]
