"""Masks made of a choice that weigh all experts' outputs: still those of the chosen, or of others?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import MoE, dense, gate, stack, tokens
from torch import Tensor, nn

import r3_pass

Use = Callable[[Tensor, Tensor], Tensor]
LOW = -1e9


def written(p: Tensor, m: Tensor) -> Tensor:
    p = p.clone()
    p[m.bool()] = torch.tensor(0.0)
    return p


# Weights [T, 8] of probabilities p and a mask m of the two that were chosen, both [T, 8].
CHOSEN: dict[str, Use] = {
    "multiplied": lambda p, m: p * m,
    "as_bool": lambda p, m: p * m.bool(),
    "compared": lambda p, m: p * (m > 0.5),
    "compared_with_a_tensor": lambda p, m: p * (m == torch.tensor(1.0)),
    "others_filled": lambda p, m: p.masked_fill(~m.bool(), 0.0),
    "others_filled_with_a_tensor": lambda p, m: p.masked_fill(m == 0, torch.tensor(0.0)),
    "where": lambda p, m: torch.where(m > 0, p, torch.tensor(0.0)),
    "added_shifted": lambda p, m: (p.log() + (m - 1) * 1e9).softmax(-1),
    "logarithm": lambda p, m: (p.log() + m.log()).softmax(-1),
    "normalised": lambda p, m: p * m / ((p * m).sum(-1, keepdim=True) + 1e-9),
    "normalised_by_clamp": lambda p, m: p * m / (p * m).sum(-1, keepdim=True).clamp(min=1e-9),
    "normalised_by_function": lambda p, m: F.normalize(p * m, p=1.0, dim=-1),
    "einsum": lambda p, m: torch.einsum("te,te->te", p, m),
    "turned_twice": lambda p, m: p * (1 - (1 - m)),
    "columns_split_and_joined": lambda p, m: p * torch.cat(m.chunk(2, -1), -1),
}

OTHERS: dict[str, Use] = {
    "filled_with_a_tensor": lambda p, m: p.masked_fill(m.bool(), torch.tensor(0.0)),
    "filled_with_a_new_tensor": lambda p, m: p.masked_fill(m.bool(), p.new_tensor(0.0)),
    "filled_with_what_is_zero": lambda p, m: p.masked_fill(m.bool(), p.min() * 0),
    "scattered": lambda p, m: p.clone().masked_scatter(m.bool(), torch.zeros_like(p)),
    "put": lambda p, m: p.clone().index_put((m.bool(),), torch.tensor(0.0)),
    "written": written,
    "less_than_a_tensor": lambda p, m: p * (m < torch.tensor(0.5)),
    "equal_to_a_tensor": lambda p, m: p * (m == torch.tensor(0.0)),
    "zero_to_the_power": lambda p, m: p * torch.pow(torch.tensor(0.0), m),
    "cosine": lambda p, m: p * torch.cos(m * 1.5707963),
    "exponential": lambda p, m: p * torch.exp(m * torch.tensor(-100.0)),
    "remainder": lambda p, m: p * ((m + 1) % 2),
    "one_more": lambda p, m: p * (m + 1),
    "low_tensor": lambda p, m: (p.log() + m * torch.tensor(LOW)).softmax(-1),
    "addcmul": lambda p, m: torch.addcmul(p, p, m, value=-1.0),
    "lerp": lambda p, m: torch.lerp(p, torch.zeros_like(p), m),
    "at_least": lambda p, m: p * m.clamp(min=0.5),
    "sigmoid": lambda p, m: p * m.sigmoid(),
    "rolled_to_other_experts": lambda p, m: p * m.roll(1, -1),
    "rolled_to_other_tokens": lambda p, m: p * m.roll(1, 0),
    "flipped": lambda p, m: p * m.flip(0),
    "rows_by_an_index": lambda p, m: p * m[torch.arange(len(m) - 1, -1, -1)],
    "columns_by_an_index": lambda p, m: p * m[:, [1, 0, 2, 3, 4, 5, 6, 7]],
    "index_select": lambda p, m: p * m.index_select(0, torch.arange(len(m) - 1, -1, -1)),
    "gathered": lambda p, m: p * m.gather(1, torch.arange(7, -1, -1).expand(len(m), -1)),
    "joined_crosswise": lambda p, m: p * torch.cat([m[1:], m[:1]]),
    "columns_joined_crosswise": lambda p, m: p * torch.cat(m.chunk(2, -1)[::-1], -1),
    "one_row_for_all": lambda p, m: p * m[:1],
    "sorted": lambda p, m: p * m.sort(-1, descending=True)[0],
    "padded_and_cut": lambda p, m: p * F.pad(m, (0, 0, 1, 0))[:-1],
    "below_the_diagonal": lambda p, m: p * m.tril(),
}


def model(use: Use) -> nn.Module:
    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        p = moe.gate(x).softmax(-1)
        return (use(p, torch.zeros_like(p).scatter(1, p.topk(2, dim=-1).indices, 1.0)),)

    return stack(lambda: MoE(route, dense, gate=gate()))


@pytest.mark.parametrize("name", CHOSEN)
def test_masks_of_the_chosen(name: str) -> None:
    ((ids,),) = tokens((2, 6))
    assert len(r3_pass.explain(model(CHOSEN[name]), ids).sites) == 2


@pytest.mark.parametrize(("low", "recorded"), [(float("-inf"), True), (-1e9, True), (-1.0, False), (0.0, False)])
def test_the_sigmoid_of_what_was_scattered(low: float, recorded: bool) -> None:
    """Llama 4: weights are the sigmoid of scores that are -inf for all that were not chosen; of -1 or 0, they all have one."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        scores = moe.gate(x)
        best, ids = scores.topk(2, dim=-1)
        return (torch.full_like(scores, low).scatter_(1, ids, best).float().sigmoid().to(scores.dtype),)

    ((ids,),) = tokens((2, 6))
    report = r3_pass.explain(stack(lambda: MoE(route, dense, gate=gate())), ids)
    assert bool(report.sites) is recorded


@pytest.mark.parametrize("name", OTHERS)
def test_masks_of_others(name: str) -> None:
    ((ids,),) = tokens((2, 6))
    assert not r3_pass.explain(model(OTHERS[name]), ids).sites
