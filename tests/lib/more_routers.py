"""More routers: other gates and other ways to choose, all of which are to be recorded."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from routers import NEVER, normalised
from tiny import (
    Block,
    Cases,
    D,
    E,
    MoE,
    Net,
    gate,
    gathered,
    linear,
    permuted,
    softmax_topk,
    stack,
    tap,
    tokens,
    weight,
)
from torch import Tensor, nn

MORE_ROUTERS = Cases()
captured, refused = MORE_ROUTERS.captured, MORE_ROUTERS.refused


def choose(moe: Any, logits: Tensor, k: int = 2) -> tuple[Tensor, Tensor]:
    """Softmax and top-k, for routers that differ in where their logits come from."""
    w, ids = logits.softmax(-1).topk(k, dim=-1)
    tap(moe, ids, logits)
    return ids, normalised(w).to(moe.up.dtype)


# ---- where the logits come from --------------------------------------------------------------------------------------
@refused("moves tokens between the graph's inputs and the router")
def sequence_first() -> nn.Module:
    """Megatron: activations are [S, B, D], so rows would come in another order than the tokens of the slot mapping."""

    class Transposed(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return self.decode(self.embed(ids).transpose(0, 1).contiguous()).transpose(0, 1)

    return Transposed([Block(MoE(softmax_topk, permuted, gate=gate())) for _ in range(2)])


@captured()
def cosine() -> nn.Module:
    """Tutel, Swin-MoE: projected tokens against expert embeddings, both normalised, with a clamped temperature."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        similarity = F.normalize(moe.project(x), dim=1) @ F.normalize(moe.embeddings, dim=0)
        return choose(moe, similarity * moe.temperature.clamp(max=4.6).exp())

    heat = nn.Parameter(torch.tensor([2.3]))
    return stack(lambda: MoE(route, project=linear(6), embeddings=weight(6, E), temperature=heat))


@captured()
def nearest_centroid() -> nn.Module:
    """Distances instead of products: the smallest ones win."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        distance = x.pow(2).sum(-1, keepdim=True) - 2 * x @ moe.centroids.t() + moe.centroids.pow(2).sum(-1)
        near, ids = torch.topk(distance, 2, dim=-1, largest=False)
        tap(moe, ids, -distance)
        return ids, torch.softmax(-near, -1)

    return stack(lambda: MoE(route, centroids=weight(E, D, scale=3.0)))


@captured()
def convolution() -> nn.Module:
    """A 1x1 convolution makes [B, E, S], and the top-k runs along its channels: k stands in the middle of the ids."""

    class Layer(MoE):
        def forward(self, x: Tensor) -> Tensor:
            logits = self.gate(x.transpose(1, 2))
            w, ids = logits.softmax(1).topk(2, dim=1)
            tap(self, ids.transpose(1, 2), logits.transpose(1, 2))
            ids, w = ids.transpose(1, 2).reshape(-1, 2), w.transpose(1, 2).reshape(-1, 2)
            return gathered(self, x.reshape(-1, D), ids, w).view(x.shape)

    def made() -> MoE:
        conv = nn.Conv1d(D, E, 1, bias=False)
        conv.weight = nn.Parameter(weight(E, D, scale=2.0)[..., None].detach())
        return Layer(softmax_topk, gate=conv)

    return stack(made)


@captured()
def experts_first() -> nn.Module:
    """Scores are [E, T], and each column chooses: top-k along dim 0 that is not expert choice."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(moe.gate @ x.T)
        w, ids = torch.topk(scores, 2, dim=0)
        tap(moe, ids.T, scores.T)
        return ids.T.contiguous(), w.T

    return stack(lambda: MoE(route, gate=weight(E, D, scale=2.0)))


@captured()
def product_and_sum() -> nn.Module:
    """A bare parameter, multiplied and summed by hand."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return choose(moe, (x.unsqueeze(1) * moe.gate).sum(-1))

    return stack(lambda: MoE(route, gate=weight(E, D, scale=2.0)))


@captured()
def two_layer_gate() -> nn.Module:
    """An MLP as the router."""

    def made() -> MoE:
        return MoE(softmax_topk, gate=nn.Sequential(linear(6, bias=True), nn.Tanh(), linear(E, 6, scale=3.0)))

    return stack(made)


@captured(also=("refused", "nothing"))
def attention_router() -> nn.Module:
    """Yuan 2.0-M32: the experts attend to each other; the scores are a product of values that all come from the router's weight."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = moe.gate(x).view(-1, 3, E).unbind(1)
        mixed = torch.softmax(q.unsqueeze(2) * k.unsqueeze(1), dim=-1)
        return choose(moe, torch.matmul(mixed, v.unsqueeze(2)).squeeze(2))

    return stack(lambda: MoE(route, gate=gate(3 * E)))


@captured()
def recurrent_router() -> nn.Module:
    """RMoE: one GRU cell carries the routers' state from layer to layer; each layer has a gate of its own."""

    class Layer(nn.Module):
        def __init__(self, cell: nn.GRUCell) -> None:
            super().__init__()
            self.cell, self.norm = cell, nn.LayerNorm(D)
            self.moe = MoE(lambda moe, x: choose(moe, moe.gate(x)), gate=gate())

        def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            flat = self.norm(x).reshape(-1, D)
            state = self.cell(flat, state)
            ids, w = self.moe.route(self.moe, state)
            return x + gathered(self.moe, flat, ids, w).view(x.shape), state

    class Recurrent(Net):
        def decode(self, x: Tensor) -> Tensor:
            state = x.new_zeros(x.shape[0] * x.shape[1], D)
            for layer in self.layers:
                x, state = layer(x, state)
            return self.head(self.norm(x))

    cell = nn.GRUCell(D, D)
    return Recurrent([Layer(cell) for _ in range(2)])


@captured()
def int8_gate() -> nn.Module:
    """A weight-only int8 gate: dequantised before its product."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return choose(moe, F.linear(x, moe.quantised.to(x.dtype) * moe.scales))

    def made() -> MoE:
        full = weight(E, D, scale=2.0).detach()
        scales = full.abs().amax(1, keepdim=True) / 127
        return MoE(route, quantised=(full / scales).round().to(torch.int8), scales=scales)

    return stack(made)


@captured()
def int8_activations() -> nn.Module:
    """Dynamic int8: tokens are quantised, too, and the product is an integer one that is scaled back."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / 127
        product = torch._int_mm((x / scale).round().to(torch.int8), moe.quantised.t())
        return choose(moe, product.float() * scale * moe.scales)

    def made() -> MoE:
        full = weight(E, D, scale=2.0).detach()
        scales = full.abs().amax(1) / 127
        return MoE(route, quantised=(full / scales[:, None]).round().to(torch.int8), scales=scales)

    return stack(made)


@captured()
def fp8_gate() -> nn.Module:
    """A block-scaled float8 gate."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = moe.quantised.to(torch.float32).view(E, 2, D // 2) * moe.scales.unsqueeze(-1)
        return choose(moe, x @ blocks.view(E, D).t())

    def made() -> MoE:
        full = weight(E, D, scale=2.0).detach().view(E, 2, D // 2)
        scales = full.abs().amax(-1) / 448
        return MoE(route, quantised=(full / scales.unsqueeze(-1)).view(E, D).to(torch.float8_e4m3fn), scales=scales)

    return stack(made)


@captured()
def dora_gate() -> nn.Module:
    """DoRA: the adapted weight is built in the forward, column by column of its own norm."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        adapted = moe.base + moe.lora_b @ moe.lora_a * 0.5
        return choose(moe, F.linear(x, moe.size * adapted / adapted.norm(dim=1, keepdim=True)))

    parts = {"base": (E, D), "lora_a": (3, D), "lora_b": (E, 3), "size": (E, 1)}
    return stack(lambda: MoE(route, **{name: weight(*shape, scale=2.0) for name, shape in parts.items()}))


@captured()
def float32_gate_in_bfloat16() -> nn.Module:
    """A bfloat16 model with a float32 gate, under autocast that the router turns off."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            return choose(moe, F.linear(x.float(), moe.gate.weight.float()))

    class Autocast(Net):
        def decode(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().decode(x)

    model = Autocast([Block(MoE(route, permuted, gate=gate())) for _ in range(2)]).bfloat16()
    for block in model.layers:
        block.mlp.gate.float()
    return model


@captured()
def padded_gate_sliced() -> nn.Module:
    """The gate is padded to a multiple of 16 for its kernel, and sliced to the real experts."""
    return stack(lambda: MoE(lambda moe, x: choose(moe, moe.gate(x)[:, :E]), gate=gate(16)))


@captured()
def padded_gate_masked() -> nn.Module:
    """The same padding, but masked by a bias of -inf, so that the selection runs over more than the real experts."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = moe.gate(x) + moe.padding
        w, ids = logits.softmax(-1).topk(2, dim=-1)
        tap(moe, ids, logits)
        return ids, w

    return stack(lambda: MoE(route, gate=gate(12), padding=torch.tensor([0.0] * E + [NEVER] * 4)))


@captured()
def masked_experts_before_softmax() -> nn.Module:
    """Experts that are switched off are masked by an index before the softmax."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = moe.gate(x)
        logits[:, moe.off] = NEVER
        return choose(moe, logits)

    return stack(lambda: MoE(route, gate=gate(), off=torch.tensor([1, 4])))


@captured()
def gate_fused_with_another_linear() -> nn.Module:
    """One product makes a shared expert's hidden state, its own gate and the router's logits; split takes them apart."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, scale, logits = moe.fused(x).split([D, 1, E], dim=-1)
        return *choose(moe, logits), moe.out(hidden.relu()) * scale.sigmoid()

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor, shared: Tensor) -> Tensor:
        return permuted(moe, x, ids, w) + shared

    return stack(lambda: MoE(route, dispatch, fused=gate(D + 1 + E), out=linear(D)))


@captured(inputs=lambda: tokens((2, 8), (1, 16)))
def as_many_tokens_as_experts() -> nn.Module:
    """T, E and D are all 16: no shape tells tokens from experts or features."""
    return stack(lambda: MoE(softmax_topk, permuted, 16, gate=gate(16)))


@captured(inputs=lambda: tokens((1, 1), (2, 1), (1, 3)))
def decoding_shapes() -> nn.Module:
    """One token at a time: every dimension of size 1 that could be mistaken for another."""
    return stack(lambda: MoE(softmax_topk, gate=gate()))


@captured()
def scores_per_expert_stacked() -> nn.Module:
    """Each expert holds its own scorer of one output; the scores are concatenated."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return choose(moe, torch.cat([scorer(x) for scorer in moe.scorers], dim=-1))

    return stack(lambda: MoE(route, scorers=nn.ModuleList(gate(1) for _ in range(E))))


# ---- how the choice is made ------------------------------------------------------------------------------------------
def in_groups(mask: Any) -> Any:
    """A router over 4 groups of 2, of which the best 2 by their maximum stay; `mask` spells how the others are dropped."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = moe.gate(x).softmax(-1)
        best = scores.reshape(-1, 4, 2).amax(-1).topk(2, dim=-1, sorted=False).indices
        left = mask(scores, best)
        w, ids = left.topk(2, dim=-1)
        tap(moe, ids, left)
        return ids, w

    return stack(lambda: MoE(route, permuted, gate=gate()))


@captured()
def groups_masked_by_setitem() -> nn.Module:
    """A mask of zeros in which advanced indexing sets the chosen groups."""

    def mask(scores: Tensor, best: Tensor) -> Tensor:
        kept = torch.zeros(len(scores), 4, dtype=torch.bool)
        kept[torch.arange(len(scores)).unsqueeze(1), best] = True
        return scores.view(-1, 4, 2).masked_fill(~kept.unsqueeze(-1), 0.0).view(-1, E)

    return in_groups(mask)


@captured()
def groups_masked_by_where() -> nn.Module:
    """A mask from one_hot, spread by repeat_interleave, in torch.where."""

    def mask(scores: Tensor, best: Tensor) -> Tensor:
        kept = F.one_hot(best, 4).sum(1).repeat_interleave(2, dim=1).bool()
        return torch.where(kept, scores, torch.full_like(scores, NEVER))

    return in_groups(mask)


@captured()
def groups_masked_in_place() -> nn.Module:
    """The scores themselves are zeroed, through a view of them."""

    def mask(scores: Tensor, best: Tensor) -> Tensor:
        kept = torch.zeros(len(scores), 4).scatter_(1, best, 1.0)
        scores.view(-1, 4, 2).mul_(kept.unsqueeze(-1))
        return scores

    return in_groups(mask)


@captured(also=("refused",))
def hierarchical() -> nn.Module:
    """A gate chooses one of 2 groups, the group's own gate one of its 4 experts; the id is made of both."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        outer = moe.outer(x).softmax(-1)
        p, group = outer.max(-1)
        logits = torch.einsum("td,ted->te", x, moe.inner[group])
        q, inside = logits.softmax(-1).max(-1)
        ids = (group * 4 + inside).unsqueeze(-1)
        tap(moe, ids)
        return ids, (p * q).unsqueeze(-1)

    return stack(lambda: MoE(route, outer=gate(2), inner=weight(2, 4, D, scale=2.0)))


@captured()
def smallest_of_negated() -> nn.Module:
    """`topk(largest=False)` over negated scores."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = moe.gate(x)
        worst, ids = (-logits).topk(2, largest=False)
        tap(moe, ids, logits)
        return ids, torch.softmax(-worst, -1)

    return stack(lambda: MoE(route, gate=gate()))


@captured()
def sorted_then_narrowed() -> nn.Module:
    """A stable sort of all scores, of which narrow and split take the first two."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(-1)
        best, order = torch.sort(p, dim=-1, descending=True, stable=True)
        ids = order.narrow(-1, 0, 2)
        tap(moe, ids, p)
        return ids, best.split([2, E - 2], dim=-1)[0]

    return stack(lambda: MoE(route, gate=gate()))


@captured()
def noisy_topk() -> nn.Module:
    """Shazeer with its noise on: what is recorded is what was chosen with it."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        clean = moe.gate(x)
        return choose(moe, clean + torch.randn_like(clean) * (F.softplus(moe.noise(x)) + 1e-2))

    return stack(lambda: MoE(route, gate=gate(), noise=linear(E)))


@captured()
def gumbel_argmax() -> nn.Module:
    """Sampling by the Gumbel trick: one expert, by argmax of perturbed logits."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = moe.gate(x)
        noisy = logits - torch.log(-torch.log(torch.rand_like(logits)))
        ids = noisy.argmax(-1, keepdim=True)
        tap(moe, ids, noisy)
        return ids, logits.softmax(-1).gather(-1, ids)

    return stack(lambda: MoE(route, gate=gate()))


@captured()
def drawn() -> nn.Module:
    """Two different experts drawn by their probability."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(-1)
        ids = torch.multinomial(p, 2)
        tap(moe, ids)
        return ids, p.gather(-1, ids)

    return stack(lambda: MoE(route, gate=gate()))


@captured(also=("refused",))
def exploring() -> nn.Module:
    """Epsilon-greedy: now and then a token takes random experts, which are the ids that count."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(-1)
        best = p.topk(2, dim=-1).indices
        ids = torch.where(torch.rand(len(x), 1) < 0.4, torch.randint(E, best.shape), best)
        tap(moe, ids)
        return ids, p.gather(-1, ids)

    return stack(lambda: MoE(route, gate=gate()))


@captured()
def hash_by_table() -> nn.Module:
    """Hash layers: a table from the vocabulary to an expert."""
    return hashed((), lambda table, ids: table[ids].flatten().unsqueeze(-1))


@captured()
def two_hashes_by_table() -> nn.Module:
    """Two hashes: the table has two experts for each token, found by an embedding look-up."""
    return hashed((2,), lambda table, ids: F.embedding(ids, table).flatten(0, 1))


def hashed(columns: tuple[int, ...], look_up: Any) -> nn.Module:
    class Hashed(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.layers:
                moe, flat = block.mlp, block.norm(x).view(-1, D)
                experts = look_up(moe.table, ids)
                tap(moe, experts)
                x = x + gathered(moe, flat, experts, torch.full(experts.shape, 0.5)).view(x.shape)
            return self.head(self.norm(x))

    return Hashed([Block(MoE(softmax_topk, table=torch.randint(E, (61, *columns)))) for _ in range(2)])


@captured()
def single_neuron_experts() -> nn.Module:
    """PEER: product keys choose among 64 experts of one neuron each, which are rows of two tables."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        q = moe.q(x).view(-1, 2, 6)
        best, ids = torch.einsum("tph,pnh->tpn", q, moe.keys).topk(3, dim=-1)
        pairs = (best[:, 0].unsqueeze(-1) + best[:, 1].unsqueeze(-2)).flatten(1)
        numbers = (ids[:, 0].unsqueeze(-1) * 8 + ids[:, 1].unsqueeze(-2)).flatten(1)
        w, at = pairs.topk(3, dim=-1)
        chosen = numbers.gather(-1, at)
        tap(moe, chosen)
        return chosen, w.softmax(-1)

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        h = F.gelu(torch.einsum("td,tkd->tk", x, moe.rows_in(ids))) * w
        return torch.einsum("tk,tkd->td", h, moe.rows_out(ids))

    def made() -> MoE:
        rows_in, rows_out = nn.Embedding(64, D), nn.Embedding(64, D)
        return MoE(route, dispatch, q=linear(12), keys=weight(2, 8, 6, scale=2.0), rows_in=rows_in, rows_out=rows_out)

    return stack(made)


@captured(also=("refused", "nothing"))
def choice_into_buffers() -> nn.Module:
    """`topk(out=...)` into tensors that were made before."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(-1)
        w, ids = torch.empty(len(x), 2), torch.empty(len(x), 2, dtype=torch.int64)
        torch.topk(p, 2, dim=-1, out=(w, ids))
        tap(moe, ids, p)
        return ids, w

    return stack(lambda: MoE(route, gate=gate()))


@captured(also=("refused",))
def one_choice_for_two_layers() -> nn.Module:
    """The second layer's experts are chosen by the first layer's router: both layers' rows are these ids."""

    class Reused(Net):
        def decode(self, x: Tensor) -> Tensor:
            ids, w = None, None
            for block in self.layers:
                moe, flat = block.mlp, block.norm(x).reshape(-1, D)
                if ids is None:
                    ids, w = softmax_topk(moe, flat)
                else:
                    tap(moe, ids)
                x = x + gathered(moe, flat, ids, w).view(x.shape)
            return self.head(self.norm(x))

    return Reused([Block(MoE(softmax_topk, gate=gate())), Block(MoE(softmax_topk))])
