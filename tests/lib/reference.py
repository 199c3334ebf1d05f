"""The reference engine under test: a tiny target and drafter, and the truth of a request from one eager prefill.

In float64 no choice hangs on the order of a sum, so that rows must be equal however a batch was cut.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor, nn

VOCAB, LAYERS, TOP_K, EXPERTS = 12, 2, 2, 4
Rows = npt.NDArray[np.int16]


def tiny(seed: int = 0, std: float = 0.6, **sizes: Any) -> nn.Module:
    """A Qwen3-MoE of two layers, the first of them dense, in float64.

    Args:
        std: of its random weights.
        sizes: what of its config is otherwise.
    """
    torch.manual_seed(seed)
    usual: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 4, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "mlp_only_layers": [0],
    }  # fmt: skip
    config: Any = transformers.Qwen3MoeConfig(**usual | sizes)
    config._experts_implementation = "batched_mm"
    model: nn.Module = transformers.Qwen3MoeForCausalLM(config).double().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.normal_(0, std)
    return model


def nearly(model: nn.Module) -> nn.Module:
    """A drafter that often, not always, guesses what the model says."""
    drafter = copy.deepcopy(model)
    torch.manual_seed(7)
    head: Any = drafter.lm_head
    head.weight.add_(torch.randn_like(head.weight) * 0.3)
    return drafter


class Truth:
    """Routing of the uncompiled model, by hooks on its routers: no graph, no cache, no matcher."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = copy.deepcopy(model)
        self.rows = functools.lru_cache(maxsize=4096)(self._rows)

    def _rows(self, tokens: tuple[int, ...]) -> Rows:
        """int16 [T, LAYERS, TOP_K] of a prefill of these tokens."""
        rows = np.full((len(tokens), LAYERS, TOP_K), -1, np.int16)
        taken: list[Tensor] = []
        hook = self.model.model.layers[1].mlp.gate.register_forward_hook(lambda _, __, out: taken.extend(out))
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            self.model(torch.tensor([tokens], device=self.model.device), use_cache=False)
        hook.remove()
        rows[:, 1] = next(t for t in taken if not t.is_floating_point()).reshape(-1, TOP_K).cpu().numpy()
        return rows
