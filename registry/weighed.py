"""Is all that experts make of choices, some of which were dropped, multiplied by the weight of its own choice?

Zeros alone prove nothing. Moved to other tokens or columns, or left out of one of the ways that experts' work takes to the result,
they let experts work for choices that were dropped.

Legend: "work" is what is made with the ids that experts see and not multiplied by their weights yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.dispatched import Dispatch
from r3_pass.registry.operators import CONTRACTIONS, CREATION, is_opaque, spelling
from r3_pass.registry.shapes import is_tensor, value
from r3_pass.registry.zeroed import Zeroed, order_of

_PICKS = frozenset({"getitem", "index_select", "take"})


@dataclasses.dataclass(frozen=True)
class _Work:
    """What is made with local ids: of which columns, and whether it lies in the order of experts."""

    columns: tuple[int, ...]
    in_order: bool


def all_weighed(
    flow: DataFlow,
    local: fx.Node,
    after: Collection[fx.Node],
    dispatch: Dispatch,
    zeroed: Zeroed,
    is_ids: Callable[[fx.Node], bool],
) -> bool:
    """Whether all that is made with some ids is multiplied by the weight of its own choice before it leaves the graph.

    Args:
        local: the ids that experts see.
        after: values downstream of them, and of their weights.
        is_ids: as of `Zeroed`.
    """
    work: dict[fx.Node, _Work | None] = {}  # None: it cannot be said
    counted, done = {local}, set[fx.Node]()
    for node in sorted(after, key=flow.order.__getitem__):
        inputs = flow.inputs(node)
        if spelling(node) in CREATION:
            continue
        if node in zeroed.layouts or node is local:
            counted.add(node)
            continue
        if not _floats(node):
            (counted if any(n in counted or n in work for n in inputs) else done).add(node)
            continue
        theirs = [work[n] for n in inputs if n in work]
        if weighing := [n for n in inputs if _takes_all(node, n, zeroed)]:
            if not all(_weighs(flow, node, w, [o for o in inputs if o in work], theirs, zeroed) for w in weighing):
                return False
            done.add(node)
        elif theirs:
            work[node] = _passed(node, theirs, inputs, counted, flow)
        elif done & set(inputs):
            done.add(node)
        elif any(n in counted for n in inputs):
            made = [n for n in inputs if n not in counted and (is_tensor(n) or flow.kind(n) != "const")]
            if made:
                work[node] = _made(node, inputs, dispatch, local)
            else:
                counted.add(node)  # a count, or a one-hot as numbers
    if any(n in flow.outputs for n in work):
        return False
    orders = {order_of(flow, n, is_ids) for n in zeroed.orders}
    return len(orders) <= 1 and all(
        _sorted_by(flow, n, is_ids) in orders for n in dispatch.chain if orders and _picked(n)
    )


def _takes_all(node: fx.Node, weight: fx.Node, zeroed: Zeroed) -> bool:
    """Whether a value that is 0 for what was dropped makes 0 of all that an operator works on for it."""
    if zeroed.zeroes(node, weight):
        return True
    weighs = weight in zeroed.layouts and zeroed.known.get(weight) is False and value(weight).dtype.is_floating_point
    return weighs and (spelling(node) in CONTRACTIONS or is_opaque(node))


def _floats(node: fx.Node) -> bool:
    """Whether a value is of floating-point numbers, or an operator's several results may be."""
    changed = node.args[0] if spelling(node) == "setitem" else None
    seen = value(changed if isinstance(changed, fx.Node) else node)
    return not hasattr(seen, "dtype") or bool(seen.dtype.is_floating_point)


def _made(node: fx.Node, inputs: Sequence[fx.Node], dispatch: Dispatch, local: fx.Node) -> _Work | None:
    everything = dispatch.columns.get(local)
    if everything is None:
        return None
    ids = [n for n in inputs if n in dispatch.columns or n is local]
    columns = {dispatch.columns.get(n, everything) for n in ids} or {everything}
    laid = [n for n in inputs if n in dispatch.chain and n not in dispatch.columns]
    if len(columns) > 1 or laid or any(n in dispatch.turned for n in ids):
        return None
    sorted_ = not ids or any(_picked(n) for n in ids)
    return _Work(columns.pop(), sorted_ and spelling(node) in _PICKS | {"embedding", "gather"})


def _picked(node: fx.Node) -> bool:
    """Whether ids are those of a sort, or picked by one."""
    if node.op not in ("call_function", "call_method") or not node.args:
        return False
    source = node.args[0]
    if spelling(node) == "getitem" and isinstance(source, fx.Node) and not is_tensor(source):
        return spelling(source) == "sort"
    return spelling(node) in _PICKS and any(is_tensor(n) for n in node.all_input_nodes[1:])


def _sorted_by(flow: DataFlow, node: fx.Node, is_ids: Callable[[fx.Node], bool]) -> fx.Node | None:
    source = node.args[0]
    if isinstance(source, fx.Node) and not is_tensor(source):
        return source
    index = next(n for n in flow.inputs(node) if n is not flow.operand(node, source))
    return order_of(flow, index, is_ids)


def _passed(
    node: fx.Node,
    theirs: Sequence[_Work | None],
    inputs: Sequence[fx.Node],
    counted: Collection[fx.Node],
    flow: DataFlow,
) -> _Work | None:
    first = theirs[0]
    if first is None or any(other != first for other in theirs):
        return None
    if spelling(node) in _PICKS and any(n in counted for n in inputs):
        return dataclasses.replace(first, in_order=False) if first.in_order else None
    return first


def _weighs(
    flow: DataFlow,
    node: fx.Node,
    weight: fx.Node,
    others: Sequence[fx.Node],
    theirs: Sequence[_Work | None],
    zeroed: Zeroed,
) -> bool:
    layout = zeroed.layouts[weight]
    if is_opaque(node):
        return "P" not in layout.tags
    tags = "".join(tag for tag in layout.tags if tag != "N")
    if tags.lstrip("T") not in ("", "K", "F", "P") or (tags.startswith("T") and tags[-1] in "FP"):
        return False
    for work in theirs:
        if work is None or work.columns != layout.columns or work.in_order is not ("P" in tags):
            return False
    if spelling(node) != "einsum":
        return True
    equation = node.args[0]
    if not isinstance(equation, str) or "." in equation:
        return False
    letters = dict(zip(_operands(node), equation.replace(" ", "").split("->")[0].split(","), strict=True))
    mine = {c for c, tag in zip(letters[weight], layout.tags, strict=True) if tag != "N"} if weight in letters else None
    return mine is not None and all(mine <= set(letters[o]) for o in others if o in letters)


def _operands(node: fx.Node) -> list[Any]:
    given = node.args[1:]
    return list(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else list(given)
