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
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from r3_pass.passes.site import Accepted
from r3_pass.registry.dataflow import (
    CONTRACTIONS,
    CREATION,
    DataFlow,
    argument,
    dims,
    is_inplace,
    is_opaque,
    is_tensor,
    spelling,
    value,
    written,
)
from r3_pass.registry.form import Selection
from r3_pass.registry.operators import COMPARISONS

_PICKS = frozenset({"gather", "take_along_dim", "getitem", "index_select"})
_SELECTS = frozenset({"max", "min", "amax", "amin", "topk", "sort", "msort", "kthvalue", "cummax", "median"})
_LAYOUT = frozenset({"view", "transpose", "permute", "movedim", "t", "contiguous", "clone", "detach", "to", "float",
                     "type_as", "double", "half", "bfloat16"})  # fmt: skip
_POINTWISE = _LAYOUT | {"mul", "add", "sub", "div", "neg"}
_MASKS = frozenset({"masked_fill", "where", "mul", "add", "sub", "scatter", "index_fill", "index_put", "setitem",
                    "masked_scatter"})  # fmt: skip


class Unprovable(Exception):
    """Why a choice cannot be forced; does not leave this file."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One operator between the router and a masked score, done again without the masks.

    Attributes:
        node: the operator.
        carrier: the argument of it that holds the scores.
        after: the step before it, by its operator; None for the first, which takes the carrier itself.
        masks: it is a mask, so that its result is the carrier, kept as it was in front of it.
    """

    node: fx.Node
    carrier: fx.Node
    after: fx.Node | None
    masks: bool


@dataclasses.dataclass(frozen=True)
class Read:
    """A score as it is before the router's own masks.

    Attributes:
        node: the operator that reads it, as one of its arguments.
        argument: that argument; read as it is if there are no steps.
        steps: in graph order; the last one makes what takes the argument's place.
    """

    node: fx.Node
    argument: fx.Node
    steps: tuple[Step, ...]


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
        self.members = {selection.node for selection, _ in site.choices}
        self.roots = set(site.roots)
        self._hidden: dict[fx.Node, bool] = {}
        # All that a selection reads: an in-place change of a view of the scores is one more input of it.
        self.between = self._behind([n for member in self.members for n in flow.inputs(member)])
        self.local = self._router_only()
        self.decided = {n for n in self.between if self._decides(n)}
        self.ids = self._integers([i for s, _ in site.choices for i in s.ids])
        picks = {n for i in self.ids for n in flow.users(i) if self._at_ids(n)}
        self.tainted = self._forward(self.decided, self.members | picks)

    def make(self) -> Forcing:
        home = {s.node.graph for s, _ in self.site.choices}
        if len(home) != 1:
            raise Unprovable("its choices are made in different graphs (nested by activation checkpointing)")
        last = self._last()
        swaps = [self._swap(selection, column) for selection, column in self.site.choices]
        swaps += [s for node in self._sorted(self.local) if (s := self._same_choice(node)) is not None]
        reads = list({r.node: r for node in self._sorted(self.tainted) for r in self._escapes(node)}.values())
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
        if selection.scores not in self.local:
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
            scores=self._read(node, given) if selection.values else Read(node, given, ()),
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
        if spelling(node) not in _SELECTS or node in self.members or node in self.between:
            return None
        results = [node] if is_tensor(node) else [u for u in self.flow.users(node) if self._item(u) in (0, None)]
        floats = tuple(r for r in results if is_tensor(r) and value(r).dtype.is_floating_point)
        scores = self.flow.operand(node, argument(node, 0, "input", "self"))
        if not any(self._becomes_a_weight(r) for r in floats) or all(self._shifts(r, scores) for r in floats):
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
        return Swap(node, first.node, first.dim % len(shape), (), floats, self._read(node, given), 0, None)

    def _shifts(self, node: fx.Node, scores: fx.Node | None) -> bool:
        """The maximum that a softmax written by hand subtracts: it moves all scores alike."""
        return all(spelling(u) == "sub" and scores in self.flow.inputs(u) for u in self.flow.users(node))

    @staticmethod
    def _item(node: fx.Node) -> int | None:
        return node.args[1] if spelling(node) == "getitem" and isinstance(node.args[1], int) else None

    def _escapes(self, node: fx.Node) -> Iterable[Read]:
        """Readers of a masked score beside the selection: picked at the ids it is read unmasked; counted it stays."""
        for user in self.flow.users(node):
            if user in self.members or user in self.between or user in self.decided:
                continue
            if self._at_ids(user):
                read = self._read(user, argument(user, 0, "input", "self"))
                if not read.steps:
                    raise Unprovable(f"{user.name} picks at the ids and at another choice ({node.name})")
                yield read
                continue
            goes_on = user in self.tainted and spelling(user) in _POINTWISE | _MASKS
            counted = user in self.tainted and not self._becomes_a_weight(user)
            if not (goes_on or counted or (user.op == "output" and not self.open_end)):
                why = f"{spelling(user)} ({user.name}) uses scores that were masked by the router's own choice ({node.name})"
                raise Unprovable(why + ", and not at the chosen experts alone")

    def _at_ids(self, user: fx.Node) -> bool:
        """Whether an operator picks from its first argument at the chosen ids."""
        return spelling(user) in _PICKS and any(n in self.ids for n in self.flow.inputs(user)[1:])

    def _check_ids(self) -> None:
        """The ids may not be made of this choice and another one."""
        for node in self._sorted(self.ids):
            for source in self.flow.inputs(node):
                if source in self.ids or not is_tensor(source) or value(source).dtype.is_floating_point:
                    continue
                if spelling(node) in ("add", "sub", "mul", "where", "cat", "stack") and self._chosen_elsewhere(source):
                    raise Unprovable(f"{node.name} makes the ids of this choice and of another one ({source.name})")

    def _chosen_elsewhere(self, node: fx.Node) -> bool:
        """Whether an integer is what another selection chose."""
        stack, seen = [node], {node}
        while stack:
            for source in self.flow.inputs(stack.pop()):
                if source in seen or source in self.members or self.flow.kind(source) != "data":
                    continue
                if spelling(source) in _SELECTS | {"argmax", "argmin", "multinomial"}:
                    return True
                if not is_tensor(source) or not value(source).dtype.is_floating_point:
                    seen.add(source)
                    stack.append(source)
        return False

    def _check_comparisons(self, swap: Swap) -> None:
        """The chosen scores may not decide by a comparison with those of all experts which of them work."""
        reached = self._forward(set(swap.values), self.members)
        mixed = {
            n
            for n in reached - set(swap.values)
            if any(s not in reached and s not in self.ids and self.flow.kind(s) == "data" for s in self.flow.inputs(n))
        }
        for node in self._sorted(self._forward(mixed, self.members)):
            if spelling(node) in (*COMPARISONS, "isclose") and not self._stays_with_ids(node):
                why = f"{spelling(node)} ({node.name}) compares the scores of the chosen with those of all experts"
                raise Unprovable(why + ": a choice of its own, which the given ids do not decide")

    def _stays_with_ids(self, node: fx.Node) -> bool:
        """Whether all that a value leads to is picked at the ids, selected by the site itself, or only counted."""
        stack, seen = [node], {node}
        while stack:
            for user in self.flow.users(stack.pop()):
                if user in seen or user in self.members or self._at_ids(user) or _is_scalar(user):
                    continue
                if user not in self.local:
                    return False
                seen.add(user)
                stack.append(user)
        return True

    # ---- unmasked scores ----------------------------------------------------------------------------------------
    def _read(self, node: fx.Node, given: fx.Node) -> Read:
        steps: dict[fx.Node, Step] = {}
        top = self._as_read(node, given)
        if top in self.tainted:
            self._unmask(top, given, steps)
        return Read(node, given, tuple(steps[n] for n in self._sorted(steps)))

    def _as_read(self, node: fx.Node, given: fx.Node) -> fx.Node:
        """The producer of an argument as it is read; the in-place update of a view of it, if that came last."""
        resolved = self.flow.operand(node, given)
        assert resolved is not None, "a tensor argument"
        if resolved in self.tainted:
            return resolved
        for other in self.flow.inputs(node):
            if other in self.tainted and is_inplace(other) and resolved in self._bases(other):
                return other
        return resolved

    def _bases(self, node: fx.Node) -> set[fx.Node]:
        found, stack = set(), [self.flow.resolve(t) for t in written(node)]
        while stack:
            top = stack.pop()
            found.add(top)
            if spelling(top) in _LAYOUT | {"getitem", "expand"} and isinstance(top.args[0], fx.Node):
                stack.append(self.flow.resolve(top.args[0]))
        return found

    def _unmask(self, node: fx.Node, given: fx.Node, steps: dict[fx.Node, Step]) -> None:
        """Find the steps that make `node`, which is read as `given`, from scores before the router's own masks."""
        if node in steps:
            return
        name = spelling(node)
        carriers: list[tuple[fx.Node, fx.Node]] = []
        deciding: list[tuple[fx.Node, fx.Node]] = []
        for raw in node.all_input_nodes:
            source = self._as_read(node, raw)
            if self.flow.kind(source) == "data":
                (carriers if self._carries(source) else deciding).append((raw, source))
        masks = bool(deciding)
        if len(carriers) != 1 or name not in (_MASKS if masks else _POINTWISE) or (is_inplace(node) and not masks):
            raise Unprovable(
                f"its scores pass {name} ({node.name}) behind a mask of the router's own choice (the groups that it "
                "kept): what "
                "the score of an expert outside of them would be, the graph does not say"
            )
        raw, source = carriers[0]
        if is_inplace(node) and dims(raw) != dims(given) and given in self._bases(node):
            raw, source = given, given  # masked through a view: what is read is the whole
        after = source if source in self.tainted else None
        steps[node] = Step(node, raw, after, masks)
        if after is not None:
            self._unmask(after, raw, steps)

    def _carries(self, node: fx.Node) -> bool:
        """Whether a value holds the router's scores themselves, not only what was decided by them."""
        stack, seen = [node], {node}
        while stack:
            top = stack.pop()
            if top in self.roots:
                return True
            for source in self.flow.inputs(top):
                if source not in seen and source not in self.decided and source in self.local:
                    seen.add(source)
                    stack.append(source)
        return False

    # ---- neighbourhoods -----------------------------------------------------------------------------------------
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

    def _sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.flow.order.__getitem__)

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

    def _forward(self, starts: set[fx.Node], stop: set[fx.Node]) -> set[fx.Node]:
        found, stack = set(starts), list(starts)
        while stack:
            for user in self.flow.users(stack.pop()):
                if user not in found and user not in stop and (user in self.local or user in self.between):
                    found.add(user)
                    stack.append(user)
        return found

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

    def _becomes_a_weight(self, node: fx.Node) -> bool:
        """Whether a value reaches something with tokens in it other than by a sum over all of them."""
        stack, seen = [node], {node}
        while stack:
            top = stack.pop()
            if self.open_end and top in self.flow.outputs and dims(top):
                return True
            for user in self.flow.users(top):
                if user in seen or user.op == "output" or _is_scalar(user) or user in self.members:
                    continue
                if user not in self.local or spelling(user) in CONTRACTIONS or is_opaque(user):
                    return True
                seen.add(user)
                stack.append(user)
        return False


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


def _is_scalar(node: fx.Node) -> bool:
    return is_tensor(node) and dims(node) == ()
