"""What tracing saw of a value: its fake tensor, its shape."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from r3_pass.registry.writes import fills

Dim = Any  # int, or the sympy expression of a symbolic size: compared without adding guards


def value(node: fx.Node) -> Any:
    """What tracing saw for this node: a fake tensor, a tuple of them, a symbolic size, or None."""
    found = node.meta.get("example_value")
    return node.meta.get("val") if found is None else found


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


def dims(node: fx.Node) -> tuple[Dim, ...]:
    """The shape as ints and sympy expressions; () for what is no tensor. Comparing them never adds a guard."""
    seen = value(node)
    if seen is None and node.target is operator.setitem and isinstance(node.args[0], fx.Node):
        return dims(node.args[0])
    if seen is None and (filled := fills(node)) is not None:
        return dims(filled)
    if not isinstance(seen, torch.Tensor):
        return ()
    return tuple(plain(s) for s in seen.shape)


def plain(size: Any) -> Dim:
    """An int, or the sympy expression of a symbolic size."""
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return int(expression) if expression.is_number else expression
    return size


def product(sizes: Sequence[Dim]) -> Dim:
    total: Dim = 1
    for size in sizes:
        total = total * size
    return total
