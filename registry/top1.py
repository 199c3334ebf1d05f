"""One expert at a time: `argmax`, or the indices of `max(dim)`.

Repeated with the chosen one masked out (GShard, sparse mixer), the choices of one router are one site of several columns.
"""

from __future__ import annotations

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.form import RoutingForm, Selection, items
from r3_pass.registry.operators import argument, spelling
from r3_pass.registry.shapes import is_tensor


def _find(flow: DataFlow, node: fx.Node) -> Selection | None:
    name = spelling(node)
    scores = flow.operand(node, argument(node, 0, "input", "self"))
    dim = argument(node, 1, "dim", "axis")
    if scores is None or not isinstance(dim, int):
        return None
    if name in ("argmax", "argmin"):
        return Selection(node, scores, dim, (node,), alone=False, values=())
    if name in ("max", "min") and not is_tensor(node):
        return Selection(node, scores, dim, items(flow, node, 1), alone=False, values=items(flow, node, 0))
    return None


TOP1 = RoutingForm("top1", _find, source="Switch Transformers, MegaBlocks (k = 1), GShard top-2, PhiMoE's sparse mixer")
