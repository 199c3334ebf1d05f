"""What a router makes of the scores of the experts that it chose, read exactly, as far as a fused router does it too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.form import Selection
from r3_pass.registry.operators import argument, spelling
from r3_pass.registry.routing import Routing, Unread
from r3_pass.registry.score_terms import CASTS, FLOATS, Rows, ScoreReader, is_last
from r3_pass.registry.shapes import dims, is_tensor, value


def first_weights(
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
            gather_last = spelling(user) == "gather" and is_last(argument(user, 1, "dim"), user)
            take_last = spelling(user) == "take_along_dim" and is_last(argument(user, 2, "dim"), user)
            source = flow.operand(user, argument(user, 0, "input", "self"))
            index = argument(user, 2 if spelling(user) == "gather" else 1, "index", "indices")
            if not (gather_last or take_last) or source is None or flow.operand(user, index) is not ids:
                continue
            reader = ScoreReader(flow, logits)
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


def follow(flow: DataFlow, routing: Routing, start: fx.Node, ids: fx.Node) -> tuple[Routing, fx.Node, set[fx.Node]]:
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
    if dtype not in FLOATS or flow.operand(node, argument(node, 0, "input", "self")) is not current:
        return None
    softens = name in ("softmax", "sigmoid") and dtype in (torch.float32, value(current).dtype)
    rounded = value(current).dtype is not value(start).dtype
    if softens and not rounded and stage == 0 and routing.scores == "logits":
        if name == "softmax" and not is_last(argument(node, 1, "dim"), node):
            return None
        return dataclasses.replace(routing, weights=name), node, {node}, _SOFTENED  # type: ignore[arg-type]  # both names are
    if name == "mul" and exact and dtype is torch.float32 and stage < _SCALED:
        scale = argument(node, 1, "other")
        if isinstance(scale, int | float) and not isinstance(scale, bool):
            return dataclasses.replace(routing, scale=float(scale)), node, {node}, _SCALED
    if name in CASTS and exact and value(node).device == value(current).device:
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
    if not kept or not is_last(argument(total, 1, "dim", "axis"), current) or value(total).dtype is not torch.float32:
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
