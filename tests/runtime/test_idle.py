"""Tensor-parallel ranks that export nothing: the same adapters run there, and not a byte is written."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import serving
import torch
from engine import Engine, ReferenceAdapter
from ranks import record_ops
from reference import nearly, tiny

import r3_pass
from r3_pass import RefusedConfiguration
from r3_pass.runtime import IdleSession, Session
from r3_pass.runtime.engines import Deployment, TransformersAdapter


def rank_of(adapter: type[Any], rank: int) -> type[Any]:
    """The adapter, unchanged but for what it says of itself."""
    return type(
        "Rank",
        (adapter,),
        {"deployment": property(lambda self: Deployment(tensor_parallel=2, tensor_parallel_rank=rank))},
    )


def reference_engine(rank: int) -> tuple[Engine, Any]:
    target = tiny(0)
    engine = Engine(
        target,
        r3_pass.backend("eager"),
        drafter=nearly(target),
        num_drafts=2,
        num_blocks=14,
        block_size=4,
        max_batch_tokens=16,
        max_num_seqs=4,
    )
    return engine, r3_pass.runtime.attach(rank_of(ReferenceAdapter, rank)(engine))


def serve(rank: int) -> tuple[list[Any], int, Any]:
    """All that an engine tells a session, on one rank: results, how often ids were recorded, the session."""
    engine, session = reference_engine(rank)
    prompts = np.random.default_rng(0).integers(0, 12, (6, 9)).tolist()
    with record_ops() as calls:
        results = engine.generate([*prompts, prompts[0]], max_tokens=12)
        engine.add_request([1, 2, 3], 9)
        for _ in range(3):
            engine.step()
        engine.compact()
        engine.update_weights(tiny(0).state_dict(), 7)
        engine.step()
        results.append(engine.abort(next(iter(engine.requests))))
        results += engine.sleep()
        engine.wake(20)
        results += engine.generate(prompts[:2], max_tokens=4)
    assert engine.scheduler.num_hits and engine.scheduler.num_preempted
    return results, calls[0], session


def test_the_reference_adapter_runs_unchanged_on_every_rank() -> None:
    """The same tokens on both, rows from the first alone; on the second graphs run their plain flavour, bound to nothing."""
    first, calls, session = serve(0)
    assert calls > 20
    assert all(result.routed_experts is not None for result in first)
    session.detach()
    torch._dynamo.reset()
    second, calls, idle = serve(1)
    assert isinstance(idle, IdleSession) and isinstance(idle, Session)
    assert calls == 0 and idle.host_bytes == 0 and idle.version == 7
    assert [r.token_ids for r in second] == [r.token_ids for r in first]
    assert all(result.routed_experts is None and result.error is None for result in second)
    idle.check_integrity()
    idle.detach()


def test_every_rank_charges_the_same_bytes() -> None:
    first, second = reference_engine(0), reference_engine(1)
    first[0].generate([[1, 2, 3]], max_tokens=2)
    assert first[1].geometry == second[1].geometry
    assert first[1].geometry == r3_pass.runtime.plan(second[0].runner.model, 14 * 4)
    for engine, session in (first, second):
        engine.sleep()
        with pytest.raises(RefusedConfiguration, match="no KV cache"):
            _ = session.geometry
        engine.wake(9)
    assert first[1].geometry == second[1].geometry and second[1].geometry.num_slots == 36
    for _, session in (first, second):
        session.detach()


def test_continuous_batching_runs_unchanged_on_an_idle_rank() -> None:
    model = serving.compiled(serving.qwen3_moe())
    session = r3_pass.runtime.attach(rank_of(TransformersAdapter, 1)(model))
    prompts = serving.prompts(4)
    outputs = model.generate_batch(
        prompts,
        generation_config=serving.sampled(),
        continuous_batching_config=serving.settings(blocks=24),
        progress_bar=False,
    )
    session.check_integrity()
    session.detach()
    assert len(outputs) == 4 and all(output.routed_experts is None for output in outputs.values())
    assert all(output.status.name == "FINISHED" for output in outputs.values())


@pytest.mark.parametrize(
    "name, ask",
    [
        ("describe", lambda s: s.describe()),
        ("read", lambda s: s.read([0])),
        ("self_test", lambda s: s.self_test()),
        ("versions", lambda s: s.versions("a")),
    ],
)
def test_what_would_look_at_rows_names_the_rank_to_ask(name: str, ask: Any) -> None:
    _, session = reference_engine(1)
    with pytest.raises(RefusedConfiguration, match=rf"{name}: this is tensor-parallel rank 1 of 2.* rank 0"):
        ask(session)
    session.detach()
    with pytest.raises(RefusedConfiguration, match="detached"):
        session.step([0])


def test_no_method_of_a_session_is_forgotten() -> None:
    """What an idle session inherits would look for a buffer."""
    public = {name for name, value in vars(Session).items() if not name.startswith("_") and name != "detached"}
    assert public <= vars(IdleSession).keys()


def test_a_rank_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_rank=2 is none of tensor_parallel=2 ranks"):
        Deployment(tensor_parallel=2, tensor_parallel_rank=2)


# ---- what a transformers model says of itself ---------------------------------------------------------------------------
def loaded(**facts: Any) -> Any:
    """A model that claims to have been loaded in some way; `config` belongs to its config."""
    model = serving.qwen3_moe()
    for name, value in facts.items():
        if name == "distributed_config":
            model.config.distributed_config = types.SimpleNamespace(**value)
        else:
            setattr(model, name, value)
    return model


def mesh(rank: int, *names: str) -> Any:
    return types.SimpleNamespace(ndim=len(names), mesh_dim_names=names, get_local_rank=lambda *_: rank)


@pytest.mark.parametrize(
    "facts, why",
    [
        ({"hf_device_map": {"model.layers.0": 0, "model.layers.1": 1}}, r"several devices.*'cuda:0', 'cuda:1'"),
        ({"hf_device_map": {"model.layers.0": "cpu", "model.layers.1": "disk"}}, r"offloaded.*'cpu', 'disk'"),
        ({"hf_device_map": {"": "disk"}}, r"offloaded \(layer_devices=\('disk',\)\)"),
        ({"distributed_config": {"pp_size": 2}}, "pipeline parallel"),
        ({"distributed_config": {"ep_size": 4}}, r"expert parallel \(expert_parallel=4"),
        (
            {"distributed_config": {"enable_expert_parallel": True}, "_tp_size": 2, "_device_mesh": mesh(0, "tp")},
            r"expert parallel \(expert_parallel=2",
        ),
        ({"_tp_size": 2}, r"tensor parallel \(tp_size=2\), and its device mesh does not say"),
    ],
)
def test_a_transformers_model_is_refused_by_how_it_was_loaded(facts: dict[str, Any], why: str) -> None:
    model = loaded(**facts)
    with pytest.raises(RefusedConfiguration, match=why):
        r3_pass.runtime.attach(model)
    assert "generate_batch" not in vars(model)


@pytest.mark.parametrize("names", [("tp",), ("ep",), ("dp", "tp")])
def test_a_tensor_parallel_model_says_its_rank(names: tuple[str, ...]) -> None:
    for rank in (0, 1):
        model = loaded(_tp_size=2, _device_mesh=mesh(rank, *names))
        assert TransformersAdapter(model).deployment.exports == (rank == 0)
        session = r3_pass.runtime.attach(model)
        assert isinstance(session, IdleSession) == (rank == 1)
        session.detach()


def test_a_model_on_one_device_is_not_refused() -> None:
    session = r3_pass.runtime.attach(loaded(hf_device_map={"": "cpu"}))
    session.detach()
