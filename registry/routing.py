"""What a router computes between its logits and the ids and weights of the chosen experts, read exactly.

`read_routing` names every value on the way as one of a few things (`Rows`, `GroupScore`, ...), each made from the ones before by an
operator whose arguments are checked, or gives up with the operator that it does not know. So what it returns is not what the graph
resembles, but what it computes. How far the weights are followed is chosen such that one value stands for all: what is done to them
behind it stays in the graph.

Legend: T tokens, E experts, K top-k, G groups of E/G experts each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx

from r3_pass.registry.dataflow import DataFlow, argument, dims, is_tensor, product, spelling, value
from r3_pass.registry.form import Selection
from r3_pass.registry.numbers import number_of

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = frozenset({"to", "float", "type", "type_as", "half", "bfloat16", "bool", "int", "long"})
_SAME = frozenset({"contiguous", "clone", "detach"})

_ITEMS: dict[str | int, int] = {0: 0, 1: 1, "values": 0, "indices": 1}

Scores = Literal["logits", "softmax", "sigmoid"]
Weights = Literal["scores", "softmax", "sigmoid"]


class Unread(Exception):
    """Why a router is not one of those that are understood; the text names what was seen."""


@dataclasses.dataclass(frozen=True)
class Routing:
    """What is computed between a router's logits and its ids and weights.

    Attributes:
        top_k: K.
        scores: what is selected over: the logits, or their softmax over all experts, or their sigmoid; plus the bias, if there is
            one.
        groups: G, 1 for none. The best `kept` groups stay, by the sum of their `best` best scores (1 or 2); the scores of all
            other experts become `fill`, or below all others if that is None.
        weights: of the chosen: their scores without bias; or softmax (over the K chosen) or sigmoid of their logits.
        normalise: what is added to the sum that they are then divided by; None if they are not.
        scale: what they are then multiplied by.
        dtype: what they are then cast to.
    """

    top_k: int
    scores: Scores
    groups: int = 1
    best: int = 1
    kept: int = 1
    fill: float | None = None
    weights: Weights = "scores"
    normalise: float | None = None
    scale: float = 1.0
    dtype: torch.dtype = torch.float32

    def simplified(self) -> Routing:
        """The same weights with less work: a softmax over all, divided by the sum of the chosen, is the softmax over the chosen."""
        if self.scores == "softmax" and self.weights == "scores" and self.normalise == 0.0:
            return dataclasses.replace(self, weights="softmax", normalise=None)
        return self


@dataclasses.dataclass(frozen=True)
class Reading:
    """A router that is understood.

    Attributes:
        logits: [..., E], in a dtype that float32 holds exactly.
        bias: E numbers of the model, added for the choice alone; None if there are none.
        weights: the value that `routing` says, [..., K].
        between: all that computes ids and weights from the logits, itself included.
    """

    routing: Routing
    logits: fx.Node
    bias: fx.Node | None
    weights: fx.Node
    between: frozenset[fx.Node]


# ---- what a value on the way is ----------------------------------------------------------------------------------
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


def read_routing(flow: DataFlow, selection: Selection, logits: fx.Node) -> Reading:
    """Read the router of one selection.

    Args:
        selection: a `topk` over the last dimension of its scores, largest first.
        logits: the product that its scores come from.

    Raises: Unread if it is none of the routers that `Routing` can say.
    """
    assert selection.scores is not None, "a selection over scores"
    reader = _Reader(flow, logits)
    choice = reader.read(selection.scores)
    if not isinstance(choice, Rows) or choice.grouped:
        raise Unread(f"it selects over something else than a row of scores ({selection.scores.name})")
    top_k = dims(selection.ids[0])[-1]
    routing = Routing(top_k, choice.function)
    if choice.mask is not None:
        score = choice.mask.score
        groups = score.rows.grouped
        routing = dataclasses.replace(routing, groups=groups, best=score.best, kept=choice.mask.kept)
        if top_k > choice.mask.kept * (reader.experts // groups):
            raise Unread(f"it chooses {top_k} experts of {choice.mask.kept} groups that hold fewer")
        never = choice.fill == float("-inf") or (choice.bias is None and choice.fill <= 0.0)
        routing = dataclasses.replace(routing, fill=None if never else choice.fill)
    between = {selection.node, *selection.ids, *(selection.values or ()), *reader.between}
    start, scored = _first_weights(flow, selection, choice, routing, logits)
    routing, weights, steps = _follow(flow, routing, start, selection.ids[0])
    return Reading(routing.simplified(), logits, choice.bias, weights, frozenset({*between, *scored, start, *steps}))


# ---- scores ------------------------------------------------------------------------------------------------------
class _Reader:
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
            "mul": self._multiplied, **dict.fromkeys(_CASTS, self._cast), **dict.fromkeys(_SAME, self._same),
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
        if name == "softmax" and not _is_last(argument(node, 1, "dim"), node):
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
        if dims(node) != dims(scores[0]) or value(added[0]).dtype not in _FLOATS:
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
        if isinstance(term, Rows) and after.dtype is torch.float32 and before.dtype in _FLOATS:
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
        if not isinstance(term, GroupMask) or term.layout != "groups" or not _is_last(argument(node, 2, "dim"), node):
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
            or not _is_last(axis, scores)
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
        over_last = _is_last(argument(node, 1, "dim", "axis"), source) and len(dims(node)) == len(dims(source)) - 1
        if not isinstance(term, GroupBest) or not over_last:
            raise self._unknown(node)
        self._float32(node)
        return GroupScore(term.rows, 2)

    def _best_of_group(self, node: fx.Node) -> Term:
        source, term = self._first(node)
        over_last = _is_last(argument(node, 1, "dim", "axis"), source) and len(dims(node)) == len(dims(source)) - 1
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
        if not _is_last(argument(node, 1, "dim"), node) or dims(base) != (*dims(index)[:-1], groups):
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


# ---- weights -----------------------------------------------------------------------------------------------------
def _first_weights(
    flow: DataFlow, selection: Selection, choice: Rows, routing: Routing, logits: fx.Node
) -> tuple[fx.Node, set[fx.Node]]:
    """The scores of the chosen: what the selection returns, or what is gathered at the ids from the scores without bias.

    Returns: them, and what those scores are made by.
    """
    used = [v for v in selection.values or () if flow.users(v)]
    if len(used) > 1:
        raise Unread("the values that it selects are read in two ways")
    if used:
        if choice.bias is not None:
            raise Unread("the bias that chooses is in its weights, too: they are the values that it selects")
        if routing.fill is not None:
            raise Unread(f"its weights may be what scores of other groups were filled with ({routing.fill})")
        return used[0], set()
    why = "no weights are read at its ids"
    for ids in selection.ids:
        for user in flow.users(ids):
            if spelling(user) not in ("gather", "take_along_dim") or dims(user) != dims(ids):
                continue
            gather_last = spelling(user) == "gather" and _is_last(argument(user, 1, "dim"), user)
            take_last = spelling(user) == "take_along_dim" and _is_last(argument(user, 2, "dim"), user)
            source = flow.operand(user, argument(user, 0, "input", "self"))
            index = argument(user, 2 if spelling(user) == "gather" else 1, "index", "indices")
            if not (gather_last or take_last) or source is None or flow.operand(user, index) is not ids:
                continue
            reader = _Reader(flow, logits)
            try:
                term = reader.read(source)
            except Unread as reason:
                why = str(reason)
                continue
            if term == Rows(choice.function):
                return user, reader.between
            why = f"its weights ({user.name}) are read from other scores than it selects over"
    raise Unread(why)


_SOFTENED, _NORMALISED, _SCALED = 1, 2, 3


def _follow(flow: DataFlow, routing: Routing, start: fx.Node, ids: fx.Node) -> tuple[Routing, fx.Node, set[fx.Node]]:
    """What is done to the weights of the chosen, as far as a fused router does it too."""
    current, stage = start, 0
    passed: set[fx.Node] = set()
    while True:
        routing = dataclasses.replace(routing, dtype=value(current).dtype)
        step = _step(flow, routing, start, current, stage)
        if step is None or dims(step[1]) != dims(ids):
            return routing, current, passed
        routing, current, nodes, stage = step
        passed |= nodes


def _step(
    flow: DataFlow, routing: Routing, start: fx.Node, current: fx.Node, stage: int
) -> tuple[Routing, fx.Node, set[fx.Node], int] | None:
    """The one next operator that takes all that there is of `current`; None where a fused router ends."""
    users = list(flow.users(current))
    exact = value(current).dtype is torch.float32
    if len(users) == 2 and exact and stage < _NORMALISED:
        return _normalised(flow, routing, current, users)
    if len(users) != 1 or users[0].op == "output" or not is_tensor(users[0]):
        return None
    (node,) = users
    name, dtype = spelling(node), value(node).dtype
    if dtype not in _FLOATS or flow.operand(node, argument(node, 0, "input", "self")) is not current:
        return None
    softens = name in ("softmax", "sigmoid") and dtype in (torch.float32, value(current).dtype)
    rounded = value(current).dtype is not value(start).dtype
    if softens and not rounded and stage == 0 and routing.scores == "logits":
        if name == "softmax" and not _is_last(argument(node, 1, "dim"), node):
            return None
        return dataclasses.replace(routing, weights=name), node, {node}, _SOFTENED  # type: ignore[arg-type]  # both names are
    if name == "mul" and exact and dtype is torch.float32 and stage < _SCALED:
        scale = argument(node, 1, "other")
        if isinstance(scale, int | float) and not isinstance(scale, bool):
            return dataclasses.replace(routing, scale=float(scale)), node, {node}, _SCALED
    if name in _CASTS and exact and value(node).device == value(current).device:
        return routing, node, {node}, stage
    return None


def _normalised(
    flow: DataFlow, routing: Routing, current: fx.Node, users: Sequence[fx.Node]
) -> tuple[Routing, fx.Node, set[fx.Node], int] | None:
    """`w / w.sum(-1, keepdim=True)`, or with a number added to the sum."""
    sums = [u for u in users if spelling(u) == "sum"]
    quotients = [u for u in users if spelling(u) == "div"]
    if len(sums) != 1 or len(quotients) != 1:
        return None
    (total,), (quotient,) = sums, quotients
    kept = dims(total) == (*dims(current)[:-1], 1)
    if not kept or not _is_last(argument(total, 1, "dim", "axis"), current) or value(total).dtype is not torch.float32:
        return None
    if quotient.kwargs.get("rounding_mode") is not None or value(quotient).dtype is not torch.float32:
        return None
    if flow.operand(quotient, argument(quotient, 0, "input", "self")) is not current:
        return None
    divisor = flow.operand(quotient, argument(quotient, 1, "other"))
    nodes = {total, quotient}
    added = 0.0
    if divisor is not total:
        if (
            divisor is None
            or spelling(divisor) != "add"
            or list(flow.users(total)) != [divisor]
            or len(divisor.args) > 2
        ):
            return None
        number = argument(divisor, 1, "other")
        first = flow.operand(divisor, argument(divisor, 0, "input", "self"))
        if first is not total or not isinstance(number, int | float) or "alpha" in divisor.kwargs or number < 0:
            return None
        added = float(number)
        nodes.add(divisor)
    if divisor is None or list(flow.users(divisor)) != [quotient]:
        return None
    return dataclasses.replace(routing, normalise=added), quotient, nodes, _NORMALISED


def _is_last(axis: Any, node: fx.Node) -> bool:
    """Whether an axis is the last one of a value."""
    if isinstance(axis, tuple | list) and len(axis) == 1:
        (axis,) = axis
    rank = len(dims(node))
    return isinstance(axis, int) and rank > 0 and axis % rank == rank - 1


def _short(node: fx.Node) -> str:
    return str(value(node).dtype).removeprefix("torch.")
