"""More routers: other gates, other selections and other ways to use the ids, all of which are to be recorded.

What must be refused, or is no routing at all, stands in `lookalikes.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from routers import NEVER, normalised
from tiny import D, E, HIDDEN, Block, Cases, Gated, MoE, Net, dense, gate, gathered, linear, looped, permuted, softmax_topk, stack, tap, weight
from torch import Tensor, nn

MORE_ROUTERS = Cases()
captured = MORE_ROUTERS.captured


def choose(moe: Any, logits: Tensor, k: int = 2) -> tuple[Tensor, Tensor]:
    """Softmax and top-k, for routers that differ in where their logits come from."""
    w, ids = logits.softmax(-1).topk(k, dim=-1)
    tap(moe, ids, logits)
    return ids, normalised(w).to(moe.up.dtype)


# ---- where the logits come from --------------------------------------------------------------------------------------
@captured()
def sequence_first() -> nn.Module:
    """Megatron: activations are [S, B, D]; rows are the router's own flattened order."""

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

    return stack(lambda: MoE(route, project=linear(6), embeddings=weight(6, E), temperature=nn.Parameter(torch.tensor([2.3]))))


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
        return ids.T, w.T

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
    return stack(lambda: MoE(softmax_topk, gate=nn.Sequential(linear(6, bias=True), nn.Tanh(), linear(E, 6, scale=3.0))))


@captured()
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
            self.cell, self.norm, self.moe = cell, nn.LayerNorm(D), MoE(lambda moe, x: choose(moe, moe.gate(x)), gate=gate())

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

    return stack(lambda: MoE(route, base=weight(E, D), lora_a=weight(3, D), lora_b=weight(E, 3), size=weight(E, 1, scale=2.0)))


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

    return stack(lambda: MoE(route, dispatch, q=linear(12), keys=weight(2, 8, 6, scale=2.0), rows_in=nn.Embedding(64, D), rows_out=nn.Embedding(64, D)))


# ---- what happens to the ids afterwards ------------------------------------------------------------------------------
@captured()
def null_expert() -> nn.Module:
    """The last choice is to do nothing: its id is E, and belongs to the record."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        padded = torch.cat([moe.up, torch.zeros_like(moe.up[:1])])
        h = F.silu(torch.einsum("td,tkfd->tkf", x, padded[ids]))
        return torch.einsum("tkf,tkdf,tk->td", h, torch.cat([moe.down, torch.zeros_like(moe.down[:1])])[ids], w)

    return stack(lambda: MoE(softmax_topk, dispatch, 5, gate=gate(6)))


@captured()
def shared_expert_as_first_column() -> nn.Module:
    """The shared expert is column 0 of the ids, and the routed ones move up by one; the record is what was chosen."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        return torch.cat([torch.zeros_like(ids[:, :1]), ids + 1], -1), torch.cat([torch.ones_like(w[:, :1]), w], -1)

    return stack(lambda: MoE(route, permuted, E + 1, gate=gate()))


@captured()
def weak_choices_zeroed() -> nn.Module:
    """Top-k, then a threshold that zeroes weights: as many ids as before."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        return ids, torch.where(w < 0.15, torch.zeros_like(w), w)

    return stack(lambda: MoE(route, gate=gate()))


@captured()
def dropped_by_capacity() -> nn.Module:
    """Tokens past an expert's capacity go to a slot that is thrown away; the record is the choice before that."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        capacity = len(x) // 2
        chosen = F.one_hot(ids.flatten(), E)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        slot = torch.where(place < capacity, ids.flatten() * capacity + place, E * capacity)
        held = x.new_zeros(E * capacity + 1, D).index_copy(0, slot, x.repeat_interleave(2, dim=0))
        y = torch.bmm(torch.bmm(held[:-1].view(E, capacity, D), moe.up.mT).relu(), moe.down.mT)
        y = torch.cat([y.view(-1, D), x.new_zeros(1, D)])[slot]
        return (y.view(-1, 2, D) * w.unsqueeze(-1)).sum(1)

    return stack(lambda: MoE(softmax_topk, dispatch, gate=gate()))


@captured()
def switch_top1() -> nn.Module:
    """Switch: one-hot of max(keepdim) dispatches by einsum into buffers [E, T, D]."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(-1)
        w, ids = torch.max(p, dim=-1, keepdim=True)
        tap(moe, ids, p)
        return ids, w

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        mask = F.one_hot(ids.squeeze(-1), E).to(x.dtype)
        held = torch.einsum("te,td->etd", mask, x)
        y = torch.bmm(torch.bmm(held, moe.up.mT).relu(), moe.down.mT)
        return torch.einsum("etd,te->td", y, mask) * w

    return stack(lambda: MoE(route, dispatch, gate=gate()))


@captured()
def one_hot_weights_the_experts() -> nn.Module:
    """One-hot [T, k, E] folds the chosen experts' weights into one matrix for each token."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        mask = F.one_hot(ids, E).to(x.dtype) * w.unsqueeze(-1)
        h = torch.einsum("td,tke,efd->tkf", x, mask, moe.up).relu()
        return torch.einsum("tkf,tke,edf->td", h, mask, moe.down)

    return stack(lambda: MoE(softmax_topk, dispatch, gate=gate()))


@captured()
def all_experts_then_gather() -> nn.Module:
    """Every expert's output is made, and the chosen ones are gathered from it."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        y = torch.stack([F.silu(x @ up.T) @ down.T for up, down in zip(moe.up, moe.down, strict=True)], dim=1)
        return (y.gather(1, ids.unsqueeze(-1).expand(-1, -1, D)) * w.unsqueeze(-1)).sum(1)

    return stack(lambda: MoE(softmax_topk, dispatch, gate=gate()))


@captured()
def module_list_with_masks() -> nn.Module:
    """All experts run in a loop over a module list, each weighed by a mask of who chose it."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return sum(expert(x) * (w * (ids == i)).sum(-1, keepdim=True) for i, expert in enumerate(moe.bank))

    return stack(lambda: MoE(softmax_topk, dispatch, gate=gate(), bank=nn.ModuleList(Gated() for _ in range(E))))


@captured()
def loop_behind_a_break() -> nn.Module:
    """The loop over experts stands in a function of its own: the router's ids leave their graph before they reach an expert."""
    return stack(lambda: MoE(softmax_topk, looped, gate=gate()))


@captured()
def index_add_of_experts() -> nn.Module:
    """Mixtral as it was: a one-hot mask [E, k, T], torch.where and index_add_ for each expert."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return add_experts(moe, x, F.one_hot(ids, num_classes=E).permute(2, 1, 0), w)

    def add_experts(moe: Any, x: Tensor, mask: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in range(E):
            column, rows = torch.where(mask[number])
            y = F.silu(x[rows] @ moe.up[number].T) @ moe.down[number].T
            out.index_add_(0, rows, y * w[rows, column, None])
        return out

    return stack(lambda: MoE(softmax_topk, dispatch, gate=gate()))


@captured()
def column_by_column() -> nn.Module:
    """A loop over the k choices, each through its own slice of the ids."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for j in range(ids.shape[1]):
            h = torch.bmm(moe.up[ids[:, j]], x.unsqueeze(-1)).relu()
            out = out + torch.bmm(moe.down[ids[:, j]], h).squeeze(-1) * w[:, j : j + 1]
        return out

    return stack(lambda: MoE(softmax_topk, dispatch, gate=gate()))


@torch.library.custom_op("tiny::fused_experts", mutates_args=())
def fused_experts(x: Tensor, up: Tensor, down: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    h = F.silu(torch.einsum("td,tkfd->tkf", x, up[ids.long()]))
    return torch.einsum("tkf,tkdf,tk->td", h, down[ids.long()], w)


@fused_experts.register_fake
def _(x: Tensor, up: Tensor, down: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    return torch.empty_like(x)


def fused(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    return fused_experts(x, moe.up, moe.down, w, ids)


@captured()
def experts_in_a_custom_op() -> nn.Module:
    """The experts are one opaque kernel that takes int32 ids."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        return ids.to(torch.int32), w

    return stack(lambda: MoE(route, fused, gate=gate()))


@captured()
def placed_experts() -> nn.Module:
    """Expert placement: a table maps logical to physical experts; the record is logical."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        return moe.placement[ids], w

    return stack(lambda: MoE(route, fused, gate=gate(), placement=torch.randperm(E)))


@captured()
def ids_shifted_in_place() -> nn.Module:
    """Expert parallelism: the ids are made local by an in-place subtraction after the choice."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        ids -= 3
        return ids % E, w

    return stack(lambda: MoE(route, gate=gate()))


@captured()
def ids_sorted_before_dispatch() -> nn.Module:
    """Each token's ids are put in ascending order for locality; the record keeps the router's order."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        ids, order = ids.sort(dim=-1)
        return ids, w.gather(-1, order)

    return stack(lambda: MoE(route, gate=gate()))


@captured()
def logits_logged_by_another_topk() -> nn.Module:
    """The user's own top-5 of the logits, returned for logging."""

    class Layer(MoE):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            shown = self.gate(x.reshape(-1, D)).topk(5).indices
            return super().forward(x), shown.float().mean()

    return stack(lambda: Layer(softmax_topk, gate=gate()))


@captured()
def auxiliary_topk() -> nn.Module:
    """A load-balancing loss makes a top-1 and a top-3 of its own from the same probabilities."""

    class Layer(MoE):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            p = self.gate(x.reshape(-1, D)).softmax(-1)
            load = F.one_hot(p.argmax(-1), E).float().mean(0) + torch.zeros_like(p).scatter(1, p.topk(3).indices, 1.0).mean(0)
            return super().forward(x), (load * p.mean(0)).sum()

    return stack(lambda: Layer(softmax_topk, permuted, gate=gate()))


@captured()
def attention_experts_beside() -> nn.Module:
    """Mixture of attention: experts in the attention, chosen by the same kind of router; only the MLP's are the layer's experts."""
    return Net([Block(MoE(softmax_topk, permuted, gate=gate()), AttentionExperts()) for _ in range(2)])


class AttentionExperts(nn.Module):
    """Each token's queries come from the experts that it chose."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.q, self.kv, self.out = gate(), weight(E, D, D), linear(2 * D), linear(D)

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.gate(x).softmax(-1).topk(2, dim=-1)
        q = torch.einsum("bsd,bskfd,bsk->bsf", x, self.q[ids], w)
        k, v = self.kv(x).chunk(2, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


@captured()
def lora_experts() -> nn.Module:
    """Mixture of LoRA experts beside a frozen MLP: the ids choose low-rank pairs, which multiply the token."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        low = torch.einsum("td,tkrd->tkr", x, moe.a[ids])
        return moe.frozen(x) + torch.einsum("tkr,tkdr,tk->td", low, moe.b[ids], w)

    return stack(lambda: MoE(softmax_topk, dispatch, gate=gate(), a=weight(E, 3, D), b=weight(E, D, 3), frozen=Gated()))


@captured()
def one_bank_for_all_layers() -> nn.Module:
    """MoEUT: the experts are shared by all layers, each layer has a gate of its own."""
    bank = weight(E, HIDDEN, D), weight(E, D, HIDDEN)

    def made() -> MoE:
        moe = MoE(softmax_topk, permuted, gate=gate())
        moe.up, moe.down = bank
        return moe

    return stack(made)


@captured()
def one_module_under_two_names() -> nn.Module:
    """Each layer's MoE is registered a second time, outside of its layer: still one layer, once."""
    model = stack(lambda: MoE(softmax_topk, gate=gate()))
    model.routed = nn.ModuleList(block.mlp for block in model.layers)
    return model


@captured()
def checkpointed_blocks() -> nn.Module:
    """Each block runs under activation checkpointing: its graph is nested in the model's."""

    class Checkpointed(Net):
        def decode(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                for block in self.layers:
                    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.head(self.norm(x))

    return Checkpointed([Block(MoE(softmax_topk, permuted, gate=gate())) for _ in range(2)])


@captured()
def vectorised_experts() -> nn.Module:
    """One module, vmapped over stacked parameters; the chosen outputs are gathered."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        y = torch.vmap(lambda up, down: F.silu(x @ up.T) @ down.T)(moe.up, moe.down)
        return (y[ids, torch.arange(len(x)).unsqueeze(-1)] * w.unsqueeze(-1)).sum(1)

    return stack(lambda: MoE(softmax_topk, dispatch, gate=gate()))


@captured()
def weights_by_dense_scatter() -> nn.Module:
    """Weights are set in a zero matrix by advanced indexing, and every expert is weighed with them."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        weights = torch.zeros(len(x), E)
        weights[torch.arange(len(x)).unsqueeze(-1), ids] = w
        return dense(moe, x, weights)

    return stack(lambda: MoE(softmax_topk, dispatch, gate=gate()))
