"""Inputs that a matcher could trip over, beyond the spelling of a router: padding that is chosen, tied weights, a huge decoy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from backend import traced
from decoder import Moe, decoder, prompt, truth
from recording import recording
from tiny import D, E, Gated, MoE, Net, dense, gate, seeded_call, softmax_topk, stack, tokens
from torch import Tensor, nn

import r3_pass
from r3_pass.passes.match import match


def over_masks(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    return sum(expert(x) * (w * (ids == i)).sum(-1, keepdim=True) for i, expert in enumerate(moe.bank))


def over_dense_weights(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    return dense(moe, x, x.new_zeros(len(x), 12).scatter(1, ids, w)[:, :E])


def behind_a_break(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """No use of the ids stands beside their choice: how many experts there are, the model's modules say."""
    torch._dynamo.graph_break()
    return over_masks(moe, x, ids, w)


def padded(dispatch: Callable[..., Tensor]) -> Net:
    """Two layers with a gate of 12 for 8 experts; what the padding scores is left to chance, as by a loader that forgot it."""
    torch.manual_seed(0)

    def made() -> MoE:
        return MoE(softmax_topk, dispatch, gate=gate(12), bank=nn.ModuleList(Gated() for _ in range(E)))

    return stack(made).eval()


@pytest.mark.parametrize("dispatch", [over_masks, over_dense_weights, behind_a_break])
def test_the_padding_of_a_gate_that_is_chosen(dispatch: Callable[..., Tensor]) -> None:
    """Such a dispatch drops these choices in silence; a trainer that replays them would index past its experts."""
    model, ((ids,), _) = padded(dispatch), tokens((2, 6), (3, 5))
    with torch.no_grad(), recording(model) as recorder:
        with recorder.session.step(range(12)):
            recorder.compiled(ids)
        with pytest.raises(r3_pass.RefusedConfiguration, match=r"layer \d chose expert (8|9|1\d), but only 8 experts"):
            recorder.session.read(range(12))


def test_the_padding_of_a_gate_that_is_chosen_by_a_request() -> None:
    model, ((ids,), _) = padded(over_masks), tokens((1, 12), (1, 5))
    with torch.no_grad(), recording(model) as recorder:
        session = recorder.session
        with pytest.raises(r3_pass.RefusedConfiguration, match="only 8 experts are there"):
            with session.step(range(12), [r3_pass.runtime.Segment("a", 0, 12)]):
                recorder.compiled(ids)
            session.finish("a", 13)  # where the rows arrive later than the step ends
        with pytest.raises(r3_pass.R3Error):
            session.finish("a", 13)


def test_the_padding_of_a_gate_that_is_not_chosen() -> None:
    """The control: the same model whose padding scores nothing is recorded."""
    model, ((ids,), _) = padded(over_masks), tokens((2, 6), (3, 5))
    for block in model.layers:
        block.mlp.gate.weight.data[E:] = 0
        block.mlp.gate.bias = nn.Parameter(torch.tensor([0.0] * E + [-1e9] * 4))
    with torch.no_grad(), recording(model) as recorder:
        _, rows = recorder.rows(12, lambda: seeded_call(recorder.compiled, (ids,)))
    assert rows.min() >= 0 and rows.max() < E


def test_a_tied_gate_cut_off_from_its_experts() -> None:
    """The gate's weight is all that the graph shows, and it is that of several layers: nothing is written to any of them."""
    model = decoder(moe=lambda k: Moe(top_k=k, after_selection=torch._dynamo.graph_break))
    for block in list(model.layers)[2:]:
        block.mlp.gate.weight = model.layers[1].mlp.gate.weight
    ids = prompt(7)
    shared = pytest.raises(r3_pass.R3Error, match=r"its weights are shared by layers\.1, layers\.2")
    with torch.no_grad(), recording(model) as recorder, shared:
        recorder.rows(7, lambda: recorder.compiled(ids))


def test_a_tied_gate_in_one_graph() -> None:
    """The same without a break: the experts in the graph name the layer, whole model or layer by layer."""
    model = decoder()
    for block in list(model.layers)[2:]:
        block.mlp.gate.weight = model.layers[1].mlp.gate.weight
    ids, layers = prompt(7), list(model.layers)
    for compiled in ([], layers):
        torch._dynamo.reset()
        with torch.no_grad(), recording(model, layers=compiled) as recorder:
            _, rows = recorder.rows(7, lambda recorder=recorder: recorder.compiled(ids))
        assert np.array_equal(rows, truth(model, ids))


class Pooled(nn.Module):
    """A router beside the largest values of a long signal."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.moe, self.score = rows, Moe(), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, signal: Tensor) -> tuple[Tensor, Tensor]:
        best = self.score(signal).topk(3, dim=0)
        return self.moe(x), signal[best.indices].sum() + best.values.sum()


def test_a_topk_over_a_million_rows() -> None:
    """Rejected by its shape, at the cost of one over twenty rows: matching reads the graph, never the tensors."""

    def seconds(rows: int) -> float:
        torch._dynamo.reset()
        graph = traced(Pooled(rows), torch.randn(5, D), torch.empty(rows, 4)).graph
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            found = match(graph)
            best = min(best, time.perf_counter() - started)
        assert len(found.sites) == 1 and [r.routing for r in found.rejected] == [False]
        assert "tokens" in found.rejected[0].reason
        return best

    assert seconds(1_000_000) < 5 * seconds(20) + 0.01
