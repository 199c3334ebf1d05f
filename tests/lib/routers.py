"""Routers and look-alikes as they are spelled outside of transformers, each with what recording it must come to.

The rule behind the verdicts: record where ids choose parameters that then multiply the token. Where they choose tokens, positions,
rows of a table, codes or classes, record nothing. Where experts are chosen but not a fixed number of them for each token, say so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tiny import (
    VOCAB,
    Attention,
    Block,
    Cases,
    D,
    E,
    Gated,
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

ROUTERS = Cases()
captured, refused, nothing = ROUTERS.captured, ROUTERS.refused, ROUTERS.nothing
NEVER = float("-inf")


def normalised(w: Tensor) -> Tensor:
    return w / w.sum(-1, keepdim=True)


# ---- captured --------------------------------------------------------------------------------------------------------
@captured()
def sigmoid_with_balance_bias() -> nn.Module:
    """TorchTitan: float32 sigmoid, a bias that only chooses, counts by histc, grouped_mm; blocks in a dict, the first one dense."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.sigmoid(moe.gate(x).to(torch.float32))
        _, ids = torch.topk(scores + moe.bias, k=3, dim=1)
        tap(moe, ids, scores + moe.bias)
        counts = torch.histc(ids.view(-1).float(), bins=E, min=0, max=E)
        return ids, normalised(scores.gather(dim=1, index=ids)), counts

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor, counts: Tensor) -> Tensor:
        order = ids.view(-1).argsort(stable=True)
        source, ends = order // 3, counts.cumsum(0).to(torch.int32)
        up, down = moe.up.bfloat16().transpose(-2, -1), moe.down.bfloat16().transpose(-2, -1)
        y = F.grouped_mm(F.silu(F.grouped_mm(x[source].bfloat16(), up, offs=ends)), down, offs=ends)
        y = y.type_as(x) * w.view(-1)[order].unsqueeze(-1)
        return moe.shared(x).scatter_add(0, source.unsqueeze(-1).expand(-1, D), y)

    return stack(
        lambda: MoE(route, dispatch, gate=gate(), bias=torch.randn(E) * 0.1, shared=Gated()),
        n=3,
        dense=[0],
        as_dict=True,
    )


@captured()
def renormalised_in_place() -> nn.Module:
    """gpt-fast: softmax, top-k, the weights divided in place, expert weights fetched by the ids."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        w /= w.sum(dim=-1, keepdim=True)
        return ids, w

    return stack(lambda: MoE(route, gate=gate()))


def grouped(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3: the best 2 of 4 groups by the sum of their two best experts, then the best 3 of what is left."""
    raw = torch.matmul(x, moe.gate.T).sigmoid()
    scores = (raw + moe.bias).view(len(x), 4, -1)
    best = scores.topk(2, dim=-1)[0].sum(dim=-1).topk(2, dim=-1)[1]
    dropped = scores.new_ones(scores.shape[:2], dtype=torch.bool).scatter_(1, best, False)
    scores = scores.masked_fill_(dropped.unsqueeze(-1), NEVER).flatten(1)
    ids = torch.topk(scores, 3, dim=-1)[1]
    tap(moe, ids, scores)
    w = raw.gather(1, ids)
    w /= w.sum(dim=-1, keepdim=True)
    return ids, w * 2.5


def grouped_moe() -> MoE:
    return MoE(grouped, permuted, 12, gate=weight(12, D, scale=2.0), bias=nn.Parameter(torch.randn(12) * 0.1))


@captured()
def groups_by_top2_sum() -> nn.Module:
    """Three top-k in one router, of which only the last chooses experts; no name says what is what."""
    return stack(grouped_moe, path="trunk.stages", name="fork")


@captured()
def loop_over_experts() -> nn.Module:
    """Mistral: top-k of raw logits without a dim, softmax over the chosen, a loop of data-dependent sizes in the same frame."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = gate(), nn.ModuleList(Gated() for _ in range(E))

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, D)
            logits = self.gate(flat)
            w, ids = torch.topk(logits, 2)
            tap(self, ids, logits)
            w = F.softmax(w, dim=1, dtype=torch.float).to(x.dtype)
            out = torch.zeros_like(flat)
            for number, expert in enumerate(self.experts):
                rows, column = torch.where(ids == number)
                out[rows] += w[rows, column, None] * expert(flat[rows])
            return out.view(x.shape)

    return stack(Loop, attention=True, name="feed_forward")


@captured()
def top1_by_max() -> nn.Module:
    """MegaBlocks with k = 1: the indices of max(keepdim), squeezed and sorted."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(dim=-1)
        w, ids = p.max(dim=-1, keepdim=True)
        tap(moe, ids, p)
        return ids.squeeze(-1), w

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        bins, order = torch.sort(ids)
        y = torch.bmm(moe.down[bins], F.gelu(torch.bmm(moe.up[bins], x[order].unsqueeze(-1)))).squeeze(-1)
        return torch.empty_like(x).index_copy(0, order, y) * w

    return stack(lambda: MoE(route, dispatch, gate=gate()), path="transformer.blocks", name="ffn")


@captured()
def two_argmax_with_capacity() -> nn.Module:
    """GShard: argmax, the choice masked out, argmax again; one-hot dispatch in which an expert that is full drops tokens.

    What is recorded is the choice before the drop.
    """

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = moe.gate(x)
        p = F.softmax(logits, dim=1, dtype=torch.float)
        capacity = 2 * p.shape[0] // E + 1
        first = torch.argmax(p, dim=1)
        taken = F.one_hot(first, num_classes=E)
        second = torch.argmax(logits.masked_fill(taken.bool(), NEVER), dim=1)
        tap(moe, torch.stack([first, second], -1), logits)
        combine, used = 0, 0
        for mask in (taken, F.one_hot(second, num_classes=E)):
            place = torch.cumsum(mask, dim=0) - 1 + used
            used = used + mask.sum(0, keepdim=True)
            mask = mask * (place < capacity).to(mask.dtype)
            slot = F.one_hot((place * mask).sum(1).clamp(max=capacity - 1), num_classes=capacity).float()
            combine = combine + torch.einsum("te,tc->tec", p * mask, slot)
        return combine, (p.mean(0) * taken.float().mean(0)).sum()

    class Layer(MoE):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            flat = x.reshape(-1, D)
            combine, loss = self.route(self, flat)
            held = torch.einsum("tec,td->ecd", combine.bool().float(), flat)
            y = torch.stack([expert(part) for expert, part in zip(self.bank, held.unbind(0), strict=True)])
            return torch.einsum("tec,ecd->td", combine, y).view(x.shape), loss

    return stack(lambda: Layer(route, gate=gate(), bank=nn.ModuleList(Gated() for _ in range(E))), n=3, dense=[0])


@captured()
def flat_ids_sorted_without_grad() -> nn.Module:
    """ScatterMoE: F.linear with a bare parameter, flattened ids sorted under no_grad, rows scattered back by index_copy."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = F.softmax(F.linear(x, moe.gate), dim=1, dtype=torch.float)
        w, ids = torch.topk(p, 2, dim=-1)
        tap(moe, ids, p)
        return ids, normalised(w).to(x.dtype)

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            expert, slot = torch.sort(ids.flatten())
        h = F.silu(torch.einsum("nd,nfd->nf", x[slot // 2], moe.up[expert]))
        y = torch.einsum("nf,ndf->nd", h, moe.down[expert])
        y = torch.empty_like(y).index_copy(0, slot, y).view(-1, 2, D)
        return torch.bmm(w.unsqueeze(1), y).squeeze(1)

    return stack(lambda: MoE(route, dispatch, gate=weight(E, D, scale=2.0)), path="model.layers")


@captured()
def one_more_than_needed() -> nn.Module:
    """Shazeer's noisy top-k: k + 1 are chosen for the threshold, the first k are the routing."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        logits = x @ moe.w_gate
        if moe.training:
            logits = logits + torch.randn_like(logits) * F.softplus(x @ moe.w_noise)
        w, ids = logits.topk(3, dim=1)
        w, ids = w[:, :2], ids[:, :2]
        tap(moe, ids, logits)
        return (torch.zeros_like(logits).scatter(1, ids, torch.softmax(w, 1)),)

    return stack(lambda: MoE(route, dense, w_gate=weight(D, E, scale=2.0), w_noise=weight(D, E)), path="body.stack")


@captured(ordered=False)
def auxiliary_loss_counts_ids() -> nn.Module:
    """DeepSeek-MoE: sorted=False; the ids are counted for a loss through a view of them, beside their dispatch."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = F.linear(x.float(), moe.gate.float(), None).softmax(dim=-1)
        w, ids = torch.topk(p, k=3, dim=-1, sorted=False)
        tap(moe, ids, p)
        return ids, normalised(w)

    class Layer(MoE):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            flat = x.reshape(-1, D)
            ids, w = self.route(self, flat)
            rows = ids.view(x.shape[0], -1)
            counts = torch.zeros(x.shape[0], E).scatter_add_(1, rows, torch.ones(rows.shape)).div_(rows.shape[1])
            loss = counts.var() + F.one_hot(ids.view(-1), E).float().mean()
            return permuted(self, flat, ids, w).view(x.shape), loss

    return stack(lambda: Layer(route, gate=weight(E, D, scale=2.0)), n=3, dense=[0], path="model.layers")


@captured()
def argsort_then_slice() -> nn.Module:
    """No top-k: all experts in descending order, sliced; tokens stay [B, S, D]."""

    class Layer(MoE):
        def forward(self, x: Tensor) -> Tensor:
            p = torch.softmax(self.gate(x), -1)
            ids = p.argsort(dim=-1, descending=True)[..., :2]
            tap(self, ids, p)
            h = F.silu(torch.einsum("bsd,bskfd->bskf", x, self.up[ids]))
            return torch.einsum("bskf,bskdf,bsk->bsd", h, self.down[ids], torch.take_along_dim(p, ids, dim=-1))

    return stack(lambda: Layer(softmax_topk, gate=gate(bias=True)), name="switch")


@captured()
def repeated_max() -> nn.Module:
    """Three times max, each choice overwritten with -inf; the ids are stacked."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = left = moe.gate(x).softmax(-1)
        weights, chosen = [], []
        for _ in range(3):
            w, i = left.max(dim=-1)
            weights.append(w)
            chosen.append(i)
            left = left.scatter(1, i.unsqueeze(1), NEVER)
        ids = torch.stack(chosen, 1)
        tap(moe, ids, p)
        return ids, normalised(torch.stack(weights, 1))

    return stack(lambda: MoE(route, permuted, gate=gate()))


@captured()
def lora_on_the_gate() -> nn.Module:
    """PEFT: the scores are the sum of the gate and of a low-rank product."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer, self.lora_A, self.lora_B = gate(), linear(4), gate(E)
            self.lora_B.weight = weight(E, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) + self.lora_B(self.lora_A(x)) * 2.0

    return stack(lambda: MoE(softmax_topk, gate=Adapted()), path="base_model.model.model.layers")


@captured()
def one_gate_for_all_layers() -> nn.Module:
    """Every layer holds the same gate module, and experts of its own: the weight does not name the layer."""
    shared = gate()
    return stack(lambda: MoE(softmax_topk, gate=shared), n=3)


@captured()
def einsum_gate_in_three_dimensions() -> nn.Module:
    """Mesh-TensorFlow: einsum against a [D, E] kernel, top-k along dim 2 of [B, S, E], a dense combination."""

    class Layer(MoE):
        def forward(self, x: Tensor) -> Tensor:
            p = torch.einsum("bsd,de->bse", x, self.kernel).softmax(2)
            w, ids = torch.topk(p, 2, 2)
            tap(self, ids, p)
            combine = torch.zeros_like(p).scatter_(2, ids, w)
            h = torch.einsum("bsd,efd->bsef", x, self.up).relu()
            return torch.einsum("bsef,edf,bse->bsd", h, self.down, combine)

    return stack(lambda: Layer(softmax_topk, kernel=weight(D, E, scale=2.0)), path="encoder.blocks", name="moe")


@captured()
def zero_experts() -> nn.Module:
    """MoE++, LongCat: choices past the experts leave the token as it is; they belong to the record."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x.float()).softmax(-1)
        ids = torch.topk(p + moe.bias, 3, dim=-1)[1]
        tap(moe, ids, p + moe.bias)
        return ids, p.gather(1, ids)

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        same = ids >= 6
        y = gathered(moe, x, ids.clamp(max=5), w.masked_fill(same, 0.0))
        return y + x * (w * same).sum(-1, keepdim=True)

    return stack(lambda: MoE(route, dispatch, 6, gate=gate(9), bias=torch.randn(9) * 0.05))


@captured()
def shared_expert_as_last_column() -> nn.Module:
    """SGLang: an expert that always runs is appended to the ids; it is no choice, so no column of the record."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).sigmoid()
        w, ids = torch.topk(p, 2, dim=-1)
        tap(moe, ids, p)
        ids = torch.cat([ids, torch.full_like(ids[:, :1], E)], dim=1)
        return ids, torch.cat([normalised(w), torch.full_like(w[:, :1], 0.4)], dim=1)

    return stack(lambda: MoE(route, experts=E + 1, gate=gate()))


@captured()
def indexer_and_sampling_beside() -> nn.Module:
    """DeepSeek-V3.2: a token indexer in the attention and top-k sampling in the head, around a grouped router."""

    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.w, self.qkv, self.out = linear(16), linear(8), linear(2), linear(3 * D), linear(D)

        def forward(self, x: Tensor) -> Tensor:
            scores = torch.einsum("bqhd,bkd->bhqk", self.q(x).unflatten(-1, (2, 8)), self.k(x)).relu()
            scores = torch.einsum("bhqk,bqh->bqk", scores, self.w(x))
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            picked = scores.masked_fill(future, NEVER).topk(3, dim=-1)[1]
            mask = torch.full_like(scores, NEVER).scatter_(-1, picked, 0.0).masked_fill(future, NEVER)
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.out(torch.softmax(q @ k.transpose(1, 2) / 4 + mask, -1) @ v)

    class Sampling(Net):
        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = super().forward(ids)[:, -1]
            best, tokens = torch.topk(logits, 3, dim=-1)
            return torch.softmax(best, -1), tokens, logits.argmax(-1)

    return Sampling([Block(mlp, Indexed()) for mlp in (Gated(), grouped_moe(), grouped_moe())])


# ---- refused ---------------------------------------------------------------------------------------------------------
@refused("encoder-decoder", inputs=lambda: pairs(((2, 6), (2, 5)), ((3, 4), (3, 7))))
def encoder_and_decoder_route() -> nn.Module:
    """NLLB: both stacks number their layers from 0, and `routed_experts` has one axis of layers."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = (stack(lambda: MoE(softmax_topk, permuted, gate=gate())) for _ in range(2))
            self.cross = linear(D)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            memory = self.cross(self.encoder.embed(source))
            for block in self.encoder.layers:
                memory = block(memory)
            y = self.decoder.embed(target)
            return self.decoder.decode(y + torch.softmax(y @ memory.transpose(1, 2), -1) @ memory)

    return Both()


def pairs(*shapes: tuple[tuple[int, int], tuple[int, int]]) -> list[tuple[Tensor, ...]]:
    return [tuple(torch.randint(VOCAB, shape) for shape in both) for both in shapes]


@refused("number of experts differs from token to token")
def top_p() -> nn.Module:
    """Experts until their probabilities add up to p: all are in order, and the cut is by value."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        p = moe.gate(x).softmax(-1)
        best, order = torch.sort(p, dim=-1, descending=True)
        return (torch.zeros_like(p).scatter(-1, order, best * (best.cumsum(-1) - best < 0.6)),)

    return stack(lambda: MoE(route, dense, gate=gate()))


@refused("runs over tokens")
def experts_choose_tokens() -> nn.Module:
    """Expert choice: top-k along the tokens. The ids are token numbers."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        w, rows = torch.topk(moe.gate(x).softmax(-1), max(1, 2 * x.shape[0] // E), dim=0)
        return rows.t(), w.t()

    def dispatch(moe: Any, x: Tensor, rows: Tensor, w: Tensor) -> Tensor:
        y = torch.bmm(F.gelu(torch.bmm(x[rows], moe.up.transpose(1, 2))), moe.down.transpose(1, 2)) * w.unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, rows.reshape(-1), y.reshape(-1, D))

    return stack(lambda: MoE(route, dispatch, gate=gate()))


# ---- nothing ---------------------------------------------------------------------------------------------------------
@nothing()
def soft_slots() -> nn.Module:
    """Soft MoE: experts work on mixtures of all tokens, nothing is chosen."""

    class Soft(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slots, self.experts = weight(4, 2, D, scale=2.0), nn.ModuleList(Gated() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            logits = torch.einsum("bnd,esd->bnes", x, self.slots)
            held = torch.einsum("bnd,bnes->besd", x, logits.softmax(1))
            y = torch.stack([expert(held[:, i]) for i, expert in enumerate(self.experts)], 1)
            return torch.einsum("besd,bnes->bnd", y, logits.flatten(2).softmax(-1).view_as(logits))

    return stack(Soft)


@nothing()
def mixture_of_depths() -> nn.Module:
    """Half of the tokens go through a heavier branch: one branch for all, and the ids are positions."""

    class Depths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.heavy = gate(1), Gated()

        def forward(self, x: Tensor) -> Tensor:
            scores = self.router(x).squeeze(-1)
            at = torch.topk(scores, x.shape[1] // 2, dim=-1, sorted=False)[1].sort(-1).values
            rows = at.unsqueeze(-1).expand(-1, -1, D)
            heavy = self.heavy(x.gather(1, rows)) * torch.sigmoid(scores.gather(1, at)).unsqueeze(-1)
            return torch.zeros_like(x).scatter_add(1, rows, heavy)

    return stack(Depths)


@nothing()
def vocabulary_topk() -> nn.Module:
    """Top-k filtering of the next token's logits: the head is a linear, too."""

    class Sampling(Net):
        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            logits = super().forward(ids)[:, -1] / 0.8
            best, tokens = torch.topk(logits, 10, dim=-1)
            kept = torch.full_like(logits, NEVER).scatter(-1, tokens, best)
            return F.softmax(kept, -1), kept.argmax(-1)

    return Sampling([Block(Gated()), Block(Gated())])


@nothing()
def token_pruning() -> nn.Module:
    """Modules named router and experts, but the top-k runs over the sequence: it picks tokens."""

    class Pruned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = gate(), Gated()

        def forward(self, x: Tensor) -> Tensor:
            at = self.router(x).softmax(-1).amax(-1).topk(3, dim=1).indices
            kept = x.gather(1, at[..., None].expand(-1, -1, D))
            return self.experts(kept).mean(1, keepdim=True).expand_as(x)

    return stack(Pruned, name="moe")


@nothing()
def k_max_pooling() -> nn.Module:
    """The largest values of each channel along time."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.conv, self.out = nn.Embedding(VOCAB, D), nn.Conv1d(D, E, 3, padding=1), linear(5, 3 * E)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            h = self.conv(self.embed(ids).transpose(1, 2))
            at = h.topk(3, dim=2)[1].sort(2)[0]
            logits = self.out(h.gather(2, at).flatten(1))
            return logits, logits.argmax(1)

    return Classifier()


@nothing()
def nearest_memories() -> nn.Module:
    """kNN memory: the nearest keys' values are added up; no token is multiplied by them."""

    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.out = linear(D), linear(D)
            self.register_buffer("keys", torch.randn(32, D))
            self.register_buffer("values", torch.randn(32, D))

        def forward(self, x: Tensor) -> Tensor:
            near, ids = (self.q(x) @ self.keys.t() / 4).topk(4, dim=-1)
            return self.out((near.softmax(-1).unsqueeze(-1) * self.values[ids]).sum(-2))

    return stack(Memory, name="memory")


@nothing(inputs=lambda: [(torch.randn(2, 4, 9),), (torch.randn(3, 4, 6),)])
def vector_quantisation() -> nn.Module:
    """VQ-VAE: the nearest code replaces the vector, straight-through."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec = nn.Conv1d(4, D, 3, padding=1), nn.Conv1d(D, 4, 3, padding=1)
            self.codes = nn.Embedding(E, D)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.enc(x).transpose(1, 2)
            ids = torch.cdist(z, self.codes.weight[None]).argmin(-1)
            code = z + (self.codes(ids) - z).detach()
            return self.dec(code.transpose(1, 2)), ids

    return Quantised()


class TopKAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = linear(3 * D), linear(D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 4
        best, at = scores.topk(3, dim=-1)
        return self.out(torch.zeros_like(scores).scatter(-1, at, best.softmax(-1)) @ v)


@nothing()
def topk_attention() -> nn.Module:
    """Each query keeps its best keys; the module is named gate."""
    return stack(TopKAttention, name="gate")


@nothing()
def indexer_with_gathered_keys() -> nn.Module:
    """DeepSeek-V3.2's indexer: keys are chosen by a product that has a weight in it, and their rows gathered."""

    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.iq, self.ik, self.iw = linear(16), linear(4), linear(4)
            self.q, self.kv, self.out = linear(D), linear(D), linear(D)

        def forward(self, x: Tensor) -> Tensor:
            heads = torch.einsum("bqhd,bkd->bqhk", self.iq(x).unflatten(-1, (4, 4)), self.ik(x)).relu()
            at = torch.topk((heads * self.iw(x.float()).unsqueeze(-1)).sum(2), 4, dim=-1)[1]
            kv = self.kv(x)[torch.arange(x.shape[0])[:, None, None], at]
            p = torch.softmax(torch.einsum("bqd,bqkd->bqk", self.q(x), kv) / 4, -1)
            return self.out(torch.einsum("bqk,bqkd->bqd", p, kv))

    return Net([Block(Gated(), Indexed()) for _ in range(2)])


@nothing()
def classifier_top5() -> nn.Module:
    """Linear, softmax, top-k, renormalised, exactly as a router does it; the ids are the answer."""

    class Classifier(Net):
        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            best, classes = torch.topk(F.softmax(super().forward(ids), -1), 5, dim=-1)
            return normalised(best), classes

    return Classifier([Block(Gated(), Attention())])
