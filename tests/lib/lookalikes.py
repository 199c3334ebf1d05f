"""What looks like a router and is not to be recorded: routing without fixed experts per token, and selections of something else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from more_routers import AttentionExperts
from tiny import VOCAB, Attention, Block, Cases, D, E, Gated, MoE, Net, dense, gate, linear, permuted, softmax_topk, stack, tap, weight
from torch import Tensor, nn

LOOKALIKES = Cases()
refused, nothing = LOOKALIKES.refused, LOOKALIKES.nothing


# ---- refused: experts are chosen, but not k of them for each token, or not where they can be recorded --------------------
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


@refused("no graph of it ran|did not run|eager")
def layer_kept_out_of_the_graph() -> nn.Module:
    """One MoE layer is disabled for the compiler and runs eagerly: a gap, not a shorter record."""
    model = stack(lambda: MoE(softmax_topk, permuted, gate=gate()))
    model.layers[1].mlp.forward = torch.compiler.disable(model.layers[1].mlp.forward)
    return model


# ---- nothing: something else is chosen -------------------------------------------------------------------------------
def in_the_mlp(**parts: Any) -> Any:
    """A decorator that makes a two-layer model of an MLP function `(self, x [B, S, D]) -> [B, S, D]` and its parts."""

    class Mlp(nn.Module):
        def __init__(self, run: Any) -> None:
            super().__init__()
            self.run = run
            for name, make in parts.items():
                setattr(self, name, make())

        def forward(self, x: Tensor) -> Tensor:
            return self.run(self, x)

    return lambda run: stack(lambda: Mlp(run))


@nothing()
def attention_experts_alone() -> nn.Module:
    """Experts in the attention and dense MLPs: attention experts are not the layer's MLP experts."""
    return Net([Block(Gated(), AttentionExperts()) for _ in range(2)])


@nothing()
def chosen_heads() -> nn.Module:
    """Mixture of heads: a router keeps 2 of 4 heads for each token, by a mask over their outputs."""

    @in_the_mlp(router=lambda: gate(4), qkv=lambda: linear(3 * D), out=lambda: linear(D))
    def run(mlp: Any, x: Tensor) -> Tensor:
        w, ids = mlp.router(x).softmax(-1).topk(2, dim=-1)
        mask = torch.zeros(*x.shape[:2], 4).scatter(-1, ids, w)
        q, k, v = mlp.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2) * mask.unsqueeze(-1)
        return mlp.out(y.flatten(2))

    return run


@nothing()
def hashed_attention() -> nn.Module:
    """Reformer: random projections and argmax put tokens into buckets, tokens are sorted by bucket and attend in chunks."""

    @in_the_mlp(planes=lambda: weight(D, 2), qk=lambda: linear(D), v=lambda: linear(D), out=lambda: linear(D), mlp=Gated)
    def run(mlp: Any, x: Tensor) -> Tensor:
        side = mlp.qk(x) @ mlp.planes
        order = torch.cat([side, -side], -1).argmax(-1).argsort(dim=-1, stable=True)
        rows = order.unsqueeze(-1).expand_as(x)
        q, v = mlp.qk(x).gather(1, rows), mlp.v(x).gather(1, rows)
        y = torch.softmax(q @ F.normalize(q, dim=-1).mT, -1) @ v
        y = mlp.out(torch.zeros_like(y).scatter(1, rows, y))
        return y + mlp.mlp(y)

    return run


@nothing()
def sparse_autoencoder() -> nn.Module:
    """k-sparse: the largest hidden units are kept, the others zeroed, and decoded by the same weight."""

    @in_the_mlp(enc=lambda: linear(4 * D))
    def run(mlp: Any, x: Tensor) -> Tensor:
        z = mlp.enc(x).relu()
        best, ids = z.topk(5, dim=-1)
        return torch.zeros_like(z).scatter(-1, ids, best) @ mlp.enc.weight

    return run


@nothing()
def sparse_autoencoder_gathered() -> nn.Module:
    """The same, decoded from the rows of the chosen units: they are added up, no token is multiplied with them."""

    @in_the_mlp(enc=lambda: linear(4 * D), codes=lambda: weight(4 * D, D))
    def run(mlp: Any, x: Tensor) -> Tensor:
        best, ids = mlp.enc(x).relu().topk(5, dim=-1)
        return torch.einsum("bsk,bskd->bsd", best, mlp.codes[ids])

    return run


@nothing()
def sparse_neurons() -> nn.Module:
    """A predictor keeps the best quarter of an MLP's own neurons by a mask; there are no experts."""

    @in_the_mlp(predict=lambda: linear(4 * D), up=lambda: linear(4 * D), gate=lambda: linear(4 * D), down=lambda: linear(D, 4 * D))
    def run(mlp: Any, x: Tensor) -> Tensor:
        ids = mlp.predict(x).topk(D, dim=-1).indices
        mask = torch.zeros(*x.shape[:2], 4 * D).scatter_(-1, ids, 1.0)
        return mlp.down(F.silu(mlp.gate(x)) * mlp.up(x) * mask)

    return run


@nothing()
def chosen_features() -> nn.Module:
    """The most relevant input features of each token are kept, and go through a gated MLP."""

    @in_the_mlp(relevance=lambda: linear(D), mlp=Gated)
    def run(mlp: Any, x: Tensor) -> Tensor:
        ids = mlp.relevance(x).topk(4, dim=-1).indices
        return mlp.mlp(x * torch.zeros_like(x).scatter(-1, ids, 1.0))

    return run


@nothing()
def product_key_memory() -> nn.Module:
    """Product keys whose values are rows that are summed: a memory, no experts."""

    @in_the_mlp(q=lambda: linear(12), keys=lambda: weight(2, 8, 6), values=lambda: nn.EmbeddingBag(64, D, mode="sum"))
    def run(mlp: Any, x: Tensor) -> Tensor:
        best, ids = torch.einsum("tph,pnh->tpn", mlp.q(x).view(-1, 2, 6), mlp.keys).topk(3, dim=-1)
        pairs = (best[:, 0].unsqueeze(-1) + best[:, 1].unsqueeze(-2)).flatten(1)
        w, at = pairs.topk(3, dim=-1)
        chosen = (ids[:, 0].unsqueeze(-1) * 8 + ids[:, 1].unsqueeze(-2)).flatten(1).gather(-1, at)
        return mlp.values(chosen, per_sample_weights=w.softmax(-1)).view(x.shape)

    return run


@nothing()
def residual_codes() -> nn.Module:
    """Residual vector quantisation: two codebooks, one after the other, and the vectors' similarity as a by-product."""

    @in_the_mlp(first=lambda: weight(E, D), second=lambda: weight(E, D), out=lambda: linear(D))
    def run(mlp: Any, x: Tensor) -> Tensor:
        rest, total = x, torch.zeros_like(x)
        for codes in (mlp.first, mlp.second):
            code = codes[(rest @ codes.T).argmax(-1)]
            total, rest = total + code, rest - code
        return mlp.out(total) * F.cosine_similarity(total, x, dim=-1).unsqueeze(-1)

    return run


@nothing()
def prompt_pool() -> nn.Module:
    """Learning to prompt: the sequence chooses prompts from a pool [P, L, D], which stand before its tokens."""

    class Prompted(Net):
        def __init__(self) -> None:
            super().__init__([Block(Gated(), Attention()) for _ in range(2)])
            self.keys, self.pool = weight(E, D), weight(E, 3, D)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            best, chosen = (F.normalize(x.mean(1), dim=-1) @ F.normalize(self.keys, dim=-1).T).topk(2, dim=-1)
            x = torch.cat([self.pool[chosen].flatten(1, 2), x * best.mean()], dim=1)
            return self.decode(x)[:, 6:]

    return Prompted()


@nothing()
def scaled_by_class() -> nn.Module:
    """FiLM: a predicted class chooses a scale and a shift, rows of two tables; no network is chosen."""

    @in_the_mlp(classify=lambda: linear(E), scale=lambda: nn.Embedding(E, D), shift=lambda: nn.Embedding(E, D), mlp=Gated)
    def run(mlp: Any, x: Tensor) -> Tensor:
        ids = mlp.classify(x).argmax(-1)
        return mlp.mlp(F.layer_norm(x * mlp.scale(ids) + mlp.shift(ids), (D,)))

    return run


@nothing()
def early_exit() -> nn.Module:
    """Each token decides between the layer and the identity: whether, not which."""

    @in_the_mlp(decide=lambda: linear(2), mlp=Gated)
    def run(mlp: Any, x: Tensor) -> Tensor:
        stop = mlp.decide(x).argmax(-1, keepdim=True) == 1
        return torch.where(stop, x, mlp.mlp(x))

    return run


@nothing()
def conditional_kernels() -> nn.Module:
    """CondConv: a softmax mixes all kernels for each token, none is chosen."""

    @in_the_mlp(router=lambda: gate(4), kernels=lambda: weight(4, D, D))
    def run(mlp: Any, x: Tensor) -> Tensor:
        return torch.einsum("bsd,efd,bse->bsf", x, mlp.kernels, mlp.router(x).softmax(-1))

    return run


@nothing()
def adapters_by_language() -> nn.Module:
    """X-MOD: adapters are chosen by the caller's language id; there is no router."""

    class Languages(Net):
        def forward(self, ids: Tensor) -> Tensor:
            x, language = self.embed(ids), (ids.sum(1) % 3).unsqueeze(-1)
            for block in self.layers:
                x = x + torch.einsum("bsd,bkfd->bsf", block(x), block.adapters[language])
            return self.head(self.norm(x))

    blocks = [Block(Gated()) for _ in range(2)]
    for block in blocks:
        block.adapters = weight(3, D, D)
    return Languages(blocks)


@nothing()
def drafting_head() -> nn.Module:
    """Sampling inside the graph: the sampled token is embedded by the head's own weight and runs through a drafter."""

    class Drafting(Net):
        def __init__(self) -> None:
            super().__init__([Block(Gated(), Attention()) for _ in range(2)])
            self.head.weight = self.embed.weight
            self.merge, self.drafter, self.position = linear(D, 2 * D), Gated(), nn.Embedding(VOCAB, D)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.decode(self.embed(ids))[:, -1]
            best, tokens = logits.topk(4, dim=-1)
            token = tokens.gather(-1, torch.multinomial(best.softmax(-1), 1)).squeeze(-1)
            state = self.merge(torch.cat([self.embed(token), self.position(token)], -1))
            return self.head(self.drafter(state)).argmax(-1), token

    return Drafting()


@nothing()
def beam_search() -> nn.Module:
    """A step of beam search: top-k over beams times vocabulary, split into beam and token; states are reordered by the beam."""

    class Beams(Net):
        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            x = self.embed(ids)
            for block in self.layers:
                x = block(x)
            scores = self.head(self.norm(x)).log_softmax(-1)
            best, flat = scores.flatten(1).topk(3, dim=-1)
            beam, token = flat // VOCAB, flat % VOCAB
            x = x.gather(1, beam.unsqueeze(-1).expand(-1, -1, D)) + self.embed(token)
            return self.head(self.layers[0](x)), best

    return Beams([Block(Gated()) for _ in range(2)])


@nothing()
def tree_of_drafts() -> nn.Module:
    """Medusa: several heads, the best tokens of each, joined to a tree of candidates."""

    class Medusa(Net):
        def __init__(self) -> None:
            super().__init__([Block(Gated(), Attention()) for _ in range(2)])
            self.heads = nn.ModuleList(linear(VOCAB) for _ in range(3))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.layers:
                x = block(x)
            best = torch.stack([head(x[:, -1]) for head in self.heads], 1).topk(2, dim=-1).indices
            tree = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]])
            return self.embed(best[:, torch.arange(3), tree]).sum(-2)

    return Medusa()


@nothing()
def boxes_by_class() -> nn.Module:
    """A detection head predicts a box for each class, and the best class chooses its box."""

    class Detector(Net):
        def __init__(self) -> None:
            super().__init__([Block(Gated(), Attention()) for _ in range(2)])
            self.classes, self.boxes = linear(E), linear(4 * E)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            x = self.decode_features(self.embed(ids))
            scores, chosen = self.classes(x).softmax(-1).max(-1)
            boxes = self.boxes(x).unflatten(-1, (E, 4))
            return boxes.gather(2, chosen[..., None, None].expand(-1, -1, 1, 4)).squeeze(2), scores

        def decode_features(self, x: Tensor) -> Tensor:
            for block in self.layers:
                x = block(x)
            return self.norm(x)

    return Detector()


@nothing()
def kept_keys() -> nn.Module:
    """KV-cache eviction: a learned scorer keeps the best keys of every head, whose rows are gathered."""

    @in_the_mlp(scorer=lambda: gate(4), q=lambda: linear(D), kv=lambda: linear(2 * D), out=lambda: linear(D))
    def run(mlp: Any, x: Tensor) -> Tensor:
        kept = mlp.scorer(x).transpose(1, 2).topk(3, dim=-1).indices
        q, kv = mlp.q(x).unflatten(-1, (4, 4)).transpose(1, 2), mlp.kv(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = kv.gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, 8)).chunk(2, -1)
        return mlp.out((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2))

    return run


@nothing()
def merged_tokens() -> nn.Module:
    """Token merging: the most similar neighbours, by a product of activations, are averaged."""

    @in_the_mlp(metric=lambda: linear(D), mlp=Gated)
    def run(mlp: Any, x: Tensor) -> Tensor:
        m = F.normalize(mlp.metric(x), dim=-1)
        similar, to = (m[:, ::2] @ m[:, 1::2].mT).max(-1)
        even = mlp.mlp(x[:, ::2]) * similar.unsqueeze(-1)
        return x.clone().index_put((torch.arange(x.shape[0]).unsqueeze(-1), 2 * to.clamp(max=1) + 1), even, accumulate=True)

    return run
