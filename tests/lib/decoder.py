"""A decoder of a few blocks, the first one dense, for tests about everything but the spelling of a router.

The truth is what hooks on the routers' linears see in a plain eager run; it asserts that no choice is a near-tie.

Legend: T tokens in the step, L decoder layers, E experts, K top-k, D features.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

D, HIDDEN, VOCAB = 16, 8, 61
MARGIN = 1e-6

Break = Callable[[], None]


def no_break() -> None:
    return None


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, HIDDEN, bias=False), nn.Linear(HIDDEN, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Moe(nn.Module):
    """Softmax, top-k, and expert weights gathered by the ids.

    Args:
        before_selection, after_selection: called between the router's linear, the top-k and the experts; a graph break, say.
    """

    def __init__(
        self, experts: int = 8, top_k: int = 2, before_selection: Break = no_break, after_selection: Break = no_break
    ) -> None:
        super().__init__()
        self.top_k, self.before_selection, self.after_selection = top_k, before_selection, after_selection
        self.gate = nn.Linear(D, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, HIDDEN, D) * D**-0.5)
        self.down = nn.Parameter(torch.randn(experts, D, HIDDEN) * HIDDEN**-0.5)
        nn.init.normal_(self.gate.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        probs = self.gate(flat).softmax(-1)
        self.before_selection()
        weights, ids = torch.topk(probs, self.top_k, dim=-1)
        self.after_selection()
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
        return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights).view(x.shape)


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(D), mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    """Token ids [B, S] in, logits [B, S, VOCAB] out.

    Args:
        layers: how many blocks.
        dense: which of them have no experts.
        top_k: of each block, or of all.
        checkpoint: activation checkpointing around each block while training.
        config: what the model's config says; none by default.
        moe: makes the MLP of a block, of its top-k.
    """

    def __init__(
        self,
        layers: int = 3,
        dense: Sequence[int] = (0,),
        top_k: int | Sequence[int] = 2,
        checkpoint: bool = False,
        config: dict[str, Any] | None = None,
        moe: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        make = moe or (lambda k: Moe(top_k=k))
        ks = [top_k] * layers if isinstance(top_k, int) else top_k
        self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB, bias=False)
        self.layers = nn.ModuleList(Block(Dense() if n in dense else make(ks[n])) for n in range(layers))
        self.checkpoint = checkpoint
        if config is not None:
            self.config = types.SimpleNamespace(**config)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.checkpoint else layer(x)
        return self.head(x)


def decoder(seed: int = 0, **options: Any) -> Decoder:
    """A seeded decoder in inference mode."""
    torch.manual_seed(seed)
    model = Decoder(**options).eval()
    return model.requires_grad_(False)


def prompt(tokens: int, seed: int = 0) -> Tensor:
    """int64 [1, T]"""
    return torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(seed))


def truth(model: nn.Module, ids: Tensor) -> npt.NDArray[np.int16]:
    """int16 [T, L, K], -1 where nothing is routed: what an eager run of the model chooses."""
    blocks = list(model.get_submodule("layers").children())
    moes = {n: b.mlp for n, b in enumerate(blocks) if hasattr(b.mlp, "gate")}
    rows = np.full((ids.numel(), len(blocks), max(m.top_k for m in moes.values())), -1, np.int16)

    def keep(n: int, k: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, logits: Tensor) -> None:
            best, chosen = torch.topk(logits.flatten(0, -2).softmax(-1), k + 1, dim=-1)
            assert (best[:, :-1] - best[:, 1:]).min() > MARGIN, "a near-tie: give the test another seed"
            rows[:, n, :k] = chosen[:, :k].cpu().numpy()

        return hook

    hooks = [m.gate.register_forward_hook(keep(n, m.top_k)) for n, m in moes.items()]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return rows
