"""Deployments that are refused at start-up: each by name, before anything is changed, and as the README says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from decoder import decoder
from stated import Engine

import r3_pass
from r3_pass import RefusedConfiguration
from r3_pass.runtime.engines import Deployment
from r3_pass.runtime.refusals import REFUSALS, check_deployment

README = Path(__file__).parent.parent.parent / "README.md"


REFUSED = {
    "pipeline parallel": Deployment(pipeline_parallel=2),
    "context parallel": Deployment(context_parallel=4),
    "expert parallel": Deployment(expert_parallel=2),
    "layers on several devices, or offloaded": Deployment(layer_devices=("cuda:0", "cuda:1")),
    "data-parallel attention with gathered tokens": Deployment(gathered_tokens=True),
    "KV transfer or offload without its rows": Deployment(moves_kv=True),
    "prefill and decode in different engines": Deployment(splits_decode=True),
    "no KV slot for each token": Deployment(token_slots=False),
    "a fused router without ids in the graph": Deployment(opaque_routers=("mono_decode",)),
}


def test_every_refusal_has_a_test() -> None:
    assert list(REFUSED) == [refusal.what for refusal in REFUSALS]


@pytest.mark.parametrize("what", list(REFUSED))
def test_a_deployment_is_refused_at_attach(what: str) -> None:
    """With the fact that was found and what to do; the model has no mark of it, and the adapter was not installed."""
    deployment = REFUSED[what]
    engine = Engine(decoder(config={"num_experts_per_tok": 2}), deployment)
    changed = {f.name: getattr(deployment, f.name) for f in dataclasses.fields(Deployment)}
    (fact, value), *_ = [(k, v) for k, v in changed.items() if v != getattr(Deployment(), k)]
    with pytest.raises(RefusedConfiguration, match=rf"{what} \({fact}={re.escape(repr(value))}") as raised:
        r3_pass.runtime.attach(engine)
    (refusal,) = [r for r in REFUSALS if r.what == what]
    assert refusal.why in str(raised.value) and refusal.instead in str(raised.value)
    assert not engine.installed and not any(vars(p) for p in engine.model.parameters())


@pytest.mark.parametrize(
    "deployment",
    [
        Deployment(),
        Deployment(tensor_parallel=8),
        Deployment(expert_parallel=8, global_expert_ids=True),
        Deployment(layer_devices=("cuda:3",)),
        Deployment(gathered_tokens=True, maps_gathered_tokens=True),
        Deployment(moves_kv=True, splits_decode=True, carries_rows=True),
    ],
)
def test_what_an_adapter_takes_care_of_is_not_refused(deployment: Deployment) -> None:
    engine = Engine(decoder(config={"num_experts_per_tok": 2}), deployment)
    session = r3_pass.runtime.attach(engine)
    assert engine.installed
    session.detach()


def test_a_self_test_needs_a_batch_of_the_adapter() -> None:
    session = r3_pass.runtime.attach(Engine(decoder(config={"num_experts_per_tok": 2}), Deployment()))
    with pytest.raises(
        RefusedConfiguration, match=r"Attach to a compiled model .* or give the engine's adapter a `probe`"
    ):
        session.self_test()
    session.detach()


def test_all_that_applies_is_named_at_once() -> None:
    with pytest.raises(RefusedConfiguration, match=r"(?s)pipeline parallel.*context parallel"):
        check_deployment(Deployment(pipeline_parallel=2, context_parallel=2))


def test_a_model_on_several_devices() -> None:
    """Layers that write to a buffer on another device."""
    model = decoder(config={"num_experts_per_tok": 2})
    model.layers[2].to("meta")
    with pytest.raises(RefusedConfiguration, match=r"several devices \(layers\.0.* on cpu and layers\.2.* on meta\)"):
        r3_pass.runtime.attach(model, num_slots=8)


def test_the_readme_has_the_table() -> None:
    text = README.read_text()
    table = text[text.index("| deployment | why |") :].split("\n\n")[0].splitlines()[2:]
    assert table == [f"| {refusal.what} | {refusal.why} |" for refusal in REFUSALS]
