"""What looks like a router and chooses something else: tokens, keys, codes, classes, words, rows of a table."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from dispatches import AttentionExperts
from tiny import VOCAB, Attention, Block, Cases, D, E, Gated, Net, gate, linear, stack, weight
from torch import Tensor, nn

LOOKALIKES = Cases()
nothing = LOOKALIKES.nothing


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


def wide() -> nn.Linear:
    return linear(4 * D)


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

    @in_the_mlp(planes=lambda: weight(D, 2), qk=lambda: linear(D), v=lambda: linear(D), mlp=Gated)
    def run(mlp: Any, x: Tensor) -> Tensor:
        side = mlp.qk(x) @ mlp.planes
        order = torch.cat([side, -side], -1).argmax(-1).argsort(dim=-1, stable=True)
        rows = order.unsqueeze(-1).expand_as(x)
        q, v = mlp.qk(x).gather(1, rows), mlp.v(x).gather(1, rows)
        y = torch.softmax(q @ F.normalize(q, dim=-1).mT, -1) @ v
        y = torch.zeros_like(y).scatter(1, rows, y)
        return y + mlp.mlp(y)

    return run


@nothing()
def sparse_autoencoder() -> nn.Module:
    """k-sparse: the largest hidden units are kept, the others zeroed, and decoded by the same weight."""

    @in_the_mlp(enc=wide)
    def run(mlp: Any, x: Tensor) -> Tensor:
        z = mlp.enc(x).relu()
        best, ids = z.topk(5, dim=-1)
        return torch.zeros_like(z).scatter(-1, ids, best) @ mlp.enc.weight

    return run


@nothing()
def sparse_autoencoder_gathered() -> nn.Module:
    """The same, decoded from the rows of the chosen units: they are added up, no token is multiplied with them."""

    @in_the_mlp(enc=wide, codes=lambda: weight(4 * D, D))
    def run(mlp: Any, x: Tensor) -> Tensor:
        best, ids = mlp.enc(x).relu().topk(5, dim=-1)
        return torch.einsum("bsk,bskd->bsd", best, mlp.codes[ids])

    return run


@nothing()
def sparse_neurons() -> nn.Module:
    """A predictor keeps the best quarter of an MLP's own neurons by a mask; there are no experts."""

    @in_the_mlp(predict=wide, up=wide, gate=wide, down=lambda: linear(D, 4 * D))
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
def composed_embeddings() -> nn.Module:
    """A table of codes for each word of the vocabulary, whose rows of two embeddings are multiplied: a lookup in two steps."""

    class Composed(Net):
        def __init__(self) -> None:
            super().__init__([Block(Gated(), Attention()) for _ in range(2)])
            self.first, self.second = nn.Embedding(E, D), nn.Embedding(E, D)
            self.register_buffer("codes", torch.randint(E, (VOCAB, 2)))

        def forward(self, ids: Tensor) -> Tensor:
            codes = self.codes[ids]
            return self.decode(self.first(codes[..., 0]) * self.second(codes[..., 1]))

    return Composed()


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

    @in_the_mlp(classify=gate, scale=lambda: nn.Embedding(E, D), shift=lambda: nn.Embedding(E, D), mlp=Gated)
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


@nothing(also=("refused",))
def skipped_tokens() -> nn.Module:
    """Each token goes through the MLP or skips it: masked before a gated MLP, whose three linears are no three experts."""

    @in_the_mlp(decide=lambda: gate(2), mlp=Gated)
    def run(mlp: Any, x: Tensor) -> Tensor:
        keep = (mlp.decide(x).argmax(-1, keepdim=True) == 1).to(x.dtype)
        return mlp.mlp(x * keep) * keep

    return run


@nothing()
def sorted_by_cluster() -> nn.Module:
    """Cluster-Former: tokens are sorted by their nearest centroid, and attend within chunks; all share the same projections."""

    @in_the_mlp(centroids=gate, **{name: lambda: linear(D) for name in ("q", "k", "v", "out")})
    def run(mlp: Any, x: Tensor) -> Tensor:
        order = mlp.centroids(x).argmax(-1).argsort(dim=-1, stable=True)
        rows = order.unsqueeze(-1).expand_as(x)
        near = x.gather(1, rows)
        y = mlp.out(torch.softmax(mlp.q(near) @ mlp.k(near).mT, -1) @ mlp.v(near))
        return torch.zeros_like(y).scatter(1, rows, y)

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
        rows = torch.arange(x.shape[0]).unsqueeze(-1)
        return x.clone().index_put((rows, 2 * to.clamp(max=1) + 1), even, accumulate=True)

    return run
