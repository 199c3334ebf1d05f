"""How layouts pass through the operators that move or pick values without changing them.

What is not read here is taken to change them: every operator on the way has to be one of the few that are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.layout import Changed, Layout
from r3_pass.registry.operators import PICKS, PIECES, argument, is_opaque, spelling
from r3_pass.registry.shapes import dims, is_tensor, value
from r3_pass.registry.turns import TURNS, moved_order
from r3_pass.registry.writes import fills

_SAME = frozenset({
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int", "short", "char", "contiguous", "clone",
    "detach", "cpu", "cuda", "alias", "pin_memory", "convert_element_type",
})  # fmt: skip
_SORTS = frozenset({"sort", "msort"})


class Laid:
    """Layouts of all values that hold what some values hold, in the same or another order.

    Args:
        layouts: of the values that there are at first.
        holds: whether a value is followed.
        sorted_by: whether an integer value is an order (or positions) made of these.
    """

    def __init__(
        self,
        flow: DataFlow,
        layouts: Mapping[fx.Node, Layout],
        holds: Callable[[fx.Node], bool],
        sorted_by: Callable[[fx.Node], bool],
    ) -> None:
        self._flow, self._starts = flow, set(layouts)
        self._holds, self._sorted_by = holds, sorted_by
        self.layouts: dict[fx.Node, Layout] = dict(layouts)
        self.changes: dict[fx.Node, str] = {}

    def _held(self, node: fx.Node) -> bool:
        return self._holds(node) or node in self._starts

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

    def _name(self, node: fx.Node) -> str:
        """An operator's spelling; that of `x.T` is "T"."""
        name = spelling(self._operator(node))
        return node.args[1] if name == "getattr" and isinstance(node.args[1], str) else name

    def _source(self, node: fx.Node, position: int = 0, *names: str) -> fx.Node | None:
        return self._flow.operand(node, argument(node, position, *(names or ("input", "self"))))

    def _known(self, node: fx.Node | None) -> Layout:
        if node is None or not self._held(node):
            raise Changed("makes something else of them")
        if node not in self.layouts:
            raise Changed("uses them as they were changed before")
        return self.layouts[node]

    # ---- one operator -------------------------------------------------------------------------------------------
    def _through(self, node: fx.Node) -> Layout:
        operator = self._operator(node)
        name = self._name(node)
        if operator is not node:
            return self._piece(node, operator, name)
        if is_opaque(node):
            return self._by_custom(node, node)
        if name in ("cat", "stack"):
            return self._joined(node, name)
        if name in PICKS:
            return self._picked(node, name)
        first = self._source(node)
        layout = self._known(first)
        assert first is not None
        if name in _SAME:
            return layout
        if name == "view":
            return self._viewed(node, first, layout)
        if name in ("expand", "expand_as"):
            return self._expanded(node, first, layout)
        if name in TURNS:
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
        held = [n for n in self._flow.inputs(operator) if self._held(n)]
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
        if source is not None and self._held(source):
            return self._taken(node, name, source, self._known(source))
        return self._looked_up(node)

    def _looked_up(self, node: fx.Node) -> Layout:
        """Values of a table, at indices that are laid out."""
        indices = [n for n in self._flow.inputs(node) if self._held(n)]
        if len(indices) != 1:
            raise Changed("looks them up by several of them at once")
        layout = self._known(indices[0])
        if len(dims(node)) < len(layout.tags):
            raise Changed("makes something else of them")
        tags = layout.tags + ("N",) * (len(dims(node)) - len(layout.tags))
        return dataclasses.replace(layout, tags=tags, offset=0)

    def _taken(self, node: fx.Node, name: str, source: fx.Node, layout: Layout) -> Layout:
        if self._flow.reshaped(node) is not None:
            raise Changed("is given another shape in place")
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
        held = [(n, self._known(n)) for n in parts if n is not None and self._held(n)]
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


def _without(tags: tuple[str, ...], at: int) -> tuple[str, ...]:
    return tags[:at] + tags[at + 1 :]
