"""What the examples serve, and the proof of its rows: what the routers of the eager model return in one prefill."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor, nn

from engine.sequence import Result

HEADS = [
    "You are a careful assistant. Answer in one short sentence, and say so where you are not sure.\n",
    "Translate into plain English:\n",
    "def fibonacci(n):\n    ",
]
TAILS = [
    "Why is the sky blue?",
    "Why is the sky red at dusk?",
    "What does a compiler pass do?",
    "return n if n < 2 else",
]


def tiny() -> nn.Module:
    """A Qwen3-MoE with random weights, the first of its layers dense; a token is a byte."""
    torch.manual_seed(0)
    config: Any = transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, moe_intermediate_size=16, num_experts=16, num_experts_per_tok=4, mlp_only_layers=[0],
    )  # fmt: skip
    config._experts_implementation = "batched_mm"
    model: nn.Module = transformers.Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.requires_grad_(False).normal_(0, 0.5)
    return model.double()


def load_whole(name: str | None, device: str) -> tuple[nn.Module, list[list[int]]]:
    """A causal MoE of transformers in float32, or the tiny one in float64, and the prompts in its tokens."""
    texts = [head + tail for tail in TAILS for head in HEADS]
    if name:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        prompts = [tokenizer(text)["input_ids"] for text in texts]
    else:
        model, prompts = tiny(), [list(text.encode()) for text in texts]
    return model.requires_grad_(False).eval().to(device), prompts


class Eager:
    """What the routers of a model return in one prefill."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.ids: dict[int, Tensor] = {}
        for path, module in model.named_modules():
            layer = re.search(r"\.(\d+)\.", path)
            if layer and re.search(r"(Router|Gate|Gating)$", type(module).__name__):
                module.register_forward_hook(lambda _, __, out, layer=int(layer[1]): self._keep(layer, out))

    def _keep(self, layer: int, output: Any) -> None:
        leaves = output if isinstance(output, tuple) else (output,)
        self.ids.update((layer, t.flatten(0, -2)) for t in leaves if isinstance(t, Tensor) and t.dtype == torch.int64)

    def equal(self, result: Result, layers: tuple[int, ...]) -> int:
        """How many of a request's rows are those of the eager model. Every recorded layer has to show its router's ids."""
        tokens = torch.tensor([result.prompt_token_ids + result.token_ids], device=next(self.model.parameters()).device)
        self.ids.clear()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            self.model(tokens, use_cache=False)
        rows: npt.NDArray[np.int16] = result.routed_experts
        if sorted(self.ids) != list(layers) or len(rows) != tokens.shape[1] - 1:
            raise SystemExit(
                f"{len(rows)} rows of layers {layers}; the eager routers of layers {sorted(self.ids)} ran."
            )
        right = np.ones(len(rows), bool)
        for layer, ids in self.ids.items():
            right &= (rows[:, layer, : ids.shape[1]] == ids[:-1].cpu().numpy()).all(-1)
        return int(right.sum())
