"""Ids that are mixed with other integers on their way: other choices, other tokens', random ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from r3_pass.registry.operators import RANDOM, spelling
from r3_pass.registry.order import out_of_order
from r3_pass.registry.origins import Origins, others
from r3_pass.registry.shapes import dims, is_tensor, value

_MIXING = frozenset(
    {"masked_fill", "add", "sub", "mul", "where", "masked_scatter", "setitem", "index_put", "maximum", "minimum", "xor"}
)
_CHOOSING = frozenset({"where", "masked_scatter", "maximum", "minimum", "setitem", "index_put"})


def mixing(origins: Origins, node: fx.Node, user: fx.Node, labels: Mapping[fx.Node, set[str]]) -> str:
    """How an operator makes of the chosen ids something that no router chose for this token; "" if it does not.

    Args: labels: what values are followed as.
    """
    flow = origins.flow
    name = spelling(user)
    if name in ("roll", "flip", "fliplr", "flipud"):
        return f"{name} ({user.name}) moves them to other tokens or columns"
    if out_of_order(flow, user):
        return f"{name} ({user.name}) moves them to other tokens"
    if name not in _MIXING:
        return ""
    for other in others(flow, user, node):
        seen = value(other)
        if not is_tensor(other) or seen.dtype.is_floating_point or seen.dtype.is_complex or seen.dtype == torch.bool:
            continue
        if name in _CHOOSING and origins.is_choice(other):
            return f"{name} ({user.name}) takes one or another of them ({node.name}, {other.name})"
        if all(size == 1 for size in dims(other)) or labels.get(other):
            continue
        if spelling(other) in RANDOM or (flow.kind(other) == "data" and not origins.made_of_ids(other)):
            return f"{name} ({user.name}) mixes them with other integers ({other.name})"
    return ""
