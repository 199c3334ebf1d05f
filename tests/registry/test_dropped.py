"""Choices whose id is made safe for an index because their weight is 0: are they, each beside its own weight?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import MoE, gate, gathered, looped, softmax_topk, stack, tokens
from torch import Tensor, nn

import r3_pass

LOCAL = 4  # experts of the first of two ranks
where = torch.where
Weights = Callable[[Tensor, Tensor, Tensor], Tensor]

# Weights of choices for which `c` [T, 2] holds, that are 0 there.
ZEROED: dict[str, Weights] = {
    "masked_fill": lambda w, c, ids: w.masked_fill(c, 0.0),
    "where": lambda w, c, ids: where(c, 0.0, w),
    "where_turned": lambda w, c, ids: where(~c, w, 0.0),
    "multiplied": lambda w, c, ids: w * ~c,
    "as_numbers": lambda w, c, ids: w * c.logical_not().to(w.dtype),
    "compared": lambda w, c, ids: w * (c == 0),
    "more_than_these": lambda w, c, ids: w.masked_fill(c | (w > 0.3), 0.0),
    "kept_by_more": lambda w, c, ids: w * (~c & (w > 0.1)),
    "renormalised": lambda w, c, ids: w.masked_fill(c, 0.0) / w.masked_fill(c, 0.0).sum(-1, keepdim=True).clamp(min=1e-6),
    "flat": lambda w, c, ids: w.flatten().masked_fill(c.flatten(), 0.0).view(w.shape),
    "transposed": lambda w, c, ids: w.t().masked_fill(c.t(), 0.0).t(),
}  # fmt: skip

# The same, but not 0 for some choice for which `c` holds.
STAYING: dict[str, Weights] = {
    "column_by_slice": lambda w, c, ids: w.masked_fill(c[:, :1], 0.0),
    "column_by_select": lambda w, c, ids: w.masked_fill(c.select(1, 0)[:, None], 0.0),
    "column_by_narrow": lambda w, c, ids: w.masked_fill(c.narrow(1, 0, 1), 0.0),
    "column_expanded": lambda w, c, ids: w.masked_fill(c[:, :1].expand(-1, 2), 0.0),
    "first_token": lambda w, c, ids: w.masked_fill(c[:1].expand(len(w), -1), 0.0),
    "any_choice": lambda w, c, ids: w.masked_fill(c.all(-1, keepdim=True), 0.0),
    "largest": lambda w, c, ids: w.masked_fill(c.amin(-1, keepdim=True), 0.0),
    "gathered": lambda w, c, ids: w.masked_fill(c.gather(1, torch.zeros_like(ids)), 0.0),
    "index_select": lambda w, c, ids: w.masked_fill(c.index_select(1, torch.tensor([1, 0])), 0.0),
    "columns_by_a_list": lambda w, c, ids: w.masked_fill(c[:, [1, 0]], 0.0),
    "rolled": lambda w, c, ids: w.masked_fill(c.roll(1, 0), 0.0),
    "flipped": lambda w, c, ids: w.masked_fill(c.flip(1), 0.0),
    "joined_crosswise": lambda w, c, ids: w.masked_fill(torch.cat([c[:, 1:], c[:, :1]], 1), 0.0),
    "transposed": lambda w, c, ids: w.t().masked_fill(c.reshape(2, -1), 0.0).t(),
    "sorted": lambda w, c, ids: w.masked_fill(c.int().sort(1)[0].bool(), 0.0),
    "those_that_are_kept": lambda w, c, ids: w * c,
    "those_that_are_kept_in_a_column": lambda w, c, ids: w * c[:, :1],
    "filled_with_one": lambda w, c, ids: w.masked_fill(c, 1.0),
    "added": lambda w, c, ids: w + c,
    "some_of_these": lambda w, c, ids: w.masked_fill(c & (w > 0.3), 0.0),
    "others_of_these": lambda w, c, ids: w.masked_fill(c ^ (w > 0.3), 0.0),
    "counted": lambda w, c, ids: w + 0 * c.float().sum(),
    "beside": lambda w, c, ids: w + 0.5 * w.masked_fill(c, 0.0),
    "not_used": lambda w, c, ids: w + 0 * w.masked_fill(c, 0.0).sum(),
}  # fmt: skip


def full(ids: Tensor) -> Tensor:
    """bool [T, 2]: the expert has been chosen more than twice before; no function of the id alone."""
    return F.one_hot(ids.flatten(), 8).cumsum(0).gather(1, ids.flatten()[:, None]).view_as(ids) > 2


def dropping(weights: Weights, safe: Callable[[Tensor, Tensor], Tensor], dispatch: Any = gathered) -> nn.Module:
    """Of full experts, the choice is dropped."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        dropped = full(ids)
        return safe(ids, dropped), weights(w, dropped, ids)

    return stack(lambda: MoE(route, dispatch, gate=gate()))


def first_rank(weights: Weights) -> nn.Module:
    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        others = ids // LOCAL != 0
        return where(others, 0, ids), weights(w, others, ids)

    return stack(lambda: MoE(route, gathered, LOCAL, gate=gate()))


def sites(model: nn.Module) -> tuple[Any, ...]:
    ((ids,),) = tokens((2, 6))
    return tuple(r3_pass.explain(model, ids).sites)


@pytest.mark.parametrize("name", STAYING)
def test_experts_of_other_ranks_whose_weights_stay(name: str) -> None:
    """Their choices would run expert 0 of the first rank, and the row would say another one."""
    assert not sites(first_rank(STAYING[name]))


@pytest.mark.parametrize("name", ZEROED)
def test_experts_of_other_ranks_without_weight(name: str) -> None:
    assert len(sites(first_rank(ZEROED[name]))) == 2


@pytest.mark.parametrize("name", STAYING)
def test_dropped_choices_whose_weights_stay(name: str) -> None:
    ((ids,),) = tokens((2, 6))
    report = r3_pass.explain(dropping(STAYING[name], lambda ids, c: ids.masked_fill(c, 0)), ids)
    assert not report.sites and any("puts expert 0 in the place of" in entry.reason for entry in report.rejected)


@pytest.mark.parametrize("name", ZEROED)
def test_dropped_choices_without_weight(name: str) -> None:
    assert len(sites(dropping(ZEROED[name], lambda ids, c: ids.masked_fill(c, 0)))) == 2


# Ids made safe in more than one step: what marks the dropped ones becomes an expert's number.
SAFE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "marked_then_clamped": lambda ids, c: ids.masked_fill(c, -1).clamp(min=0),
    "marked_past_the_end_then_clamped": lambda ids, c: where(c, 8, ids).clamp(max=7),
    "marked_then_folded": lambda ids, c: ids.masked_fill(c, -1) % 8,
    "marked_then_shifted": lambda ids, c: (ids.masked_fill(c, 8) + 1 - 1).clamp(0, 7),
    "counted_from_the_end": lambda ids, c: ids.masked_fill(c, -1),
    "all_but_where_it_stays": lambda ids, c: where(~c, ids, 3),
    "by_method": lambda ids, c: ids.where(~c, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", SAFE)
def test_numbers_that_become_an_experts(name: str) -> None:
    """-1 in an index is the last expert."""
    zeroed, staying = ZEROED["masked_fill"], STAYING["rolled"]
    assert len(sites(dropping(zeroed, SAFE[name]))) == 2
    assert not sites(dropping(staying, SAFE[name])) or name in (
        "all_but_where_it_stays",
        "by_method",
    )  # recorded is what it took instead


@pytest.mark.parametrize(
    "safe",
    [
        lambda ids, c: ids.masked_fill(c, 0).sort(-1)[0],
        lambda ids, c: ids.masked_fill(c[:, :1], 0),
        lambda ids, c: ids.masked_fill(~c, 0),
        lambda ids, c: ids.masked_fill(c, 0).masked_fill(ids > 5, 0),
        lambda ids, c: ids.clamp(max=5),
    ],
)
def test_weights_that_are_zeroed_for_other_choices(safe: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert not sites(dropping(ZEROED["masked_fill"], safe))


def work_masked(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """What experts make of dropped choices is made 0 itself."""
    dropped = full(ids)
    safe = ids.masked_fill(dropped, 0)
    h = F.silu(torch.einsum("td,tkfd->tkf", x, moe.up[safe]))
    y = torch.einsum("tkf,tkdf->tkd", h, moe.down[safe]).masked_fill(dropped.unsqueeze(-1), 0.0)
    return (y * w.unsqueeze(-1)).sum(1)


def numbers_for_weights(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Weights of other choices are left as they are, and their products multiplied by a function of the id that is not 0."""
    safe = where(ids >= LOCAL, 0, ids)
    h = F.silu(torch.einsum("td,tkfd->tkf", x, moe.up[safe]))
    y = torch.einsum("tkf,tkdf->tkd", h, moe.down[safe]) * (ids + 1).float().unsqueeze(-1)
    return (y * w.unsqueeze(-1)).sum(1) + 0 * w.masked_fill(ids >= LOCAL, 0.0).sum()


def test_what_is_multiplied_in_the_place_of_weights() -> None:
    def made(dispatch: Any, experts: int) -> nn.Module:
        return stack(lambda: MoE(softmax_topk, dispatch, experts, gate=gate()))

    assert len(sites(made(work_masked, 8))) == 2
    assert not sites(made(numbers_for_weights, LOCAL))


def test_dropped_choices_that_leave_the_graph() -> None:
    """The experts are behind a graph break: the weights that leave beside the ids have to be the zeroed ones."""
    assert len(sites(dropping(ZEROED["multiplied"], lambda ids, c: ids.masked_fill(c, 0), looped))) == 2
    assert not sites(dropping(STAYING["column_by_slice"], lambda ids, c: ids.masked_fill(c, 0), looped))
