"""Choices that are changed between the selection and the experts: none of them may be recorded as if it had been carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tiny import Block, Cases, D, E, MoE, Net, dense, gate, gathered, softmax_topk, stack, tap, tokens
from torch import Tensor, nn

ALTERED_ROUTERS = Cases()
captured, refused = ALTERED_ROUTERS.captured, ALTERED_ROUTERS.refused
T = 12  # tokens of a call: 2 x 6

IN_CI = frozenset({
    "columns_by_unbind", "column_by_select", "reranked_by_argsort", "replaced_under_a_condition", "shifted_where_full",
    "rows_by_a_table", "row_of_the_last_token", "scrambled", "folded_by_division", "complement_by_subtraction",
    "complement_by_a_table",
})  # fmt: skip


def full(ids: Tensor) -> Tensor:
    """bool [T, 2]: the expert has been chosen more than twice before."""
    return F.one_hot(ids.flatten(), E).cumsum(0).gather(1, ids.flatten()[:, None]).view_as(ids) > 2


def reranked(moe: Any, x: Tensor, ids: Tensor) -> Tensor:
    return ids.gather(1, moe.other(x).gather(1, ids).argsort(-1, descending=True)[:, :2])


CHANGES: dict[str, tuple[int, Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "columns_by_unbind": (3, lambda m, x, i: torch.stack(i.unbind(-1)[:2], -1)),
    "columns_by_split": (3, lambda m, x, i: i.split([2, 1], -1)[0]),
    "columns_by_chunk": (4, lambda m, x, i: i.chunk(2, -1)[1]),
    "columns_by_a_list": (4, lambda m, x, i: i[:, [0, 2]]),
    "columns_by_index_select": (4, lambda m, x, i: i.index_select(1, m.two)),
    "column_by_an_integer": (2, lambda m, x, i: i[:, 0, None]),
    "column_by_select": (2, lambda m, x, i: i.select(1, 0).unsqueeze(1)),
    "column_repeated": (2, lambda m, x, i: i[:, :1].expand(-1, 2)),
    "reranked_by_argsort": (4, reranked),
    "replaced_under_a_condition": (2, lambda m, x, i: i.masked_fill(full(i), m.two[1])),
    "replaced_by_index_put": (2, lambda m, x, i: i.index_put((full(i),), m.two[1])),
    "multiplied_by_a_condition": (2, lambda m, x, i: i * ~full(i)),
    "shifted_where_full": (2, lambda m, x, i: (i + full(i).long()) % E),
    "least_of_two": (2, lambda m, x, i: torch.minimum(i, torch.where(full(i), 0, E))),
    "one_of_a_stack": (2, lambda m, x, i: torch.stack([i, (i + 1) % E], -1).gather(-1, full(i).long()[..., None])[..., 0]),
    "multiplied_by_position": (2, lambda m, x, i: i * (torch.arange(len(i))[:, None] >= 3)),
    "rows_by_a_table": (2, lambda m, x, i: i[m.order]),
    "rows_by_gather": (2, lambda m, x, i: i.gather(0, m.order[:, None].expand(-1, 2))),
    "rows_padded_and_cut": (2, lambda m, x, i: F.pad(i, (0, 0, 1, 0))[:-1]),
    "row_of_the_first_token": (2, lambda m, x, i: i[:1].expand_as(i)),
    "row_of_the_last_token": (2, lambda m, x, i: i.view(2, -1, 2)[:, -1:].expand(-1, 6, -1).reshape(-1, 2)),
    "scrambled": (2, lambda m, x, i: i.t().reshape(-1, 2)),
    "below_the_diagonal": (2, lambda m, x, i: i.tril()),
    "folded_by_division": (2, lambda m, x, i: (i // 2) * 2),
    "folded_by_clamp": (2, lambda m, x, i: i.clamp(max=5)),
    "folded_by_or": (2, lambda m, x, i: i | 1),
    "all_the_same": (2, lambda m, x, i: i * 0 + 3),
}  # fmt: skip


def changed(top_k: int, change: Callable[[Any, Tensor, Tensor], Tensor]) -> nn.Module:
    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(-1)
        ids = change(moe, x, p.topk(top_k, dim=-1).indices)
        tap(moe, ids)
        return ids, p.gather(1, ids)

    return stack(lambda: MoE(route, gate=gate(), other=gate(), two=torch.tensor([1, 3]), order=torch.randperm(T)))


COMPLEMENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "complement_by_subtraction": lambda p, m: p - p * m,
    "complement_by_ones": lambda p, m: p * (torch.ones_like(m) - m),
    "complement_by_negation": lambda p, m: p * (-m + 1),
    "complement_by_rsub": lambda p, m: p * torch.rsub(m, 1),
    "complement_by_abs": lambda p, m: p * (m - 1).abs(),
    "complement_by_ne": lambda p, m: p * (m != 1),
    "complement_by_xor": lambda p, m: p * (m.bool() ^ True),
    "complement_by_alpha": lambda p, m: torch.add(p, p * m, alpha=-1),
    "complement_by_a_penalty": lambda p, m: (p.log() - 1e9 * m).softmax(-1),
    "complement_by_a_low_fill": lambda p, m: p.log().masked_fill(m.bool(), -1000.0).softmax(-1),
    "complement_by_where": lambda p, m: torch.where(m.bool(), p * 0, p),
    "complement_by_a_table": lambda p, m: p * torch.tensor([1.0, 0.0])[m.long()],
}


def complement(weights: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        p = moe.gate(x).softmax(-1)
        return (weights(p, torch.zeros_like(p).scatter(1, p.topk(6, dim=-1).indices, 1.0)),)

    return stack(lambda: MoE(route, dense, gate=gate()))


def add(name: str, why: str, reason: str, make: Callable[[], nn.Module], **options: Any) -> None:
    def case() -> nn.Module:
        return make()

    case.__name__, case.__doc__ = name, why
    refused(reason, slow=name not in IN_CI, **options)(case)


for _name, _change in CHANGES.items():
    add(
        _name,
        "The ids are changed by an operator before they choose parameters.",
        "the ids that reach experts are not",
        lambda given=_change: changed(*given),  # type: ignore[misc]  # a default binds the loop's value
        inputs=lambda: tokens((2, 6)),
    )
for _name, _weights in COMPLEMENTS.items():
    add(
        _name,
        "All experts but the chosen ones run.",
        "",
        lambda given=_weights: complement(given),  # type: ignore[misc]
        also=("nothing",),
    )


@refused("threshold", also=("nothing",))
def any_above_a_threshold() -> nn.Module:
    """DynMoE: all experts above a threshold, and the best one where there is none."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        scores = moe.gate(x).sigmoid()
        chosen = (scores > 0.9).float()
        best = F.one_hot(scores.argmax(-1), E).float()
        return (torch.where(chosen.sum(1, keepdim=True) == 0, best, chosen),)

    return stack(lambda: MoE(route, dense, gate=gate()))


@refused("another order", inputs=lambda: tokens((4, 4)))
def square_batch_turned() -> nn.Module:
    """As many sequences as tokens in each: no shape tells that the router sees them turned about."""

    class Turned(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return self.decode(self.embed(ids.t())).transpose(0, 1)

    return Turned([Block(MoE(softmax_topk, gate=gate())) for _ in range(2)])


@refused("another order", inputs=lambda: tokens((2, 4)), slow=True)
def windows_of_equal_sides() -> nn.Module:
    """Windows of two by two tokens."""

    class Windows(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids).view(-1, 2, 2, D).transpose(1, 2).reshape(-1, 4, D)
            return self.decode(x).view(len(x), 2, 2, -1).transpose(1, 2)

    return Windows([Block(MoE(softmax_topk, gate=gate())) for _ in range(2)])


@refused("not the first ones")
def every_second_expert() -> nn.Module:
    """The selection runs over the even experts alone."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = moe.gate(x).softmax(-1)[:, ::2].topk(2, dim=-1)
        return ids * 2, w

    return stack(lambda: MoE(route, gate=gate()))


@refused("not the first ones", slow=True)
def second_half_of_the_bank() -> nn.Module:
    """The selection runs over the second half of the experts, whose parameters are sliced alike."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = moe.gate(x).softmax(-1)[:, 4:].topk(2, dim=-1)
        return ids, w

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        h = torch.einsum("td,tkfd->tkf", x, moe.up[4:][ids]).relu()
        return torch.einsum("tkf,tkdf,tk->td", h, moe.down[4:][ids], w)

    return stack(lambda: MoE(route, dispatch, gate=gate()))


@refused("names none of", slow=True)
def null_expert_first() -> nn.Module:
    """The first of nine choices is to do nothing; the others are moved down by one."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = moe.gate(x).softmax(-1).topk(2, dim=-1)
        return (ids - 1).clamp(min=0), w * (ids >= 1)

    return stack(lambda: MoE(route, gate=gate(E + 1)))


@captured()
def experts_of_one_rank() -> nn.Module:
    """Expert parallelism: ids less the rank's first expert; those of other ranks get no weight. The record is the choice."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        local = ids - 2
        here = (local >= 0) & (local < 4)
        return torch.where(here, local, torch.zeros_like(local)), w * here

    return stack(lambda: MoE(route, gathered, 4, gate=gate()))


@captured(slow=True)
def replicas_by_token() -> nn.Module:
    """Each expert has two replicas; the token's place in the batch says which of them a table gives."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        return moe.table[ids, (torch.arange(len(x)) % 2)[:, None].expand_as(ids)], w

    return stack(lambda: MoE(route, gathered, 2 * E, gate=gate(), table=torch.randperm(2 * E).view(E, 2)))


@refused("not known to keep them", slow=True)
def routed_under_vmap() -> nn.Module:
    """The choice is made in a vmap over tokens."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = torch.vmap(lambda row: row.softmax(-1).topk(2, -1))(moe.gate(x))
        return ids, w

    return stack(lambda: MoE(route, gate=gate()))
