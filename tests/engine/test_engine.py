"""The reference engine end to end, each request against one eager prefill of its tokens; on a GPU under CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import architectures
import numpy as np
import pytest
import torch
import transformers
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


@pytest.mark.parametrize("device", DEVICES)
def test_its_routing_is_compared_with_the_eager_model_at_start_up(device: str) -> None:
    """In blocks that are free again, before the first request."""
    engine, session, truth = serve(device)
    assert str(session.self_test()).startswith("layer 1: 16 of 16 rows equal (topk")
    assert len(engine.blocks.free) == engine.blocks.num_blocks and not engine.blocks.owners
    with pytest.raises(RefusedConfiguration, match=r"engine makes the batch: call self_test\(\)"):
        session.self_test(torch.zeros(1, 4))
    engine.add_request([1, 2, 3], 4)
    with pytest.raises(RefusedConfiguration, match="before the first request"):
        session.self_test()
    check(engine.generate(prompts(2, 9), max_tokens=6), truth)
    session.detach()


@pytest.mark.inductor
@pytest.mark.parametrize("device", DEVICES)
def test_with_inductor(device: str) -> None:
    engine, session, truth = serve(device, inner="inductor")
    check(engine.generate(prompts(4, 11), max_tokens=12), truth)
    session.detach()


# What the engine refuses to serve, and why; every other architecture it serves.
REFUSED = {
    "qwen3_next": "linear_attention layers, which keep a recurrent state",
    "qwen3_5_moe": "linear_attention layers, which keep a recurrent state",
    "jamba": "linear_attention layers, which keep a recurrent state",
    "kimi_linear": "linear_attention layers, which keep a recurrent state",
    "nemotron_h": "linear_attention layers, which keep a recurrent state",
    "lfm2_moe": "conv layers, which keep the last inputs of a convolution",
    "deepseek_v32": "indexed_attention layers, which keep the keys of an indexer",
    "glm_moe_dsa": "indexed_attention layers, which keep the keys of an indexer",
    "hy_v4": "indexed_attention layers, which keep the keys of an indexer",
    "inkling2_text": "hybrid_sliding layers, which keep something that is not known here",
    "llama4_text": "scales attention .* by positions that it counts by itself",
    "unlimited_ocr_text": "no head that gives logits",
    "step3p7_text": "no head that gives logits",
    "muse_spark_text": "no head that gives logits",
    "glm4v_moe_text": "no head that gives logits",
    "switch_transformers": "an encoder-decoder",
}
FAST = {"deepseek_v3", "gpt_oss", "lfm2_moe"}


def in_ci(name: str) -> Any:
    return name if name in FAST else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [in_ci(name) for name in architectures.ARCHITECTURES if name not in REFUSED])
def test_serves(name: str) -> None:
    """Every attention and every router that it can serve at all."""
    serves(architectures.build(name), architectures.build(name))


@pytest.mark.parametrize("name", [in_ci(name) for name in REFUSED])
def test_refuses(name: str) -> None:
    """At construction, by name; the model has its own attention again."""
    model: Any = architectures.build(name).model
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=f"{type(model).__name__} .*{REFUSED[name]}"):
        Engine(model, r3_pass.backend("eager"))
    assert model.config._attn_implementation == before


@pytest.mark.slow
def test_serves_attention_in_chunks() -> None:
    """Llama 4, with what it is refused for turned off."""
    built, oracle = architectures.build("llama4_text"), architectures.build("llama4_text")
    for module in (*built.model.modules(), *oracle.model.modules()):
        if hasattr(module, "attn_temperature_tuning"):
            module.attn_temperature_tuning = False
    serves(built, oracle)


def serves(built: Any, oracle: Any) -> None:
    """Tokens are those of the model's own greedy decoding, and rows those of its routers; also past windows and chunks."""
    engine = Engine(built.model, r3_pass.backend("eager"), num_blocks=32, block_size=4, max_batch_tokens=16)
    session = r3_pass.runtime.attach(ReferenceAdapter(engine))
    prompts = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10, 12, 13], [3], list(range(20, 40))]
    for result in engine.generate(prompts, max_tokens=12):
        tokens = torch.tensor([result.prompt_token_ids + result.token_ids])
        with torch.no_grad():
            scores = oracle.model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
        best = scores[len(result.prompt_token_ids) - 1 : -1].max(-1)
        assert best.indices.tolist() == result.token_ids
        assert np.allclose(best.values, result.log_probs, atol=1e-4)
        rows = result.routed_experts
        for layer, ids in oracle.truth({"input_ids": tokens}).items():
            mine, theirs = rows[:, layer, : ids.shape[1]].astype(np.int64), ids[:-1].numpy()
            if not oracle.architecture.ordered:
                mine, theirs = np.sort(mine), np.sort(theirs)
            assert np.array_equal(mine, theirs), f"layer {layer}"
    session.detach()


def test_serves_capped_scores() -> None:
    """Gemma 2, which is dense: tokens only."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, query_pre_attn_scalar=1, attn_logit_softcapping=1.0, sliding_window=6, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False).normal_(0, 0.7)
    oracle = copy.deepcopy(model)
    engine = Engine(model, "eager", num_blocks=16, block_size=4, max_batch_tokens=8)
    (result,) = engine.generate(prompts(1, 11), max_tokens=12)
    tokens = torch.tensor([result.prompt_token_ids + result.token_ids])
    assert oracle(tokens).logits[0].argmax(-1)[10:-1].tolist() == result.token_ids


def longrope(model: Any) -> None:
    model.model.rotary_emb.rope_type = "longrope"


def bidirectional(model: Any) -> None:
    model.model.layers[1].self_attn.is_causal = False


def looks_back(model: Any) -> None:
    """A layer that mixes a token with the one before it, outside of attention."""
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x + x.roll(1, 1))


def counts_positions(model: Any) -> None:
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])


def own_attention(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (attention.o_proj(attention.q_proj(hidden_states)), None)
    model.model.layers[0].self_attn.layer_idx = 1


def deaf(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda hidden_states, position_embeddings, attention_mask=None, **_: forward(
        hidden_states, position_embeddings, attention_mask
    )


@pytest.mark.parametrize(
    "change, why",
    [
        (longrope, "longrope rotary embeddings"),
        (bidirectional, "a mask of its own"),
        (looks_back, "computes something else"),
        (counts_positions, "computes something else"),
        (deaf, "does not pass keyword arguments on"),
        (own_attention, "not transformers' attention interface"),
    ],
)
def test_refuses_what_no_layer_kind_tells(change: Any, why: str) -> None:
    model = tiny(0)
    change(model)
    with pytest.raises(ValueError, match=why):
        Engine(model, "eager")


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


def test_a_request_may_be_aborted_by_its_own_callback() -> None:
    engine, session, truth = serve("cpu")
    aborted: list[Result] = []

    def third(name: str, token: int) -> None:
        seq = engine.requests[name]
        if len(seq.token_ids) == seq.num_prompt + 3:
            aborted.append(engine.abort(name))

    assert engine.generate([[1, 2, 3]], max_tokens=9, on_token=third) == []
    (result,) = aborted
    tokens = (1, 2, 3, *result.token_ids)
    assert result.finish_reason == "abort" and len(result.token_ids) == 3
    assert np.array_equal(result.routed_experts, truth.rows(tokens)[:-1])
    with pytest.raises(KeyError):
        engine.abort(result.request_id)
    session.detach()


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_abort_of_requests_that_wait_and_that_run(num_drafts: int) -> None:
    engine, session, truth = serve("cpu", num_drafts, max_num_seqs=2)
    for _ in range(4):
        engine.add_request([1, 2, 3, 4, 5, 6], 9)
    assert len(engine.abort("req_3").routed_experts) == 0
    engine.step()
    running = engine.abort("req_0")
    assert running.token_ids == [] and np.array_equal(running.routed_experts, truth.rows((1, 2, 3, 4, 5, 6))[:5])
    done = [result for _ in range(40) for result in engine.step()]
    assert [result.request_id for result in done] == ["req_1", "req_2"]
    check(done, truth)
    assert not engine.requests and len(engine.blocks.free) == engine.blocks.num_blocks
    session.detach()


def test_generate_leaves_results_of_earlier_requests_to_the_next_step() -> None:
    engine, session, truth = serve("cpu")
    engine.add_request([1, 2, 3], 2, request_id="earlier")
    check(engine.generate(prompts(2, 9), max_tokens=6), truth)
    (earlier,) = engine.step()
    assert earlier.request_id == "earlier"
    check([earlier], truth)
    with pytest.raises(ValueError, match="tokens 1 to 99"):
        engine.generate([[1, 2], [1, 99]])
    assert not engine.requests
    session.detach()


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_a_stop_token_among_accepted_drafts_ends_the_request(num_drafts: int) -> None:
    engine, session, truth = serve("cpu", num_drafts)
    (whole,) = engine.generate([[1, 2, 3]], max_tokens=20)
    for stop in set(whole.token_ids):
        (result,) = engine.generate([[1, 2, 3]], max_tokens=20, stop_token_ids=[stop])
        assert result.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1] and result.finish_reason == "stop"
        check([result], truth)
    assert engine.num_accepted and engine.num_rejected
    session.detach()


def test_many_decodes_with_drafts_share_a_small_budget() -> None:
    """Room for one decode and its drafts a step, and for a prompt in small pieces: all come to their ends."""
    engine, session, truth = serve("cpu", 3, max_batch_tokens=5, num_blocks=16)
    check(engine.generate(prompts(5, 14), max_tokens=9), truth)
    session.detach()


@pytest.mark.cuda
def test_sequences_longer_than_the_captured_graphs() -> None:
    engine, session, truth = serve("cuda")
    check(engine.generate([*prompts(1, 60), *prompts(2, 9, seed=1)], max_tokens=40), truth)
    session.detach()


def test_after_a_step_that_raised_nothing_goes_on() -> None:
    """What was scheduled was not computed: going on would attend to KV that is not there."""
    engine, session, truth = serve("cpu")
    engine.add_request([1, 2, 3], 5)
    engine.step()
    run, engine.runner.run = engine.runner.run, lambda batch: 1 // 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.runner.run = run  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="an earlier step raised"):
        engine.step()
    (result,) = engine.sleep()
    assert np.array_equal(result.routed_experts, truth.rows((1, 2, 3))[:2])
    with pytest.raises(RuntimeError, match="sleeps"):
        engine.step()
    with pytest.raises(ValueError, match="sleeps"):
        engine.add_request([1])
    engine.wake(20)
    check(engine.generate(prompts(2, 9), max_tokens=4), truth)
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
