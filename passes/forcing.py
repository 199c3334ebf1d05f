"""How a site's choice can be forced: what to swap so that given ids take the place of the chosen ones, or why that is
not provable.

The rule: `n = where(given < 0, chosen, given)` takes the place of every use of the ids, and the score of `n`, live and
unmasked, the place of every use of the chosen scores. All later operators stay. So a plan is a list of selections with
the values they return, and the *masks* that stand between the router and a score that is read at `n`: a mask that
depends on the router's own choice (the groups it kept) would hand over zeros or -inf for a given expert outside of
what this model would have kept. Scores are read in front of it.

What a plan cannot prove is a reason: scores that pass a softmax behind such a mask, weights that come from another
selection, masks made of the chosen scores. Decides, never mutates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import fx

from r3_pass.passes.reach import Reach, is_scalar
from r3_pass.passes.site import Accepted
from r3_pass.passes.unmask import MASKS, POINTWISE, Read, Unmasking, Unprovable
from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.form import Selection
from r3_pass.registry.operators import COMPARISONS, argument, spelling
from r3_pass.registry.shapes import dims, is_tensor, value

_SELECTS = frozenset({"max", "min", "amax", "amin", "topk", "sort", "msort", "kthvalue", "cummax", "median"})


@dataclasses.dataclass(frozen=True)
class Swap:
    """One selection whose ids and scores are replaced.

    Attributes:
        node: the selection.
        like: the selection whose choice it makes; itself, or an earlier one of which it returns the scores.
        dim: the dimension of its scores that it runs over, not negative.
        ids, values: what it returns, to be replaced.
        scores: what it selects over, unmasked.
        column: first column of the given ids that it takes.
        width: how many columns its ids have; None if they have no such dimension.
    """

    node: fx.Node
    like: fx.Node
    dim: int
    ids: tuple[fx.Node, ...]
    values: tuple[fx.Node, ...]
    scores: Read
    column: int
    width: int | None


@dataclasses.dataclass(frozen=True)
class Forcing:
    """What to do to force one site.

    Attributes:
        reads: further scores that are picked at the ids, and are masked where they are read.
        last: ids in which the model mixes others after its selection, and which experts see; None if there are none.
    """

    swaps: tuple[Swap, ...]
    reads: tuple[Read, ...]
    last: fx.Node | None
    id_dim: int | None


def plan(flow: DataFlow, site: Accepted, broken: bool = False) -> Forcing | str:
    """How to force the choice of a site; a reason (text) if it cannot be.

    Args:
        broken: the graph ends in a graph break, so that what it returns may yet become a weight.
    """
    if site.no_replay:
        return site.no_replay
    try:
        return _Plan(flow, site, broken and not site.proved).make()
    except Unprovable as reason:
        return str(reason)


class _Plan:
    def __init__(self, flow: DataFlow, site: Accepted, open_end: bool) -> None:
        self.flow = flow
        self.site = site
        self.open_end = open_end
        self.reach = Reach(flow, site, open_end)
        self.unmasking = Unmasking(self.reach)

    def make(self) -> Forcing:
        home = {s.node.graph for s, _ in self.site.choices}
        if len(home) != 1:
            raise Unprovable("its choices are made in different graphs (nested by activation checkpointing)")
        last = self._last()
        swaps = [self._swap(selection, column) for selection, column in self.site.choices]
        swaps += [s for node in self.reach.in_order(self.reach.local) if (s := self._same_choice(node)) is not None]
        reads = list(
            {r.node: r for node in self.reach.in_order(self.reach.tainted) for r in self._escapes(node)}.values()
        )
        self._check_ids()
        for swap in swaps:
            self._check_comparisons(swap)
        touched = [n for r in (*reads, *(s.scores for s in swaps)) for n in (r.node, r.argument)]
        touched += [
            n for r in (*reads, *(s.scores for s in swaps)) for step in r.steps for n in (step.node, step.carrier)
        ]
        if any(n.graph not in home for n in (*touched, *([last] if last is not None else []))):
            raise Unprovable("its scores are masked, or its ids changed, in another graph (activation checkpointing)")
        return Forcing(tuple(swaps), tuple(reads), last, self.site.id_dim)

    # ---- what is replaced ---------------------------------------------------------------------------------------
    def _swap(self, selection: Selection, column: int) -> Swap:
        node = selection.node
        if selection.values is None or selection.scores is None:
            raise Unprovable(f"its form ({self.site.form}) does not say where the scores of the chosen are")
        if selection.scores not in self.reach.local:
            raise Unprovable(f"what {node.name} selects over is made of more than its router's scores")
        if node.kwargs.get("out") is not None:
            raise Unprovable(f"{node.name} writes its choice into buffers that were made before (out=)")
        known = {*selection.ids, *selection.values}
        for user in self.flow.users(node):
            if node not in known and user not in known:
                raise Unprovable(f"{user.name} takes all that {node.name} returns")
        shape = dims(selection.scores)
        dim = selection.dim % len(shape)
        ranks = {len(dims(i)) for i in selection.ids}
        wide = ranks == {len(shape)}
        width = dims(selection.ids[0])[dim] if wide else None
        if not wide and ranks != {len(shape) - 1}:
            raise Unprovable(f"the ids of {node.name} have another layout than its scores")
        given = argument(node, 0, "input", "self")
        return Swap(
            node=node,
            like=node,
            dim=dim,
            ids=selection.ids,
            values=tuple(v for v in selection.values if self.flow.users(v) or v in self.flow.outputs),
            scores=self.unmasking.read(node, given) if selection.values else Read(node, given, ()),
            column=column,
            width=width,
        )

    def _last(self) -> fx.Node | None:
        """The recorded ids, where they are more than a cut of what was selected."""
        (recorded, *others) = self.site.columns
        starts = {i for s, _ in self.site.choices for i in s.ids}
        node = recorded
        while not others and node not in starts:
            name = spelling(node)
            source = self.flow.operand(node, node.args[0]) if node.args else None
            if name in ("where", "masked_scatter"):
                return recorded
            if source is None or name not in ("getitem", "narrow", "slice"):
                raise Unprovable(f"the ids that experts see are made by {name} ({node.name}) from those selected")
            if not _from_the_first(node):
                raise Unprovable(f"{node.name} cuts the first columns off the selected ids")
            node = source
        return None

    def _same_choice(self, node: fx.Node) -> Swap | None:
        """Another selection by the same router whose scores become weights: the same choice, or not to be forced."""
        if spelling(node) not in _SELECTS or node in self.reach.members or node in self.reach.between:
            return None
        results = [node] if is_tensor(node) else [u for u in self.flow.users(node) if self._item(u) in (0, None)]
        floats = tuple(r for r in results if is_tensor(r) and value(r).dtype.is_floating_point)
        scores = self.flow.operand(node, argument(node, 0, "input", "self"))
        if not any(self.reach.becomes_a_weight(r) for r in floats) or all(self._shifts(r, scores) for r in floats):
            return None
        first = self.site.choices[0][0]
        axis = argument(node, 1, "dim", "axis")
        axis = axis[0] if isinstance(axis, tuple | list) and len(axis) == 1 else axis
        shape = dims(scores) if scores is not None else ()
        same = (
            spelling(node) in ("max", "amax")
            and spelling(first.node) in ("max", "argmax", "topk")
            and argument(first.node, 3, "largest", default=True) is True
            and scores is first.scores
            and isinstance(axis, int)
            and axis % len(shape) == first.dim % len(shape)
            and self.site.top_k == 1
            and self.flow.order[node] > self.flow.order[first.node]
            and node.graph is first.node.graph
        )
        if not same:
            raise Unprovable(
                f"a weight of the experts comes from another selection ({node.name}), which has its own choice"
            )
        given = argument(node, 0, "input", "self")
        return Swap(node, first.node, first.dim % len(shape), (), floats, self.unmasking.read(node, given), 0, None)

    def _shifts(self, node: fx.Node, scores: fx.Node | None) -> bool:
        """The maximum that a softmax written by hand subtracts: it moves all scores alike."""
        return all(spelling(u) == "sub" and scores in self.flow.inputs(u) for u in self.flow.users(node))

    @staticmethod
    def _item(node: fx.Node) -> int | None:
        return node.args[1] if spelling(node) == "getitem" and isinstance(node.args[1], int) else None

    def _escapes(self, node: fx.Node) -> Iterable[Read]:
        """Readers of a masked score beside the selection: picked at the ids it is read unmasked; counted it stays."""
        for user in self.flow.users(node):
            if user in self.reach.members or user in self.reach.between or user in self.reach.decided:
                continue
            if self.reach.at_ids(user):
                read = self.unmasking.read(user, argument(user, 0, "input", "self"))
                if not read.steps:
                    raise Unprovable(f"{user.name} picks at the ids and at another choice ({node.name})")
                yield read
                continue
            goes_on = user in self.reach.tainted and spelling(user) in POINTWISE | MASKS
            counted = user in self.reach.tainted and not self.reach.becomes_a_weight(user)
            if not (goes_on or counted or (user.op == "output" and not self.open_end)):
                why = f"{spelling(user)} ({user.name}) uses scores that were masked by the router's own choice ({node.name})"
                raise Unprovable(why + ", and not at the chosen experts alone")

    def _check_ids(self) -> None:
        """The ids may not be made of this choice and another one."""
        for node in self.reach.in_order(self.reach.ids):
            for source in self.flow.inputs(node):
                if source in self.reach.ids or not is_tensor(source) or value(source).dtype.is_floating_point:
                    continue
                if spelling(node) in ("add", "sub", "mul", "where", "cat", "stack") and self._chosen_elsewhere(source):
                    raise Unprovable(f"{node.name} makes the ids of this choice and of another one ({source.name})")

    def _chosen_elsewhere(self, node: fx.Node) -> bool:
        """Whether an integer is what another selection chose."""
        stack, seen = [node], {node}
        while stack:
            for source in self.flow.inputs(stack.pop()):
                if source in seen or source in self.reach.members or self.flow.kind(source) != "data":
                    continue
                if spelling(source) in _SELECTS | {"argmax", "argmin", "multinomial"}:
                    return True
                if not is_tensor(source) or not value(source).dtype.is_floating_point:
                    seen.add(source)
                    stack.append(source)
        return False

    def _check_comparisons(self, swap: Swap) -> None:
        """The chosen scores may not decide by a comparison with those of all experts which of them work."""
        reached = self.reach.forward(set(swap.values), self.reach.members)
        mixed = {
            n
            for n in reached - set(swap.values)
            if any(
                s not in reached and s not in self.reach.ids and self.flow.kind(s) == "data"
                for s in self.flow.inputs(n)
            )
        }
        for node in self.reach.in_order(self.reach.forward(mixed, self.reach.members)):
            if spelling(node) in (*COMPARISONS, "isclose") and not self._stays_with_ids(node):
                why = f"{spelling(node)} ({node.name}) compares the scores of the chosen with those of all experts"
                raise Unprovable(why + ": a choice of its own, which the given ids do not decide")

    def _stays_with_ids(self, node: fx.Node) -> bool:
        """Whether all that a value leads to is picked at the ids, selected by the site itself, or only counted."""
        stack, seen = [node], {node}
        while stack:
            for user in self.flow.users(stack.pop()):
                if user in seen or user in self.reach.members or self.reach.at_ids(user) or is_scalar(user):
                    continue
                if user not in self.reach.local:
                    return False
                seen.add(user)
                stack.append(user)
        return True


def _from_the_first(node: fx.Node) -> bool:
    """Whether a slice begins at the first column and leaves none out."""
    if spelling(node) == "narrow":
        return bool(argument(node, 2, "start") == 0)
    if spelling(node) == "slice":
        return argument(node, 2, "start") in (None, 0) and argument(node, 4, "step") in (None, 1)
    if spelling(node) == "getitem" and not is_tensor(node.args[0]):
        return bool(node.args[1] == 0)  # the first part of a split
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(not isinstance(i, slice) or (i.start in (None, 0) and i.step in (None, 1)) for i in index)
