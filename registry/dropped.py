"""Ids that were replaced by an expert's number, to be safe as an index: were these choices dropped, that is, are their weights 0?

    ids = where(full, 0, ids)        weights = weights.masked_fill(full, 0.0)

The record is what was chosen, so experts may work for the number in its place only if nothing of that work is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.dispatched import Dispatch
from r3_pass.registry.id_tables import function_tables
from r3_pass.registry.layout import Layout
from r3_pass.registry.operators import spelling
from r3_pass.registry.shapes import dims, value
from r3_pass.registry.unchanged import Drop
from r3_pass.registry.weighed import all_weighed
from r3_pass.registry.writes import written
from r3_pass.registry.zeroed import Zeroed, aligned


def without_weight(
    flow: DataFlow,
    drop: Drop,
    ids: Sequence[fx.Node],
    layouts: dict[fx.Node, Layout],
    experts: int | None,
    dispatch: Dispatch,
    is_ids: Callable[[fx.Node], bool],
) -> bool:
    """Whether all that is made with ids that were replaced is multiplied by 0.

    Args:
        ids: the selection's; `layouts` those of all that holds them.
        experts: E, or None.
        dispatch: where they go; its columns are known.
        is_ids: whether a value is followed as ids.
    """
    laid: dict[fx.Node, Layout] = {n: layouts[n] for n in ids if n in layouts}
    tables = {k: v for n in ids for k, v in function_tables(flow, n, experts).items()} if experts is not None else {}
    dropped = _dropped_ids(drop, tables)
    functions = {n: everywhere(table[dropped]) for n, table in tables.items()} if dropped is not None else {}
    known: dict[fx.Node, bool] = {}
    if drop.condition is not None:
        layout = None if drop.at not in layouts else aligned(layouts[drop.at], dims(drop.at), dims(drop.condition))
        if layout is None:
            return False
        for node, holds in _implied(flow, drop.condition, drop.holds).items():
            held = aligned(layout, dims(drop.condition), dims(node))
            if held is not None and node not in laid:
                laid[node], known[node] = held, holds
    zeroed = Zeroed(flow, laid, known, functions, is_ids)
    worked = downstream(flow, list(dispatch.events))
    zeroed.read([n for n in downstream(flow, list(laid)) if n not in worked])
    weights = [n for n, zero in zeroed.known.items() if zero is False and value(n).dtype.is_floating_point]
    after = downstream(flow, [drop.node, *weights])
    escapes = any(_leaves(flow, n) and is_ids(n) for n in downstream(flow, [drop.node]))
    if escapes and not any(_leaves(flow, n) for n in weights):
        return False
    return all_weighed(flow, drop.node, after, dispatch, zeroed, is_ids)


def _leaves(flow: DataFlow, node: fx.Node) -> bool:
    """Whether others get a value after the graph: as its result, or because it was written into an argument."""
    return node in flow.outputs or any(n.op == "placeholder" for target in written(node) for n in flow.bases(target))


def downstream(flow: DataFlow, starts: Sequence[fx.Node], ends: Sequence[fx.Node] = ()) -> set[fx.Node]:
    """All that is made with some values, themselves included, up to other values."""
    stack, seen = list(starts), set(starts)
    while stack:
        for user in flow.users(stack.pop()):
            if user not in seen and user.op != "output" and user not in ends:
                seen.add(user)
                stack.append(user)
    return seen


def _dropped_ids(drop: Drop, tables: dict[fx.Node, Tensor]) -> Tensor | None:
    """bool [E]: which ids are replaced, if that depends on the id alone."""
    if drop.condition is not None:
        table = tables.get(drop.condition)
        return None if table is None else (table != 0) == drop.holds
    source = next((n for n in drop.node.all_input_nodes if n in tables), None)
    if source is None or drop.node not in tables:
        return None
    return tables[drop.node] != tables[source]


def everywhere(values: Tensor) -> bool | None:
    """False if all are 0, True if none is."""
    nonzero = values != 0
    return None if len(values) == 0 else True if bool(nonzero.all()) else None if bool(nonzero.any()) else False


def _implied(flow: DataFlow, condition: fx.Node, holds: bool) -> dict[fx.Node, bool]:
    """What a condition is made of, as far as it is known where the condition is `holds`."""
    known, stack = {condition: holds}, [condition]
    while stack:
        top = stack.pop()
        name, truth = spelling(top), known[top]
        if name == "not" or (name, truth) in (("and", True), ("or", False)):
            for source in flow.inputs(top):
                if source not in known and getattr(value(source), "dtype", None) == torch.bool:
                    known[source] = truth if name != "not" else not truth
                    stack.append(source)
    return known
