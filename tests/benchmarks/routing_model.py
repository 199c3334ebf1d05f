"""Routers alone: linear, softmax, top-k, normalise, and an operator in the place of the experts, so that nothing hides the cost.

Legend: T tokens, L layers, K top-k, E experts, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

HIDDEN = 64

_ops = torch.library.Library("r3_bench", "FRAGMENT")
if not hasattr(torch.ops.r3_bench, "experts"):  # pytest imports this file once more
    _ops.define("experts(Tensor x, Tensor ids, Tensor w, Tensor bank) -> Tensor")
    _ops.impl("experts", lambda x, ids, w, bank: x + 1, "CompositeExplicitAutograd")
    _ops.define("put(Tensor(a!) buffer, int layer, Tensor slots, Tensor ids) -> ()")
    _ops.define("put_view(Tensor(a!) view, Tensor slots, Tensor ids) -> ()")
    for _key in ("CPU", "CUDA"):
        _ops.impl("put", lambda buffer, layer, slots, ids: (buffer[:, layer].index_put_((slots,), ids), None)[1], _key)
        _ops.impl("put_view", lambda view, slots, ids: (view.index_put_((slots,), ids), None)[1], _key)
    _ops.impl("put", lambda buffer, layer, slots, ids: None, "Meta")
    _ops.impl("put_view", lambda view, slots, ids: None, "Meta")


class Layer(nn.Module):
    """A router and, where the experts would be, an operator that does next to nothing."""

    def __init__(self, top_k: int, experts: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(HIDDEN, experts, bias=False)
        self.bank = nn.Parameter(torch.zeros(experts, 1, 1))

    def forward(self, x: Tensor, view: Tensor | None = None, slots: Tensor | None = None) -> Tensor:
        """x [T, hidden]; with a layer's part [S + 1, K] of a buffer, ids are put into it."""
        return self.routed(x, view, slots)[0]

    def routed(self, x: Tensor, view: Tensor | None = None, slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same, and ids [T, K]."""
        weights, ids = torch.topk(torch.softmax(self.gate(x).float(), -1), self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        if view is not None:
            torch.ops.r3_bench.put_view(view, slots, ids.to(view.dtype))
        return torch.ops.r3_bench.experts(x, ids, weights, self.bank), ids


class Routers(nn.Module):
    """All layers, to be compiled as one; with a buffer [S + 1, L, K], the ids of each are put into it one layer at a time; with
    `keep` they are returned."""

    def __init__(self, layers: int, top_k: int, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(top_k, experts) for _ in range(layers))

    def forward(
        self, x: Tensor, buffer: Tensor | None = None, slots: Tensor | None = None, keep: bool = False
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        kept: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x, ids = layer.routed(x)
            if buffer is not None:
                torch.ops.r3_bench.put(buffer, number, slots, ids.to(buffer.dtype))
            if keep:
                kept.append(ids)
        return (x, kept) if keep else x

    def one_by_one(self, x: Tensor, views: Sequence[Tensor] | None = None, slots: Tensor | None = None) -> Tensor:
        """The same through layers that are compiled by themselves."""
        for number, layer in enumerate(self.layers):
            x = layer(x) if views is None else layer(x, views[number], slots)
        return x
