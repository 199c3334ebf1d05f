"""What of vLLM's configuration is refused, by name; no vLLM is needed."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from r3_pass.errors import RefusedConfiguration, StaleRoutes
from r3_pass.runtime.engines import vllm, vllm_config, vllm_front, vllm_plugin
from r3_pass.runtime.engines.vllm_slots import find_slots
from r3_pass.runtime.refusals import check_deployment


def config(**changes: Any) -> Any:
    """Of vLLM 0.32, as far as it is read; `parallel__data_parallel_size=2` changes a part."""
    parallel = {
        "pipeline_parallel_size": 1, "tensor_parallel_size": 1, "data_parallel_size": 1, "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1, "use_ubatching": False,
    }  # fmt: skip
    made = SimpleNamespace(
        use_v2_model_runner=False,
        parallel_config=SimpleNamespace(**parallel),
        aux_output_config=SimpleNamespace(enabled=False),
        speculative_config=None,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        model_config=SimpleNamespace(runner_type="generate"),
        kv_transfer_config=None,
        ec_transfer_config=None,
    )
    for name, value in changes.items():
        part, _, field = name.rpartition("__")
        setattr(getattr(made, part) if part else made, field, value)
    return made


def check(given: Any) -> None:
    vllm_config.check_config(given)
    check_deployment(vllm_config.deployment_of(given))


def test_the_usual_configuration() -> None:
    check(config())
    check(config(speculative_config=SimpleNamespace(method="ngram")))
    check(config(scheduler_config__async_scheduling=True))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallel"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "context parallel"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallel"),
        ({"parallel_config__data_parallel_size": 2}, "gathered tokens"),
        ({"parallel_config__tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"parallel_config__use_ubatching": True}, "microbatches"),
        ({"kv_transfer_config": object()}, "KV transfer"),
        ({"ec_transfer_config": object()}, "another instance"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"aux_output_config__enabled": True}, "enable_return_routed_experts is on"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "'eagle'"),
        (
            {"speculative_config": SimpleNamespace(method="ngram"), "scheduler_config__async_scheduling": True},
            "async_scheduling=False",
        ),
        ({"cache_config__kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
        ({"model_config__runner_type": "pooling"}, "'pooling'"),
    ],
)  # fmt: skip
def test_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RefusedConfiguration, match=named):
        check(config(**changes))


def test_versions(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for version, said in (("0.32.0", False), ("0.32.0+cpu", False), ("0.33.1", True)):
            monkeypatch.setitem(sys.modules, "vllm.version", SimpleNamespace(__version__=version))
            caplog.clear()
            vllm_config.check_version()
            assert ("was tested with vLLM 0.32.0, this is 0.33.1" in caplog.text) == said


def test_a_plug_in_that_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_plugin.SWITCH, raising=False)
    vllm_plugin.register()  # would import vLLM
    monkeypatch.setenv(vllm_plugin.SWITCH, "0")
    vllm_plugin.register()
    assert "vllm.v1.engine.core" not in sys.modules or not hasattr(sys.modules["vllm.v1.engine.core"], vllm_plugin.CALL)


def test_errors_are_their_requests() -> None:
    """By the ids that callers know: of a request that runs still in the front end, of one that has ended there, of another call."""
    states = {"7-ab12": SimpleNamespace(external_req_id="7")}
    processor = SimpleNamespace(request_states=states, r3_pass_names={"0_8-cd34": "8", "1_8-cd34": "8"})
    core = {
        "7-ab12": "StaleRoutes: why: request '7-ab12', position 3",
        "0_8-cd34": "MissingRoutes: first",
        "1_8-cd34": "MissingRoutes: second",
        "9-ef56": "StaleRoutes: of a request that was aborted",
    }
    found = vllm_front.by_user_id(processor, core)
    assert list(found) == ["7", "8", "9-ef56"] and found["8"] == "MissingRoutes: first" and not processor.r3_pass_names
    outputs = [SimpleNamespace(request_id=i) for i in ("6", "7", "8")]
    with pytest.raises(StaleRoutes) as raised:
        vllm_front.raise_errors(found, outputs)
    assert str(raised.value) == "request '7' has no routed_experts (2 in all): why: request '7', position 3"
    assert raised.value.__dict__["outputs"] == outputs
    vllm_front.raise_errors(found, outputs[:1])
    assert vllm_front.by_user_id(None, core) == core, "an EngineCore has no front end"


@pytest.mark.parametrize(
    ("switch", "named"),
    [
        ("0", "engine with R3_PASS_VLLM=1 in the environment"),
        ("1", r"R3_PASS_VLLM is set: .* detach\(\) ended it .*Start a new engine, and leave its session attached"),
    ],
)
def test_cuda_graphs_of_another_time(switch: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: after a detach, whoever attached again was told to set what was set."""
    monkeypatch.setenv(vllm_plugin.SWITCH, switch)
    adapter: Any = object.__new__(vllm.VllmAdapter)
    adapter.runner = SimpleNamespace(device=torch.device("cuda"))
    adapter._captured = True
    mode = SimpleNamespace(name="FULL")
    adapter._config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
    with pytest.raises(RefusedConfiguration, match=rf"cudagraph_mode=FULL.*{named}.*enforce_eager=True"):
        adapter._refuse_captured()
    mode.name = "NONE"
    adapter._refuse_captured()


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class UniformTypeKVCacheSpecs(SimpleNamespace):
    pass


def _cache(*specs: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=s, layer_names=[f"layer.{i}"]) for i, s in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups, num_blocks=5)


def test_the_group_of_full_attention() -> None:
    full, window = FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=8)
    found = find_slots(_cache(window, full))
    assert found is not None and (found.group, found.layer, found.num_slots) == (1, "layer.1", 20)
    assert found.of([3, 1]).tolist() == [12, 13, 14, 15, 4, 5, 6, 7]
    assert find_slots(_cache(window)) is None and find_slots(_cache()) is None
    uniform = UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"a": full, "b": full})
    assert find_slots(_cache(uniform)) is not None
    uniform.kv_cache_specs["b"] = window
    assert find_slots(_cache(uniform)) is None
