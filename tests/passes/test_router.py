"""The fused router's arithmetic, beside the unfused graph's and float64: the CPU form here, the kernel in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so the kernel's cases run in a process of their own; on a GPU, in
test_cuda_router.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fusable import FORMS, NEVER, Routes, Spec, check_routes
from interpreter import INTERPRETED, outside, run_in_the_interpreter
from torch import Tensor

from r3_pass.passes.router import arguments, route_reference
from r3_pass.registry.routing import Routing

INF, NAN = float("inf"), float("nan")
SIZES = {
    (8, 1): (0, 1, 7, 64, 257),
    (60, 4): (64,),
    (128, 8): (257,),
    (256, 8): (1, 64),
    (384, 6): (7,),
    (256, 2): (7,),
}
"""By E and K, the numbers of tokens: the interpreter takes a second for a large one."""


def in_pytorch(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    return route_reference(logits, bias, *arguments(routing))


def in_triton(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    from r3_pass.passes.router_kernels import route

    return route(logits, bias, routing, block=None if logits.shape[0] < 8 else 64)


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
IN_HALF = ("softmax_normalised", "topk_softmax", "sigmoid_bias_groups") if INTERPRETED else tuple(FORMS)
CASES = [*((name, FLOAT32) for name in FORMS), *((name, BFLOAT16) for name in IN_HALF)]
HERE: Routes = in_triton if INTERPRETED else in_pytorch


@outside
def test_in_the_interpreter() -> None:
    """All other tests of this file, with the kernel."""
    run_in_the_interpreter(__file__)


@pytest.mark.parametrize(("form", "dtype"), CASES, ids=str)
def test_beside_the_unfused_graph_and_float64(form: str, dtype: torch.dtype) -> None:
    """Ids are equal where the choice is clear; the largest error of the weights is not above the unfused graph's."""
    check_routes(HERE, FORMS[form], dtype, SIZES)


@pytest.mark.parametrize(("form", "dtype"), CASES, ids=str)
def test_ties_and_what_is_no_number(form: str, dtype: torch.dtype) -> None:
    """Whatever the logits are, K different ids in range; NaN above all, and of equal scores the first."""
    experts, spec = (60 if FORMS[form].groups == 6 else 16), FORMS[form]
    spec = dataclasses.replace(spec, experts=experts, top_k=4)
    usual = torch.randn(experts)
    number = torch.arange(experts)
    logits = torch.stack(
        [
            torch.zeros(experts), torch.full((experts,), -INF), torch.full((experts,), INF), torch.full((experts,), NAN),
            (number % 3).float(), (number == 5).float(), torch.where(number == 5, NAN, usual),
            torch.where(number % 2 == 0, -INF, usual), torch.where(number == 3, INF, usual), -200.0 * number,
            torch.where(number < experts - 2, -INF, usual), usual,
        ]
    ).to(dtype)  # fmt: skip
    bias = torch.zeros(experts) if spec.bias else None
    weights, ids = HERE(logits, bias, spec.routing)
    assert ids.min() >= 0 and ids.max() < experts
    assert all(len(set(row)) == 4 for row in ids.tolist())
    expected, expected_ids = in_pytorch(logits, bias, spec.routing)
    assert torch.equal(ids, expected_ids)
    assert torch.allclose(weights, expected, rtol=1e-6, atol=1e-7, equal_nan=True)
    if spec.scores != "softmax":
        assert ids[0].tolist() == [0, 1, 2, 3] and ids[6, 0] == 5


@pytest.mark.parametrize("form", ["softmax_normalised", "sigmoid_bias_groups", "topk_softmax"])
def test_layouts(form: str) -> None:
    """Rows with a stride, columns with a stride, more dimensions; weights in half precision are those in float32, rounded."""
    spec = dataclasses.replace(FORMS[form], experts=16, top_k=3)
    bias = 0.1 * torch.randn(16) if spec.bias else None
    wide = torch.randn(6, 40)
    expected = HERE(wide[:, 8:24].contiguous(), bias, spec.routing)
    for logits in (wide[:, 8:24], wide[:, 8:24].t().contiguous().t()):
        assert all(map(torch.equal, HERE(logits, bias, spec.routing), expected))
    weights, ids = HERE(wide[:, 8:24].reshape(2, 3, 16), bias, spec.routing)
    assert weights.shape == ids.shape == (2, 3, 3)
    assert torch.equal(weights.flatten(0, 1), expected[0]) and torch.equal(ids.flatten(0, 1), expected[1])
    rounded, _ = HERE(wide[:, 8:24], bias, dataclasses.replace(spec.routing, dtype=torch.bfloat16))
    assert rounded.dtype is torch.bfloat16
    if INTERPRETED:  # Triton's interpreter cuts digits off where a GPU rounds
        assert torch.allclose(rounded.float(), expected[0], rtol=2**-7)
    else:
        assert torch.equal(rounded, expected[0].bfloat16())


@outside
def test_the_operator_is_what_compilers_expect() -> None:
    """Schema, fake implementation and real one agree, with symbolic sizes too."""
    for form in ("softmax_normalised", "sigmoid_bias_groups"):
        spec = dataclasses.replace(FORMS[form], experts=16, top_k=3)
        bias = torch.randn(16) if spec.bias else None
        torch.library.opcheck(
            torch.ops.r3_pass.route.default,
            (torch.randn(5, 16), bias, *arguments(spec.routing)),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )


def test_filled_scores_take_part_in_the_choice() -> None:
    """DeepSeek-V3 with zeros for dropped groups: an expert of a kept group whose biased score is negative loses to them."""
    spec = Spec(experts=8, top_k=3, scores="sigmoid", bias=True, groups=2, best=2, kept=1, fill=0.0)
    logits = torch.tensor([[3.0, 2.0, -9.0, -9.0, -4.0, -4.0, -4.0, -4.0]])
    bias = torch.tensor([0.0, 0.0, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0])
    _, ids = HERE(logits, bias, spec.routing)
    assert ids.tolist() == [[0, 1, 4]]
    assert spec.route(logits, bias)[1].tolist()[0][:2] == [0, 1] and spec.route(logits, bias)[1][0, 2] >= 4
    _, never = HERE(logits, bias, dataclasses.replace(spec, fill=NEVER).routing)
    assert never.tolist() == [[0, 1, 2]]
