"""The one number that an argument stands for, if there is one."""

from __future__ import annotations

from typing import Any

from torch import fx

from r3_pass.registry.operators import argument, spelling


def number_of(given: Any) -> int | float | None:
    """The one number that an argument is, or that a tensor made in the graph is full of; None if it is not known."""
    if not isinstance(given, fx.Node):
        return given if isinstance(given, int | float) else None
    name = spelling(given)
    if name in ("zeros", "zeros_like", "new_zeros"):
        return 0
    if name in ("ones", "ones_like", "new_ones"):
        return 1
    if name in ("full", "full_like", "new_full"):
        found = argument(given, 2 if name == "new_full" else 1, "fill_value")
        return found if isinstance(found, int | float) else None
    if name in ("tensor", "scalar_tensor"):
        found = argument(given, 0, "data")
        return found if isinstance(found, int | float) else None
    return None


def is_zero(given: Any) -> bool:
    return number_of(given) == 0


def is_low(given: Any) -> bool:
    """-inf, or what stands for it: any number below what a score that is kept has."""
    found = number_of(given)
    return found is not None and found < 0
