"""Every form of routing: replayed, its loss and all its gradients are those of the eager model with the same experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from architectures import ARCHITECTURES, build
from dispatches import DISPATCHES
from forced import gradients, loss_of, random_ids, worst
from more_routers import MORE_ROUTERS
from routers import ROUTERS
from tiny import Case, seeded_call
from torch import Tensor, nn

import r3_pass
from r3_pass.oracle import find, forced

Routes = dict[int, Tensor]

# ---- transformers ----------------------------------------------------------------------------------------------------
OFTEN = ["qwen3_moe", "gpt_oss", "deepseek_v2", "phimoe"]
NOT_HERE = {"switch_transformers"}  # an encoder-decoder, whose layers have no one axis
EAGER = {
    "qwen3_next",
    "qwen3_5_moe",
}  # AOTAutograd cannot compile their backward, with or without this pass (torch 2.13)
RARELY = [name for name in ARCHITECTURES if name not in {*OFTEN, *NOT_HERE}]


def test_checkpointing_is_not_seen(name: str = "qwen3_moe") -> None:
    architecture(name, checkpoint=True)


@pytest.mark.parametrize("name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in RARELY)])
def test_architecture(name: str) -> None:
    architecture(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in {*NOT_HERE, *EAGER, "qwen3_moe"}])
def test_architecture_under_checkpointing(name: str) -> None:
    architecture(name, checkpoint=True)


def architecture(name: str, checkpoint: bool = False) -> None:
    built = build(name)
    spec, model, inputs = built.architecture, built.model, built.inputs[0]
    tokens, blocks = inputs["input_ids"].numel(), built.decoder_layers
    routers = dict(zip(spec.sparse, built.routers.values(), strict=True))
    given = {layer: random_ids(tokens, spec.experts, spec.top_k, seed=layer) for layer in spec.sparse}

    def routing(module: nn.Module, number: int, scores: Tensor, ids: Tensor) -> bool:
        return scores.shape[-1] == spec.experts and (ids.dim() < scores.dim() or ids.shape[-1] in (1, spec.top_k))

    with forced({routers[layer]: ids for layer, ids in given.items()}, routing) as oracle:
        loss = loss_of(model(**inputs))
        want = gradients(model, loss)
    assert oracle.forced >= len(routers)
    backend = r3_pass.backend("eager" if name in EAGER else "aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)

    def call() -> Any:
        if checkpoint:
            return torch.utils.checkpoint.checkpoint(compiled, use_reentrant=False, **inputs)
        return compiled(**inputs)

    with torch._dynamo.config.patch(recompile_limit=64), backend.replay(routes(given, tokens, len(blocks))):
        replayed = loss_of(call())
        got = gradients(model, replayed)
    same((replayed, got), (loss, want))


def test_auxiliary_loss_stays_live() -> None:
    """TRL's default for MoE: a second top-k for each layer, of the same logits, whose choice is only counted."""
    built = build("qwen3_moe")
    model, inputs = built.model, built.inputs[0]
    inputs = {**inputs, "labels": inputs["input_ids"], "output_router_logits": True}
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.5
    tokens, spec = inputs["input_ids"].numel(), built.architecture
    routers = dict(zip(spec.sparse, built.routers.values(), strict=True))
    given = {layer: random_ids(tokens, spec.experts, spec.top_k, seed=layer) for layer in spec.sparse}
    with forced({routers[layer]: ids for layer, ids in given.items()}, lambda *_: True):
        output = model(**inputs)
        want = gradients(model, output.loss)
    assert output.aux_loss > 0
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    with backend.replay(routes(given, tokens, len(built.decoder_layers))):
        replayed = compiled(**inputs)
        got = gradients(model, replayed.loss)
    torch.testing.assert_close(replayed.aux_loss, output.aux_loss)
    same((replayed.loss, got), (output.loss, want))


@pytest.mark.parametrize("compiled", ["layers", "mlps"])
def test_hooks_that_break_blocks_are_named(compiled: str) -> None:
    """What transformers collects router logits by stands between the top-k and the experts of a block."""
    built = build("qwen3_moe")
    model, inputs, spec = built.model, built.inputs[0], built.architecture
    backend = r3_pass.backend("eager", mode="both")
    for block in built.decoder_layers:
        (block if compiled == "layers" else block.mlp).compile(backend=backend)
    tokens = inputs["input_ids"].numel()
    given = {layer: random_ids(tokens, spec.experts, spec.top_k, seed=layer) for layer in spec.sparse}
    with (
        pytest.raises(r3_pass.NoRouterFound, match="output_router_logits"),
        backend.replay(routes(given, tokens, len(built.decoder_layers)), model=model),
    ):
        model(**inputs, output_router_logits=True)
    session = r3_pass.runtime.attach(model, backend=backend, num_slots=tokens)
    with pytest.raises(r3_pass.NoRouterFound, match="output_router_logits"), session.step(range(tokens)):
        model(**inputs, output_router_logits=True)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["model", "layers", "mlps"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_gradient_checkpointing_of_transformers(name: str, compiled: str) -> None:
    """Inside of one graph, and outside of the blocks' graphs, which the backward calls again."""
    built = build(name)
    spec, model, inputs = built.architecture, built.model, built.inputs[0]
    model.train()
    tokens, blocks = inputs["input_ids"].numel(), built.decoder_layers
    routers = dict(zip(spec.sparse, built.routers.values(), strict=True))
    given = {layer: random_ids(tokens, spec.experts, spec.top_k, seed=layer) for layer in spec.sparse}
    with forced(
        {routers[layer]: ids for layer, ids in given.items()},
        lambda module, number, scores, ids: scores.shape[-1] == spec.experts and ids.shape[-1] == spec.top_k,
    ):
        loss = loss_of(model(**inputs))
        want = gradients(model, loss)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    backend = r3_pass.backend("aot_eager", mode="replay")
    call: Any = torch.compile(model, backend=backend) if compiled == "model" else model
    for block in blocks if compiled != "model" else []:
        (block if compiled == "layers" else block.mlp).compile(backend=backend)

    with backend.replay(routes(given, tokens, len(blocks)), model=model):
        replayed = loss_of(call(**inputs))
        got = gradients(model, replayed)
    same((replayed, got), (loss, want))


# ---- hand-written ----------------------------------------------------------------------------------------------------
CASES = {name: case for cases in (ROUTERS, MORE_ROUTERS, DISPATCHES) for name, case in cases.items()}
HAND_OFTEN = [
    "sigmoid_with_balance_bias",
    "two_argmax_with_capacity",
    "one_more_than_needed",
    "sorted_then_narrowed",
    "repeated_max",
    "groups_masked_by_setitem",
    "switch_top1",
    "shared_expert_as_last_column",
    "auxiliary_topk",
    "checkpointed_blocks",
]
MASKED = {"padded_gate_masked": 8}  # experts past these have a score of -inf
REFUSED = {
    "hierarchical": "mixes them with other integers",
    "exploring": "an expert twice",  # it draws the same expert twice
    "single_neuron_experts": "only pairs of the best half keys are scored",
    "one_choice_for_two_layers": "choose experts of layers.0, layers.1",
    "attention_experts_by_another_name": "routes twice in one forward",
}
NO_TRAINING = {
    "groups_masked_in_place",  # softmax's result changed in place
    "ids_shifted_in_place",  # ids changed in place behind the gather that saved them
    "experts_in_a_custom_op",  # no backward is registered
    "placed_experts",
    "masked_experts_before_softmax",  # weights of -inf where random ids name them
}
NOT_TRACED = {"choice_into_buffers", "attention_router", "vectorised_experts"}  # no site without a session's structure
TAKEN = [
    name
    for name, case in CASES.items()
    if case.verdict == "captured" and name not in {*REFUSED, *NO_TRAINING, *NOT_TRACED, "loop_over_experts"}
]


@pytest.mark.parametrize(
    "name", [*HAND_OFTEN, *(pytest.param(n, marks=pytest.mark.slow) for n in TAKEN if n not in HAND_OFTEN)]
)
def test_router(name: str) -> None:
    case = CASES[name]
    model, ((*args,), *_) = case.build()
    truth = case.truth(model, tuple(args))
    tokens, blocks = args[0].numel(), list_of_blocks(model, truth)
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    live = loss_of(seeded_call(compiled, tuple(args)))
    off = gradients(model, live)
    own = routes(truth, tokens, len(blocks))
    if not all(site.form == "table" for site in backend.report().sites):
        with backend.replay(own):
            loss = loss_of(seeded_call(compiled, tuple(args)))
            on = gradients(model, loss)
        assert torch.equal(loss, live) and all(torch.equal(on[n], off[n]) for n in off), "own ids: the same bits"
        experts = MASKED.get(name) or max(site.num_experts for site in backend.report().sites)
        truth = {layer: random_ids(tokens, experts, ids.shape[1], seed=layer) for layer, ids in truth.items()}
    chosen = find(
        {blocks[n]: ids for n, ids in case.truth(model, tuple(args)).items()}, lambda: seeded_call(model, tuple(args))
    )
    with forced({blocks[n]: ids for n, ids in truth.items()}, lambda module, number, *_: number in chosen[module]):
        loss = loss_of(seeded_call(model, tuple(args)))
        want = gradients(model, loss)
    with backend.replay(routes(truth, tokens, len(blocks))):
        replayed = loss_of(seeded_call(compiled, tuple(args)))
        got = gradients(model, replayed)
    same((replayed, got), (loss, want))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_router(name: str) -> None:
    case = CASES[name]
    model, ((*args,), *_) = case.build()
    truth = case.truth(model, tuple(args))
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    given = routes(truth, args[0].numel(), len(list_of_blocks(model, truth)))
    with pytest.raises(r3_pass.R3Error, match=REFUSED[name]), backend.replay(given):
        seeded_call(compiled, tuple(args))


@pytest.mark.parametrize("name", ["groups_masked_in_place", "ids_shifted_in_place"])
def test_router_that_cannot_be_trained(name: str) -> None:
    """Without gradients, its output is that of the eager model, where masks and ids change in place."""
    case = CASES[name]
    model, ((*args,), *_) = case.build()
    model.requires_grad_(False)
    truth = case.truth(model, tuple(args))
    tokens, blocks = args[0].numel(), list_of_blocks(model, truth)
    given = {layer: random_ids(tokens, 8, ids.shape[1], seed=layer) for layer, ids in truth.items()}
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    chosen = find({blocks[n]: ids for n, ids in truth.items()}, lambda: seeded_call(model, tuple(args)))
    with forced({blocks[n]: ids for n, ids in given.items()}, lambda module, number, *_: number in chosen[module]):
        want = loss_of(seeded_call(model, tuple(args)))
    with backend.replay(routes(given, tokens, len(blocks))):
        torch.testing.assert_close(loss_of(seeded_call(compiled, tuple(args))), want)


def list_of_blocks(model: nn.Module, truth: Routes) -> list[nn.Module]:
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict) and len(m) > max(truth))
    return [*next(lists).children()]


def routes(by_layer: Routes, tokens: int, layers: int) -> Tensor:
    """int64 [T, L, K]"""
    found = torch.full((tokens, layers, max(ids.shape[1] for ids in by_layer.values())), -1)
    for layer, ids in by_layer.items():
        found[:, layer, : ids.shape[1]] = ids
    return found


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    apart, whose = worst(got[1], want[1])
    assert apart < 1e-5, f"{whose} differs by {apart}"


def test_every_case_is_somewhere() -> None:
    assert {*REFUSED, *NO_TRAINING, *NOT_TRACED, *HAND_OFTEN} <= {*CASES} and isinstance(CASES["drawn"], Case)
