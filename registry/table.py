"""Hash routing: the ids stand in an integer table of the model and are looked up by the token."""

from __future__ import annotations

import torch
from torch import fx

from r3_pass.registry.dataflow import DataFlow, argument, dims, is_tensor, spelling, value
from r3_pass.registry.form import RoutingForm, Selection


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
    return Selection(node, None, -1, (node,))


TABLE = RoutingForm("table", _find, source="Hash layers; DeepSeek-V4's first layers")
