"""The fused router on a GPU: the kernel beside eager PyTorch, Inductor and float64, and a model that records through it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusable import FORMS, Spec, check_routes, fusable
from recording import recording, same_rows
from tiny import tokens
from torch import Tensor

from r3_pass.passes.router import arguments, route, route_reference
from r3_pass.registry.routing import Routing

pytestmark = pytest.mark.cuda

SIZES = {(e, k): (0, 1, 7, 64, 257, 2049) for e in (8, 60, 128, 256, 384) for k in (1, 2, 4, 6, 8)}


def on_the_device(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    return route(logits, bias, *arguments(routing))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_beside_eager(form: str, dtype: torch.dtype) -> None:
    check_routes(on_the_device, FORMS[form], dtype, SIZES, "cuda")


@pytest.mark.inductor
@pytest.mark.parametrize("form", FORMS)
def test_beside_inductor(form: str) -> None:
    def compiled(spec: Spec) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(spec.route, dynamic=True)

    check_routes(on_the_device, FORMS[form], torch.float32, {(256, 8): (257, 2049), (60, 4): (64,)}, "cuda", compiled)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_beside_the_reference(form: str, dtype: torch.dtype) -> None:
    """Also with ties, NaN and infinities; weights in bfloat16 are rounded to the nearest."""
    spec = dataclasses.replace(FORMS[form], experts=24, top_k=4)
    logits = torch.randint(-3, 4, (513, 24)).float()
    logits[5, 7], logits[6, ::2], logits[7, 3] = torch.nan, -torch.inf, torch.inf
    logits[8], logits[9], logits[10] = torch.nan, -torch.inf, 0.0
    logits = logits.to(dtype)
    bias = 0.125 * torch.randint(-3, 4, (24,)).float() if spec.bias else None
    for out in (torch.float32, torch.bfloat16):
        routing = dataclasses.replace(spec.routing, dtype=out)
        weights, ids = route_reference(logits, bias, *arguments(routing))
        ours, our_ids = on_the_device(logits.cuda(), bias.cuda() if bias is not None else None, routing)
        assert our_ids.min() >= 0 and our_ids.max() < 24 and all(len(set(row)) == 4 for row in our_ids.tolist())
        if spec.scores != "softmax" or spec.groups == 1:  # else equal only up to rounding, and rounding breaks ties
            same = (ids == our_ids.cpu()).all(-1)
            assert bool(same.all()) or spec.bias, (~same).nonzero()
            close = torch.isclose(weights.float(), ours.cpu().float(), rtol=2**-8, atol=1e-7, equal_nan=True)
            assert bool(close[same].all())


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("form", ["softmax_normalised", "sigmoid_bias_groups", "topk_softmax"])
def test_a_model_records_what_it_used(form: str, inner: str) -> None:
    """The ids in the slot buffer are those of an eager router."""
    spec = dataclasses.replace(FORMS[form], experts=16, top_k=4)
    model = fusable(spec).cuda()
    x = tokens((3, 7))[0][0].cuda()
    with torch.no_grad(), recording(model, inner, fuse_router=True) as recorder:
        want = model(x)
        got, rows = recorder.rows(21, lambda: recorder.compiled(x))
        assert {entry.fused for entry in recorder.backend.report().sites} == {True}
        assert torch.allclose(want, got, atol=1e-3, rtol=1e-3)
        truth: dict[int, Tensor] = {}
        hooks = [layer.mlp.gate.register_forward_hook(_keeps(truth, n, spec, layer.mlp)) for n, layer in _layers(model)]
        model(x)
        for hook in hooks:
            hook.remove()
        assert same_rows(rows, truth) == ""


def _layers(model: Any) -> list[tuple[int, Any]]:
    return list(enumerate(model.layers))


def _keeps(truth: dict[int, Tensor], number: int, spec: Spec, moe: Any) -> Callable[..., None]:
    def keep(module: Any, args: Any, logits: Tensor) -> None:
        truth[number] = spec.route(logits, moe.bias)[1].cpu()

    return keep
