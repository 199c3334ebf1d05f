"""Experts are chosen, but not k of them for each token, or not where they can be recorded: the error says which."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tiny import (
    Block,
    Cases,
    D,
    E,
    MoE,
    Net,
    dense,
    gate,
    gathered,
    linear,
    permuted,
    softmax_topk,
    stack,
    tap,
    weight,
)
from torch import Tensor, nn

REFUSALS = Cases()
refused = REFUSALS.refused


@refused("depend on the other tokens")
def sinkhorn() -> nn.Module:
    """Megatron's balanced routing: rows and columns are normalised in turn, so a token's ids depend on the batch."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = moe.gate(x)
        plan = logits.exp()
        for _ in range(3):
            plan = plan / plan.sum(dim=0, keepdim=True)
            plan = plan / plan.sum(dim=1, keepdim=True)
        ids = plan.topk(1, dim=-1).indices
        return ids, logits.sigmoid().gather(-1, ids)

    return stack(lambda: MoE(route, permuted, gate=gate()))


@refused("depend on the other tokens")
def softmax_over_tokens() -> nn.Module:
    """The scores are normalised over the tokens of the batch before each token chooses."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = moe.gate(x).softmax(dim=0).topk(2, dim=-1)
        return ids, w

    return stack(lambda: MoE(route, gate=gate()))


@refused("runs over tokens")
def experts_choose_by_one_hot() -> nn.Module:
    """Expert choice in the paper's own spelling: scores transposed to [E, T], one-hot of the chosen tokens, einsum both ways."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        w, rows = moe.gate(x).softmax(-1).t().topk(2, dim=-1)
        return rows, w

    def dispatch(moe: Any, x: Tensor, rows: Tensor, w: Tensor) -> Tensor:
        chosen = F.one_hot(rows, len(x)).to(x.dtype)
        y = torch.bmm(torch.bmm(torch.einsum("ect,td->ecd", chosen, x), moe.up.mT).relu(), moe.down.mT)
        return torch.einsum("ect,ecd,ec->td", chosen, y, w)

    return stack(lambda: MoE(route, dispatch, gate=gate()))


@refused("runs over tokens")
def experts_choose_in_each_sequence() -> nn.Module:
    """Expert choice within [B, S, E]: each expert takes the best 2 tokens of every sequence."""

    class Layer(MoE):
        def forward(self, x: Tensor) -> Tensor:
            p = self.gate(x).softmax(-1).transpose(1, 2)
            w, at = p.topk(2, dim=-1)
            rows = at.flatten(1).unsqueeze(-1).expand(-1, -1, D)
            held = x.gather(1, rows).unflatten(1, (E, 2))
            h = torch.einsum("becd,efd->becf", held, self.up).relu()
            y = torch.einsum("becf,edf->becd", h, self.down) * w.unsqueeze(-1)
            return torch.zeros_like(x).scatter_add(1, rows, y.flatten(1, 2))

    return stack(lambda: Layer(softmax_topk, gate=gate()))


@refused("only its values", also=("captured",))
def threshold_from_topk() -> nn.Module:
    """The k-th best value is a threshold, and everything below it is masked: k experts for each token, but no ids."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        p = moe.gate(x).softmax(-1)
        least = p.topk(2, dim=-1).values[:, -1:]
        return (torch.where(p >= least, p, torch.zeros_like(p)),)

    return stack(lambda: MoE(route, dense, gate=gate()))


@refused("", also=("nothing",))
def relu_routing() -> nn.Module:
    """ReMoE: as many experts as have a positive score; no operator chooses anything."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        return (moe.gate(x).relu(),)

    return stack(lambda: MoE(route, dense, gate=gate()))


@refused("tokens")
def one_choice_for_each_sequence() -> nn.Module:
    """Sentence-level experts: the mean of a sequence chooses for all of its tokens, so there is one row for each sequence."""

    class Layer(MoE):
        def forward(self, x: Tensor) -> Tensor:
            w, ids = self.gate(x.mean(1)).softmax(-1).topk(2, dim=-1)
            h = F.silu(torch.einsum("bsd,bkfd->bskf", x, self.up[ids]))
            return torch.einsum("bskf,bkdf,bk->bsd", h, self.down[ids], w)

    return stack(lambda: Layer(softmax_topk, gate=gate()))


@refused("routes (twice|a second time)")
def block_that_runs_twice() -> nn.Module:
    """A looped transformer: the same blocks run twice in one forward."""

    class Looped(Net):
        def decode(self, x: Tensor) -> Tensor:
            for _ in range(2):
                for block in self.layers:
                    x = block(x)
            return self.head(self.norm(x))

    return Looped([Block(MoE(softmax_topk, gate=gate())) for _ in range(2)])


@refused("routes twice")
def two_routed_mlps_in_a_layer() -> nn.Module:
    """Two MoE blocks in one decoder layer."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (MoE(softmax_topk, permuted, gate=gate()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    return stack(Two)


@torch.library.custom_op("tiny::whole_moe", mutates_args=())
def whole_moe(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    w, ids = (x @ gate.T).softmax(-1).topk(2, dim=-1)
    h = F.silu(torch.einsum("td,tkfd->tkf", x, up[ids]))
    return torch.einsum("tkf,tkdf,tk->td", h, down[ids], w)


@whole_moe.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.empty_like(x)


@refused("tiny::whole_moe")
def router_inside_a_custom_op() -> nn.Module:
    """Hidden states in, hidden states out: the op that hides the router is named."""

    def dispatch(moe: Any, x: Tensor) -> Tensor:
        return whole_moe(x, moe.gate, moe.up, moe.down)

    return stack(lambda: MoE(lambda moe, x: (), dispatch, gate=weight(E, D)))


@torch.library.custom_op("tiny::topk_softmax", mutates_args=())
def topk_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    w, ids = logits.softmax(-1).topk(k, dim=-1)
    return w, ids.to(torch.int32)


@topk_softmax.register_fake
def _(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits), k), logits.new_empty(len(logits), k, dtype=torch.int32)


@refused("tiny::topk_softmax", also=("captured",))
def choice_inside_a_custom_op() -> nn.Module:
    """A fused top-k kernel returns the ids: until a form knows it, it is named."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = topk_softmax(moe.gate(x), 2)
        tap(moe, ids)
        return ids.long(), w

    return stack(lambda: MoE(route, gate=gate()))


@torch.library.custom_op("tiny::topk_into", mutates_args=("w", "ids"))
def topk_into(w: Tensor, ids: Tensor, logits: Tensor) -> None:
    best, chosen = logits.softmax(-1).topk(w.shape[1], dim=-1)
    w.copy_(best)
    ids.copy_(chosen)


@refused("tiny::topk_into", also=("captured",))
def choice_written_by_a_custom_op() -> nn.Module:
    """vLLM's spelling: the kernel returns nothing and writes the ids into a tensor that it is given."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = torch.empty(len(x), 2), torch.empty(len(x), 2, dtype=torch.int32)
        topk_into(w, ids, moe.gate(x))
        tap(moe, ids)
        return ids.long(), w

    return stack(lambda: MoE(route, gate=gate()))


@refused("tokens")
def sub_tokens() -> nn.Module:
    """Multi-head MoE: each token is split into two that are routed by themselves, so there are twice as many rows."""

    class Layer(MoE):
        def forward(self, x: Tensor) -> Tensor:
            parts = self.split(x).reshape(-1, D)
            return self.merge(gathered(self, parts, *softmax_topk(self, parts)).view(*x.shape[:2], 2 * D))

    return stack(lambda: Layer(softmax_topk, gate=gate(), split=linear(2 * D), merge=linear(D, 2 * D)))


@refused("lists of blocks|routes twice")
def stages_of_blocks() -> nn.Module:
    """Swin: each stage numbers its own blocks from 0, so there is no one list of layers."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(MoE(softmax_topk, permuted, gate=gate())) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return Net([Stage() for _ in range(2)], path="stages")


@refused("no graph of it ran|did not run|eager")
def layer_kept_out_of_the_graph() -> nn.Module:
    """One MoE layer is disabled for the compiler and runs eagerly: a gap, not a shorter record."""
    model = stack(lambda: MoE(softmax_topk, permuted, gate=gate()))
    model.layers[1].mlp.forward = torch.compiler.disable(model.layers[1].mlp.forward)
    return model
