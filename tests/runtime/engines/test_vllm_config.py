"""What of vLLM's configuration is refused, by name; no vLLM is needed."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from r3_pass.errors import RefusedConfiguration, StaleRoutes
from r3_pass.runtime.engines import vllm, vllm_plugin
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
    vllm.check_config(given)
    check_deployment(vllm.deployment_of(given))


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
            vllm.check_version()
            assert ("was tested with vLLM 0.32.0, this is 0.33.1" in caplog.text) == said


def test_a_plug_in_that_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_plugin.SWITCH, raising=False)
    vllm_plugin.register()  # would import vLLM
    monkeypatch.setenv(vllm_plugin.SWITCH, "0")
    vllm_plugin.register()
    assert "vllm.v1.engine.core" not in sys.modules or not hasattr(sys.modules["vllm.v1.engine.core"], vllm_plugin.CALL)


@pytest.mark.parametrize("core", ["7-ab12", "0_7-ab12", "7"])
def test_errors_of_another_process(core: str) -> None:
    output = SimpleNamespace(request_id="7")
    with pytest.raises(StaleRoutes, match=rf"request '{core}' has no routed_experts \(1 in all\): why: so") as raised:
        vllm.raise_errors({core: "StaleRoutes: why: so", "17-cd34": "StaleRoutes: of another call"}, [output])
    assert raised.value.__dict__["outputs"] == [output]
    vllm.raise_errors({"17-cd34": "StaleRoutes: of another call"}, [output])


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
