"""What happens to the ids after the choice: dispatches that are to be recorded, whatever they do to them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tiny import (
    HIDDEN,
    Block,
    Cases,
    D,
    E,
    Gated,
    MoE,
    Net,
    dense,
    gate,
    linear,
    looped,
    permuted,
    softmax_topk,
    stack,
    tap,
    weight,
)
from torch import Tensor, nn

DISPATCHES = Cases()
captured = DISPATCHES.captured


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
            first, best = F.one_hot(p.argmax(-1), E).float(), torch.zeros_like(p).scatter(1, p.topk(3).indices, 1.0)
            return super().forward(x), ((first + best).mean(0) * p.mean(0)).sum()

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


@captured(also=("refused",))
def attention_experts_by_another_name() -> nn.Module:
    """The same, where no path says "attention": what the chosen parameters make are queries."""

    class Mixed(Block):
        def __init__(self) -> None:
            super().__init__(MoE(softmax_topk, permuted, gate=gate()))
            self.mixer = AttentionExperts()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.mixer(x))

    return Net([Mixed() for _ in range(2)])


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


@captured(also=("refused", "nothing"))
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
