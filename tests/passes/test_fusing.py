"""What is fused is exactly what a fused router computes; anything else stays as it is, and the report says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend import operators, traced
from fusable import NEVER, Spec, fusable, model_of
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import same_outputs
from tiny import tokens
from torch import Tensor, fx

import r3_pass
from r3_pass.passes.fuse import Fused, fuse
from r3_pass.passes.fusing import Fusion, plan_fusion
from r3_pass.passes.match import is_weight, match
from r3_pass.registry.dataflow import DataFlow

Routed = tuple[Tensor, ...]
ROUTE = "r3_pass::route"


def fused(model: torch.nn.Module, args: Any = None) -> tuple[fx.GraphModule, Fused]:
    """The one graph of a model, and that graph fused."""
    with torch.no_grad():
        graph = traced(model, *(args or tokens((2, 6))[0]))
    return graph, fuse(graph, match(graph.graph).sites)


@st.composite
def specs(draw: Any) -> Spec:
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    size = draw(st.integers(2, 5)) * (2 if groups == 1 else 1)
    kept = draw(st.integers(1, groups))
    scores = draw(st.sampled_from(["softmax", "sigmoid"] if groups > 1 else ["softmax", "sigmoid", "logits"]))
    return Spec(
        experts=groups * size,
        top_k=draw(st.integers(1, kept * size)),
        scores=scores,
        bias=scores != "logits" and draw(st.booleans()),
        groups=groups,
        best=draw(st.sampled_from([1, 2])) if groups > 1 else 1,
        kept=kept if groups > 1 else 1,
        fill=draw(st.sampled_from([NEVER, 0.0])),
        after=draw(st.sampled_from(["softmax", "sigmoid"])) if scores == "logits" else "",
        epsilon=draw(st.sampled_from([None, 0.0, 1e-20, 1e-6])),
        scale=draw(st.sampled_from([None, 2.5, 16])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        spelling=draw(st.integers(0, 3)),
    )


@settings(max_examples=40)
@given(specs())
def test_every_router_is_read_as_what_it_is(spec: Spec) -> None:
    """The plan has the parameters that the router was spelled from; the fused graph has no other operator of it left."""
    torch._dynamo.reset()
    model = fusable(spec, layers=1)
    (args,) = tokens((3, 7))
    graph, made = fused(model, args)
    (site,) = match(graph.graph).sites
    plan = plan_fusion(DataFlow(graph.graph, is_weight), site)
    assert isinstance(plan, Fusion), plan
    ends_early = spec.after == "sigmoid" and spec.dtype is torch.bfloat16  # rounded before it is normalised
    if not ends_early:
        assert plan.reading.routing == spec.routing
    left = set(operators(made.module))
    assert ROUTE in left and not left & {"topk", "sort", "max", "amax", "gather", "scatter", "masked_fill", "sigmoid"}
    assert operators(graph)[ROUTE] == 0, "the graph of Dynamo stays"
    with torch.no_grad():
        want, got = (
            torch.compile(model, backend=r3_pass.backend("eager", fuse_router=on))(*args) for on in (False, True)
        )
    assert torch.allclose(want, got, rtol=2e-2 if spec.dtype is torch.bfloat16 else 1e-4, atol=1e-2), spec


# ---- look-alikes ---------------------------------------------------------------------------------------------------
def softmax(moe: Any, x: Tensor) -> Tensor:
    return moe.gate(x).softmax(-1)


def chosen(scores: Tensor, k: int = 2) -> Routed:
    values, ids = scores.topk(k, dim=-1)
    return ids, values


def grouped(moe: Any, x: Tensor, by: Callable[[Tensor, Tensor], Tensor], **other: Any) -> dict[str, Tensor]:
    """DeepSeek-V3's router over 2 groups, with something in it of one's own."""
    scores = moe.gate(x).sigmoid()
    choice = scores + moe.bias
    groups = by(scores, choice)
    best = groups.topk(other.get("kept", 1), dim=-1)[1]
    mask = torch.zeros_like(groups).scatter_(1, best, other.get("mark", 1))
    wide = mask.unsqueeze(-1).expand(-1, 2, 4).reshape(-1, 8)
    masked = choice.masked_fill(~wide.bool(), NEVER)
    ids = masked.topk(2, dim=-1)[1]
    return {"scores": scores, "groups": groups, "best": best, "masked": masked, "ids": ids, "w": scores.gather(1, ids)}


def top2(scores: Tensor, choice: Tensor) -> Tensor:
    return choice.view(-1, 2, 4).topk(2, dim=-1)[0].sum(-1)


def softcapped(moe: Any, x: Tensor) -> Routed:
    return chosen((torch.tanh(moe.gate(x) / 30.0) * 30.0).softmax(-1))


def with_temperature(moe: Any, x: Tensor) -> Routed:
    return chosen((moe.gate(x) / 0.7).softmax(-1))


def with_jitter(moe: Any, x: Tensor) -> Routed:
    logits = moe.gate(x)
    return chosen((logits * torch.empty_like(logits).uniform_(0.99, 1.01)).softmax(-1))


def softmax_in_groups(moe: Any, x: Tensor) -> Routed:
    return chosen(moe.gate(x).view(-1, 2, 4).softmax(-1).flatten(1))


def log_probabilities(moe: Any, x: Tensor) -> Routed:
    return chosen(moe.gate(x).log_softmax(-1))


def bias_on_logits(moe: Any, x: Tensor) -> Routed:
    return chosen((moe.gate(x) + moe.bias).softmax(-1))


def bias_in_the_weights(moe: Any, x: Tensor) -> Routed:
    return chosen(moe.gate(x).sigmoid() + moe.bias)


def half_precision_scores(moe: Any, x: Tensor) -> Routed:
    ids, w = chosen(moe.gate(x).bfloat16().softmax(-1))
    return ids, w.to(x.dtype)


def threshold(moe: Any, x: Tensor) -> Routed:
    scores = softmax(moe, x)
    return chosen(scores.masked_fill(scores < 0.05, 0.0))


def weights_of_other_scores(moe: Any, x: Tensor) -> Routed:
    logits = moe.gate(x)
    ids = logits.softmax(-1).topk(2, dim=-1)[1]
    return ids, logits.sigmoid().gather(1, ids)


def cut_of_the_choice(moe: Any, x: Tensor) -> Routed:
    ids, w = chosen(softmax(moe, x), 3)
    return ids[:, :2], w[:, :2]


def one_by_one(moe: Any, x: Tensor) -> Routed:
    w, ids = softmax(moe, x).max(dim=-1, keepdim=True)
    return ids, w


def changed_in_place(moe: Any, x: Tensor) -> Routed:
    logits = moe.gate(x)
    ids, w = chosen(logits.softmax(-1))
    logits.mul_(2.0)
    return ids, w * logits.sum(-1, keepdim=True)


def weights_changed_through_a_part(moe: Any, x: Tensor) -> Routed:
    ids, w = chosen(softmax(moe, x))
    first, _ = w.split(1, dim=1)
    first.mul_(0.5)
    return ids, w


def weights_changed_in_place(moe: Any, x: Tensor) -> Routed:
    ids, w = chosen(softmax(moe, x))
    half = w[:, :1]
    half.mul_(0.5)
    return ids, w


def groups_by_other_scores(moe: Any, x: Tensor) -> Routed:
    made = grouped(moe, x, lambda scores, choice: scores.view(-1, 2, 4).topk(2, dim=-1)[0].sum(-1))
    return made["ids"], made["w"]


def groups_by_three_best(moe: Any, x: Tensor) -> Routed:
    made = grouped(moe, x, lambda scores, choice: choice.view(-1, 2, 4).topk(3, dim=-1)[0].sum(-1))
    return made["ids"], made["w"]


def groups_by_mean(moe: Any, x: Tensor) -> Routed:
    made = grouped(moe, x, lambda scores, choice: choice.view(-1, 2, 4).mean(-1))
    return made["ids"], made["w"]


def groups_marked_twice(moe: Any, x: Tensor) -> Routed:
    made = grouped(moe, x, top2, mark=2)
    return made["ids"], made["w"]


def masked_scores_used_again(moe: Any, x: Tensor) -> Routed:
    made = grouped(moe, x, top2)
    kept = (made["masked"] > NEVER).sum(-1, keepdim=True)
    return made["ids"], made["w"] * kept


def groups_used_again(moe: Any, x: Tensor) -> Routed:
    made = grouped(moe, x, top2)
    return made["ids"], made["w"] + made["best"].to(x.dtype)


@pytest.mark.parametrize(
    ("route", "reason"),
    [
        (softcapped, r"mul \(.*\) lies between its logits and its scores"),
        (with_temperature, r"div \(.*\) lies between"),
        (with_jitter, r"uniform \(.*\) lies between"),
        (softmax_in_groups, r"softmax \(.*\) is taken of something else than the logits"),
        (log_probabilities, r"log_softmax \(.*\) lies between"),
        (bias_on_logits, r"bias.* is added \(.*\) to something else than a row of softmax or sigmoid scores"),
        (bias_in_the_weights, "the bias that chooses is in its weights, too"),
        (half_precision_scores, r"cast to bfloat16"),
        (threshold, r"lt \(.*\) lies between"),
        (weights_of_other_scores, "read from other scores than it selects over"),
        (cut_of_the_choice, r"the ids that experts see are made by getitem"),
        (one_by_one, r"its form \(softmax_top1\) is none of those that are fused"),
        (changed_in_place, r"mul \(.*\) changes in place what its router reads or returns"),
        (weights_changed_in_place, r"mul \(.*\) changes in place what its router reads or returns"),
        (weights_changed_through_a_part, r"mul \(.*\) changes in place what its router reads or returns"),
        (groups_by_other_scores, "its groups are scored by other values than its experts"),
        (groups_by_three_best, r"topk \(.*\) lies between"),
        (groups_by_mean, r"mean \(.*\) lies between"),
        (groups_marked_twice, "its groups are marked by 2 among 0"),
        (masked_scores_used_again, "depends on the choice, beside the experts"),
        (groups_used_again, "depends on the choice, beside the experts"),
    ],
)
def test_look_alikes_are_left_alone(route: Any, reason: str) -> None:
    """Each with its reason in the report, and with the outputs of the same compiler without fusing, bit for bit."""
    model = model_of(route)
    (args,) = tokens((2, 6))
    backend = r3_pass.backend("eager", fuse_router=True)
    with torch.no_grad():
        torch.manual_seed(1)
        got = torch.compile(model, backend=backend)(*args)
        torch._dynamo.reset()
        torch.manual_seed(1)
        want = torch.compile(model, backend=r3_pass.backend("eager"))(*args)
    entries = backend.report().sites
    assert len(entries) == 2 and not any(entry.fused for entry in entries)
    for entry in entries:
        assert re.search(reason, entry.unfused), entry.unfused
        assert f"NOT FUSED: {entry.module} ({entry.form}): {entry.unfused}" in str(backend.report())
    assert same_outputs(got, want)


# ---- what else reads it --------------------------------------------------------------------------------------------
def test_others_keep_what_they_read() -> None:
    """Probabilities of an auxiliary loss, and the logits, are computed as before; the choice is the operator's."""

    def route(moe: Any, x: Tensor) -> Routed:
        logits = moe.gate(x)
        probabilities = logits.float().softmax(-1)
        w, ids = probabilities.topk(2, dim=-1)
        loss = probabilities.mean(0).square().sum() + logits.logsumexp(-1).mean()
        return ids, w / w.sum(-1, keepdim=True) + loss

    _, made = fused(model_of(route))
    assert made.reasons == ("", "")
    left = operators(made.module)
    assert left["softmax"] == 2 and left["topk"] == 0 and left[ROUTE] == 2


def test_weights_that_are_read_twice_are_fused_up_to_there() -> None:
    """The scores of the chosen are normalised for the experts and summed for a loss: the operator returns what both read."""

    def route(moe: Any, x: Tensor) -> Routed:
        w, ids = softmax(moe, x).topk(2, dim=-1)
        return ids, w / w.sum(-1, keepdim=True) * w.amax()

    _, made = fused(model_of(route))
    assert made.reasons == ("", "")
    left = operators(made.module)
    assert left["topk"] == 0 and left["div"] == 2 and left["sum"] >= 2


def test_weights_divided_in_place_and_read_by_their_old_name() -> None:
    """`w.div_(total)` as a statement: what is read as `w` from then on are the weights."""

    def route(moe: Any, x: Tensor) -> Routed:
        w, ids = softmax(moe, x).topk(2, dim=-1)
        w.div_(w.sum(-1, keepdim=True))
        return ids, w * w

    model = model_of(route)
    (args,) = tokens((2, 6))
    with torch.no_grad():
        want = model(*args)
        backend = r3_pass.backend("eager", fuse_router=True)
        got = torch.compile(model, backend=backend)(*args)
    assert {entry.fused for entry in backend.report().sites} == {True}
    assert torch.allclose(want, got, atol=1e-5)


def test_a_mask_put_on_through_a_view_is_not_lost() -> None:
    """The topk reads the scores by their own name; the mask was written through a view of another shape."""

    def route(moe: Any, x: Tensor) -> Routed:
        scores = softmax(moe, x)
        grouped = scores.view(-1, 2, 4)
        best = grouped.amax(-1).topk(1, dim=-1)[1]
        dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        grouped.masked_fill_(dropped.unsqueeze(-1), 0.0)
        w, ids = scores.topk(2, dim=-1)
        return ids, w

    graph, made = fused(model_of(route))
    assert made.module is graph and all("changes in place" in reason for reason in made.reasons), made.reasons


def test_routing_of_three_dimensional_tokens() -> None:
    """Logits [B, S, E] that are viewed as [T, E], and ids [B, S, K]."""

    def route(moe: Any, x: Tensor) -> Routed:
        scores = moe.gate(x.view(2, -1, x.shape[-1])).softmax(-1)
        w, ids = scores.view(-1, 8).topk(2, dim=-1)
        return ids, w

    _, made = fused(model_of(route))
    assert made.reasons == ("", "")

    def kept(moe: Any, x: Tensor) -> Routed:
        w, ids = moe.gate(x.view(2, -1, x.shape[-1])).softmax(-1).topk(2, dim=-1)
        return ids.flatten(0, 1), w.flatten(0, 1)

    _, made = fused(model_of(kept))
    assert made.reasons == ("", "")


def test_weights_that_need_gradients_are_not_fused() -> None:
    """With gradients, the logits need them; when they are switched off, Dynamo compiles the graph again, and it is fused."""
    model = fusable(Spec()).requires_grad_(True)
    (args,) = tokens((2, 6))
    backend = r3_pass.backend("aot_eager", fuse_router=True)
    compiled = torch.compile(model, backend=backend)
    compiled(*args).sum().backward()
    assert all(p.grad is not None for p in model.layers[0].mlp.gate.parameters())  # type: ignore[union-attr, index]
    assert {"gradients" in entry.unfused for entry in backend.report().sites} == {True}
    with torch.no_grad():
        compiled(*args)
    assert {entry.fused for record in backend.graphs[1:] for entry in record.sites()} == {True}


def test_what_was_fused_is_not_run_with_gradients() -> None:
    """Compiled without gradients first: a call with them is compiled anew, and has them."""
    model = fusable(Spec()).requires_grad_(True)
    (args,) = tokens((2, 6))
    backend = r3_pass.backend("aot_eager", fuse_router=True)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        compiled(*args)
    assert {entry.fused for entry in backend.report().sites} == {True}
    compiled(*args).sum().backward()
    assert all(p.grad is not None for p in model.layers[0].mlp.gate.parameters())  # type: ignore[union-attr, index]
    assert {entry.fused for record in backend.graphs[1:] for entry in record.sites()} == {False}


def test_a_region_that_is_checkpointed_is_not_fused() -> None:
    from torch.utils.checkpoint import checkpoint

    inner = fusable(Spec())

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = inner.layers
            self.embed = inner.embed

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    with torch.enable_grad():
        graph = traced(Outer().requires_grad_(True), *tokens((2, 6))[0])
    made = fuse(graph, match(graph.graph).sites)
    assert made.module is graph and all("another graph" in reason for reason in made.reasons), made.reasons


@pytest.mark.parametrize("mode", ["replay", "both"])
def test_replay_is_refused(mode: Any) -> None:
    with pytest.raises(r3_pass.RefusedConfiguration, match="a fused router takes no given routes"):
        r3_pass.backend(mode=mode, fuse_router=True)


def test_the_report_without_fusing_says_nothing_of_it() -> None:
    backend = r3_pass.backend("eager")
    with torch.no_grad():
        torch.compile(fusable(Spec()), backend=backend)(*tokens((2, 6))[0])
    assert {entry.fused for entry in backend.report().sites} == {None} and "fused" not in str(backend.report()).lower()
