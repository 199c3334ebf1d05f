"""Hash routing: the ids stand in an integer table of the model and are looked up by the token."""

from __future__ import annotations

import torch
from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.form import RoutingForm, Selection
from r3_pass.registry.operators import argument, spelling
from r3_pass.registry.shapes import dims, is_tensor, value


def _find(flow: DataFlow, node: fx.Node) -> Selection | None:
    name = spelling(node)
    if name not in ("getitem", "embedding", "index_select") or not is_tensor(node):
        return None
    table = flow.operand(
        node, argument(node, 1 if name == "embedding" else 0, "weight" if name == "embedding" else "input")
    )
    if table is None or not is_tensor(table) or flow.kind(table) != "weight" or flow.kind(node) != "data":
        return None
    dtype = value(table).dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or not 1 <= len(dims(table)) <= 2:
        return None
    return Selection(node, None, -1, (node,)) if _from_tokens(flow, node) else None


def _from_tokens(flow: DataFlow, node: fx.Node) -> bool:
    """Whether a value depends on integers only: token ids, not ids that a selection among scores made of hidden states."""
    stack, seen = [node], {node}
    while stack:
        for source in flow.inputs(stack.pop()):
            if source in seen or flow.kind(source) != "data":
                continue
            if is_tensor(source) and value(source).dtype.is_floating_point:
                return False
            seen.add(source)
            stack.append(source)
    return True


TABLE = RoutingForm("table", _find, source="Hash layers; DeepSeek-V4's first layers", fixed=True)
