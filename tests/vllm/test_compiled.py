"""vLLM compiled: the pass where the graph shows the routing, and what is said where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm_serving as serving

import r3_pass
from r3_pass.errors import RefusedConfiguration
from r3_pass.runtime.engines.vllm import compilation_config


def _model(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()


def _generate(llm: Any, **sampling: Any) -> list[Any]:
    llm.reset_prefix_cache()
    found: list[Any] = llm.generate(serving.prompts(), serving.sampling(**sampling), use_tqdm=False)
    return found


def _tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(c.token_ids) for o in outputs for c in o.outputs]


@pytest.fixture(scope="module")
def plain(start: Any) -> Any:
    """As vLLM compiles by itself."""
    return start("qwen3_moe", num_gpu_blocks_override=14)


@pytest.fixture
def opaque(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The shape that CUDA has: the whole MoE layer is one operator."""
    import torch
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    def select(runner: Any) -> Any:
        shared = runner._shared_experts is not None
        return torch.ops.vllm.moe_forward_shared if shared else torch.ops.vllm.moe_forward

    monkeypatch.setattr(MoERunner, "_select_forward", select)
    yield


def test_a_graph_of_vllms_own_backend_is_refused(plain: Any) -> None:
    """Its router is inlined, and nothing of ours was there when it was compiled."""
    with pytest.raises(RefusedConfiguration, match="compiled into a graph before") as raised:
        r3_pass.runtime.attach(plain)
    message = str(raised.value)
    assert message.startswith("2 of 2 MoE layers") and "layer 0 (model.layers.0.mlp.experts)" in message
    assert "layer 2 (" in message and "r3_pass.runtime.engines.vllm.backend" in message


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_the_graph(name: str, start: Any, plain: Any) -> None:
    """Prefix hits, chunks of 48 tokens, preemption: rows of an eager prefill, and tokens of a run without r3_pass."""
    config = compilation_config() if name == "qwen3_moe" else serving.FAST
    llm = start(name, compilation_config=config, num_gpu_blocks_override=14)
    without = _generate(llm, new=60)
    session = r3_pass.runtime.attach(llm)
    outputs = _generate(llm, new=60)
    truth = serving.Truth(getattr(serving, name)())
    assert truth.check(outputs) > 1000 and truth.ties == 0
    assert _tokens(outputs) == _tokens(without)
    if name == "qwen3_moe":
        assert _tokens(_generate(plain, new=60)) == _tokens(outputs)
    report = session.report()
    assert [(s.layer, s.graph) for s in report.sites] == [(layer, 0) for layer in session.describe().layers]
    assert not any(r.routing for r in report.rejected)
    session.check_integrity()
    session.detach()
    assert _tokens(_generate(llm, new=60)) == _tokens(outputs)


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_an_opaque_operator(name: str, start: Any, opaque: None) -> None:
    """The graph holds `vllm.moe_forward` or `vllm.moe_forward_shared`, and no top-k."""
    llm = start(name, compilation_config=serving.FAST, num_gpu_blocks_override=14)
    without = _generate(llm, new=60)
    session = r3_pass.runtime.attach(llm)
    outputs = _generate(llm, new=60)
    truth = serving.Truth(getattr(serving, name)())
    assert truth.check(outputs) > 1000 and truth.ties == 0
    assert _tokens(outputs) == _tokens(without)
    assert {(s.form, s.graph) for s in session.report().sites} == {("router_hook", None)}
    session.detach()
    assert all(m.router.capture_fn is None for m in _model(llm).modules() if hasattr(m, "router"))
