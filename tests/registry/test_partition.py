"""Experts split among ranks: what a rank's experts get of the router's choice, in every spelling, and what is no such thing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import MoE, gate, gathered, softmax_topk, stack, tokens
from torch import Tensor, nn

import r3_pass

LOCAL = 4  # experts of this rank, the second of two
Split = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
where = torch.where


def as_sentinels(ids: Tensor, w: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """transformers 5.24."""
    return where(others, LOCAL, ids % LOCAL).clamp(0, LOCAL - 1), w.masked_fill(others, 0.0)


def by_fmod(ids: Tensor, w: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """transformers 5.17: ids below 0 stay below 0."""
    local = torch.fmod(ids.masked_fill(others, -1), LOCAL)
    return local.masked_fill(local == -1, LOCAL).clamp(0, LOCAL - 1), w.masked_fill(others, 0.0)


def flat(ids: Tensor, w: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    local = (ids.reshape(-1) - LOCAL).clamp(min=0)
    return local.view(ids.shape), (w.reshape(-1) * (ids.reshape(-1) >= LOCAL)).view(w.shape)


def renormalised(ids: Tensor, w: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    mine = where(others, 0.0, w)
    return where(others, 0, ids - LOCAL), mine / mine.sum(-1, keepdim=True).clamp(min=1e-9)


SPLITS: list[Split] = [as_sentinels, by_fmod, flat, renormalised]

# The same with a mistake in it: ids of other ranks reach experts of this one, or its own do not.
MISTAKES: dict[str, Split] = {
    "weights_stay": lambda ids, w, others: (as_sentinels(ids, w, others)[0], w),
    "weights_of_the_others": lambda ids, w, others: (as_sentinels(ids, w, others)[0], w.masked_fill(~others, 0.0)),
    "another_first_expert": lambda ids, w, others: ((ids - 3).clamp(0, LOCAL - 1), w.masked_fill(others, 0.0)),
    "one_of_its_own_dropped": lambda ids, w, others: as_sentinels(ids, w, others | (ids == 5)),
    "weights_beside": lambda ids, w, others: (as_sentinels(ids, w, others)[0], w.masked_fill(others, 0.0) + 0.1 * w),
    "weights_again": lambda ids, w, others: (as_sentinels(ids, w, others)[0], w.masked_fill(others, 0.0).softmax(-1)),
    "shifted": lambda ids, w, others: as_sentinels(ids + 1, w, others),
    "reversed": lambda ids, w, others: (where(others, 0, 7 - ids), w.masked_fill(others, 0.0)),
    "of_another_token": lambda ids, w, others: (as_sentinels(ids, w, others)[0].roll(1, 0), w.masked_fill(others, 0.0)),
    "weights_in_other_rows": lambda ids, w, others: (
        as_sentinels(ids, w, others)[0],
        w.t().masked_fill(others.reshape(2, -1), 0.0).t(),
    ),
    "another_expert_in_the_first_ones_place": lambda ids, w, others: (
        where(others | (ids == 6), 0, ids - LOCAL),
        w.masked_fill(others, 0.0),
    ),
    "two_made_one": lambda ids, w, others: (as_sentinels(ids, w, others)[0].clamp(0, 1), w.masked_fill(others, 0.0)),
}

# Zeros that are moved away from the choice that they stand beside, however ids are split; `w` is masked already.
MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "to_other_tokens": lambda w: w[torch.arange(w.shape[0] - 1, -1, -1)],
    "to_other_columns": lambda w: w[:, [1, 0]],
    "to_all_columns": lambda w: w[:, :1].expand(-1, 2),
    "by_gather": lambda w: w.gather(1, 1 - torch.arange(2).expand(w.shape[0], 2)),
}


def one_by_one(moe: Any, x: Tensor, ids: Tensor, w: Tensor, mistaken: bool = False) -> Tensor:
    """A column of the choice after the other; each with its weights, or with those of the other one."""
    out = torch.zeros_like(x)
    for k in range(2):
        h = F.silu(torch.einsum("td,tfd->tf", x, moe.up[ids[:, k]]))
        out = out + torch.einsum("tf,tdf->td", h, moe.down[ids[:, k]]) * w[:, 1 - k if mistaken else k, None]
    return out


def sorted_by_expert(moe: Any, x: Tensor, ids: Tensor, w: Tensor, of_weights: str = "same") -> Tensor:
    """Products in the order of experts, weights in the same order, in another one or as they were; and back."""
    experts, order = ids.flatten().sort(stable=True)
    h = F.gelu(torch.bmm(moe.up[experts], x[order // 2].unsqueeze(-1)))
    y = torch.bmm(moe.down[experts], h).squeeze(-1)
    orders = {"same": order, "another": ids.flatten().argsort(descending=True)}
    flat = w.flatten()[orders[of_weights]] if of_weights in orders else w.flatten()
    return (y * flat.unsqueeze(-1))[order.argsort()].view(*w.shape, -1).sum(1)


def each(moe: Any, x: Tensor, ids: Tensor) -> Tensor:
    h = F.silu(torch.einsum("td,tkfd->tkf", x, moe.up[ids]))
    return torch.einsum("tkf,tkdf->tkd", h, moe.down[ids])


def on_the_tokens(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    h = torch.einsum("tkd,tkfd->tkf", x.unsqueeze(1) * w.unsqueeze(-1), moe.up[ids]).sigmoid()
    return torch.einsum("tkf,tkdf->td", h, moe.down[ids])


# Experts' work that reaches the result without its own weight.
UNWEIGHED: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "all_of_it": lambda moe, x, ids, w: each(moe, x, ids).sum(1),
    "a_part_of_it": lambda moe, x, ids, w: (
        (each(moe, x, ids) * (w.unsqueeze(-1))).sum(1) + 0.1 * each(moe, x, ids).sum(1)
    ),
    "a_bias": lambda moe, x, ids, w: (each(moe, x, ids) * w.unsqueeze(-1) + moe.down[ids][..., 0]).sum(1),
    "all_weights_at_once": lambda moe, x, ids, w: torch.einsum("tkd,tj->td", each(moe, x, ids), w),
    "weights_on_the_tokens": on_the_tokens,
    "columns_crossed": functools.partial(one_by_one, mistaken=True),
    "another_order": functools.partial(sorted_by_expert, of_weights="another"),
    "an_order_for_the_products_alone": functools.partial(sorted_by_expert, of_weights="none"),
}


def less_the_first(ids: Tensor, w: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    return where(others, 0, ids - LOCAL), w.masked_fill(others, 0.0)


def model(split: Split, dispatch: Any = gathered, rank: int = 1) -> nn.Module:
    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        return split(ids, w, ids // LOCAL != rank)

    return stack(lambda: MoE(route, dispatch, LOCAL, gate=gate()))


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.__name__)
def test_the_ids_of_all_experts_are_recorded(split: Split) -> None:
    ((ids,),) = tokens((2, 6))
    target = model(split)
    compiled = torch.compile(target, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=12)
    with session.step(range(12)):
        compiled(ids)
    chosen: dict[int, Tensor] = {}
    for layer, block in enumerate(target.layers):  # type: ignore[arg-type]
        block.mlp.gate.register_forward_hook(
            lambda _, __, scores, layer=layer: chosen.update({layer: scores.softmax(-1).topk(2).indices})
        )
    target(ids)
    rows = session.read(range(12))
    for layer, expected in chosen.items():
        assert (rows[:, layer] == expected.reshape(12, 2).numpy()).all()
    assert rows.max() >= LOCAL > rows.min()
    session.detach()


@pytest.mark.parametrize("name", list(MISTAKES))
def test_what_is_not_the_choice_is_refused(name: str) -> None:
    ((ids,),) = tokens((2, 6))
    report = r3_pass.explain(model(MISTAKES[name]), ids)
    assert not report.sites and all(entry.routing for entry in report.rejected)


@pytest.mark.parametrize("dispatch", [one_by_one, sorted_by_expert], ids=lambda dispatch: dispatch.__name__)
@pytest.mark.parametrize("split", [as_sentinels, less_the_first], ids=lambda split: split.__name__)
def test_weights_beside_their_choice(split: Split, dispatch: Any) -> None:
    ((ids,),) = tokens((2, 6))
    assert len(r3_pass.explain(model(split, dispatch), ids).sites) == 2


@pytest.mark.parametrize("split", [as_sentinels, less_the_first], ids=lambda split: split.__name__)
@pytest.mark.parametrize("name", [*MOVED, *UNWEIGHED])
def test_zeros_that_are_not_beside_their_choice(name: str, split: Split) -> None:
    def moved(ids: Tensor, w: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        local, weights = split(ids, w, others)
        return local, MOVED[name](weights) if name in MOVED else weights

    ((ids,),) = tokens((2, 6))
    assert not r3_pass.explain(model(moved, UNWEIGHED.get(name, gathered)), ids).sites


@pytest.mark.parametrize("name", list(MOVED))
def test_on_the_first_rank(name: str) -> None:
    """Its experts keep their numbers."""

    def split(ids: Tensor, w: Tensor, others: Tensor, moved: bool = True) -> tuple[Tensor, Tensor]:
        weights = w.masked_fill(others, 0.0)
        return where(others, 0, ids), MOVED[name](weights) if moved else weights

    ((ids,),) = tokens((2, 6))
    assert not r3_pass.explain(model(split, rank=0), ids).sites
    assert len(r3_pass.explain(model(functools.partial(split, moved=False), rank=0), ids).sites) == 2


def test_given_ids_are_split_as_chosen_ones_are() -> None:
    """Replay puts them in the place of the choice, before a rank's share of it is taken."""
    ((ids,),) = tokens((2, 6))
    backend = r3_pass.backend("eager", mode="both")
    assert r3_pass.verify.self_test(torch.compile(model(as_sentinels).train(), backend=backend), backend, ids).ok
