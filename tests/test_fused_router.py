"""Whole models with fused routers: which are fused, every recorded row is what an eager prefill routes, and outputs stay close."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from all_routers import ALL_ROUTERS
from architectures import ARCHITECTURES, build
from fusable import FORMS, fusable
from recording import compiled, recording, same_rows
from tiny import Case, tokens
from verdicts import router

import r3_pass

EVERY_TIME = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "glm4_moe", "deepseek_v2", "minimax_m2"]
OTHERS = [name for name in ARCHITECTURES if name not in EVERY_TIME and name != "switch_transformers"]
ORDERED = ["qwen3_moe", "mixtral", "gpt_oss", "olmoe"]
"""Others ask topk for no order; a fused router's is that of the scores."""

UNFUSED = {
    "laguna": r"mul \(.*\) lies between its logits and its scores",  # a soft cap
    "muse_spark_text": r"mul \(.*\) lies between its logits and its scores",  # a temperature
    "phimoe": r"its form \(top1x2\) is none of those that are fused",
}
CAPTURED = {name: case for name, case in ALL_ROUTERS.items() if case.verdict == "captured"}
ALWAYS_FUSED = ["sigmoid_with_balance_bias", "groups_by_top2_sum", "renormalised_in_place", "loop_over_experts"]
NEVER_FUSED = ["groups_masked_in_place", "argsort_then_slice", "one_more_than_needed", "experts_first"]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch.set_num_threads(1)
    torch._dynamo.reset()


def also_slow(others: list[str]) -> list[object]:
    return [*EVERY_TIME, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.mark.parametrize("name", also_slow(OTHERS))
def test_architectures(name: str) -> None:
    check(name, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_TIME)
def test_architectures_layer_by_layer(name: str) -> None:
    check(name, "aot_eager", per_layer=True)


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_architectures_with_inductor(name: str) -> None:
    check(name, "inductor")


def check(name: str, inner: str, per_layer: bool = False) -> None:
    """Both calls, the second one with dynamic sizes; live and recording, the outputs are the same to the bit."""
    built = build(name)
    layers = built.decoder_layers if per_layer else []
    truths = [built.truth(inputs) for inputs in built.inputs]
    with torch.no_grad():
        wanted = [built.model(**inputs)[0] for inputs in built.inputs]
    with (
        torch._dynamo.config.patch(recompile_limit=64),
        torch.no_grad(),
        recording(built.model, inner, layers, fuse_router=True) as recorder,
    ):
        for inputs, truth, want in zip(built.inputs, truths, wanted, strict=True):
            count = inputs["input_ids"].numel()
            got, rows = recorder.rows(count, lambda inputs=inputs: recorder.compiled(**inputs)[0])
            assert same_rows(rows, truth, name in ORDERED) == ""
            assert torch.allclose(got, want, rtol=1e-3, atol=1e-4), float((got - want).abs().max())
            assert torch.equal(recorder.compiled(**inputs)[0], got), "recording changed the outputs"
        entries = recorder.backend.report().sites
    assert {entry.fused for entry in entries} == {name not in UNFUSED}
    for entry in entries:
        assert entry.fused or re.search(UNFUSED[name], entry.unfused), entry.unfused


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in ALWAYS_FUSED + NEVER_FUSED else pytest.mark.slow)
        for name, case in CAPTURED.items()
    ],
)
def test_routers(case: Case) -> None:
    """Fused or not, the rows of hand-written routers are what they chose."""
    model, inputs = case.build()
    outcome = router(case, model, inputs, "eager", fuse_router=True)
    assert outcome.right, f"{case.why}\n{outcome.verdict} instead of {case.verdict}: {outcome.detail}"
    if case.name in ALWAYS_FUSED:
        assert set(outcome.unfused) == {""}
    if case.name in NEVER_FUSED:
        assert all(outcome.unfused)


def test_outputs_with_and_without_a_session_are_the_same() -> None:
    """Both flavours of a graph are fused; the ids of another layout are recorded from what the experts get."""
    model = fusable(FORMS["sigmoid_bias"])
    (args,) = tokens((2, 6))
    with torch.no_grad():
        backend = r3_pass.backend("aot_eager", fuse_router=True)
        run = compiled(model, backend)
        live = run(*args)
        session = r3_pass.runtime.attach(run, num_slots=16)
        with session.step(range(12)):
            assert torch.equal(run(*args), live)
        assert (session.read(range(12)) >= 0).all()
        assert "fused" in str(backend.report()).splitlines()[0]
        session.detach()


def test_self_test_of_a_session() -> None:
    """An eager model chooses what the fused router did; where its topk is unsorted, in another order."""
    for form in ("softmax_normalised", "sigmoid_bias_groups"):
        torch._dynamo.reset()
        model = fusable(dataclasses.replace(FORMS[form], top_k=3, spelling=1))
        with torch.no_grad(), recording(model, fuse_router=True) as recorder:
            assert recorder.session.self_test(*tokens((2, 6))[0]).ok


def test_by_name_with_options() -> None:
    model = fusable(FORMS["softmax"])
    (args,) = tokens((2, 6))
    options = {"inner": "eager", "fuse_router": True}
    with torch.no_grad():
        want = torch.compile(model, backend=r3_pass.backend("eager", fuse_router=True))(*args)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, backend="r3_pass", options=options)(*args), want)
