"""What can be forced, what is read in front of which mask, and near misses that are refused with their reason."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend import operators, traced
from torch import Tensor, nn

from r3_pass.passes.forcing import Forcing, plan
from r3_pass.passes.match import is_weight, match
from r3_pass.passes.replay import force
from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.form import RoutingForm
from r3_pass.registry.forms import registered
from r3_pass.registry.operators import spelling
from r3_pass.registry.topk import TOPK

T, D, E, K = 5, 8, 6, 2
Route = Callable[[Any, Tensor], tuple[Tensor, Tensor]]


class Moe(nn.Module):
    """Expert weights gathered by the ids that `route` returns, weighed by its weights [T, K] and a further term."""

    def __init__(self, route: Route) -> None:
        super().__init__()
        self.route = route
        self.gate, self.other = nn.Linear(D, E, bias=False), nn.Linear(D, 3, bias=False)
        self.bank = nn.Parameter(torch.randn(E, D, D))
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        ids, w, *more = self.route(self, x)
        return (torch.einsum("td,tkdf->tkf", x, self.bank[ids]) * w.unsqueeze(-1)).sum(1), *more


def planned(route: Route) -> tuple[Forcing | str, Any]:
    module = traced(Moe(route), torch.randn(T, D))
    (site,) = match(module.graph).sites
    return plan(DataFlow(module.graph, is_weight), site), module


def kept_groups(p: Tensor) -> Tensor:
    """bool [T, E]: the best 2 of 3 groups of 2."""
    best = p.view(-1, 3, 2).amax(-1).topk(2, dim=-1)[1]
    return torch.zeros(len(p), 3).scatter(1, best, 1.0).bool().repeat_interleave(2, 1)


def plain(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    w, ids = moe.gate(x).softmax(-1).topk(K)
    return ids, w


def grouped(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    p = moe.gate(x).softmax(-1)
    w, ids = p.masked_fill(~kept_groups(p), 0.0).topk(K)
    return ids, w


def grouped_then_scaled(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    p = moe.gate(x).softmax(-1)
    w, ids = (torch.where(kept_groups(p), p, 0.0).float() * 2.5).topk(K)
    return ids, w


def grouped_and_gathered(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    p = moe.gate(x).softmax(-1)
    left = p * kept_groups(p)
    ids = left.topk(K)[1]
    return ids, left.gather(1, ids)


def grouped_in_place(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    p = moe.gate(x).sigmoid().clone()
    p.view(-1, 3, 2).mul_(kept_groups(p).view(-1, 3, 2))
    w, ids = p.topk(K)
    return ids, w


def grouped_values_unused(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    p = moe.gate(x).sigmoid()
    ids = p.masked_fill(~kept_groups(p), 0.0).topk(K)[1]
    return ids, p.gather(1, ids)


def grouped_with_a_loss(moe: Any, x: Tensor) -> tuple[Tensor, ...]:
    p = moe.gate(x).softmax(-1)
    left = p.masked_fill(~kept_groups(p), 0.0)
    w, ids = left.topk(K)
    return ids, w, left.mean(0).pow(2).sum()


def softmax_by_hand(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = moe.gate(x)
    ids = logits.topk(K)[1]
    shifted = (logits - logits.max(-1, keepdim=True).values).exp()
    return ids, (shifted / shifted.sum(-1, keepdim=True)).gather(1, ids)


@pytest.mark.parametrize(
    ("route", "steps", "reads"),
    [
        (plain, [], []),
        (grouped, ["masked_fill"], []),
        (grouped_then_scaled, ["where", "float", "mul"], []),
        (grouped_and_gathered, [], [["mul"]]),
        (grouped_in_place, ["mul"], []),
        (grouped_values_unused, [], []),
        (grouped_with_a_loss, ["masked_fill"], []),
        (softmax_by_hand, [], []),
    ],
)
def test_scores_are_read_in_front_of_the_routers_own_masks(
    route: Route, steps: list[str], reads: list[list[str]]
) -> None:
    forcing, _ = planned(route)
    assert isinstance(forcing, Forcing), forcing
    (swap,) = forcing.swaps
    assert [spelling(s.node) for s in swap.scores.steps] == steps
    assert [[spelling(s.node) for s in read.steps] for read in forcing.reads] == reads


# ---- near misses -----------------------------------------------------------------------------------------------------
def softmax_behind_the_mask(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = moe.gate(x)
    w, ids = logits.masked_fill(~kept_groups(logits), -torch.inf).softmax(-1).topk(K)
    return ids, w


def normalised_over_kept_groups(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    p = moe.gate(x).softmax(-1)
    left = p * kept_groups(p)
    w, ids = left.topk(K)
    return ids, w / left.sum(-1, keepdim=True)


def weighed_by_the_best(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    p = moe.gate(x).softmax(-1)
    w, ids = p.topk(K)
    return ids, w / p.amax(-1, keepdim=True)


def threshold(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    p = moe.gate(x).softmax(-1)
    w, ids = p.topk(K)
    return ids, w / (p * (p >= w[:, -1:])).sum(-1, keepdim=True)


def two_levels(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    group = moe.other(x).argmax(-1, keepdim=True)
    w, inside = moe.gate(x)[:, :2].softmax(-1).topk(1)
    return group * 2 + inside, w


def masked_by_another_router(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    group = moe.other(x).argmax(-1, keepdim=True)
    mask = torch.zeros(len(x), 3).scatter(1, group, 1.0).repeat_interleave(2, 1)
    w, ids = (moe.gate(x) + (1 - mask) * -1e9).softmax(-1).topk(K)
    return ids, w


@pytest.mark.parametrize(
    ("route", "reason"),
    [
        (softmax_behind_the_mask, "pass softmax .* behind a mask of the router's own choice"),
        (normalised_over_kept_groups, "sum .* uses scores that were masked"),
        (weighed_by_the_best, "weight of the experts comes from another selection"),
        (threshold, "compares the scores of the chosen with those of all experts"),
        (masked_by_another_router, "behind a mask of the router's own choice"),
    ],
)
def test_what_is_not_provable_is_refused(route: Route, reason: str) -> None:
    found, _ = planned(route)
    assert isinstance(found, str) and re.search(reason, found), found


def test_ids_of_two_choices() -> None:
    module = traced(Moe(two_levels), torch.randn(T, D))
    flow = DataFlow(module.graph, is_weight)
    for site in match(module.graph).sites:
        found = plan(flow, site)
        assert isinstance(found, str), "either half alone is no expert"


def test_a_form_that_does_not_say_where_its_scores_are() -> None:
    """A form that users registered before replay: its values would stay those of the live choice."""

    def without_values(flow: DataFlow, node: Any) -> Any:
        found = TOPK.find(flow, node)
        return dataclasses.replace(found, values=None) if found is not None else None

    module = traced(Moe(plain), torch.randn(T, D))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["r3_pass.registry.forms"], "FORMS", ())
        with registered(RoutingForm("mine", without_values)):
            (site,) = match(module.graph).sites
    found = plan(DataFlow(module.graph, is_weight), site)
    assert isinstance(found, str) and "does not say where the scores" in found


# ---- the rewrite -----------------------------------------------------------------------------------------------------
def test_the_rewrite_adds_what_its_docstring_says() -> None:
    module = traced(Moe(plain), torch.randn(T, D))
    before = operators(module)
    made = force(module, match(module.graph).sites, torch.device("cpu"))
    assert not isinstance(made, str) and made.unforced == ("",) and (made.tokens, made.top_k) == (T, K)
    added = operators(made.module) - before
    assert added["gather"] == added["where"] == added["lt"] == 1 and added["topk"] == 0
    assert operators(module) == before, "the traced graph stays as it is"
    (selection,) = [
        n for n in made.module.graph.nodes if n.op in ("call_function", "call_method") and spelling(n) == "topk"
    ]
    values = [u for u in selection.users if u.args[1] == 0]
    assert all(not u.users for u in values), "the native scores are not used any more"


def test_what_is_traced_for_the_rewrite_saves_nothing() -> None:
    """A graph that is compiled inside of a checkpointed region put the tensors of its own rewrite on the region's list."""
    saved: list[Tensor] = []
    module = traced(Moe(plain), torch.randn(T, D))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        force(module, match(module.graph).sites, torch.device("cpu"))
    assert not saved
