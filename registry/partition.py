"""Expert parallelism: ids of all experts become numbers of those that one rank holds, and the others lose their weight.

    local = where(ids // n == rank, ids % n, n)         weights = weights.masked_fill(ids // n != rank, 0)

However it is spelled, both are functions of one id by itself, so all that they can do is known from the E ids that there are: the
graph's own operators are run on these. What the experts then get of the router's choice must be these two and nothing else.

Legend: E experts of the router, n of them on this rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.dispatch import follow_ids
from r3_pass.registry.dispatched import Dispatch
from r3_pass.registry.dropped import downstream, everywhere
from r3_pass.registry.id_tables import function_tables
from r3_pass.registry.layout import first_layout
from r3_pass.registry.numbers import number_of
from r3_pass.registry.operators import argument, spelling
from r3_pass.registry.shapes import dims, is_tensor, value
from r3_pass.registry.trace import Root
from r3_pass.registry.weighed import all_weighed
from r3_pass.registry.writes import is_inplace
from r3_pass.registry.zeroed import Zeroed


@dataclasses.dataclass(frozen=True)
class Partition:
    """A selection whose experts are split among ranks.

    Attributes:
        ids: the selection's, of all E experts.
        local: what becomes of them: `id - first` for the rank's own, anything for the others, whose weight is 0.
        first, count: the rank's own experts.
        dispatch: where the local ids go.
    """

    ids: fx.Node
    local: fx.Node
    first: int
    count: int
    dispatch: Dispatch


def partition(
    flow: DataFlow, ids: Sequence[fx.Node], roots: Sequence[Root], experts: int, k_dim: int | None
) -> Partition | None:
    """The partition that stands between a selection and its experts; None if there is none, or it cannot be proved.

    Args: as of `follow_ids`.
    """
    used = [n for n in ids if flow.users(n)]
    if len(used) != 1 or not roots:
        return None
    tables = function_tables(flow, used[0], experts)
    masked = list(_masked(flow, tables))
    owned = {kept for _, kept in masked if kept is not None}
    if len(owned) != 1:
        return None
    (kept,) = owned
    first, count = kept[0], len(kept)
    if kept != tuple(range(first, first + count)) or experts % count:
        return None
    weights = [n for n, mine in masked if mine is not None]
    for local, table in tables.items():
        if local is used[0] or dims(local) != dims(used[0]) or table.dtype.is_floating_point:
            continue
        if table.dtype == torch.bool or table[first : first + count].tolist() != list(range(count)):
            continue
        dispatch = follow_ids(flow, (local,), roots, count, k_dim)
        held = [_rows(w) for w in dispatch.weights if len(dims(w)) >= 3]
        if not (dispatch.proved and held and set(held) == {count}):
            continue
        others = torch.ones(experts, dtype=torch.bool, device="cpu")
        others[first : first + count] = False
        functions = {n: everywhere(found[others]) for n, found in tables.items()}
        start = {used[0]: first_layout(used[0], k_dim)}
        zeroed = Zeroed(flow, start, {}, functions, lambda node, local=local: node is local)  # type: ignore[misc]  # binds it
        zeroed.read([n for n in tables if n is not used[0]])
        zeroed.read(weights)
        if all(zeroed.known.get(w) is False for w in weights) and _alone(flow, roots, local, weights, zeroed, dispatch):
            return Partition(used[0], local, first, count, dispatch)
    return None


def shares(flow: DataFlow, ids: fx.Node, experts: int) -> set[tuple[int, ...]]:
    """For which experts some weights stay, of those that are zeroed by the id alone."""
    return {kept for _, kept in _masked(flow, function_tables(flow, ids, experts)) if kept is not None}


def _masked(flow: DataFlow, tables: dict[fx.Node, Tensor]) -> Iterator[tuple[fx.Node, tuple[int, ...] | None]]:
    """Floating-point values that are zeroed by the id, and for which ids they stay; None if none or all."""
    for condition, table in tables.items():
        for user in flow.users(condition):
            if user in tables or not is_tensor(user) or not value(user).dtype.is_floating_point or is_inplace(user):
                continue
            keep = _keeps(flow, user, condition, table)
            if keep is not None:
                kept = tuple(keep.nonzero().flatten().tolist())
                yield user, kept if 0 < len(kept) < len(table) else None


def _keeps(flow: DataFlow, user: fx.Node, condition: fx.Node, table: Tensor) -> Tensor | None:
    """bool [E]: for which ids an operator leaves a weight as it is; for the others it makes it 0. None for another operator."""
    name = spelling(user)
    if name == "masked_fill" and table.dtype == torch.bool:
        mask = flow.operand(user, argument(user, 1, "mask"))
        return ~table if mask is condition and number_of(argument(user, 2, "value")) == 0 else None
    if name == "mul":
        plain = [flow.operand(user, g) for g in user.args[:2]]
        ones = table.dtype == torch.bool or bool(((table == 0) | (table == 1)).all())
        return table != 0 if ones and plain.count(condition) == 1 else None
    if name == "where" and user.op != "call_method" and table.dtype == torch.bool:
        if flow.operand(user, argument(user, 0, "condition")) is not condition:
            return None
        yes, no = argument(user, 1, "input", "self"), argument(user, 2, "other")
        return table if number_of(no) == 0 else ~table if number_of(yes) == 0 else None
    return None


def _alone(
    flow: DataFlow,
    roots: Sequence[Root],
    local: fx.Node,
    weights: Sequence[fx.Node],
    zeroed: Zeroed,
    dispatch: Dispatch,
) -> bool:
    """Whether the router's product reaches the experts and what they make by the local ids and these weights only.

    The weights must stay 0 where they are: what is made of them by anything but products and layouts is a way of its own.
    """
    after = downstream(flow, list(dispatch.events))
    known, own = set(weights), set[fx.Node]()
    for node in sorted(downstream(flow, weights) - known - after, key=flow.order.__getitem__):
        if known & set(flow.inputs(node)):
            zeroed.read([node])
            (known if zeroed.known.get(node) is False else own).add(node)
    made = downstream(flow, [local, *known])
    if not all_weighed(flow, local, made, dispatch, zeroed, lambda node: node is local):
        return False
    others = downstream(flow, [*(root.node for root in roots), *own], (local, *known))
    return not after & others


def _rows(weight: fx.Node) -> Any:
    """How many experts of a bank this rank holds: of a DTensor, its own part."""
    seen = value(weight)
    return getattr(seen, "_local_tensor", seen).shape[0]
