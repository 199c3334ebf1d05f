"""Spellings that differ in kind from the usual ones: plain routers in odd words, and choices that are no whole row of ids."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tiny import (
    HIDDEN,
    VOCAB,
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
    looped,
    permuted,
    softmax_topk,
    stack,
    tap,
    weight,
)
from torch import Tensor, nn

HOSTILE_ROUTERS = Cases()
captured, refused, nothing = HOSTILE_ROUTERS.captured, HOSTILE_ROUTERS.refused, HOSTILE_ROUTERS.nothing


def best_two(moe: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    p = logits.softmax(-1)
    w, ids = p.topk(2, dim=-1)
    tap(moe, ids, p)
    return ids, w


# ---- how the scores are made -----------------------------------------------------------------------------------------
@captured()
def linear_of_buffers() -> nn.Module:
    """A fixed random router: its weight and its bias are buffers, and only the experts are trained."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return best_two(moe, F.linear(x, moe.fixed, moe.offset))

    return stack(lambda: MoE(route, fixed=weight(E, D, scale=2.0).detach().clone(), offset=torch.randn(E) * 0.1))


@captured(slow=True)
def addmm_gate() -> nn.Module:
    """torch.addmm with a transposed weight and a bias."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return best_two(moe, torch.addmm(moe.bias, x, moe.kernel.t(), beta=0.5))

    return stack(lambda: MoE(route, permuted, kernel=weight(E, D, scale=2.0), bias=nn.Parameter(torch.randn(E) * 0.1)))


@captured(slow=True)
def batched_gate() -> nn.Module:
    """bmm of [B, S, D] with the weight expanded over the batch."""

    class Layer(MoE):
        def forward(self, x: Tensor) -> Tensor:
            logits = torch.bmm(x, self.kernel.unsqueeze(0).expand(x.shape[0], -1, -1))
            ids, w = best_two(self, logits.view(-1, E))
            return gathered(self, x.reshape(-1, D), ids, w).view(x.shape)

    return stack(lambda: Layer(softmax_topk, kernel=weight(D, E, scale=2.0)))


@captured()
def tensordot_gate() -> nn.Module:
    """tensordot over the features."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return best_two(moe, torch.tensordot(x, moe.kernel, dims=([1], [1])))

    return stack(lambda: MoE(route, permuted, kernel=weight(E, D, scale=2.0)))


@captured(slow=True)
def two_gates_concatenated() -> nn.Module:
    """One gate for the first half of the experts and one for the others: one choice over both."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return best_two(moe, torch.cat([moe.near(x), moe.far(x)], dim=-1))

    return stack(lambda: MoE(route, near=gate(3), far=gate(5)))


@captured(slow=True)
def two_gates_multiplied() -> nn.Module:
    """Two gates' probabilities are multiplied before the choice."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.what(x).softmax(-1) * moe.where(x).sigmoid()
        w, ids = p.topk(2, dim=-1)
        tap(moe, ids, p)
        return ids, w

    return stack(lambda: MoE(route, what=gate(), where=gate()))


@captured(slow=True)
def jitter_on_the_token() -> nn.Module:
    """Switch: the router's input is multiplied by uniform noise."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return best_two(moe, moe.gate(x * torch.empty_like(x).uniform_(0.9, 1.1)))

    return stack(lambda: MoE(route, permuted, gate=gate()))


@captured(slow=True)
def task_embedding_added() -> nn.Module:
    """The router sees the token and an embedding of its position beside it; z-loss and entropy are computed from the logits."""

    class Layer(MoE):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            seen = torch.cat([x, self.place(torch.arange(x.shape[1])).expand(x.shape[0], -1, -1)], -1)
            logits = self.gate(seen).reshape(-1, E)
            ids, w = best_two(self, logits)
            loss = logits.logsumexp(-1).square().mean() - (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
            return gathered(self, x.reshape(-1, D), ids, w).view(x.shape), loss

    return stack(lambda: Layer(softmax_topk, gate=linear(E, D + 4, scale=2.0), place=nn.Embedding(16, 4)))


@captured(also=("refused",))
def heads_vote() -> nn.Module:
    """Four router heads score every expert; their scores are averaged."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return best_two(moe, moe.gate(x).view(-1, 4, E).mean(1))

    return stack(lambda: MoE(route, gate=gate(4 * E)))


@captured(slow=True)
def frozen_copy_of_the_scores() -> nn.Module:
    """Straight-through: the choice is made on detached scores, the weights come from the live ones."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = moe.gate(x)
        ids = logits.detach().clone().topk(2, dim=-1).indices
        tap(moe, ids, logits)
        return ids, torch.softmax(logits, -1).gather(1, ids)

    return stack(lambda: MoE(route, permuted, gate=gate()))


@captured(slow=True)
def bias_updated_in_the_forward() -> nn.Module:
    """Loss-free balancing: the bias that chooses is a buffer, which the forward itself moves after the choice."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = moe.gate(x).sigmoid()
        ids = (scores + moe.bias).topk(2, dim=-1).indices
        tap(moe, ids, scores + moe.bias)
        load = torch.zeros(E).index_add(0, ids.flatten(), torch.ones(ids.numel()))
        moe.load.copy_((load.mean() - load).sign() * 1e-3)
        return ids, scores.gather(1, ids)

    return stack(lambda: MoE(route, gate=gate(), bias=torch.randn(E) * 0.05, load=torch.zeros(E)))


# ---- how the choice is made ------------------------------------------------------------------------------------------
@refused("", also=("nothing",))
def gumbel_softmax_hard() -> nn.Module:
    """F.gumbel_softmax(hard=True): a one-hot over all experts' outputs, made inside one function: there are no ids."""

    class Layer(MoE):
        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, D)
            logits = self.gate(flat)
            chosen = F.gumbel_softmax(logits, tau=0.5, hard=True)
            return dense(self, flat, chosen).view(x.shape)

    return stack(lambda: Layer(softmax_topk, gate=gate()))


@refused("", also=("nothing",))
def inverse_cumulative() -> nn.Module:
    """An expert is drawn by comparing a uniform number with the cumulated probabilities: no operator selects."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(-1)
        ids = (p.cumsum(-1) < torch.rand(len(x), 1)).sum(-1, keepdim=True).clamp(max=E - 1)
        return ids, p.gather(1, ids)

    return stack(lambda: MoE(route, gate=gate()))


@refused("", also=("captured",))
def threshold_from_kthvalue() -> nn.Module:
    """kthvalue is the threshold, everything below it is zero: there are no ids."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        p = moe.gate(x).softmax(-1)
        least = p.kthvalue(E - 1, dim=-1, keepdim=True).values
        return (p * (p >= least),)

    return stack(lambda: MoE(route, dense, gate=gate()))


@refused("", also=("captured",))
def one_hot_of_the_maximum() -> nn.Module:
    """The chosen expert is where the probability equals its maximum: only values are used."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        p = moe.gate(x).softmax(-1)
        return (torch.where(p == p.amax(-1, keepdim=True), p, torch.zeros_like(p)),)

    return stack(lambda: MoE(route, dense, gate=gate()))


@captured(slow=True)
def best_one_skipped() -> nn.Module:
    """The best of three is skipped (it is the shared expert's, say): the record is the other two."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(-1)
        w, ids = p.topk(3, dim=-1)
        w, ids = w[:, 1:], ids[:, 1:]
        tap(moe, ids)
        return ids, w

    return stack(lambda: MoE(route, gate=gate()))


@captured(also=("refused",))
def first_by_hash_second_by_gate() -> nn.Module:
    """One expert is looked up by the token's number, one is chosen by the gate: a row is both of them, or nothing."""

    class Mixed(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.layers:
                moe, flat = block.mlp, block.norm(x).view(-1, D)
                p = moe.gate(flat).softmax(-1)
                experts = torch.stack([moe.table[ids].flatten(), p.argmax(-1)], -1)
                tap(moe, experts)
                x = x + gathered(moe, flat, experts, p.gather(1, experts)).view(x.shape)
            return self.head(self.norm(x))

    return Mixed([Block(MoE(softmax_topk, gate=gate(), table=torch.randint(E, (VOCAB,)))) for _ in range(2)])


@captured(also=("refused",))
def a_gate_for_each_choice() -> nn.Module:
    """Two gates over the same experts, each of which chooses one: a row is both choices, or nothing."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = moe.first(x).softmax(-1).max(-1), moe.second(x).softmax(-1).max(-1)
        ids = torch.stack([first.indices, second.indices], -1)
        tap(moe, ids)
        return ids, torch.stack([first.values, second.values], -1)

    return stack(lambda: MoE(route, first=gate(), second=gate()))


@captured(also=("refused",))
def halves_of_the_experts() -> nn.Module:
    """Each half of the experts is chosen from by itself; the second half's ids are moved up."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(-1)
        low, high = p[:, : E // 2].topk(1, dim=-1), p[:, E // 2 :].topk(1, dim=-1)
        ids = torch.cat([low.indices, high.indices + E // 2], -1)
        tap(moe, ids)
        return ids, torch.cat([low.values, high.values], -1)

    return stack(lambda: MoE(route, permuted, gate=gate()))


@captured(also=("refused",))
def two_levels_of_one_gate() -> nn.Module:
    """The best group by its sum, then the best expert inside of it; the id is made of both."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(-1).view(-1, 2, E // 2)
        group = p.sum(-1).argmax(-1)
        inside = p[torch.arange(len(x)), group]
        w, local = inside.max(-1, keepdim=True)
        ids = group.unsqueeze(-1) * (E // 2) + local
        tap(moe, ids)
        return ids, w

    return stack(lambda: MoE(route, gate=gate()))


@captured(also=("refused",))
def overflow_to_the_second_choice() -> nn.Module:
    """Capacity: a token whose first expert is full takes its second one. What counts is what it took."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(-1)
        best = p.topk(2, dim=-1).indices
        chosen = F.one_hot(best[:, 0], E)
        full = ((chosen.cumsum(0) - 1) * chosen).sum(-1) >= 2
        ids = torch.where(full, best[:, 1], best[:, 0]).unsqueeze(-1)
        tap(moe, ids)
        return ids, p.gather(1, ids)

    return stack(lambda: MoE(route, gate=gate()))


@captured(also=("refused",), slow=True)
def choice_kept_for_a_while() -> nn.Module:
    """Routing with inertia: a token keeps its neighbour's expert where its own is hardly better."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(-1)
        w, own = p.max(-1, keepdim=True)
        before = torch.cat([own[:1], own[:-1]])
        ids = torch.where(p.gather(1, before) > 0.5 * w, before, own)
        tap(moe, ids)
        return ids, p.gather(1, ids)

    return stack(lambda: MoE(route, gate=gate()))


@captured(also=("refused",))
def chunks_of_tokens() -> nn.Module:
    """The batch is routed in two parts, to save memory; each part has its own choice."""

    class Layer(MoE):
        def forward(self, x: Tensor) -> Tensor:
            tap(self, self.gate(x.reshape(-1, D)).softmax(-1).topk(2, dim=-1).indices)
            parts = x.reshape(-1, D).chunk(2)
            routed = []
            for part in parts:
                w, ids = self.gate(part).softmax(-1).topk(2, dim=-1)
                routed.append((ids, w))
            return torch.cat([gathered(self, part, *r) for part, r in zip(parts, routed, strict=True)]).view(x.shape)

    return stack(lambda: Layer(softmax_topk, gate=gate()))


# ---- what the ids are used for ---------------------------------------------------------------------------------------
@captured(slow=True)
def experts_in_a_parameter_list() -> nn.Module:
    """Experts are single parameters, stacked in the forward."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        up, down = torch.stack(list(moe.ups)), torch.stack(list(moe.downs))
        h = F.silu(torch.einsum("td,tkfd->tkf", x, up[ids]))
        return torch.einsum("tkf,tkdf,tk->td", h, down[ids], w)

    def made() -> MoE:
        moe = MoE(softmax_topk, dispatch, gate=gate())
        del moe.up, moe.down
        moe.ups = nn.ParameterList(weight(HIDDEN, D) for _ in range(E))
        moe.downs = nn.ParameterList(weight(D, HIDDEN) for _ in range(E))
        return moe

    return stack(made)


@captured(slow=True)
def masked_gates_over_outputs() -> nn.Module:
    """All outputs [T, E, D] are weighed by gates that a scatter_ of ones has masked and that are normalised again."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        p = moe.gate(x).softmax(-1)
        ids = p.topk(2, dim=-1).indices
        tap(moe, ids, p)
        mask = torch.zeros_like(p)
        mask.scatter_(1, ids, 1.0)
        gates = p * mask
        return (gates / gates.sum(-1, keepdim=True),)

    def dispatch(moe: Any, x: Tensor, gates: Tensor) -> Tensor:
        y = torch.stack([expert(x) for expert in moe.bank], dim=1)
        return torch.einsum("te,ted->td", gates, y)

    return stack(lambda: MoE(route, dispatch, gate=gate(), bank=nn.ModuleList(Gated() for _ in range(E))))


@captured(slow=True)
def shared_expert_behind_a_sigmoid() -> nn.Module:
    """Qwen2: a shared expert whose weight is a sigmoid of its own one-output gate."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return permuted(moe, x, ids, w) + moe.shared(x) * moe.shared_gate(x).sigmoid()

    return stack(lambda: MoE(softmax_topk, dispatch, gate=gate(), shared=Gated(), shared_gate=gate(1)))


@captured(slow=True)
def sorted_into_buffers_by_index_add() -> nn.Module:
    """One column after the other is gathered from the bank, and added to the result by index_add_."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        out, rows = torch.zeros_like(x), torch.arange(len(x))
        for expert, scale in zip(ids.unbind(-1), w.unbind(-1), strict=True):
            h = F.gelu(torch.einsum("td,tfd->tf", x, moe.up.index_select(0, expert)))
            out.index_add_(0, rows, torch.einsum("tf,tdf->td", h, moe.down.index_select(0, expert)) * scale[:, None])
        return out

    return stack(lambda: MoE(softmax_topk, dispatch, gate=gate()))


@captured(also=("refused", "nothing"))
def scaling_vectors() -> nn.Module:
    """(IA)3 experts: the ids pick vectors that scale the hidden units of one MLP; an embedding that multiplies the token."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        scale = (moe.vectors(ids) * w.unsqueeze(-1)).sum(1)
        return moe.out(moe.first(x).relu() * scale)

    return stack(
        lambda: MoE(
            softmax_topk,
            dispatch,
            gate=gate(),
            vectors=nn.Embedding(E, HIDDEN),
            first=linear(HIDDEN),
            out=linear(D, HIDDEN),
        )
    )


@captured(also=("refused",))
def replicas_of_experts() -> nn.Module:
    """The gate chooses among two replicas of each expert; the expert is the half of the number."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(-1)
        w, slots = p.topk(2, dim=-1)
        tap(moe, slots // 2)
        return slots // 2, w

    return stack(lambda: MoE(route, gate=gate(2 * E)))


@captured(slow=True)
def experts_behind_two_breaks() -> nn.Module:
    """A break between the router and the experts, and one between the experts and their sum."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        y = looped(moe, x, ids, w)
        torch._dynamo.graph_break()
        return y

    return stack(lambda: MoE(softmax_topk, dispatch, gate=gate()))


# ---- expert choice, in other words -----------------------------------------------------------------------------------
def token_rows(select: Any) -> nn.Module:
    """Experts choose 2 tokens each, by `select(scores [T, E]) -> weights [2, E], rows [2, E]`."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        w, rows = select(moe.gate(x).softmax(-1))
        return rows, w

    def dispatch(moe: Any, x: Tensor, rows: Tensor, w: Tensor) -> Tensor:
        h = torch.einsum("ced,efd->cef", x[rows], moe.up).relu()
        y = torch.einsum("cef,edf->ced", h, moe.down) * w.unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, rows.flatten(), y.flatten(0, 1))

    return stack(lambda: MoE(route, dispatch, gate=gate()))


@refused("runs over tokens|no fixed size")
def experts_choose_along_rows() -> nn.Module:
    """topk(dim=0) of [T, E]."""
    return token_rows(lambda p: p.topk(2, dim=0))


@refused("runs over tokens|no fixed size", slow=True)
def experts_choose_by_sorting() -> nn.Module:
    """All tokens in each expert's order, of which the first two stay."""

    def select(p: Tensor) -> tuple[Tensor, Tensor]:
        best, order = p.sort(dim=0, descending=True)
        return best[:2], order[:2]

    return token_rows(select)


@refused("")
def experts_choose_one_token_each() -> nn.Module:
    """max along the tokens: one token for each expert."""

    def select(p: Tensor) -> tuple[Tensor, Tensor]:
        w, rows = p.max(dim=0, keepdim=True)
        return w, rows

    return token_rows(select)


# ---- in which order the tokens come ----------------------------------------------------------------------------------
def around(there: Any, back: Any) -> nn.Module:
    """A model that puts its tokens in another order before its layers, and back behind them."""

    class Turned(Net):
        def decode(self, x: Tensor) -> Tensor:
            return back(super().decode(there(x)))

    return Turned([Block(MoE(softmax_topk, permuted, gate=gate())) for _ in range(2)])


@refused("another order")
def tokens_rotated_by_cat() -> nn.Module:
    """The last token comes first: slices are joined in another order."""
    return around(lambda x: torch.cat([x[:, -1:], x[:, :-1]], 1), lambda x: torch.cat([x[:, 1:], x[:, :1]], 1))


@refused("another order")
def tokens_picked_by_a_constant() -> nn.Module:
    """Tokens are indexed by numbers that depend on no input: from the last to the first."""

    def turn(x: Tensor) -> Tensor:
        return x[:, torch.arange(x.shape[1] - 1, -1, -1)]

    return around(turn, turn)


@refused("another order")
def tokens_written_by_a_constant() -> nn.Module:
    """The same, written instead of read: `out[:, order] = x`."""

    def turn(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:, torch.arange(x.shape[1] - 1, -1, -1)] = x
        return out

    return around(turn, turn)


@captured(slow=True)
def tokens_split_and_joined() -> nn.Module:
    """The sequence is cut in two and joined in its own order: nothing moved."""
    return around(lambda x: torch.cat([x[:, :2], x[:, 2:]], 1), lambda x: x)


@captured()
def embedding_by_indexing() -> nn.Module:
    """The tokens' embeddings are rows that are indexed, not looked up."""

    class Indexed(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return self.decode(self.embed.weight[ids])

    return Indexed([Block(MoE(softmax_topk, permuted, gate=gate())) for _ in range(2)])


# ---- weights that are no plain linear's ------------------------------------------------------------------------------
@captured()
def scaled_mm_gate() -> nn.Module:
    """torch._scaled_mm: tokens and weight in float8, a scale for each row and column."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        size = x.abs().amax(-1, keepdim=True) / 448
        tokens = (x / size).to(torch.float8_e4m3fn)
        logits = torch._scaled_mm(tokens, moe.quantised.t(), scale_a=size, scale_b=moe.scales, out_dtype=torch.float32)
        return best_two(moe, logits)

    def made() -> MoE:
        full = weight(E, D, scale=2.0).detach()
        scales = full.abs().amax(1, keepdim=True) / 448
        return MoE(route, quantised=(full / scales).to(torch.float8_e4m3fn), scales=scales.t().contiguous())

    return stack(made)


@captured(slow=True)
def int8_packed_gate() -> nn.Module:
    """torch._weight_int8pack_mm: an int8 weight that a kernel scales."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return best_two(moe, torch.ops.aten._weight_int8pack_mm(x, moe.quantised, moe.scales))

    def made() -> MoE:
        full = weight(E, D, scale=2.0).detach()
        scales = full.abs().amax(1) / 127
        return MoE(route, quantised=(full / scales[:, None]).round().to(torch.int8), scales=scales)

    return stack(made)


@captured(slow=True)
def adapters_stacked_on_the_gate() -> nn.Module:
    """Two LoRA adapters on one gate: W x + sum of scale * B(A x), with a dropout that is off."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer, self.drop = gate(), nn.Dropout(0.1)
            self.a = nn.ModuleDict({name: linear(3) for name in ("one", "two")})
            self.b = nn.ModuleDict({name: linear(E, 3) for name in ("one", "two")})

        def forward(self, x: Tensor) -> Tensor:
            y = self.base_layer(x)
            for name in self.a:
                y = y + self.b[name](self.a[name](self.drop(x))) * 0.5
            return y

    return stack(lambda: MoE(softmax_topk, permuted, gate=Adapted()))


@captured(slow=True)
def float32_gate_without_autocast() -> nn.Module:
    """A bfloat16 model whose gate is a float32 parameter; the token is cast for it, the weights are cast back."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = best_two(moe, x.float() @ moe.kernel)
        return ids, w.to(x.dtype)

    model = stack(lambda: MoE(route, kernel=weight(D, E, scale=2.0))).bfloat16()
    for block in model.layers:
        block.mlp.kernel.data = weight(D, E, scale=2.0).data
    return model


@captured(slow=True)
def one_gate_weight_for_all_layers() -> nn.Module:
    """The layers' gates are modules of their own that share one parameter: the experts tell which layer it is."""
    model = stack(lambda: MoE(softmax_topk, permuted, gate=gate()), n=3)
    for block in model.layers:
        block.mlp.gate.weight = model.layers[0].mlp.gate.weight
    return model


def padded(dispatch: Any, **parts: Any) -> nn.Module:
    """A gate of 12 for 8 experts, whose last 4 outputs are -1e9 by their bias."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = moe.gate(x)
        p = logits.softmax(-1)
        w, ids = p.topk(2, dim=-1)
        tap(moe, ids, logits[:, :E])
        return ids, w

    def made() -> MoE:
        moe = MoE(route, dispatch, gate=gate(12, bias=True), **{name: make() for name, make in parts.items()})
        moe.gate.bias.data[E:] = -1e9
        return moe

    return stack(made)


@captured(slow=True)
def padded_gate_with_outputs_gathered() -> nn.Module:
    """The outputs of all 8 experts, of which the chosen ones are gathered."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        y = torch.einsum("tef,edf->ted", torch.einsum("td,efd->tef", x, moe.up).relu(), moe.down)
        return (y.gather(1, ids.unsqueeze(-1).expand(-1, -1, D)) * w.unsqueeze(-1)).sum(1)

    return padded(dispatch)


@captured()
def padded_gate_with_dense_weights() -> nn.Module:
    """Weights are scattered over 12, and the 8 of the experts are used."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return dense(moe, x, x.new_zeros(len(x), 12).scatter(1, ids, w)[:, :E])

    return padded(dispatch)


@captured()
def padded_gate_with_masks() -> nn.Module:
    """A loop over 8 modules, each weighed by who chose it."""

    def dispatch(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return sum(expert(x) * (w * (ids == i)).sum(-1, keepdim=True) for i, expert in enumerate(moe.bank))

    return padded(dispatch, bank=lambda: nn.ModuleList(Gated() for _ in range(E)))


# ---- ids that are not the whole truth --------------------------------------------------------------------------------
@refused("left out", also=("nothing",))
def worst_experts_left_out() -> nn.Module:
    """The ids are those of the experts that a token does not use: their scores are zeroed, all others weigh."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        p = moe.gate(x).softmax(-1)
        worst = p.topk(3, dim=-1, largest=False).indices
        return (p.scatter(1, worst, 0.0),)

    return stack(lambda: MoE(route, dense, gate=gate()))


@refused("left out", also=("nothing",))
def weakest_expert_masked() -> nn.Module:
    """One expert is taken away from each token, by a mask of ones in which it is set to zero."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        p = moe.gate(x).softmax(-1)
        kept = torch.ones_like(p)
        kept[torch.arange(len(x)), p.argmin(-1)] = 0.0
        return (p * kept,)

    return stack(lambda: MoE(route, dense, gate=gate()))


@captured()
def chosen_by_an_inverted_mask() -> nn.Module:
    """True everywhere but at the chosen, and zero where it is True: twice turned about, the ids are the chosen."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        p = moe.gate(x).softmax(-1)
        ids = p.topk(2, dim=-1).indices
        tap(moe, ids, p)
        dropped = torch.ones_like(p, dtype=torch.bool).scatter(1, ids, False)
        return (p.masked_fill(dropped, 0.0),)

    return stack(lambda: MoE(route, dense, gate=gate()))


@captured(slow=True)
def chosen_by_an_additive_mask() -> nn.Module:
    """-inf everywhere but at the chosen, added to the logits before their softmax."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor]:
        logits = moe.gate(x)
        ids = logits.topk(2, dim=-1).indices
        tap(moe, ids, logits)
        return ((logits + torch.full_like(logits, float("-inf")).scatter(1, ids, 0.0)).softmax(-1),)

    return stack(lambda: MoE(route, dense, gate=gate()))


def second_one_full(ids: Tensor) -> Tensor:
    """bool [T, 2]: the second choice is another token's already."""
    chosen = F.one_hot(ids[:, 1], E)
    full = ((chosen.cumsum(0) - 1) * chosen).sum(-1, keepdim=True) >= 1
    return torch.cat([torch.zeros_like(full), full], -1)


@captured(also=("refused",))
def overflow_to_expert_zero() -> nn.Module:
    """A token whose second expert is full takes expert 0 instead, with its weight: what counts is what it took."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        w, best = moe.gate(x).softmax(-1).topk(2, dim=-1)
        ids = torch.where(second_one_full(best), 0, best)
        tap(moe, ids)
        return ids, w

    return stack(lambda: MoE(route, gate=gate()))


@refused("in the place of")
def overflow_filled_with_zero() -> nn.Module:
    """The same, by masked_fill."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        return ids.masked_fill(second_one_full(ids), 0), w

    return stack(lambda: MoE(route, gate=gate()))


@captured(slow=True)
def dropped_choices_made_safe() -> nn.Module:
    """A weak choice is dropped: its weight is zeroed, and its id is made 0 so that it can index. The record is the choice."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        weak = w < 0.2
        return ids.masked_fill(weak, 0), w.masked_fill(weak, 0.0)

    return stack(lambda: MoE(route, gate=gate()))


@refused("not those that it chose")
def second_choice_overwritten() -> nn.Module:
    """The second choice is set to the first one in place."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = moe.gate(x).softmax(-1)
        w, ids = p.topk(2, dim=-1)
        ids[:, 1] = ids[:, 0]
        return ids, w

    return stack(lambda: MoE(route, gate=gate()))


@refused("moves them to other tokens")
def ids_of_the_token_before() -> nn.Module:
    """Each token takes its neighbour's experts."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, w = softmax_topk(moe, x)
        return torch.cat([ids[-1:], ids[:-1]]), w

    return stack(lambda: MoE(route, gate=gate()))


@captured(also=("refused",))
def choices_written_into_a_buffer() -> nn.Module:
    """argmax, three times; each choice is written into its column of a tensor that was made before."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        p = left = moe.gate(x).softmax(-1)
        ids = torch.zeros(len(x), 3, dtype=torch.int64)
        for column in range(3):
            best = left.argmax(-1)
            ids[:, column] = best
            left = left.scatter(1, best.unsqueeze(1), -1.0)
        tap(moe, ids, p)
        return ids, p.gather(1, ids)

    return stack(lambda: MoE(route, gate=gate()))


@refused("another order")
def tokens_interleaved_by_steps() -> nn.Module:
    """Every second token first, then the others."""
    return around(lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1), lambda x: x)


@refused("another order")
def tokens_turned_by_einsum() -> nn.Module:
    """einsum as a transposition of batch and sequence."""
    return around(lambda x: torch.einsum("bsd->sbd", x), lambda x: torch.einsum("sbd->bsd", x))


@refused("another order")
def tokens_unbound_and_stacked() -> nn.Module:
    """The sequence is taken apart and put together from its end."""
    return around(lambda x: torch.stack(x.unbind(1)[::-1], 1), lambda x: x.flip(1))


@captured()
def layers_without_a_residual() -> nn.Module:
    """The experts' output, sorted back by index_add, is all that the next layer's router sees."""

    class Straight(Net):
        def decode(self, x: Tensor) -> Tensor:
            for block in self.layers:
                x = block.mlp(block.norm(x))
            return self.head(self.norm(x))

    return Straight([Block(MoE(softmax_topk, permuted, gate=gate())) for _ in range(2)])


@refused("another order")
def tokens_written_by_an_order_of_their_own() -> nn.Module:
    """Tokens are laid out by the order of their ids, which sorts nothing back."""

    class Sorted(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            rows = torch.arange(len(x)).unsqueeze(-1)
            laid = torch.zeros_like(x)
            laid[rows, ids.argsort(-1)] = x
            return self.decode(laid)

    return Sorted([Block(MoE(softmax_topk, permuted, gate=gate())) for _ in range(2)])


@captured()
def embedding_by_index_select() -> nn.Module:
    """The same, flattened and by index_select."""

    class Selected(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return self.decode(self.embed.weight.index_select(0, ids.flatten()).view(*ids.shape, D))

    return Selected([Block(MoE(softmax_topk, permuted, gate=gate())) for _ in range(2)])
