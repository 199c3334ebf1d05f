"""Ids that leave a graph by a graph break, and the graphs that they come to: do experts get there what the router chose?

    router, selection  |  graph break  |  experts

Neither graph shows both. The first says which of its results are a site's ids; each later one says what it makes of an integer
argument, if that should be such ids: what experts get of it, and whose experts. Who hands which tensor on is seen at the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import fx

from r3_pass.passes.altered import changed, reached
from r3_pass.passes.match import is_weight
from r3_pass.passes.site import Accepted
from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.dispatch import follow_ids
from r3_pass.registry.dispatched import Dispatch
from r3_pass.registry.partition import partition
from r3_pass.registry.shapes import dims, value
from r3_pass.registry.trace import Root
from r3_pass.registry.writes import written

_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.uint8})


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is known of ids that left a graph: k of them a token, of so many experts. They are [.., k]."""

    num_experts: int
    top_k: int


@dataclasses.dataclass(frozen=True)
class Use:
    """What a graph does with an argument that holds a choice.

    Attributes:
        argument: which one, from 0.
        choice: the choice that it was read as.
        chooses: whether experts are chosen by it here.
        how: what makes the ids that reach experts differ from it, whichever do; "" if nothing does.
        columns: which of its k columns reach experts: others may do so in another graph.
        experts: arguments that are weights of the experts it chooses among.
        left: results that are made of it, as the same choice, and what makes each differ from it.
        written: what is done to the argument itself, in place: who gets it later gets that; "" if nothing.
    """

    argument: int
    choice: Choice
    chooses: bool
    how: str
    columns: frozenset[int]
    experts: tuple[int, ...]
    left: tuple[tuple[int, str], ...]
    written: str


def choice_of(site: Accepted) -> Choice:
    return Choice(site.num_experts, site.top_k)


def leaving(graph: fx.Graph, site: Accepted) -> tuple[int, ...]:
    """Which results of a graph hold the ids of a site that is not proved, all of them and as they were chosen."""
    if site.proved or len(site.columns) != 1 or site.id_dim is None:
        return ()
    recorded = site.columns[0]
    if site.id_dim % max(len(dims(recorded)), 1) != len(dims(recorded)) - 1:
        return ()
    roots = [Root(node, (), None) for node in site.roots]
    flow = DataFlow(graph, is_weight)
    dispatch = follow_ids(flow, (recorded,), roots, site.num_experts, site.id_dim)
    return tuple(result for result, how in _left(flow, dispatch, site.top_k) if not how)


def uses(graph: fx.Graph, choices: Iterable[Choice]) -> tuple[Use, ...]:
    """What a graph makes of its integer arguments, each read as each choice that its shape allows, where experts are chosen by it.

    Expert parallelism behind the break, where the weights of other ranks' choices are proved to be 0, is left out: nothing differs.
    """
    found: list[Use] = []
    plain: DataFlow | None = None
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for number, node in enumerate(placeholders):
        seen = value(node)
        if not isinstance(seen, torch.Tensor) or seen.dtype not in _INTEGERS or not dims(node):
            continue
        for choice in choices:
            if dims(node)[-1] != choice.top_k:
                continue
            if is_weight(node):  # ids that a module holds between the two
                flow = DataFlow(graph, lambda n, held=node: n is not held and is_weight(n))
            else:
                flow = plain = plain or DataFlow(graph, is_weight)
            roots = [Root(n, (), None) for n in placeholders if n is node or _beside(n, node)]
            dispatch = follow_ids(flow, (node,), roots, choice.num_experts, -1)
            left, overwritten = _left(flow, dispatch, choice.top_k), _written(flow, dispatch, node)
            if dispatch.proved and partition(flow, (node,), roots, choice.num_experts, -1) is None:
                how, columns = changed(dispatch, node, choice.num_experts), frozenset(reached(dispatch, node))
                held = tuple(i for i, n in enumerate(placeholders) if n in dispatch.weights)
                found.append(Use(number, choice, True, how, columns, held, left, overwritten))
            elif left or overwritten:
                found.append(Use(number, choice, False, "", frozenset(), (), left, overwritten))
    return tuple(found)


def _left(flow: DataFlow, dispatch: Dispatch, top_k: int) -> tuple[tuple[int, str], ...]:
    """Results that hold ids, as many a token, and what was done to them on the way."""
    found = []
    for number, result in enumerate(_results(flow)):
        if result in dispatch.left and dims(result)[-1:] == (top_k,):
            found.append((number, _how(dispatch, result)))
    return tuple(found)


def _written(flow: DataFlow, dispatch: Dispatch, argument: fx.Node) -> str:
    """What was written into an argument that holds ids."""
    changed = (n for n in dispatch.chain if n is not argument and any(argument in flow.bases(t) for t in written(n)))
    return next((how for n in changed if (how := _how(dispatch, n))), "")


def _how(dispatch: Dispatch, ids: fx.Node) -> str:
    """The first thing that was done to ids on their way, as they say it who come after it."""
    how = ""
    step: fx.Node | None = ids
    while step is not None:
        how, step = dispatch.mixed.get(step, how), dispatch.chain.get(step)
    return how


def _beside(node: fx.Node, ids: fx.Node) -> bool:
    """Whether an argument may be the weights of a choice: floating-point, one for each id."""
    seen = value(node)
    return isinstance(seen, torch.Tensor) and seen.dtype.is_floating_point and dims(node) == dims(ids)


def _results(flow: DataFlow) -> tuple[fx.Node | None, ...]:
    """What the graph returns, each as it is when it returns."""
    (output,) = (n for n in flow.graph.nodes if n.op == "output")
    given = output.args[0]
    return tuple(flow.operand(output, result) for result in (given if isinstance(given, tuple | list) else (given,)))
