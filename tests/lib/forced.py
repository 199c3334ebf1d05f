"""Random routes, losses and gradients: what tests of replay compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def random_ids(tokens: int, experts: int, k: int, seed: int = 0, live: float = 0.2) -> Tensor:
    """int64 [T, k]: different experts for each token; some rows are -1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :k]
    ids[torch.rand(tokens, generator=generator) < live] = -1
    return ids


def loss_of(output: Any) -> Tensor:
    """A scalar that depends on every element of the first tensor of an output."""
    logits = output if isinstance(output, Tensor) else output[0]
    weights = torch.linspace(-1, 1, logits.numel(), device=logits.device).sin().reshape(logits.shape)
    return (logits.float() * weights).sum() / logits.shape[-1]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference of a gradient, norm over norm, and whose it is."""
    assert got.keys() == want.keys(), f"other parameters have gradients: {sorted(got.keys() ^ want.keys())}"
    return max(
        (float((got[name] - want[name]).norm() / want[name].norm().clamp(min=1e-12)), name)
        for name in want
        if want[name].norm() > 1e-10 or got[name].norm() > 1e-10
    )
