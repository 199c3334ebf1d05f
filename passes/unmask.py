"""A score as it is before the router's own masks: the operators in between done again, without the masks.

What the graph does not say is a reason: scores that pass a softmax behind a mask of the router's own choice, say.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from r3_pass.passes.reach import Reach
from r3_pass.registry.operators import spelling
from r3_pass.registry.shapes import dims
from r3_pass.registry.writes import is_inplace, written

_LAYOUT = frozenset({"view", "transpose", "permute", "movedim", "t", "contiguous", "clone", "detach", "to", "float",
                     "type_as", "double", "half", "bfloat16"})  # fmt: skip
POINTWISE = _LAYOUT | {"mul", "add", "sub", "div", "neg"}
MASKS = frozenset({"masked_fill", "where", "mul", "add", "sub", "scatter", "index_fill", "index_put", "setitem",
                   "masked_scatter"})  # fmt: skip


class Unprovable(Exception):
    """Why a choice cannot be forced; caught by `forcing.plan`."""


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


class Unmasking:
    """Reads of one site's scores."""

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self.flow = reach.flow

    def read(self, node: fx.Node, given: fx.Node) -> Read:
        steps: dict[fx.Node, Step] = {}
        top = self._as_read(node, given)
        if top in self.reach.tainted:
            self._unmask(top, given, steps)
        return Read(node, given, tuple(steps[n] for n in self.reach.in_order(steps)))

    def _as_read(self, node: fx.Node, given: fx.Node) -> fx.Node:
        """The producer of an argument as it is read; the in-place update of a view of it, if that came last."""
        resolved = self.flow.operand(node, given)
        assert resolved is not None, "a tensor argument"
        if resolved in self.reach.tainted:
            return resolved
        for other in self.flow.inputs(node):
            if other in self.reach.tainted and is_inplace(other) and resolved in self._bases(other):
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
        if len(carriers) != 1 or name not in (MASKS if masks else POINTWISE) or (is_inplace(node) and not masks):
            raise Unprovable(
                f"its scores pass {name} ({node.name}) behind a mask of the router's own choice (the groups that it "
                "kept): what "
                "the score of an expert outside of them would be, the graph does not say"
            )
        raw, source = carriers[0]
        if is_inplace(node) and dims(raw) != dims(given) and given in self._bases(node):
            raw, source = given, given  # masked through a view: what is read is the whole
        after = source if source in self.reach.tainted else None
        steps[node] = Step(node, raw, after, masks)
        if after is not None:
            self._unmask(after, raw, steps)

    def _carries(self, node: fx.Node) -> bool:
        """Whether a value holds the router's scores themselves, not only what was decided by them."""
        stack, seen = [node], {node}
        while stack:
            top = stack.pop()
            if top in self.reach.roots:
                return True
            for source in self.flow.inputs(top):
                if source not in seen and source not in self.reach.decided and source in self.reach.local:
                    seen.add(source)
                    stack.append(source)
        return False
