"""Product keys: two small selections, all their pairs, and a last selection that picks among the pairs.

    ids = (ids_x[..., None] * n + ids_y[..., None, :]).flatten(-2).gather(-1, scores.topk(k)[1])

The experts are rows of two tables (down and up), so there may be hundreds of thousands.
"""

from __future__ import annotations

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.form import RoutingForm, Selection
from r3_pass.registry.operators import argument, spelling
from r3_pass.registry.shapes import is_tensor, value


def _find(flow: DataFlow, node: fx.Node) -> Selection | None:
    if spelling(node) not in ("gather", "take_along_dim") or not is_tensor(node) or value(node).dtype.is_floating_point:
        return None
    source = flow.operand(node, argument(node, 0, "input", "self"))
    index = flow.operand(node, argument(node, 2 if spelling(node) == "gather" else 1, "index", "indices"))
    if source is None or index is None or not _chosen(flow, index):
        return None
    parts = _selections_behind(flow, source)
    return Selection(node, None, -1, (node,), roots=tuple(parts)) if parts else None


def _chosen(flow: DataFlow, index: fx.Node) -> bool:
    """Whether an index is what a selection returned."""
    return spelling(index) == "getitem" and any(spelling(n) == "topk" for n in flow.inputs(index))


def _selections_behind(flow: DataFlow, ids: fx.Node) -> list[fx.Node]:
    """The selections whose indices an integer value is computed from; none if it comes from anything else, too."""
    found: dict[fx.Node, None] = {}
    stack, seen = [ids], {ids}
    while stack and len(seen) < 60:
        top = stack.pop()
        if spelling(top) == "topk":
            found[top] = None
            continue
        for source in flow.inputs(top):
            if source in seen or flow.kind(source) != "data":
                continue
            if is_tensor(source) and value(source).dtype.is_floating_point:
                return []
            seen.add(source)
            stack.append(source)
    return list(found)


PRODUCT_KEYS = RoutingForm(
    "product_keys",
    _find,
    source="PEER; Doge",
    no_replay="only pairs of the best half keys are scored: a given expert outside of them has no score in the graph",
)
