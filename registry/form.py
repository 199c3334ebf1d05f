"""What a routing form is: how one spelling of "choose k of E" is recognised.

A form only says what an operator chooses and where its ids are. That the scores are a router's, and that the ids choose
parameters, is proved by the matcher for every form alike (`scores.py`, `dispatch.py`), so a form is a dozen lines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.operators import spelling
from r3_pass.registry.shapes import dims


@dataclasses.dataclass(frozen=True)
class Selection:
    """One choice that an operator makes.

    Attributes:
        node: the operator.
        scores: what it selects over, [..., E, ...]; None for ids that are looked up, not selected.
        dim: the dimension of `scores` that it runs over.
        ids: the values that hold the chosen ids, equal ones if several, [..., k] or [...] for k = 1.
        needs_slice: the operator orders all E; the routing is the slice that follows.
        roots: for ids that are looked up, what scored them, so that it is not taken for the token.
        alone: False if several such choices of one router make up the k columns together (repeated argmax).
        values: the values that hold the scores of the chosen, laid out as the ids; () if the operator returns none, None if the
            form does not say, so that nothing of it can be replayed.
    """

    node: fx.Node
    scores: fx.Node | None
    dim: int
    ids: tuple[fx.Node, ...]
    needs_slice: bool = False
    roots: tuple[fx.Node, ...] = ()
    alone: bool = True
    values: tuple[fx.Node, ...] | None = None


@dataclasses.dataclass(frozen=True)
class RoutingForm:
    """A named way to spell a selection.

    Attributes:
        name: the last part of the form's name in reports ("softmax_topk" is softmax scores with this form "topk").
        find: returns what the node selects, or None if the node is not of this form. Must not change the graph.
        source: where this spelling is known from.
        fixed: the ids follow from the token alone, the same in every engine: nothing is left to replay.
        no_replay: why its choice cannot be replayed; "" if it can.
    """

    name: str
    find: Callable[[DataFlow, fx.Node], Selection | None]
    source: str = ""
    fixed: bool = False
    no_replay: str = ""


def items(flow: DataFlow, node: fx.Node, index: int) -> tuple[fx.Node, ...]:
    """The values `node[index]` of an operator that returns several tensors."""
    names = {0: ("values",), 1: ("indices",)}.get(index, ())
    return tuple(
        user
        for user in flow.users(node)
        if (spelling(user) == "getitem" and user.args[1] == index)
        or (spelling(user) == "getattr" and user.args[1] in names)
    )


def rank(node: fx.Node) -> int:
    return len(dims(node))
