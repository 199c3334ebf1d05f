"""What a graph makes of each id that there is, for values that are a function of one id by itself.

However such a function is spelled, all that it can do is known from the E ids: the graph's own operators are run on these.

Legend: E experts of the router.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.numbers import number_of
from r3_pass.registry.operators import CASTS, argument, spelling
from r3_pass.registry.shapes import dims, is_tensor, value
from r3_pass.registry.writes import is_inplace

_ARITHMETIC = frozenset({
    "add", "sub", "mul", "floordiv", "mod", "eq", "ne", "gt", "ge", "lt", "le", "and", "or", "not", "xor", "where", "masked_fill",
    "clamp", "clamp_min", "clamp_max", "clip",
})  # fmt: skip
_LAYOUTS = frozenset({"view", "contiguous", "clone", "detach", "alias"})
_MAX_VALUES = 4096


def function_tables(flow: DataFlow, ids: fx.Node, experts: int) -> dict[fx.Node, Tensor]:
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
    if name in _LAYOUTS or name in CASTS:
        source = flow.operand(node, argument(node, 0, "input", "self"))
        if source not in tables or (name in CASTS and dims(source) != dims(node)):
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
