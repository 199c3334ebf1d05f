"""The reference engine end to end, each request against one eager prefill of its tokens; on a GPU under CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import architectures
import numpy as np
import pytest
import torch
from engine import Engine, ReferenceAdapter, Result
from reference import VOCAB, Truth, nearly, tiny

import r3_pass
from r3_pass import RefusedConfiguration, StaleRoutes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()


def serve(device: str, num_drafts: int = 0, inner: str = "eager", **sizes: Any) -> tuple[Engine, Any, Truth]:
    """An engine on the device, warmed up (on a GPU: with its CUDA graphs), and its session."""
    target = tiny(0).to(device)
    options = {"num_blocks": 48, "block_size": 4, "max_batch_tokens": 16, "max_num_seqs": 8, **sizes}
    drafter = nearly(target) if num_drafts else None
    truth = Truth(target)
    engine = Engine(target, r3_pass.backend(inner), drafter=drafter, num_drafts=num_drafts, **options)
    session = r3_pass.runtime.attach(ReferenceAdapter(engine))
    if device == "cuda":
        engine.warm_up(max_model_len=64)
        assert len(engine.runner.graphs) == 3
    return engine, session, truth


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, VOCAB, (count, length)).tolist()


def check(results: list[Result], truth: Truth) -> None:
    for result in results:
        assert result.error is None and result.finish_reason in ("length", "stop")
        tokens = tuple(result.prompt_token_ids + result.token_ids)
        assert result.routed_experts.dtype == np.int16
        assert np.array_equal(result.routed_experts, truth.rows(tokens)[:-1])


@pytest.mark.parametrize("device", DEVICES)
def test_decode_with_a_prefix_hit(device: str) -> None:
    engine, session, truth = serve(device)
    (prompt,) = prompts(1, 13)
    first = engine.generate([prompt], max_tokens=20)
    again = engine.generate([prompt], max_tokens=20)
    check(first + again, truth)
    assert first[0].token_ids == again[0].token_ids
    session.detach()


@pytest.mark.parametrize("device", DEVICES)
def test_concurrent_requests(device: str) -> None:
    """More than fit: they wait, are preempted, and take each other's blocks."""
    engine, session, truth = serve(device, num_blocks=24)
    check(engine.generate(prompts(12, 9), max_tokens=24), truth)
    session.check_integrity()
    session.detach()


@pytest.mark.parametrize("device", DEVICES)
def test_chunked_prefill_then_a_prefix_hit(device: str) -> None:
    engine, session, truth = serve(device)
    (prompt,) = prompts(1, 45)
    check(engine.generate([prompt], max_tokens=4), truth)
    check(engine.generate([prompt, [*prompt[:40], 1, 2]], max_tokens=8), truth)
    session.detach()


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_verification_of_drafted_tokens(device: str, num_drafts: int) -> None:
    """With drafts that the target accepts and others that it rejects; tokens are those of an engine without a drafter."""
    engine, session, truth = serve(device, num_drafts)
    results = engine.generate(prompts(6, 9), max_tokens=20)
    check(results, truth)
    session.detach()
    alone, session, _ = serve(device)
    assert [r.token_ids for r in alone.generate(prompts(6, 9), max_tokens=20)] == [r.token_ids for r in results]
    session.detach()


@pytest.mark.inductor
@pytest.mark.parametrize("device", DEVICES)
def test_with_inductor(device: str) -> None:
    engine, session, truth = serve(device, inner="inductor")
    check(engine.generate(prompts(4, 11), max_tokens=12), truth)
    session.detach()


SERVED = ["mixtral", "deepseek_v3", "gpt_oss", "olmoe", "glm4_moe", "qwen2_moe", "phimoe", "granitemoe", "ernie4_5_moe"]


@pytest.mark.parametrize(
    "name", [name if name == "deepseek_v3" else pytest.param(name, marks=pytest.mark.slow) for name in SERVED]
)
def test_serves_architectures(name: str) -> None:
    """Other attentions (latent, with sinks, in windows) and routers; tokens are those of the model's own greedy decoding."""
    built = architectures.build(name)
    oracle = architectures.build(name)
    engine = Engine(built.model, r3_pass.backend("eager"), num_blocks=32, block_size=4, max_batch_tokens=16)
    session = r3_pass.runtime.attach(ReferenceAdapter(engine))
    for result in engine.generate([[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10, 12, 13], [3]], max_tokens=12):
        tokens = torch.tensor([result.prompt_token_ids + result.token_ids])
        with torch.no_grad():
            logits = oracle.model(input_ids=tokens, use_cache=False).logits[0]
        assert logits.argmax(-1)[len(result.prompt_token_ids) - 1 : -1].tolist() == result.token_ids
        rows = result.routed_experts
        for layer, ids in oracle.truth({"input_ids": tokens}).items():
            mine = rows[:, layer, : ids.shape[1]].astype(np.int64)
            theirs = ids[:-1].numpy()
            if not architectures.ARCHITECTURES[name].ordered:
                mine, theirs = np.sort(mine), np.sort(theirs)
            assert np.array_equal(mine, theirs), f"layer {layer}"
    session.detach()


def test_callbacks_come_in_order_and_a_step_late() -> None:
    engine, session, _ = serve("cpu")
    seen: list[int] = []
    name = engine.add_request([1, 2, 3], 5, on_token=lambda _, token: seen.append(token))
    engine.step()
    assert seen == []
    engine.step()
    assert len(seen) == 1
    results: list[Result] = []
    while not results:
        results = engine.step()
    assert results[0].request_id == name and results[0].token_ids == seen and len(results[0].log_probs) == 5
    session.detach()


def test_sleep_frees_the_buffer_and_wake_binds_a_new_one_without_compiling() -> None:
    engine, session, truth = serve("cpu")
    engine.generate(prompts(2, 9), max_tokens=4)
    engine.add_request([1, 2, 3], 9, request_id="late")
    for _ in range(3):
        engine.step()
    (late,) = engine.sleep()
    assert late.finish_reason == "abort"
    assert np.array_equal(late.routed_experts, truth.rows((1, 2, 3, *late.token_ids))[: len(late.routed_experts)])
    with pytest.raises(RefusedConfiguration, match="no KV cache"):
        _ = session.geometry
    engine.wake(20)
    assert session.geometry.num_slots == 80
    with torch.compiler.set_stance("fail_on_recompile"):
        check(engine.generate(prompts(2, 9), max_tokens=4), truth)
    session.detach()


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_new_weights_while_requests_run(num_drafts: int) -> None:
    """Rows of tokens that were handed out stay those of the weights that made them; the session says which."""
    engine, session, old = serve("cpu", num_drafts)
    other = tiny(1)
    new = Truth(other)
    engine.add_request([1, 2, 3, 4, 5], 12)
    while engine.step() or len(next(iter(engine.requests.values())).token_ids) < 9:
        pass
    engine.update_weights(other.state_dict(), 7)
    results: list[Result] = []
    while not results:
        if engine.requests:
            versions = session.versions("req_0")
        results = engine.step()
    (result,) = results
    tokens = tuple(result.prompt_token_ids + result.token_ids)
    assert [tag for _, tag in versions] == [None, 7]
    change = versions[1][0]
    assert np.array_equal(result.routed_experts[:change], old.rows(tokens)[:change])
    assert np.array_equal(result.routed_experts[change:], new.rows(tokens)[change:-1])
    session.detach()


def test_blocks_of_older_weights_are_refused_if_the_engine_would_share_them() -> None:
    """An engine that forgets to forget its prefix cache: the request fails by name, the others go on."""
    engine, session, truth = serve("cpu")
    (prompt,) = prompts(1, 13)
    engine.generate([prompt], max_tokens=4)
    engine.blocks.forget_prefixes = lambda: None  # type: ignore[method-assign]
    engine.update_weights(dict(engine.runner.model.state_dict()), 1)
    failed, fine = engine.generate([prompt, [3, 1, 2]], max_tokens=4)
    assert failed.finish_reason == "error" and isinstance(failed.error, StaleRoutes)
    check([fine], truth)
    session.detach()


def test_detach_leaves_the_engine_as_it_was() -> None:
    engine, session, _ = serve("cpu", num_drafts=2)
    parts = (engine, engine.runner, engine.scheduler, engine.blocks, engine.drafter)
    assert any(callable(v) for part in parts for v in vars(part).values())
    session.detach()
    wrapped = {
        "run",
        "run_captured",
        "move_blocks",
        "admit",
        "preempt",
        "emit",
        "update_weights",
        "sleep",
        "wake",
        "take",
    }
    assert not [name for part in parts for name in vars(part) if name in wrapped | {"propose"}]
    assert engine.generate([[1, 2, 3]], max_tokens=3)[0].routed_experts is None


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
