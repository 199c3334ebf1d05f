"""What the experiment fixes before anything is measured: setup.json, and the two models that it describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

HERE = Path(__file__).parent
SETUP: dict[str, Any] = json.loads((HERE / "setup.json").read_text())
PROMPTS: list[list[int]] = [list(prompt.encode()) for prompt in SETUP["prompts"]]


def weights_of(kind: str) -> Path:
    return HERE / f"{kind}.safetensors"


def build(kind: str, dtype: torch.dtype, device: str, experts: str, attention: str) -> Any:
    """The "moe" model or the "dense" one, random."""
    config: Any = transformers.Qwen3MoeConfig(**SETUP["architecture"], **SETUP[kind])
    config._experts_implementation = experts
    config._attn_implementation = attention
    model: nn.Module = transformers.Qwen3MoeForCausalLM(config)
    return model.to(device=device, dtype=dtype)


def load(kind: str, dtype: torch.dtype, device: str, experts: str, attention: str) -> Any:
    """With the weights of `train.py`, bfloat16 values whatever the dtype."""
    model = build(kind, dtype, device, experts, attention)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in load_file(weights_of(kind)).items()})
    return model.eval()


def all_experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Every expert for every token, for training: the model is so small that this is faster than to sort tokens."""
    mask = torch.zeros(len(hidden), module.num_experts, dtype=weights.dtype, device=hidden.device)
    mask = mask.scatter(1, ids, weights)
    gate, up = (hidden[None] @ module.gate_up_proj.transpose(1, 2)).chunk(2, -1)
    out = (nn.functional.silu(gate) * up) @ module.down_proj.transpose(1, 2)
    return torch.einsum("etd,te->td", out, mask.to(out.dtype))
