"""The MoE architectures of transformers: every row of every layer is what the router chose, and the outputs stay what they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from architectures import ARCHITECTURES, Built, build
from recording import Recorder, compiled, recording, same_rows
from torch import Tensor, nn

import r3_pass

EVERY_TIME = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "glm4_moe", "granitemoe"]
OTHERS = [name for name in ARCHITECTURES if name not in EVERY_TIME and name != "switch_transformers"]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Where a model breaks its graph, all of its layers share the frames of a few decorators, more often than Dynamo's 8 times."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def also_slow(others: list[str]) -> list[object]:
    return [*EVERY_TIME, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.mark.parametrize("name", also_slow(OTHERS))
def test_whole_model(name: str) -> None:
    check(build(name), "aot_eager")


@pytest.mark.parametrize("name", also_slow(OTHERS[::5]))
def test_layer_by_layer(name: str) -> None:
    check(build(name), "aot_eager", per_layer=True)


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_inductor(name: str) -> None:
    check(build(name), "inductor")


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("name", [name for name in EVERY_TIME if name not in ("qwen3_moe", "gpt_oss")])
def test_inductor_for_the_others(name: str) -> None:
    check(build(name), "inductor")


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("name", EVERY_TIME)
def test_inductor_layer_by_layer(name: str) -> None:
    check(build(name), "inductor", per_layer=True)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", [*EVERY_TIME, "phimoe", "longcat_flash"])
def test_experts_implementation(name: str, experts: str) -> None:
    """The eager experts loop over data-dependent sizes, which splits each layer's graph behind the router."""
    check(build(name, experts), "aot_eager")


def check(built: Built, inner: str, per_layer: bool = False) -> None:
    """Record both calls; the second one has other sizes, for which Dynamo compiles dynamic dimensions."""
    layers = built.decoder_layers if per_layer else []
    truths = [built.truth(inputs) for inputs in built.inputs]
    outputs = []
    with torch.no_grad(), recording(built.model, inner, layers) as recorder:
        for inputs, truth in zip(built.inputs, truths, strict=True):
            tokens = inputs["input_ids"].numel()
            output, rows = recorder.rows(tokens, lambda inputs=inputs: recorder.compiled(**inputs)[0])
            assert rows.shape == (tokens, len(built.decoder_layers), built.architecture.top_k)
            assert same_rows(rows, truth, built.architecture.ordered) == ""
            outputs.append(output)
    assert all(torch.equal(*both) for both in zip(outputs, plain_outputs(built, inner, layers), strict=True))


def plain_outputs(built: Built, inner: str, layers: list[nn.Module]) -> list[Tensor]:
    """What the same compiler makes of the model without r3_pass."""
    torch._dynamo.reset()
    run = compiled(built.model, inner, layers)
    with torch.no_grad():
        return [run(**inputs)[0] for inputs in built.inputs]


def test_a_layer_with_fewer_choices_is_padded() -> None:
    built = build("qwen3_moe")
    list(built.routers.values())[-1].top_k = 2
    inputs = built.inputs[0]
    with torch.no_grad(), recording(built.model) as recorder:
        _, rows = recorder.rows(inputs["input_ids"].numel(), lambda: recorder.compiled(**inputs))
    assert (rows[:, 0] == -1).all() and (rows[:, 1] >= 0).all()
    assert (rows[:, 2, :2] >= 0).all() and (rows[:, 2, 2] == -1).all()


def test_an_encoder_decoder_is_refused_by_name() -> None:
    built = build("switch_transformers")
    with pytest.raises(
        r3_pass.RefusedConfiguration, match="SwitchTransformersForConditionalGeneration is an encoder-decoder"
    ):
        Recorder(built.model, "aot_eager")


def test_the_decoder_of_an_encoder_decoder_is_recorded_by_itself() -> None:
    """What the refusal advises: the decoder alone, with the encoder's states as an input."""
    built = build("switch_transformers")
    inputs = built.inputs[0]
    with torch.no_grad():
        states = built.model.get_encoder()(inputs["input_ids"])[0]
        truth = built.truth(inputs)
        with recording(built.model.get_decoder()) as recorder:
            ids = inputs["decoder_input_ids"]
            _, rows = recorder.rows(
                ids.numel(), lambda: recorder.compiled(ids, encoder_hidden_states=states, use_cache=False)
            )
    assert same_rows(rows, truth) == ""
