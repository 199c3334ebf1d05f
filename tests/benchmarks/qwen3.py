"""Qwen3-30B-A3B's geometry with random weights in the reference engine, for the benchmarks of whole forwards and of serving."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from bench import CUDA, DEVICE
from torch import nn

import r3_pass

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from engine import Engine, ReferenceAdapter

BLOCK = 16
PARTS = ["model", "blocks"]
"""What is compiled: the model as one, or each layer's MoE block by itself, the rest of the model eager."""

_FULL: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
_TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def build(layers: int, tiny: bool) -> Any:
    """The causal model, in bfloat16 (a tiny one in float32)."""
    config: Any = transformers.Qwen3MoeConfig(
        **(_TINY if tiny else _FULL), num_hidden_layers=layers, norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    config._experts_implementation = "batched_mm" if tiny else "grouped_mm"
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    try:
        with torch.device(DEVICE):
            return transformers.Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def sharing_weights(model: nn.Module) -> Any:
    """The model once more over the same memory, with modules and parameters of its own: for another compiler, another session."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def backend_of(variant: str, inner: str) -> Any:
    return inner if variant == "off" else r3_pass.backend(inner, fuse_router=variant == "fused")


def engine_of(model: Any, backend: Any, parts: str, dynamic: bool, **options: Any) -> Engine:
    """An engine that serves the model, compiled anew."""
    # The variants share code objects, whose limit on compilations counts them all.
    torch._dynamo.config.recompile_limit = 64
    engine = Engine(model, backend, block_size=BLOCK, **options)
    if parts == "blocks":
        for layer in model.model.layers:
            layer.mlp.compile(backend=backend, dynamic=True)
        engine.runner.compiled = model
    elif not dynamic:
        engine.runner.compiled = torch.compile(model, backend=backend, dynamic=False)
    return engine


def attach(engine: Engine, backend: Any) -> Any:
    """A session, or None for a backend that does not record."""
    return None if isinstance(backend, str) else r3_pass.runtime.attach(ReferenceAdapter(engine), backend=backend)


def unfused(backend: Any) -> list[str]:
    """Sites that a fusing backend left as they are, with its reasons."""
    if isinstance(backend, str) or not backend.fuse_router:
        return []
    return [f"{entry.module}: {entry.unfused}" for entry in backend.report().sites if not entry.fused]


def read_bytes(model: Any, tokens: int) -> int:
    """What a decode reads at least: all weights but the embedding's, and keys and values of `tokens` tokens."""
    config = model.config
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    width = next(model.parameters()).dtype.itemsize
    kv = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * width
    return weights + tokens * kv


def settle() -> None:
    if CUDA:
        torch.cuda.synchronize()
