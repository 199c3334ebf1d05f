"""One training step of a tiny Qwen3-MoE with given routes, in one process and on tensor-parallel ranks (transformers' own plan).

Every rank sees all tokens, so all routes too; gradients of weights that are split are put together.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from engine.parallel import load
from reference import TOP_K, tiny
from torch import Tensor, nn

import r3_pass
from r3_pass.oracle import forced

VOCAB, LAYERS, EXPERTS = 32, 3, 8
Step = tuple[Tensor, dict[str, Tensor]]
"""A loss and all gradients."""


def save(path: str) -> None:
    """A model whose first layer is dense, in float32."""
    model: Any = tiny(
        std=0.3, vocab_size=VOCAB, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, num_experts=EXPERTS, norm_topk_prob=True,
    )  # fmt: skip
    model.float().save_pretrained(path)


def batch() -> tuple[Tensor, Tensor]:
    """ids int64 [2, 9] and routes int64 [2, 9, LAYERS, TOP_K]: random experts, -1 for the dense layer and for some tokens."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (2, 9), generator=draw)
    routes = torch.rand(2, 9, LAYERS, EXPERTS, generator=draw).topk(TOP_K).indices
    routes[:, :, 0] = -1
    routes[0, 3] = -1
    return ids, routes


def loss_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def alone(path: str) -> Step:
    """The eager model with these experts, in one process."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, experts_implementation="batched_mm").train()
    ids, routes = batch()
    rows = routes.flatten(0, 1)
    with forced({model.model.layers[n].mlp: rows[:, n] for n in range(1, LAYERS)}, lambda *_: True):
        loss = loss_of(model, ids)
        loss.backward()
    return loss.detach(), gradients(model)


def replayed(path: str, world: int, expert_parallel: bool) -> tuple[Step, dict[int, int]]:
    """On one rank: the step with given routes, and how often each layer was replayed."""
    split = load(path, world, expert_parallel=expert_parallel, experts_implementation="grouped_mm")
    model: Any = split.requires_grad_(True).train()
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    ids, routes = batch()
    with backend.replay(routes, model=model):
        loss = loss_of(compiled, ids)
        loss.backward()
    return (loss.detach(), gradients(model)), dict(backend.report().replayed)
