"""The operator that a fused router is: `r3_pass::route`, from a router's logits to the ids and weights of the chosen experts.

One Triton kernel on a GPU (`router_kernels.py`); on a CPU, the same arithmetic in PyTorch. The ids that it returns are those that
the experts get and those that are recorded: one tensor.

The choice is by float32, whatever the logits are; of the weights only the result is rounded. The order of choice is descending; of
equal scores the lowest id comes first; NaN is above everything, as in `torch.topk`, so ids are in range and differ whatever the
logits hold. Where a softmax alone lies between logits and scores, the logits are compared instead: the same order, without the ties
that rounding makes.

Legend: T tokens, E experts, K top-k, G groups of E/G experts each.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from r3_pass.registry.routing import Routing

MARGIN = 2.0**-20
"""The chosen ids are those of the unfused graph wherever neighbours among its K + 1 best scores, and the group scores at the edge
of the kept ones, differ by more than this times the larger of 1 and their magnitude."""

MOST_EXPERTS, MOST_CHOICES = 1024, 32

_library = torch.library.Library("r3_pass", "FRAGMENT")
_library.define(
    "route(Tensor logits, Tensor? bias, int top_k, str scores, int groups, int best, int kept, float? fill, str weights, "
    "float? normalise, float scale, ScalarType dtype) -> (Tensor, Tensor)"
)


def arguments(routing: Routing) -> tuple[Any, ...]:
    """What `route` takes behind the logits and the bias."""
    return tuple(getattr(routing, field.name) for field in dataclasses.fields(routing))


def route_reference(logits: Tensor, bias: Tensor | None, *described: Any) -> tuple[Tensor, Tensor]:
    """Choose experts.

    Args:
        logits: [..., E] in float32, bfloat16 or float16.
        bias: E numbers that are added to the scores for the choice alone, or None.
        described: the attributes of a `Routing`, in order.

    Returns: weights [..., K] in `dtype`, ids int64 [..., K], both contiguous.
    """
    routing = Routing(*described)
    values = logits.float()
    scores = _scores(values, routing.scores)
    choice = scores if bias is None else scores + bias.reshape(-1).float()
    plain = routing.scores == "softmax" and bias is None and routing.groups == 1
    if routing.groups > 1:
        grouped = choice.unflatten(-1, (routing.groups, -1))
        group_scores = grouped.topk(routing.best, dim=-1).values.sum(-1)
        kept = _best(group_scores, routing.kept)
        dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, kept, False)
        fill = float("-inf") if routing.fill is None else routing.fill
        choice = grouped.masked_fill(dropped.unsqueeze(-1), fill).flatten(-2)
    ids = _best(values if plain else choice, routing.top_k)
    exact = values.double()
    if routing.weights == "softmax":
        weights = exact.gather(-1, ids).softmax(-1)
    elif routing.weights == "sigmoid":
        weights = exact.gather(-1, ids).sigmoid()
    else:
        weights = _scores(exact, routing.scores).gather(-1, ids)
    if routing.normalise is not None:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.normalise)
    return (weights * routing.scale).float().to(routing.dtype).contiguous(), ids.contiguous()


def _scores(values: Tensor, scores: str) -> Tensor:
    if scores == "logits":
        return values
    return values.softmax(-1) if scores == "softmax" else values.sigmoid()


def _best(scores: Tensor, k: int) -> Tensor:
    """Ids of the k best, in order; of equal ones the first. `sort` puts NaN above everything, and is stable where asked to be."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _route_cuda(logits: Tensor, bias: Tensor | None, *described: Any) -> tuple[Tensor, Tensor]:
    from r3_pass.passes import router_kernels  # Triton is imported where there is a GPU only

    return router_kernels.route(logits, bias, Routing(*described))


def _route_meta(logits: Tensor, bias: Tensor | None, *described: Any) -> tuple[Tensor, Tensor]:
    routing = Routing(*described)
    shape = (*logits.shape[:-1], routing.top_k)
    return logits.new_empty(shape, dtype=routing.dtype), logits.new_empty(shape, dtype=torch.int64)


_library.impl("route", route_reference, "CPU")
_library.impl("route", _route_cuda, "CUDA")
_library.impl("route", _route_meta, "Meta")
route = torch.ops.r3_pass.route.default
