"""From a selection back to the router: what passes the selected dimension on, what is a root, and where the search ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend import named, traced
from torch import Tensor, fx, nn

from r3_pass.passes.match import is_weight
from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.operators import argument
from r3_pass.registry.products import einsum_letters
from r3_pass.registry.scores import index_mapping, trace_scores
from r3_pass.registry.trace import Trace

T, D, E = 6, 8, 12


class Router(nn.Module):
    """`topk(scores(self, x), dim)`, with the weights that the cases need."""

    def __init__(self, scores: Callable[[Any, Tensor], Tensor], dim: int = -1) -> None:
        super().__init__()
        self.scores, self.dim = scores, dim
        self.gate, self.part, self.one = (
            nn.Linear(D, E),
            nn.Linear(D, E // 2),
            nn.ModuleList(nn.Linear(D, 1) for _ in range(3)),
        )
        self.wide, self.conv = nn.Linear(D, E + 2), nn.Conv1d(D, E, 1)
        self.bias, self.batched = nn.Parameter(torch.randn(E)), nn.Parameter(torch.randn(2, D, E))
        self.pool = nn.Parameter(torch.randn(D, 20))
        self.register_buffer("table", torch.randint(E, (T, E)))

    def forward(self, x: Tensor) -> Any:
        return torch.topk(self.scores(self, x), 2, dim=self.dim)


def trace_of(scores: Callable[[Any, Tensor], Tensor], dim: int = -1, x: Tensor | None = None) -> tuple[Trace, DataFlow]:
    module = traced(Router(scores, dim), torch.randn(T, D) if x is None else x)
    flow = DataFlow(module.graph, is_weight)
    selection = named(module, "topk", -1)
    read = flow.operand(selection, argument(selection, 0, "input"))
    assert read is not None
    return trace_scores(flow, read, dim), flow


def width(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["example_value"].shape)


PASSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda m, x: m.gate(x),
    "matmul": lambda m, x: x @ m.gate.weight.t(),
    "matmul_weight_first": lambda m, x: (m.gate.weight @ x.t()).t(),
    "addmm": lambda m, x: torch.addmm(m.gate.bias, x, m.gate.weight.t()),
    "mm": lambda m, x: torch.mm(x, m.gate.weight.t()),
    "bmm": lambda m, x: torch.bmm(x.view(2, -1, D), m.batched),
    "einsum": lambda m, x: torch.einsum("td,ed->te", x, m.gate.weight),
    "einsum_ellipsis": lambda m, x: torch.einsum("...d,ed->...e", x.view(2, -1, D), m.gate.weight),
    "einsum_implicit": lambda m, x: torch.einsum("td,zd", x, m.gate.weight),
    "einsum_list": lambda m, x: torch.functional.einsum("td,ed->te", [x, m.gate.weight]),
    "weight_changed_on_the_way": lambda m, x: F.linear(x, F.normalize(m.gate.weight, dim=-1) * 3),
    "softmax": lambda m, x: F.softmax(m.gate(x), dim=-1),
    "float_and_back": lambda m, x: m.gate(x).float().sigmoid().to(x.dtype),
    "bias_and_scale": lambda m, x: (m.gate(x).sigmoid() + m.bias) * 2.5,
    "gumbel_noise": lambda m, x: m.gate(x) + torch.rand_like(m.gate(x)).log().neg(),
    "masked_in_place": lambda m, x: m.gate(x).masked_fill_(m.bias > 0, -1.0),
    "masked_by_where": lambda m, x: torch.where(m.bias > 0, m.gate(x), float("-inf")),
    "scattered_mask": lambda m, x: m.gate(x).scatter(1, m.table, 0.0),
    "setitem": lambda m, x: _set(m.gate(x)),
    "masked_through_a_view": lambda m, x: _masked_through_a_view(m.gate(x)),
    "masked_through_a_view_then_softmax": lambda m, x: _masked_through_a_view(m.gate(x)).softmax(-1) * 2,
    "groups": lambda m, x: m.gate(x).view(T, 3, 4).softmax(-1).flatten(1),
    "normalised": lambda m, x: (p := m.gate(x).exp()) / p.sum(-1, keepdim=True),
    "minus_max": lambda m, x: (p := m.gate(x)) - p.amax(-1, keepdim=True),
    "transposed_twice": lambda m, x: m.gate(x).t().contiguous().transpose(0, 1),
    "permuted": lambda m, x: m.gate(x.view(2, -1, D)).permute(1, 0, 2),
    "movedim": lambda m, x: m.gate(x.view(2, -1, D)).movedim(0, 1),
    "expanded": lambda m, x: m.gate(x).unsqueeze(0).expand(2, -1, -1),
    "sliced": lambda m, x: m.wide(x)[..., :E],
    "split": lambda m, x: m.wide(x).split([E, 2], dim=-1)[0],
    "chunk": lambda m, x: m.gate(x).chunk(2, dim=-1)[0],
    "unbind": lambda m, x: m.gate(x.view(2, -1, D)).unbind(0)[1],
    "one_row": lambda m, x: m.gate(x)[3],
    "new_axis": lambda m, x: m.gate(x)[:, None],
    "two_halves": lambda m, x: torch.cat([m.part(x), m.part(x + 1)], dim=-1),
    "tokens_joined": lambda m, x: torch.cat([m.gate(x), m.gate(x + 1)], dim=0),
    "stacked_heads": lambda m, x: torch.stack([m.gate(x), m.gate(x) * 2], dim=1),
    "mean_over_heads": lambda m, x: m.gate(x.view(2, -1, D)).mean(0),
    "one_output_each": lambda m, x: torch.stack([one(x).squeeze(-1) for one in m.one], dim=-1),
    "conv": lambda m, x: m.conv(x.t().unsqueeze(0)).squeeze(0).t(),
    "product_and_sum": lambda m, x: (x.unsqueeze(1) * m.gate.weight).sum(-1),
    "distances": lambda m, x: -torch.cdist(x, m.gate.weight),
    "values_of_a_sort_over_tokens_kept": lambda m, x: m.gate(x.view(2, -1, D)).max(0)[0],
}  # fmt: skip


def _masked_through_a_view(scores: Tensor) -> Tensor:
    scores.view(T, 3, 4).masked_fill_((scores > 0).view(T, 3, 4).any(-1, keepdim=True), 0.0)
    scores.view(T, 3, 4)[:, 0] = 0.0
    return scores


def _set(scores: Tensor) -> Tensor:
    scores[:, 0] = 0.0
    return scores


@pytest.mark.parametrize("case", PASSES)
def test_a_router_behind(case: str) -> None:
    """Each is a way in which real routers treat their scores; a rule that does not pass it on loses those routers."""
    trace, flow = trace_of(PASSES[case])
    assert trace.roots and not trace.over_tokens and trace.couples_tokens is None, trace.why_not
    weights = {w for root in trace.roots for w in root.weights}
    assert weights and all(flow.kind(w) == "weight" for w in weights)


def test_the_width_of_a_root_is_that_of_the_product() -> None:
    """A selection over more values than the linear has outputs is no routing; the width is what tells."""
    trace, _ = trace_of(PASSES["sliced"])
    assert [r.width for r in trace.roots] == [E + 2]
    trace, _ = trace_of(PASSES["groups"])
    assert [r.width for r in trace.roots] == [E]
    trace, _ = trace_of(PASSES["one_output_each"])
    assert [(r.width, len(r.weights)) for r in trace.roots] == [(3, 6)]


def test_a_graph_input_is_a_root_without_weights() -> None:
    """After a graph break between gate and selection the scores come in as an argument: the experts name the layer then."""
    trace, _ = trace_of(lambda m, x: x.softmax(-1))
    assert [(r.node.op, r.weights, r.width) for r in trace.roots] == [("placeholder", (), D)]


ENDS: dict[str, tuple[Callable[[Any, Tensor], Tensor], int, str]] = {
    "query_times_key": (lambda m, x: m.gate(x) @ m.gate(x).t(), -1, "product of two activations"),
    "query_times_key_einsum": (lambda m, x: torch.einsum("td,sd->ts", x, x + 1), -1, "product of activations"),
    "over_tokens": (lambda m, x: m.gate(x), 0, "over tokens"),
    "over_tokens_transposed": (lambda m, x: m.gate(x).t(), -1, "over tokens"),
    "over_tokens_einsum": (lambda m, x: torch.einsum("td,ed->et", x, m.gate.weight), -1, "over tokens"),
    "over_tokens_einsum_implicit": (lambda m, x: torch.einsum("td,ed", x, m.gate.weight), -1, "over tokens"),
    "batch_of_a_product": (lambda m, x: torch.bmm(x.view(2, -1, D), m.batched), 0, "batch dimension"),
    "sorted": (lambda m, x: m.gate(x).sort(-1).values, -1, "values of another selection"),
    "values_of_a_topk": (lambda m, x: m.gate(x).topk(4)[0], -1, "values of another selection"),
    "cumulative": (lambda m, x: m.gate(x).softmax(-1).cumsum(-1), -1, "cumsum"),
    "gathered": (lambda m, x: m.gate(x).gather(1, m.table), -1, "picked by gather"),
    "indexed": (lambda m, x: m.gate(x)[:, m.table[0]], -1, "picked by an index tensor"),
    "part_of_the_outputs": (
        lambda m, x: m.gate(x).view(T, 2, 3, 2).transpose(1, 2).reshape(T, -1),
        -1,
        "part or a mixture",
    ),
    "mixed_with_tokens": (lambda m, x: m.gate(x).reshape(-1, 8), -1, "part or a mixture"),
    "broadcast_only": (lambda m, x: x.sum(-1, keepdim=True) + m.bias, -1, "from no router output"),
    "conv_over_positions": (lambda m, x: m.conv(x.t().unsqueeze(0)).squeeze(0), -1, "another dimension"),
    "stacked_constants": (lambda m, x: torch.stack([x.sum(-1), x.mean(-1)], -1), -1, "no weight scores one by one"),
}


@pytest.mark.parametrize("case", ENDS)
def test_no_router_behind(case: str) -> None:
    """Near misses: attention, expert choice, sampling, indexers, code books. Each recorded would be rows of no router."""
    scores, dim, reason = ENDS[case]
    trace, _ = trace_of(scores, dim)
    assert not trace.roots and reason in trace.why_not
    assert trace.over_tokens is ("over_tokens" in case)


@pytest.mark.parametrize(
    ("scores", "couples"),
    [
        (lambda m, x: m.gate(x).softmax(0), True),
        (lambda m, x: (p := m.gate(x).exp()) / p.sum(0, keepdim=True), True),
        (lambda m, x: m.gate(x) - m.gate(x).mean(0), True),
        (lambda m, x: m.gate(x).softmax(1), False),
        (lambda m, x: m.gate(x) - m.gate(x).mean(1, keepdim=True), False),
    ],
)
def test_scores_that_hang_on_the_other_tokens(scores: Callable[[Any, Tensor], Tensor], couples: bool) -> None:
    """Sinkhorn: a trainer that replays one token's ids would replay what another batch made of them."""
    trace, _ = trace_of(scores)
    assert (trace.couples_tokens is not None) is couples and trace.roots


@pytest.mark.parametrize(
    ("equation", "ranks", "letters"),
    [
        ("td,ed->te", [2, 2], (["td", "ed"], "te")),
        ("td, ed", [2, 2], (["td", "ed"], "et")),
        ("ij,jk", [2, 2], (["ij", "jk"], "ik")),
        ("...d,ed->...e", [3, 2], (["\u0391\u0392d", "ed"], "\u0391\u0392e")),
        ("...d,...ed->...e", [2, 3], (["\u0391d", "\u0391ed"], "\u0391e")),
        ("td->te", [2, 2], None),
        (7, [2], None),
    ],
)
def test_einsum_letters(equation: Any, ranks: list[int], letters: Any) -> None:
    """A letter read off by one makes a selection over tokens out of one over experts."""
    assert einsum_letters(equation, ranks) == letters


@pytest.mark.parametrize(
    ("index", "rank", "mapping"),
    [
        ((slice(None), slice(0, 2)), 2, [0, 1]),
        ((0,), 3, [1, 2]),
        ((Ellipsis, slice(0, 2)), 3, [0, 1, 2]),
        ((slice(None), None), 2, [0, None, 1]),
        ((Ellipsis, 0), 3, [0, 1]),
    ],
)
def test_index_mapping(index: tuple[Any, ...], rank: int, mapping: list[int | None]) -> None:
    """`scores[:, None]` read as `scores[:, 0]` would follow the wrong dimension."""
    assert index_mapping(index, rank) == mapping
