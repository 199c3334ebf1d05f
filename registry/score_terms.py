"""What a router computes between its logits and what it selects over, read exactly.

`ScoreReader` names every value on the way as one of a few things (`Rows`, `GroupScore`, ...), each made from the ones before by an
operator whose arguments are checked, or gives up with the operator that it does not know.

Legend: E experts, G groups of E/G experts each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.numbers import number_of
from r3_pass.registry.operators import argument, spelling
from r3_pass.registry.routing import Scores, Unread
from r3_pass.registry.shapes import dims, is_tensor, product, value

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CASTS = frozenset({"to", "float", "type", "type_as", "half", "bfloat16", "bool", "int", "long"})
_SAME = frozenset({"contiguous", "clone", "detach"})

_ITEMS: dict[str | int, int] = {0: 0, 1: 1, "values": 0, "indices": 1}


@dataclasses.dataclass(frozen=True)
class Rows:
    """Scores of all experts: [..., E], or [..., G, E/G] with `grouped`. `mask` says which were replaced by `fill`."""

    function: Scores
    bias: fx.Node | None = None
    grouped: int = 0
    mask: GroupIds | None = None
    fill: float = 0.0


@dataclasses.dataclass(frozen=True)
class GroupBest:
    """The two best scores of each group, [..., G, 2]."""

    rows: Rows


@dataclasses.dataclass(frozen=True)
class GroupScore:
    """[..., G]: the sum of each group's `best` best scores."""

    rows: Rows
    best: int


@dataclasses.dataclass(frozen=True)
class GroupIds:
    """[..., kept]: the best groups."""

    score: GroupScore
    kept: int


@dataclasses.dataclass(frozen=True)
class GroupMask:
    """1 for kept groups and 0 for others (`keeps`), or the other way about.

    Attributes:
        layout: "groups" [..., G], "column" [..., G, 1], "grouped" [..., G, E/G] or "experts" [..., E].
    """

    ids: GroupIds
    keeps: bool
    layout: Literal["groups", "column", "grouped", "experts"]


Term = Rows | GroupBest | GroupScore | GroupIds | GroupMask


class ScoreReader:
    """Says what a value is, by what it was made of."""

    def __init__(self, flow: DataFlow, logits: fx.Node) -> None:
        self.flow = flow
        self.logits = logits
        self.experts = int(dims(logits)[-1])
        self.between: set[fx.Node] = set()
        self._terms: dict[fx.Node, Term] = {}
        self._rules: dict[str, Callable[[fx.Node], Term]] = {
            "softmax": self._activation, "sigmoid": self._activation, "add": self._biased, "view": self._layout,
            "expand": self._layout, "expand_as": self._layout, "repeat_interleave": self._repeated,
            "getitem": self._item, "getattr": self._item, "sum": self._sum, "amax": self._best_of_group, "scatter": self._scattered,
            "not": self._inverted, "eq": self._inverted, "masked_fill": self._filled, "where": self._filled,
            "mul": self._multiplied, **dict.fromkeys(CASTS, self._cast), **dict.fromkeys(_SAME, self._same),
        }  # fmt: skip

    def read(self, node: fx.Node) -> Term:
        if node is self.logits:
            return Rows("logits")
        if node not in self._terms:
            rule = self._rules.get(spelling(node))
            if rule is None or node.kwargs.get("out") is not None or not is_tensor(node):
                raise self._unknown(node)
            self._terms[node] = rule(node)
            self.between.add(node)
        return self._terms[node]

    def _unknown(self, node: fx.Node) -> Unread:
        return Unread(f"{spelling(node)} ({node.name}) lies between its logits and its scores")

    def _operand(self, node: fx.Node, position: int, *names: str) -> fx.Node:
        found = self.flow.operand(node, argument(node, position, *names))
        if found is None:
            raise self._unknown(node)
        return found

    def _first(self, node: fx.Node) -> tuple[fx.Node, Term]:
        source = self._operand(node, 0, "input", "self")
        return source, self.read(source)

    def _activation(self, node: fx.Node) -> Term:
        name = spelling(node)
        _, term = self._first(node)
        if term != Rows("logits"):
            raise Unread(f"{name} ({node.name}) is taken of something else than the logits, one row a token")
        if name == "softmax" and not is_last(argument(node, 1, "dim"), node):
            raise Unread(f"{name} ({node.name}) does not run over the experts")
        self._float32(node)
        return Rows("softmax" if name == "softmax" else "sigmoid")

    def _float32(self, node: fx.Node) -> None:
        if value(node).dtype is not torch.float32:
            raise Unread(f"its scores are {_short(node)} ({node.name}): rounded to fewer digits than a fused router's")

    def _biased(self, node: fx.Node) -> Term:
        given = [self._operand(node, 0, "input", "self"), self._operand(node, 1, "other")]
        added = [n for n in given if self.flow.kind(n) == "weight"]
        scores = [n for n in given if n not in added]
        if (
            len(added) != 1
            or len(scores) != 1
            or not is_tensor(added[0])
            or "alpha" in node.kwargs
            or len(node.args) > 2
        ):
            raise self._unknown(node)
        term = self.read(scores[0])
        shape = dims(added[0])
        if not isinstance(term, Rows) or term.bias is not None or term.grouped or term.mask is not None:
            raise self._unknown(node)
        if term.function == "logits" or not shape or shape[-1] != self.experts or product(shape) != self.experts:
            raise Unread(
                f"{added[0].name} is added ({node.name}) to something else than a row of softmax or sigmoid scores"
            )
        if dims(node) != dims(scores[0]) or value(added[0]).dtype not in FLOATS:
            raise self._unknown(node)
        self._float32(node)
        return dataclasses.replace(term, bias=added[0])

    def _cast(self, node: fx.Node) -> Term:
        source, term = self._first(node)
        before, after = value(source), value(node)
        if before.device != after.device:
            raise self._unknown(node)
        if isinstance(term, GroupMask) or before.dtype is after.dtype:
            return term
        if isinstance(term, Rows) and after.dtype is torch.float32 and before.dtype in FLOATS:
            return term
        raise Unread(f"its scores are cast to {_short(node)} ({node.name}) on the way")

    def _same(self, node: fx.Node) -> Term:
        return self._first(node)[1]

    def _layout(self, node: fx.Node) -> Term:
        source, term = self._first(node)
        before, after = dims(source), dims(node)
        if value(source).dtype is not value(node).dtype:
            raise self._unknown(node)  # view(dtype)
        moved = self._moved(term, before, after, spelling(node) != "view")
        if moved is None:
            raise Unread(
                f"{spelling(node)} ({node.name}: {list(before)} to {list(after)}) lays out its scores in another way"
            )
        return moved

    def _moved(self, term: Term, before: Sequence[Any], after: Sequence[Any], expands: bool) -> Term | None:
        """What a value is in another shape; an expansion only repeats a mask within its groups."""
        if expands:
            groups = term.ids.score.rows.grouped if isinstance(term, GroupMask) else 0
            if not isinstance(term, GroupMask) or term.layout != "column" or tuple(before[:-1]) != tuple(after[:-1]):
                return None
            return dataclasses.replace(term, layout="grouped") if after[-1] == self.experts // groups else None
        if isinstance(term, Rows):
            if after[-1] == self.experts:
                return dataclasses.replace(term, grouped=0)
            groups = after[-2] if len(after) > 1 else 0
            fits = isinstance(groups, int) and groups > 1 and after[-1] > 1 and groups * after[-1] == self.experts
            return dataclasses.replace(term, grouped=groups) if fits and term.grouped in (0, groups) else None
        if isinstance(term, GroupScore):
            return term if after[-1] == term.rows.grouped else None
        if isinstance(term, GroupMask):
            groups = term.ids.score.rows.grouped
            if tuple(before) == tuple(after):
                return term
            if term.layout == "groups" and tuple(after) == (*before, 1):
                return dataclasses.replace(term, layout="column")
            if term.layout == "grouped" and after[-1] == self.experts:
                return dataclasses.replace(term, layout="experts")
        return None

    def _repeated(self, node: fx.Node) -> Term:
        _, term = self._first(node)
        times = argument(node, 1, "repeats")
        if not isinstance(term, GroupMask) or term.layout != "groups" or not is_last(argument(node, 2, "dim"), node):
            raise self._unknown(node)
        if times != self.experts // term.ids.score.rows.grouped:
            raise self._unknown(node)
        return dataclasses.replace(term, layout="experts")

    def _item(self, node: fx.Node) -> Term:
        source = self._operand(node, 0)
        if is_tensor(source):
            return self._indexed(node, source)
        number = _ITEMS.get(node.args[1]) if isinstance(node.args[1], str | int) else None
        name = spelling(source)
        scores = self._operand(source, 0, "input", "self")
        axis = argument(source, 2 if name == "topk" else 1, "dim", default=-1)
        largest = argument(source, 3, "largest", default=True) if name == "topk" else True
        if (
            name not in ("topk", "max")
            or not is_last(axis, scores)
            or largest is not True
            or source.kwargs.get("out") is not None
        ):
            raise self._unknown(source)
        term = self.read(scores)
        self.between.add(source)
        if isinstance(term, Rows) and term.grouped and term.mask is None and number == 0:
            if name == "topk" and dims(node)[-1] == 2:
                return GroupBest(term)
            if name == "max" and len(dims(node)) == len(dims(scores)) - 1:
                return GroupScore(term, 1)
        if isinstance(term, GroupScore) and name == "topk" and number == 1:
            return GroupIds(term, int(dims(node)[-1]))
        raise self._unknown(source)

    def _indexed(self, node: fx.Node, source: fx.Node) -> Term:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if any(i is not None and i is not Ellipsis and i != slice(None) for i in index):
            raise self._unknown(node)
        moved = self._moved(self.read(source), dims(source), dims(node), False)
        if moved is None:
            raise self._unknown(node)
        return moved

    def _sum(self, node: fx.Node) -> Term:
        source, term = self._first(node)
        over_last = is_last(argument(node, 1, "dim", "axis"), source) and len(dims(node)) == len(dims(source)) - 1
        if not isinstance(term, GroupBest) or not over_last:
            raise self._unknown(node)
        self._float32(node)
        return GroupScore(term.rows, 2)

    def _best_of_group(self, node: fx.Node) -> Term:
        source, term = self._first(node)
        over_last = is_last(argument(node, 1, "dim", "axis"), source) and len(dims(node)) == len(dims(source)) - 1
        if not isinstance(term, Rows) or not term.grouped or term.mask is not None or not over_last:
            raise self._unknown(node)
        return GroupScore(term, 1)

    def _scattered(self, node: fx.Node) -> Term:
        base = self._operand(node, 0, "input", "self")
        index = self._operand(node, 2, "index")
        ids = self.read(index)
        made, put = number_of(base), argument(node, 3, "value", "src")
        if (
            not isinstance(ids, GroupIds)
            or not isinstance(put, int | float)
            or "reduce" in node.kwargs
            or len(node.args) > 4
        ):
            raise self._unknown(node)
        groups = ids.score.rows.grouped
        if not is_last(argument(node, 1, "dim"), node) or dims(base) != (*dims(index)[:-1], groups):
            raise self._unknown(node)
        if {made, put} != {0, 1} or self.flow.kind(base) != "const":
            raise Unread(f"its groups are marked by {put} among {made} ({node.name})")
        self.between.add(base)
        return GroupMask(ids, keeps=bool(put), layout="groups")

    def _inverted(self, node: fx.Node) -> Term:
        source, term = self._first(node)
        compared = spelling(node) == "eq" and argument(node, 1, "other") not in (0, False)
        if (
            not isinstance(term, GroupMask)
            or compared
            or (spelling(node) == "not" and value(source).dtype is not torch.bool)
        ):
            raise self._unknown(node)
        return dataclasses.replace(term, keeps=not term.keeps)

    def _filled(self, node: fx.Node) -> Term:
        """`masked_fill(scores, dropped, fill)`, `where(kept, scores, fill)`, `where(dropped, fill, scores)`."""
        if spelling(node) == "masked_fill":
            given: list[Any] = [
                argument(node, 0, "input", "self"),
                argument(node, 1, "mask"),
                argument(node, 2, "value"),
            ]
            keeps = False
        else:
            given = [argument(node, 1, "input", "self"), argument(node, 0, "condition"), argument(node, 2, "other")]
            keeps = number_of(given[0]) is None
            given = given if keeps else [given[2], given[1], given[0]]
        scores, mask = self.flow.operand(node, given[0]), self.flow.operand(node, given[1])
        fill = number_of(given[2])
        if scores is None or mask is None or fill is None or fill != fill:
            raise Unread(f"{spelling(node)} ({node.name}) fills its scores with what is no number")
        if isinstance(given[2], fx.Node):
            raise self._unknown(node)
        return self._masked(node, scores, mask, keeps, float(fill))

    def _multiplied(self, node: fx.Node) -> Term:
        """`scores * kept`: zero where a group was dropped."""
        given = [self._operand(node, 0, "input", "self"), self._operand(node, 1, "other")]
        terms = [self.read(n) for n in given]
        if isinstance(terms[0], GroupMask):
            given.reverse()
        return self._masked(node, given[0], given[1], True, 0.0)

    def _masked(self, node: fx.Node, scores: fx.Node, mask: fx.Node, keeps: bool, fill: float) -> Term:
        rows, term = self.read(scores), self.read(mask)
        if not isinstance(rows, Rows) or not isinstance(term, GroupMask) or rows.mask is not None:
            raise self._unknown(node)
        by = dataclasses.replace(term.ids.score.rows, grouped=0)
        if by != dataclasses.replace(rows, grouped=0):
            raise Unread(f"its groups are scored by other values than its experts ({node.name})")
        fits = term.layout == "experts" if not rows.grouped else term.layout in ("column", "grouped")
        same_groups = rows.grouped in (0, term.ids.score.rows.grouped)
        if (
            term.keeps is not keeps
            or not fits
            or not same_groups
            or dims(node) != dims(scores)
            or rows.function == "logits"
        ):
            raise self._unknown(node)
        return dataclasses.replace(rows, mask=term.ids, fill=fill)


def is_last(axis: Any, node: fx.Node) -> bool:
    """Whether an axis is the last one of a value."""
    if isinstance(axis, tuple | list) and len(axis) == 1:
        (axis,) = axis
    rank = len(dims(node))
    return isinstance(axis, int) and rank > 0 and axis % rank == rank - 1


def _short(node: fx.Node) -> str:
    return str(value(node).dtype).removeprefix("torch.")
