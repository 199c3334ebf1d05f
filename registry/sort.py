"""All experts in order of their score, then the first k: `argsort(...)[..., :k]` or `sort(...)` with a slice."""

from __future__ import annotations

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.form import RoutingForm, Selection, items
from r3_pass.registry.operators import argument, spelling
from r3_pass.registry.shapes import is_tensor


def _find(flow: DataFlow, node: fx.Node) -> Selection | None:
    name = spelling(node)
    scores = flow.operand(node, argument(node, 0, "input", "self"))
    if name not in ("sort", "argsort") or scores is None or not is_tensor(scores):
        return None
    dim = argument(node, 1, "dim", default=-1)
    ids = (node,) if name == "argsort" else items(flow, node, 1)
    values = () if name == "argsort" else items(flow, node, 0)
    axis = dim if isinstance(dim, int) and not isinstance(dim, bool) else -1
    return Selection(node, scores, axis, ids, needs_slice=True, values=values)


SORT = RoutingForm("sort", _find, source="hand-written routers")
