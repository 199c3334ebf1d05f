"""Routers that are nearly what a fused one computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import E, MoE, gate, gathered, stack, tokens
from torch import Tensor

import r3_pass


def rounded_before_the_softmax(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits are rounded to half precision, and then are the weights made."""
    w, ids = moe.gate(x).topk(2)
    return ids, w.half().softmax(-1).float()


def bias_written_before(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = moe.gate(x).sigmoid()
    moe.bias[0] = 0.5
    ids = (scores + moe.bias).topk(2).indices
    return ids, scores.gather(1, ids)


@torch.no_grad()
@pytest.mark.parametrize("route", [rounded_before_the_softmax, bias_written_before], ids=lambda r: r.__name__)
def test_the_result_is_that_of_the_graph(route: Callable[[Any, Tensor], tuple[Tensor, Tensor]]) -> None:
    torch.manual_seed(0)
    model = stack(lambda: MoE(route, gathered, gate=gate(), bias=torch.randn(E) * 0.1)).eval().requires_grad_(False)
    ((ids,),) = tokens((4, 16))
    expected = model(ids)
    compiled = torch.compile(model, backend=r3_pass.backend("aot_eager", fuse_router=True))
    session = r3_pass.runtime.attach(compiled, num_slots=64)
    with session.step(range(64)):
        found = compiled(ids)
    session.detach()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
