"""Experts drawn at random by their probability: `multinomial(probs, k)`. What was drawn is what is recorded."""

from __future__ import annotations

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.form import RoutingForm, Selection
from r3_pass.registry.operators import argument, spelling


def _find(flow: DataFlow, node: fx.Node) -> Selection | None:
    scores = flow.operand(node, argument(node, 0, "input", "self"))
    if spelling(node) != "multinomial" or scores is None:
        return None
    return Selection(node, scores, -1, (node,), values=())


SAMPLED = RoutingForm("sampled", _find, source="stochastic routers (S-BASE, random second expert)")
