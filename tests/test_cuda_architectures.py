"""Architectures of transformers on a GPU: rows equal to the eager router's, per compiler and way of compiling."""

from __future__ import annotations

import pytest
import torch
from architectures import build
from recording import recording, same_rows

pytestmark = pytest.mark.cuda

NAMES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "glm4_moe", "granitemoe"]


@pytest.mark.parametrize("per_layer", [False, True], ids=["whole", "per layer"])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_on_a_gpu(name: str, inner: str, per_layer: bool) -> None:
    """float32 with TF32 off; two batch shapes, the second compiled with dynamic dimensions; near-ties fail in `truth`."""
    torch._dynamo.reset()
    torch.backends.cuda.matmul.allow_tf32 = False
    built = build(name)
    built.model.cuda()
    layers = built.decoder_layers if per_layer else []
    calls = [{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()} for inputs in built.inputs]
    truths = [
        {layer: ids.cpu() for layer, ids in built.truth(call).items()} for call in calls
    ]  # before anything is compiled
    with torch.no_grad(), recording(built.model, inner, layers) as recorder:
        for call, truth in zip(calls, truths, strict=True):
            _, rows = recorder.rows(call["input_ids"].numel(), lambda call=call: recorder.compiled(**call))
            assert same_rows(rows, truth, built.architecture.ordered) == ""
