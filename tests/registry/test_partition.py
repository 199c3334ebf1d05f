"""Experts split among ranks: what a rank's experts get of the router's choice, in every spelling, and what is no such thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
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


def model(split: Split) -> nn.Module:
    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        return split(ids, w, ids // LOCAL != 1)

    return stack(lambda: MoE(route, gathered, LOCAL, gate=gate()))


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


def test_given_ids_are_split_as_chosen_ones_are() -> None:
    """Replay puts them in the place of the choice, before a rank's share of it is taken."""
    ((ids,),) = tokens((2, 6))
    backend = r3_pass.backend("eager", mode="both")
    assert r3_pass.verify.self_test(torch.compile(model(as_sentinels).train(), backend=backend), backend, ids).ok
