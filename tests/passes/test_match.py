"""The matcher's decisions: what is accepted and as what, and every decoy rejected with its reason."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend import traced
from decoder import Decoder, decoder, prompt
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import r3_pass.passes
from r3_pass.passes.match import is_weight, match
from r3_pass.passes.places import layer_in_path, module_path
from r3_pass.passes.site import Accepted, Match, Rejected
from r3_pass.registry.shapes import dims

T, D, E, H = 6, 8, 12, 5


class Layer(nn.Module):
    """`use(self, x [T, D])` with a router, experts, and things that look like them."""

    def __init__(self, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.use = use
        self.gate, self.head = nn.Linear(D, E, bias=False), nn.Linear(D, 61, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E + 1, H, D)), nn.Parameter(torch.randn(E + 1, D, H))
        self.bias, self.codes = nn.Parameter(torch.randn(E)), nn.Parameter(torch.randn(61, D))
        self.register_buffer("table", torch.randint(E, (61, 2)))
        self.register_buffer("physical", torch.arange(E).flip(0))

    def forward(self, x: Tensor) -> Any:
        return self.use(self, x)


def experts(m: Layer, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    h = torch.einsum("td,tkfd->tkf", x, m.up[ids]).relu()
    return torch.einsum("tkf,tkdf,tk->td", h, m.down[ids], w)


def matched(use: Callable[..., Any], x: Tensor | None = None, broken: bool = False) -> Match:
    return match(traced(Layer(use), torch.randn(T, D) if x is None else x).graph, broken=broken)


def one_site(found: Match) -> Accepted:
    (site,) = found.sites
    return site


def plain(m: Layer, x: Tensor) -> Tensor:
    w, ids = m.gate(x).softmax(-1).topk(2)
    return experts(m, x, ids, w)


def test_a_router_and_what_is_said_of_it() -> None:
    """Every field is read by the rewrite or by the layer's look-up; `experts` without `gate` must still name the layer."""
    site = one_site(matched(plain))
    assert (site.form, site.num_experts, site.top_k, site.id_dim, site.proved) == ("softmax_topk", E, 2, 1, True)
    assert [dims(c) for c in site.columns] == [(T, 2)]
    assert [dims(w) for w in site.gate] == [(E, D)]
    assert {dims(w) for w in site.experts} == {(E + 1, H, D), (E + 1, D, H)}
    assert site and not site.overwritten


def test_a_match_changes_nothing() -> None:
    """A matcher that mutates makes its decision depend on how often it was asked."""
    graph = traced(Layer(plain), torch.randn(T, D)).graph
    before = str(graph)
    first = match(graph)
    assert match(graph) == first and str(graph) == before


@pytest.mark.parametrize(
    ("scores", "form"),
    [
        (lambda m, z: z, "topk"),
        (lambda m, z: z.softmax(-1), "softmax_topk"),
        (lambda m, z: z.sigmoid() + m.bias, "sigmoid_bias_topk"),
        (
            lambda m, z: z.masked_fill(
                F.one_hot(z.view(T, 3, 4).amax(-1).topk(1)[1], 3).sum(1).repeat_interleave(4, 1) == 0, 0.0
            ),
            "grouped_topk",
        ),
    ],
)
def test_forms_are_named_by_what_happens(scores: Callable[..., Tensor], form: str) -> None:
    """The name is what a report shows and what replay will choose its rule by."""

    def use(m: Layer, x: Tensor) -> Tensor:
        w, ids = scores(m, m.gate(x)).topk(2)
        return experts(m, x, ids, w)

    assert one_site(matched(use)).form == form


def test_topk_then_softmax() -> None:
    """gpt-oss normalises the chosen scores; named like the other order, replay would divide by all of them."""

    def use(m: Layer, x: Tensor) -> Tensor:
        w, ids = m.gate(x).topk(2)
        return experts(m, x, ids, w.softmax(-1))

    assert one_site(matched(use)).form == "topk_softmax"


# ---- what is recorded -----------------------------------------------------------------------------------------------
def test_the_shared_slice_is_recorded() -> None:
    """k + 1 are computed for a margin, k are routed: recorded whole, the rows would be a column too wide."""

    def use(m: Layer, x: Tensor) -> Tensor:
        w, ids = m.gate(x).topk(3)
        return experts(m, x, ids[:, :2], w[:, :2]) + w[:, 2:]

    site = one_site(matched(use))
    assert site.top_k == 2 and dims(site.columns[0]) == (T, 2)


def test_a_shared_expert_appended_is_not() -> None:
    """Failure class 4: the shared expert's column behind the router's own is no choice of the router."""

    def use(m: Layer, x: Tensor) -> Tensor:
        w, ids = m.gate(x).topk(2)
        shared = torch.full((T, 1), E)
        return experts(m, x, torch.cat([ids, shared], 1), torch.cat([w, torch.ones(T, 1)], 1))

    site = one_site(matched(use))
    assert site.top_k == 2 and dims(site.columns[0]) == (T, 2)


def test_physical_ids_are_not_recorded() -> None:
    """Failure class 4: behind expert-parallel balancing an id names a place, which the trainer does not know."""

    def use(m: Layer, x: Tensor) -> Tensor:
        w, ids = m.gate(x).topk(2)
        return experts(m, x, m.physical[ids], w)

    assert [c.args[1] for c in one_site(matched(use)).columns] == [1]


@pytest.mark.parametrize(
    "change",
    [
        lambda m, ids: ids.add_(1),
        lambda m, ids: ids.__setitem__(ids > 3, E),
        lambda m, ids: ids.copy_(m.physical[ids]),
        lambda m, ids: ids[:, 1:].fill_(E),
    ],
)
def test_ids_changed_in_place_are_kept_from_before(change: Callable[..., Any]) -> None:
    """The record op stands at the end of the graph, where these ids are physical, shifted or a shared expert's."""

    def use(m: Layer, x: Tensor) -> Tensor:
        w, ids = m.gate(x).topk(2)
        change(m, ids)
        return experts(m, x, ids, w)

    assert one_site(matched(use)).overwritten


@pytest.mark.parametrize(
    ("use", "id_dim", "shapes"),
    [
        (lambda m, x: experts(m, x, (s := m.gate(x).t().topk(2, dim=0))[1].t(), s[0].t()), 0, [(2, T)]),
        (lambda m, x: experts(m, x, (s := m.gate(x).max(-1, keepdim=True))[1], s[0]), 1, [(T, 1)]),
        (lambda m, x: experts(m, x, (s := m.gate(x).max(-1))[1].unsqueeze(1), s[0].unsqueeze(1)), None, [(T,)]),
        (
            lambda m, x: experts(m, x, (s := m.gate(x.view(2, 3, D)).topk(2))[1].view(-1, 2), s[0].view(-1, 2)),
            2,
            [(2, 3, 2)],
        ),
    ],
)
def test_where_k_stands(use: Callable[..., Any], id_dim: int | None, shapes: list[tuple[int, ...]]) -> None:
    """Taken for the last dimension where it is the first, tokens and columns would change places."""
    site = one_site(matched(use))
    assert (site.id_dim, [dims(c) for c in site.columns]) == (id_dim, shapes)


def two_argmax(m: Layer, x: Tensor) -> Tensor:
    z = m.gate(x)
    first = z.argmax(-1)
    second = z.masked_fill(F.one_hot(first, E) > 0, -100.0).argmax(-1)
    ids = torch.stack([first, second], -1)
    return experts(m, x, ids, z.gather(1, ids))


def test_repeated_choices_are_columns_of_one_site() -> None:
    """GShard: two argmax of one router are its first and second choice, in this order."""
    site = one_site(matched(two_argmax))
    assert site.form == "top1x2" and site.top_k == 2 and len(site.columns) == 2 == len(site.selections)
    assert [c.name for c in site.columns] == ["first", "second"]


def test_the_same_choice_twice_is_one_column() -> None:
    """`max` for the weight and `argmax` for the id, of the same scores, are one choice; as two columns, rows would double it."""

    def use(m: Layer, x: Tensor) -> Tensor:
        p = m.gate(x).softmax(-1)
        w, again = p.max(-1)
        ids = p.argmax(-1)
        return experts(m, x, ids.unsqueeze(1), w.unsqueeze(1)) + experts(m, x, again.unsqueeze(1), w.unsqueeze(1))

    site = one_site(matched(use))
    assert site.top_k == 1 and len(site.columns) == 1


# ---- decoys ---------------------------------------------------------------------------------------------------------
def both(decoy: Callable[[Layer, Tensor], Any]) -> Callable[[Layer, Tensor], Any]:
    return lambda m, x: (plain(m, x), decoy(m, x))


def indexer(m: Layer, x: Tensor) -> Tensor:
    keys = m.gate(x)
    return x[torch.einsum("td,sd->ts", keys, keys).topk(3)[1]]


DECOYS: dict[str, tuple[Callable[[Layer, Tensor], Any], str]] = {
    "group_selection": (
        lambda m, x: m.gate(x).view(T, 3, 4).topk(2)[0].sum(-1).topk(2)[0],
        "its indices are not used",
    ),
    "vocabulary_sampling": (lambda m, x: m.codes[m.head(x).topk(5)[1]].sum(1), "choose no parameters"),
    "greedy_token": (lambda m, x: m.head(x).argmax(-1), "they are returned"),
    "token_indexer": (lambda m, x: x[(x @ x.t()).topk(3)[1]].sum(1), "product of two activations"),
    "indexer_by_einsum": (indexer, "product of activations"),
    "auxiliary_loss": (lambda m, x: (F.one_hot(m.gate(x).topk(2)[1], E).float().mean(0) * 2).sum(), "choose no parameters"),
    "own_logging": (lambda m, x: m.gate(x).topk(2)[1], "they are returned"),
    "entropy_of_the_best": (lambda m, x: m.gate(x).softmax(-1).topk(4)[0].log().sum(), "its indices are not used"),
    "over_positions": (lambda m, x: x[m.gate(x).sum(-1).topk(2, dim=0)[1]], "over tokens"),
    "beam": (lambda m, x: m.head(x).flatten().topk(4)[1], "over a batch dimension"),
    "code_book": (lambda m, x: m.codes[torch.cdist(x, m.codes).argmin(-1)], "the router's own weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", DECOYS)
def test_decoys_beside_a_router(case: str) -> None:
    """A decoy that is recorded makes a second site of the layer, or wrong rows; its reason is what the user reads."""
    decoy, reason = DECOYS[case]
    found = matched(both(decoy))
    assert one_site(found).form == "softmax_topk"
    reasons = [r.reason for r in found.rejected]
    assert any(reason in r for r in reasons), reasons
    assert not any(r.routing for r in found.rejected), "a decoy is no routing that is missing"
    assert not any(found.rejected), "a rejection is falsy"


def test_a_decoy_on_the_routers_own_scores() -> None:
    """REPLAY.md: the auxiliary loss selects once more on the same router, with the same k; only the use of the ids tells."""

    def use(m: Layer, x: Tensor) -> Any:
        p = m.gate(x).softmax(-1)
        w, ids = p.topk(2)
        counts = F.one_hot(p.topk(2)[1], E).float().mean((0, 1))
        return experts(m, x, ids, w), (counts * p.mean(0)).sum()

    found = matched(use)
    assert one_site(found).selections[0].name == "topk"
    assert ["choose no parameters" in r.reason for r in found.rejected] == [True]


class Hashed(nn.Module):
    """Ids stand in a table and are looked up by the token."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.weights, self.embed = weights, nn.Embedding(61, D)
        self.up, self.down = nn.Parameter(torch.randn(E, H, D)), nn.Parameter(torch.randn(E, D, H))
        self.register_buffer("table", torch.randint(E, (61, 2)))

    def forward(self, tokens: Tensor) -> Tensor:
        ids = self.table[tokens]
        x = self.embed(tokens)
        return experts(self, x, ids, torch.ones(T, 2)) if self.weights else x * ids.sum(-1, keepdim=True)


def test_ids_from_a_table() -> None:
    """Hash routing has no scores: the table names the layer, its width is k."""
    site = one_site(match(traced(Hashed(True), torch.randint(61, (T,))).graph))
    assert (site.form, site.num_experts, site.top_k, site.proved) == ("table", E, 2, True)
    assert [dims(w) for w in site.gate] == [(61, 2)]


def test_a_table_of_something_else() -> None:
    """Near miss: any integer buffer that is indexed by tokens."""
    found = match(traced(Hashed(False), torch.randint(61, (T,))).graph)
    assert found.sites == () and "choose no parameters" in found.rejected[0].reason


# ---- routing that cannot be recorded --------------------------------------------------------------------------------
def sinkhorn(m: Layer, x: Tensor) -> Tensor:
    p = m.gate(x).exp()
    p = p / p.sum(0, keepdim=True)
    w, ids = (p / p.sum(1, keepdim=True)).topk(2)
    return experts(m, x, ids, w)


def expert_choice(m: Layer, x: Tensor) -> Tensor:
    w, chosen = m.gate(x).softmax(-1).t().topk(3, dim=-1)
    held = torch.einsum("ekd,efd->ekf", x[chosen], m.up[:E])
    y = torch.einsum("ekf,edf->ekd", held, m.down[:E]) * w.unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, chosen.flatten(), y.flatten(0, 1))


def top_p(m: Layer, x: Tensor) -> Tensor:
    p, order = m.gate(x).softmax(-1).sort(-1, descending=True)
    return experts(m, x, order, torch.where(p.cumsum(-1) < 0.9, p, 0.0))


def two_whole_choices(m: Layer, x: Tensor) -> Tensor:
    p = m.gate(x).softmax(-1)
    w, ids = p.topk(2)
    v, others = (p * m.bias).topk(2)
    return experts(m, x, ids, w) + experts(m, x, others, v)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (sinkhorn, "depend on the other tokens"),
        (expert_choice, "over tokens"),
        (top_p, "differs from token to token"),
        (two_whole_choices, "several selections on one router"),
    ],
)
def test_routing_without_ids_per_token(use: Callable[..., Any], reason: str) -> None:
    """Skipped in silence, these layers would look dense in the rows; they must be marked as routing, so that a step refuses."""
    found = matched(use)
    assert found.sites == ()
    refusals = [r for r in found.rejected if r.routing]
    assert refusals and all(reason in r.reason for r in refusals)


# ---- graphs that end in a break -------------------------------------------------------------------------------------
def hands_out(m: Layer, x: Tensor) -> Any:
    w, ids = m.gate(x).topk(2)
    return w, ids


def test_ids_that_leave_by_a_break_are_sites_to_confirm() -> None:
    """Experts behind a graph break: accepted unproved. Without a break the same graph returns ids to its caller: no routing."""
    site = one_site(matched(hands_out, broken=True))
    assert not site.proved and site.top_k == 2
    assert matched(hands_out, broken=False).sites == ()


@pytest.mark.parametrize(
    "part",
    [
        lambda ids: ids.chunk(2, -1)[1],
        lambda ids: ids.split([1, 3], -1)[0],
        lambda ids: torch.stack(ids.unbind(-1)[:2], -1),
        lambda ids: ids[:, 0, None],
    ],
)
def test_columns_that_leave_by_a_break(part: Callable[[Tensor], Tensor]) -> None:
    """Experts behind the break get some of the choices: all of them, or others, would be recorded."""
    found = matched(lambda m, x: part(m.gate(x).topk(4)[1]), broken=True)
    assert found.sites == () and "columns" in found.rejected[0].reason


def test_columns_that_leave_by_a_break_one_by_one() -> None:
    """Near miss: all of them leave; or a mask leaves beside one of them, which may be of all."""
    assert one_site(matched(lambda m, x: m.gate(x).topk(2)[1].unbind(-1), broken=True)).top_k == 2

    def counts(m: Layer, x: Tensor) -> Any:
        ids = m.gate(x).topk(2)[1]
        return F.one_hot(ids, E), ids[:, 0]

    assert one_site(matched(counts, broken=True)).top_k == 2


@pytest.mark.parametrize("written", [True, False])
def test_ids_that_leave_a_checkpoint_and_are_written_by_another_name(written: bool) -> None:
    """Memory is shared across the border of a nested graph, too. Near miss: nothing is written."""

    def route(m: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        w, ids = m.gate(x).softmax(-1).topk(2)
        return w, ids

    def use(m: Layer, x: Tensor) -> Any:
        w, ids = checkpoint(route, m, x, use_reentrant=False)
        first = ids.unbind(1)[0]
        if written:
            first.bitwise_xor_(1)
        return experts(m, x, ids, w)

    found = matched(use)
    assert len(found.sites) == (not written)
    assert not written or any(
        "are not those that it chose" in r.reason or "may not be those" in r.reason for r in found.rejected
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids.t_(),
        lambda ids: ids.swapaxes_(0, 1).fill_(2),
        lambda ids: ids[:, :1].squeeze_(1),
        lambda ids: ids.as_strided_((2, T), (T, 1)),
    ],
)
def test_ids_of_another_shape_in_place(change: Callable[[Tensor], Tensor]) -> None:
    """Dynamo notes one shape for a value, the last: how many experts a token had is not to be seen any more."""

    def use(m: Layer, x: Tensor) -> Any:
        w, ids = m.gate(x).softmax(-1).topk(2)
        out = experts(m, x, ids, w)
        return out, change(ids).sum()

    found = matched(use)
    assert found.sites == () and "another shape in place" in found.rejected[0].reason


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids.unbind(-1)[0].bitwise_xor_(1),
        lambda ids: ids.split(1, -1)[1].fill_(0),
        lambda ids: ids.as_strided((T,), (2,)).zero_(),
        lambda ids: ids.data.bitwise_xor_(1),
        lambda ids: ids.long().bitwise_xor_(1),
        lambda ids: ids.contiguous().bitwise_xor_(1),
        lambda ids: ids.to(ids.dtype).bitwise_xor_(1),
        lambda ids: torch._foreach_mul_([ids], 0),
        lambda ids: torch._foreach_mul_(list(ids.chunk(2, -1)), 0),
        lambda ids: ids.numpy().__setitem__(0, 1),
        lambda ids: ids.numpy().fill(1),
    ],
)
def test_ids_that_are_written_by_another_name(change: Callable[[Tensor], Any]) -> None:
    """No result stands for what experts get: the ids that were chosen would be recorded."""

    def use(m: Layer, x: Tensor) -> Tensor:
        w, ids = m.gate(x).softmax(-1).topk(2)
        change(ids)
        return experts(m, x, ids, w)

    found = matched(use)
    assert found.sites == () and any("may write others" in r.reason and r.routing for r in found.rejected)


def test_a_view_from_before_a_write() -> None:
    """It reads what was written to the ids since."""

    def use(m: Layer, x: Tensor) -> Tensor:
        w, ids = m.gate(x).softmax(-1).topk(2)
        flat = ids.view(-1)
        ids.bitwise_xor_(1)
        return experts(m, x, flat.view(-1, 2), w)

    assert matched(use).sites == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda ids, w: torch._foreach_add_([F.one_hot(ids, E).sum((0, 1))], 1),
        lambda ids, w: torch._foreach_mul_([w], 2.0),
        lambda ids, w: ids.clone().bitwise_xor_(1),
        lambda ids, w: ids.int().unbind(-1)[0].bitwise_xor_(1),
        lambda ids, w: ids.numpy().copy().__setitem__(0, 1),
        lambda ids, w: ids.unbind(-1)[0] + 1,
        lambda ids, w: ids.clamp_(0, E - 1),
    ],
)
def test_memory_of_its_own_is_written(change: Callable[[Tensor, Tensor], Any]) -> None:
    """Near miss: what is made of the ids, and the weights beside them."""

    def use(m: Layer, x: Tensor) -> Tensor:
        w, ids = m.gate(x).softmax(-1).topk(2)
        change(ids, w)
        return experts(m, x, ids, w)

    assert one_site(matched(use)).top_k == 2


def test_copies_of_another_shape_in_place() -> None:
    """The shape that was noted of a slice is not the one it had: no reason to fail, whatever it is used for."""

    def beside(m: Layer, x: Tensor) -> Any:
        w, ids = m.gate(x).softmax(-1).topk(2)
        return experts(m, x, ids, w), (ids * 1)[:, :1].squeeze_(1)

    assert one_site(matched(beside)).top_k == 2

    def used(m: Layer, x: Tensor) -> Tensor:
        w, ids = m.gate(x).softmax(-1).topk(1)
        first = (ids + 0)[:, :1]
        first.squeeze_(1)
        return experts(m, x, first[:, None], w)

    assert matched(used).sites == ()


def test_counts_of_another_shape_in_place() -> None:
    """Near miss: what is made of the ids has memory of its own."""

    def use(m: Layer, x: Tensor) -> Any:
        w, ids = m.gate(x).softmax(-1).topk(2)
        return experts(m, x, ids, w), torch.bincount(ids.view(-1), minlength=E).unsqueeze_(0)

    assert one_site(matched(use)).top_k == 2


def test_what_leaves_by_a_break_without_ids_is_none() -> None:
    """Near miss: a loss that leaves by the same break."""
    assert matched(lambda m, x: m.gate(x).topk(2)[1].float().mean(), broken=True).sites == ()


def test_a_proved_site_wins_over_a_returned_one() -> None:
    """The logging top-k of a graph with a break escapes as ids would; the one that reaches experts is the routing."""

    def use(m: Layer, x: Tensor) -> Any:
        p = m.gate(x).softmax(-1)
        w, ids = p.topk(2)
        return experts(m, x, ids, w), p.topk(3)[1]

    found = matched(use, broken=True)
    assert one_site(found).top_k == 2 and "another selection" in found.rejected[0].reason


# ---- layers and modules ---------------------------------------------------------------------------------------------
def test_each_layer_of_a_whole_model() -> None:
    """The layer by the module path, the dense one before it counted."""
    model = decoder(layers=4, dense=(0, 2), top_k=(2, 2, 2, 3))
    found = match(traced(model, prompt(5)).graph)
    assert [(s.layer, s.module, s.top_k) for s in found.sites] == [(1, "layers.1.mlp", 2), (3, "layers.3.mlp", 3)]


def test_sites_inside_checkpoints() -> None:
    """Under activation checkpointing router and experts stand in a nested graph; its placeholders are no weights of their own."""
    model = Decoder(checkpoint=True)
    found = match(traced(model, prompt(5)).graph)
    assert [s.layer for s in found.sites] == [1, 2]
    assert all(w.graph is found.sites[0].gate[0].graph for s in found.sites for w in (*s.gate, *s.experts))


def test_a_gate_outside_of_a_checkpoint() -> None:
    """Router outside, experts inside: both ends of the path cross the border."""

    def use(m: Layer, x: Tensor) -> Tensor:
        w, ids = m.gate(x).topk(2)
        return checkpoint(lambda x, ids, w: experts(m, x, ids, w), x, ids, w, use_reentrant=False)

    site = one_site(matched(use))
    assert site.proved and len(site.gate) == 1 and len(site.experts) == 2


@pytest.mark.parametrize(
    ("path", "layer"), [("model.layers.3.mlp", 3), ("layers.12", 12), ("mlp.gate", None), ("", None), ("h2.mlp", None)]
)
def test_layer_in_a_path(path: str, layer: int | None) -> None:
    """`h2` is a name, not a place in a list."""
    assert layer_in_path(path) == layer


@pytest.mark.parametrize("variable", ["L['self']", "L['net']", "G['policy']"])
def test_a_module_path_starts_at_the_model(variable: str) -> None:
    """Whatever variable holds it; modules in a list are those that registered them."""
    node = torch.fx.Graph().placeholder("x")
    for below in (".layers.3.mlp", "._modules['layers']._modules['3'].mlp", ".layers[3].mlp"):
        node.meta["nn_module_stack"] = {"mlp": (f"{variable}{below}", torch.nn.Module)}
        assert module_path(node) == "layers.3.mlp"


def test_weights_are_told_from_data() -> None:
    """Parameters, buffers and plain tensors on a module are weights; arguments and closed-over tensors are data."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.loose = nn.Parameter(torch.ones(2)), torch.ones(2)
            self.register_buffer("b", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.p + self.b + self.loose + x

    graph = traced(Module(), torch.ones(2)).graph
    kinds = {n.name.strip("_").lower(): is_weight(n) for n in graph.nodes if n.op == "placeholder"}
    assert len(kinds) == 4 and sum(kinds.values()) == 3
    assert [k for k, weight in kinds.items() if not weight] == ["l_x"]


def test_another_graphs_weights_can_be_told_by_the_caller() -> None:
    """RecordPass runs on graphs that are not Dynamo's, where only the caller knows which placeholders are weights."""

    def route(x: Tensor, gate: Tensor, bank: Tensor) -> Tensor:
        return torch.bmm(bank[(x @ gate).topk(1)[1][:, 0]], x.unsqueeze(-1))

    graph = traced(route, torch.randn(T, D), torch.randn(D, E), torch.randn(E, D, D)).graph
    assert match(graph).sites == ()
    assert len(match(graph, weight=lambda n: "gate" in n.name or "bank" in n.name).sites) == 1


def test_values_of_the_decision_types() -> None:
    """`if decision:` is how callers read them."""
    assert not Rejected("topk", "why", True, "")
    assert one_site(matched(plain))


def test_the_package_is_one_copy() -> None:
    """`import passes` would register `r3_pass::record` a second time, which torch refuses with a riddle."""
    with pytest.raises(ImportError, match=r"r3_pass\.passes"):
        runpy.run_path(r3_pass.passes.__file__, run_name="passes")
