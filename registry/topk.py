"""`topk` in all its spellings: most routers there are."""

from __future__ import annotations

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.form import RoutingForm, Selection, items
from r3_pass.registry.operators import argument, spelling


def _find(flow: DataFlow, node: fx.Node) -> Selection | None:
    if spelling(node) != "topk":
        return None
    scores = flow.operand(node, argument(node, 0, "input", "self"))
    dim = argument(node, 2, "dim", default=-1)
    if scores is None:
        return None
    return Selection(node, scores, int(dim), items(flow, node, 1), values=items(flow, node, 0))


TOPK = RoutingForm("topk", _find, source="Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss and most others in transformers")
