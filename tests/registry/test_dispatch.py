"""From expert ids forwards: the uses that prove routing, and their near misses that prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend import named, traced
from torch import Tensor, nn

from r3_pass.passes.match import is_weight
from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.dispatch import follow_ids
from r3_pass.registry.dispatched import Dispatch
from r3_pass.registry.form import items
from r3_pass.registry.scores import trace_scores
from r3_pass.registry.shapes import dims

T, D, E, H = 6, 8, 4, 5

library = torch.library.Library("r3_test_dispatch", "DEF")
library.define("fused(Tensor x, Tensor up, Tensor down, Tensor ids) -> Tensor")
library.define("count(Tensor ids) -> Tensor")
library.impl("fused", lambda x, up, down, ids: x.clone(), "CompositeExplicitAutograd")
library.impl("count", lambda ids: ids.float(), "CompositeExplicitAutograd")


class Layer(nn.Module):
    """Softmax and top-k over E experts; `use(self, x [T, D], ids [T, 2], w [T, 2])` is the case."""

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.use = use
        self.gate = nn.Linear(D, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, H, D)), nn.Parameter(torch.randn(E, D, H))
        self.square = nn.Parameter(torch.randn(E, D, D))
        self.codes, self.more_codes = nn.Parameter(torch.randn(E, D)), nn.Parameter(torch.randn(E, D))
        self.scale = nn.Parameter(torch.randn(E))
        self.experts = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(E))
        self.head = nn.Linear(D, D)
        self.register_buffer("physical", torch.randperm(E))
        self.register_buffer("memory", torch.randn(E, D))

    def forward(self, x: Tensor) -> Any:
        w, ids = self.gate(x).softmax(-1).topk(2)
        return self.use(self, x, ids, w)


def followed(use: Callable[..., Any]) -> tuple[Dispatch, DataFlow]:
    module = traced(Layer(use), torch.randn(T, D))
    flow = DataFlow(module.graph, is_weight)
    selection = named(module, "topk")
    roots = trace_scores(flow, flow.inputs(selection)[0], -1).roots
    return follow_ids(flow, items(flow, selection, 1), roots, E), flow


def gathered(m: Layer, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    h = torch.einsum("td,tkfd->tkf", x, m.up[ids]).relu()
    return torch.einsum("tkf,tkdf,tk->td", h, m.down[ids], w)


def sorted_and_grouped(m: Layer, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    ends = torch.histc(flat.float(), bins=E, min=0, max=E).cumsum(0).to(torch.int32)
    y = F.grouped_mm(x[order // 2].bfloat16(), m.square.bfloat16(), offs=ends)
    return torch.zeros_like(x).index_add(0, order // 2, y.to(x.dtype) * w.flatten()[order].unsqueeze(-1))


def looped_by_mask(m: Layer, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        out = out + expert(x) * (w * (ids == number)).sum(-1, keepdim=True)
    return out


def dense_mixture(m: Layer, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    weights = torch.zeros(T, E).scatter(1, ids, w)
    y = torch.einsum("td,efd,eof->teo", x, m.up, m.down)
    return (y * weights.unsqueeze(-1)).sum(1)


def one_hot_capacity(m: Layer, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    mask = F.one_hot(ids, E).sum(1).float()
    held = torch.einsum("te,td->etd", mask, x)
    return torch.einsum("etd,efd,eof->to", held, m.up, m.down)


def picked_outputs(m: Layer, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    y = torch.einsum("td,edo->teo", x, m.square)
    chosen = y.gather(1, ids.unsqueeze(-1).expand(-1, -1, D))
    return (chosen * w.unsqueeze(-1)).sum(1)


def rank_one_experts(m: Layer, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Doge: an expert is one row in each of two tables."""
    h = torch.einsum("td,tkd->tk", x, F.embedding(ids, m.codes)) * w
    return torch.einsum("tk,tkd->td", h, F.embedding(ids, m.more_codes)) @ torch.eye(D)


PROVED: dict[str, tuple[Callable[..., Any], str]] = {
    "gathered": (gathered, "weights"),
    "index_select": (lambda m, x, ids, w: torch.bmm(m.square.index_select(0, ids[:, 0]), x.unsqueeze(-1)), "weights"),
    "multiplied_and_summed": (lambda m, x, ids, w: (m.square[ids[:, 0]] * x.unsqueeze(1)).sum(-1), "weights"),
    "one_hot_picks_weights": (
        lambda m, x, ids, w: torch.einsum(
            "tdo,td->to", torch.einsum("te,edo->tdo", F.one_hot(ids[:, 0], E).float(), m.square), x
        ),
        "weights",
    ),
    "physical_ids": (lambda m, x, ids, w: gathered(m, x, m.physical[ids], w), "weights"),
    "arithmetic": (lambda m, x, ids, w: gathered(m, x, (ids + 1).clamp(max=E - 1).int().long(), w), "weights"),
    "grouped": (sorted_and_grouped, "grouped"),
    "custom_op": (lambda m, x, ids, w: torch.ops.r3_test_dispatch.fused(x, m.up, m.down, ids), "grouped"),
    "custom_op_behind_sort": (
        lambda m, x, ids, w: torch.ops.r3_test_dispatch.fused(x, m.up, m.down, ids.flatten().sort()[1]),
        "grouped",
    ),
    "looped_by_mask": (looped_by_mask, "experts"),
    "capacity": (one_hot_capacity, "experts"),
    "dense_mixture": (dense_mixture, "combine"),
    "outputs_picked": (picked_outputs, "outputs"),
    "rank_one_experts": (rank_one_experts, "weights"),
}


@pytest.mark.parametrize("case", PROVED)
def test_ids_that_choose_parameters(case: str) -> None:
    """Each is how some model hands tokens to experts; a rule lost makes all models of that spelling unrecordable."""
    use, kind = PROVED[case]
    found, _ = followed(use)
    assert found.proved and kind in found.events.values(), (found.events, found.fates)


UNPROVED: dict[str, tuple[Callable[..., Any], str]] = {
    "returned": (lambda m, x, ids, w: (ids, x), "they are returned"),
    "counted": (lambda m, x, ids, w: F.one_hot(ids, E).sum((0, 1)).float() @ m.scale, "never"),
    "tokens_picked": (lambda m, x, ids, w: x[ids].sum(1) @ m.head.weight, "index activations"),
    "positions_picked": (lambda m, x, ids, w: torch.einsum("tkd,td->tk", x[ids], x), "index activations"),
    "scores_picked": (lambda m, x, ids, w: x * m.gate(x).softmax(-1).gather(1, ids).sum(-1, keepdim=True), "index activations"),
    "codes_added": (lambda m, x, ids, w: x + m.codes[ids].sum(1), "rows of a table"),
    "one_table_scored": (lambda m, x, ids, w: torch.einsum("td,tkd->tk", x, m.codes[ids]), "rows of a table"),
    "scaled_only": (lambda m, x, ids, w: x * m.scale[ids].sum(-1, keepdim=True), "rows of a table"),
    "mask_of_another_choice": (
        lambda m, x, ids, w: x * m.gate(x).masked_fill(F.one_hot(ids, E).sum(1) > 0, 0.0).topk(1)[0],
        "",
    ),
    "tokens_dropped": (lambda m, x, ids, w: m.head(x * (ids[:, :1] > 0)), ""),
    "custom_op_without_weights": (lambda m, x, ids, w: x + torch.ops.r3_test_dispatch.count(ids).sum(), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", UNPROVED)
def test_ids_that_choose_no_parameters(case: str) -> None:
    """Near misses: samplers, indexers, code books, losses. Each proved would record rows of a choice that is no routing."""
    use, fate = UNPROVED[case]
    found, _ = followed(use)
    assert not found.proved, found.events
    assert not fate or fate == "never" or any(fate in f for f in found.fates), found.fates


def test_the_experts_weights_are_named() -> None:
    """Where the gate is in another graph, these weights name the layer."""
    found, _ = followed(gathered)
    assert {dims(w) for w in found.weights} == {(E, D, H), (E, H, D)}
    found, _ = followed(looped_by_mask)
    assert [dims(w) for w in found.weights] == [(D, D)] * E


@pytest.mark.parametrize(
    ("use", "escapes"),
    [
        (lambda m, x, ids, w: (ids, x), True),
        (lambda m, x, ids, w: F.one_hot(ids, E).permute(2, 1, 0), True),
        (lambda m, x, ids, w: ids.flatten().argsort(), True),
        (lambda m, x, ids, w: F.one_hot(ids, E).float().mean(), False),
        (lambda m, x, ids, w: x * w[:, :1], False),
    ],
)
def test_ids_that_escape(use: Callable[..., Any], escapes: bool) -> None:
    """A loss returned by the graph is no way to experts in the next one; ids and masks are."""
    assert followed(use)[0].escapes is escapes


def test_values_used_are_told_from_values_only_counted() -> None:
    """The slice that reaches experts is what is recorded, not the k + 1 that were computed."""

    def use(m: Layer, x: Tensor, ids: Tensor, w: Tensor) -> Any:
        return gathered(m, x, ids[:, :1], w[:, :1]), F.one_hot(ids, E).sum((0, 1))

    found, _ = followed(use)
    assert {dims(n) for n in found.used} == {(T, 2), (T, 1)}
