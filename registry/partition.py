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
from torch.utils._python_dispatch import _disable_current_modes

from r3_pass.registry.dataflow import (
    DataFlow,
    argument,
    dims,
    is_inplace,
    is_tensor,
    spelling,
    value,
)
from r3_pass.registry.dispatch import Dispatch, follow_ids
from r3_pass.registry.scores import Root
from r3_pass.registry.unchanged import number_of
from r3_pass.registry.zeroed import Zeroed, all_weighed

_ARITHMETIC = frozenset({
    "add", "sub", "mul", "floordiv", "mod", "eq", "ne", "gt", "ge", "lt", "le", "and", "or", "not", "xor", "where", "masked_fill",
    "clamp", "clamp_min", "clamp_max", "clip",
})  # fmt: skip
_CASTS = frozenset({"to", "long", "int", "float", "type_as", "half", "bfloat16", "double", "convert_element_type"})
_LAYOUTS = frozenset({"view", "contiguous", "clone", "detach", "alias"})
_MAX_VALUES = 4096


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
    tables = _tables(flow, used[0], experts)
    masked = list(_masked(flow, tables))
    owned = {kept for _, _, kept in masked if kept is not None}
    if len(owned) != 1:
        return None
    (kept,) = owned
    first, count = kept[0], len(kept)
    if kept != tuple(range(first, first + count)) or experts % count:
        return None
    weights = [(n, condition) for n, condition, mine in masked if mine is not None]
    for local, table in tables.items():
        if local is used[0] or dims(local) != dims(used[0]) or table.dtype.is_floating_point:
            continue
        if table.dtype == torch.bool or table[first : first + count].tolist() != list(range(count)):
            continue
        dispatch = follow_ids(flow, (local,), roots, count, k_dim)
        held = [_rows(w) for w in dispatch.weights if len(dims(w)) >= 3]
        if not (dispatch.proved and held and set(held) == {count}):
            continue
        zeroed = Zeroed(flow, used[0], k_dim, tables, local)
        if all(zeroed.starts(*w) for w in weights) and _alone(
            flow, roots, local, [w for w, _ in weights], zeroed, dispatch
        ):
            return Partition(used[0], local, first, count, dispatch)
    return None


def shares(flow: DataFlow, ids: fx.Node, experts: int) -> set[tuple[int, ...]]:
    """For which experts some weights stay, of those that are zeroed by the id alone."""
    return {kept for _, _, kept in _masked(flow, _tables(flow, ids, experts)) if kept is not None}


def _tables(flow: DataFlow, ids: fx.Node, experts: int) -> dict[fx.Node, Tensor]:
    """What each value that is a function of one id by itself is for the ids 0 .. E - 1, in graph order."""
    with _disable_current_modes(), torch.no_grad():
        tables = {ids: torch.arange(experts, device="cpu")}
        waiting = set(flow.users(ids))
        while waiting and len(tables) < _MAX_VALUES:
            node = min(waiting, key=flow.order.__getitem__)
            waiting.remove(node)
            found = _run(flow, node, tables)
            if found is not None:
                tables[node] = found
                waiting.update(u for u in flow.users(node) if u.op in ("call_function", "call_method"))
    return tables


def _run(flow: DataFlow, node: fx.Node, tables: dict[fx.Node, Tensor]) -> Tensor | None:
    """A value by the graph's own operator; None if it is none that looks at one id by itself, or mixes in something else."""
    name = spelling(node)
    if not is_tensor(node) or is_inplace(node) or node.kwargs.get("out") is not None:
        return None
    if name in _LAYOUTS or name in _CASTS:
        source = flow.operand(node, argument(node, 0, "input", "self"))
        if source not in tables or (name in _CASTS and dims(source) != dims(node)):
            return None
        if name in _LAYOUTS and value(source).dtype is not value(node).dtype:
            return None  # view(dtype): the same bits, other numbers
        return tables[source].to(value(node).dtype)
    if name not in _ARITHMETIC or not node.args:
        return None
    arguments: list[Any] = []
    for given in node.args:
        made = _argument(flow, node, given, tables)
        if made is None and given is not None:
            return None
        arguments.append(made)
    keywords = {k: _argument(flow, node, v, tables) for k, v in node.kwargs.items()}
    if any(made is None and node.kwargs[k] is not None for k, made in keywords.items()):
        return None
    operator: Any = getattr(arguments.pop(0), str(node.target)) if node.op == "call_method" else node.target
    try:
        result = operator(*arguments, **keywords)
    except (TypeError, RuntimeError):  # it does not take one id, or one number, in the place of many
        return None
    return result if isinstance(result, Tensor) and result.dim() == 1 else None


def _argument(flow: DataFlow, node: fx.Node, given: Any, tables: dict[fx.Node, Tensor]) -> Any:
    """An operand for the E ids: a table of the same layout as the result, or one number."""
    if not isinstance(given, fx.Node):
        return given if isinstance(given, int | float | str) else None
    source = flow.operand(node, given)
    if source in tables:
        return tables[source] if dims(source) == dims(node) else None
    number = number_of(source)
    return None if number is None else torch.tensor(number, device="cpu")


def _masked(flow: DataFlow, tables: dict[fx.Node, Tensor]) -> Iterator[tuple[fx.Node, fx.Node, tuple[int, ...] | None]]:
    """Floating-point values that are zeroed by the id, by which value, and for which ids they stay; None if none or all."""
    for condition, table in tables.items():
        for user in flow.users(condition):
            if user in tables or not is_tensor(user) or not value(user).dtype.is_floating_point or is_inplace(user):
                continue
            keep = _keeps(flow, user, condition, table)
            if keep is not None:
                kept = tuple(keep.nonzero().flatten().tolist())
                yield user, condition, kept if 0 < len(kept) < len(table) else None


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
    after = _downstream(flow, list(dispatch.events), ())
    known, own = set(weights), set[fx.Node]()
    for node in sorted(_downstream(flow, weights, ()) - known - after, key=flow.order.__getitem__):
        if known & set(flow.inputs(node)):
            zeroed.read([node])
            (known if node in zeroed.layouts else own).add(node)
    if not all_weighed(flow, local, _downstream(flow, [local, *known], ()), dispatch, zeroed):
        return False
    others = _downstream(flow, [*(root.node for root in roots), *own], (local, *known))
    return not after & others


def _downstream(flow: DataFlow, starts: Sequence[fx.Node], ends: Sequence[fx.Node]) -> set[fx.Node]:
    stack, seen = list(starts), set(starts)
    while stack:
        for user in flow.users(stack.pop()):
            if user not in seen and user.op != "output" and user not in ends:
                seen.add(user)
                stack.append(user)
    return seen


def _rows(weight: fx.Node) -> Any:
    """How many experts of a bank this rank holds: of a DTensor, its own part."""
    seen = value(weight)
    return getattr(seen, "_local_tensor", seen).shape[0]
