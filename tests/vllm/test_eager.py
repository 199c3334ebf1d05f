"""vLLM in eager mode: the engine's own hook on the routers. A small KV cache, so that requests are preempted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm_serving as serving
from vllm import TokensPrompt

import r3_pass
from r3_pass.errors import BufferLayoutError, MissingRoutes, PartialCapture, RefusedConfiguration, StaleRoutes
from r3_pass.runtime.engines import vllm_routers


@pytest.fixture(scope="module")
def llm(start: Any) -> Any:
    return start("qwen3_moe", enforce_eager=True, num_gpu_blocks_override=14)


@pytest.fixture(scope="module")
def truth() -> Any:
    return serving.Truth(serving.qwen3_moe())


@pytest.fixture
def session(llm: Any) -> Iterator[Any]:
    llm.reset_prefix_cache()
    session = r3_pass.runtime.attach(llm)
    yield session
    session.check_integrity()
    session.detach()
    assert not _wrapped(llm)


def _core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def _worker(llm: Any) -> Any:
    return _core(llm).model_executor.driver_worker.worker


def _wrapped(llm: Any) -> list[str]:
    """Methods of the engine's objects that an adapter has put over."""
    worker = _worker(llm)
    owners = [
        llm,
        llm.llm_engine.output_processor,
        _core(llm).scheduler,
        worker,
        worker.model_runner,
        worker.model_runner.get_model(),
    ]
    return [n for o in owners for n, v in vars(o).items() if getattr(v, "__qualname__", "").startswith("WrapPoints")]


def _generate(llm: Any, prompts: list[Any] | None = None, **sampling: Any) -> list[Any]:
    found: list[Any] = llm.generate(prompts or serving.prompts(), serving.sampling(**sampling), use_tqdm=False)
    return found


def _tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(c.token_ids) for o in outputs for c in o.outputs]


def _watch(llm: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    scheduler, seen = _core(llm).scheduler, []
    original = getattr(scheduler, name)
    monkeypatch.setattr(scheduler, name, lambda *a, **k: (seen.append(a), original(*a, **k))[1])
    return seen


def test_mixed_run_with_preemption(llm: Any, truth: Any, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted = _watch(llm, monkeypatch, "_preempt_request")
    outputs = _generate(llm, new=60)
    assert truth.check(outputs) == sum(len(o.prompt_token_ids) + 59 for o in outputs)
    assert preempted and sum(o.num_cached_tokens for o in outputs) > 100
    report = session.report()
    assert [(s.layer, s.form, s.graph) for s in report.sites] == [(0, "router_hook", None), (2, "router_hook", None)]
    assert session.describe().layers == (0, 2) and session.describe().num_layers == 3
    assert not _core(llm).scheduler.r3_pass_delivery._table, "rows of finished requests are gone"
    monkeypatch.undo()


def test_tokens_are_those_without_a_session(llm: Any, truth: Any) -> None:
    llm.reset_prefix_cache()
    plain = _generate(llm, new=40)
    llm.reset_prefix_cache()
    session = r3_pass.runtime.attach(llm)
    recorded = _generate(llm, new=40)
    session.detach()
    assert _tokens(plain) == _tokens(recorded) and truth.check(recorded)
    assert all(c.routed_experts is None for o in plain for c in o.outputs)
    llm.reset_prefix_cache()
    after = _generate(llm, new=40)
    assert _tokens(after) == _tokens(plain) and all(c.routed_experts is None for o in after for c in o.outputs)


def test_several_sequences_share_a_prompt(llm: Any, truth: Any, session: Any) -> None:
    outputs = _generate(llm, serving.prompts(5), n=3, temperature=1.0)
    assert all(len(o.outputs) == 3 for o in outputs)
    assert len({tuple(c.token_ids) for c in outputs[0].outputs}) > 1
    truth.check(outputs)


def test_same_prompt_twice_in_one_step(llm: Any, truth: Any, session: Any) -> None:
    """The second one hits blocks that the first one fills in the same step."""
    prompt = {"prompt_token_ids": serving.prompts()[0]["prompt_token_ids"][:40]}
    outputs = _generate(llm, [prompt, prompt, prompt])
    assert outputs[2].num_cached_tokens == 32
    truth.check(outputs)


@pytest.mark.parametrize(
    "sampling",
    [{"new": 1}, {"prompt_logprobs": 2}, {"stop_token_ids": [3, 20, 60, 99]}, {"min_tokens": 2, "temperature": 1.0}],
    ids=["one token", "prompt logprobs", "stop tokens", "sampled"],
)  # fmt: skip
def test_ways_to_end(llm: Any, truth: Any, session: Any, sampling: dict[str, Any]) -> None:
    truth.check(_generate(llm, **sampling))


def test_rows_from_a_position_of_the_prompt_on(llm: Any, truth: Any, session: Any) -> None:
    (output,) = _generate(llm, serving.prompts()[:1], routed_experts_prompt_start=20)
    completion = output.outputs[0]
    tokens = [*output.prompt_token_ids, *completion.token_ids]
    want, _ = truth.of(tokens)
    assert np.array_equal(np.sort(completion.routed_experts, -1), want[20:-1])


def test_blocks_cached_before_attach_have_no_rows(llm: Any, truth: Any) -> None:
    llm.reset_prefix_cache()
    prompts = serving.prompts()
    plain = _generate(llm, prompts[:1])
    session = r3_pass.runtime.attach(llm)
    with pytest.raises(StaleRoutes, match="reset_prefix_cache") as raised:
        _generate(llm, prompts[:2])
    first, second = raised.value.outputs
    assert first.outputs[0].routed_experts is None and _tokens([first]) == _tokens(plain)
    truth.check([second])
    llm.reset_prefix_cache()
    truth.check(_generate(llm, prompts[:2]))
    session.detach()


def test_attach_in_the_middle_of_a_request(llm: Any, truth: Any) -> None:
    llm.reset_prefix_cache()
    engine = llm.llm_engine
    engine.add_request("early", TokensPrompt(serving.prompts()[0]), serving.sampling(8))
    for _ in range(3):
        engine.step()
    session = r3_pass.runtime.attach(llm)
    engine.add_request("late", TokensPrompt(serving.prompts()[2]), serving.sampling(8))
    done = _run(engine)
    assert done["early"].outputs[0].routed_experts is None
    truth.check([done["late"]])
    (error,) = _core(llm).scheduler.r3_pass_delivery.pop_errors().values()
    assert error.startswith("MissingRoutes") and "before the session was attached" in error
    session.detach()


def _run(engine: Any) -> dict[str, Any]:
    done = {}
    while engine.has_unfinished_requests():
        done.update({o.request_id: o for o in engine.step() if o.finished})
    return done


@pytest.mark.parametrize("steps", [0, 1, 5], ids=["waiting", "in the middle of its prefill", "decoding"])
def test_aborted_requests(llm: Any, truth: Any, session: Any, steps: int) -> None:
    engine = llm.llm_engine
    for i, prompt in enumerate(serving.prompts()[:4]):
        engine.add_request(f"r{i}", TokensPrompt(prompt), serving.sampling(8))
    for _ in range(steps):
        engine.step()
    engine.abort_request(["r0", "r2"])
    done = _run(engine)
    assert set(done) == {"r1", "r3"}
    truth.check(done.values())
    delivery = _core(llm).scheduler.r3_pass_delivery
    assert delivery._table is None or not len(delivery._table)
    assert not delivery._sent and not delivery._refused


def test_stop_strings_end_in_the_front_end(llm: Any, truth: Any, session: Any) -> None:
    """The front end may stop a request that the core runs on: rows come with each output, so that it has them."""
    engine = llm.llm_engine
    engine.add_request("r", TokensPrompt(serving.prompts()[0]), serving.sampling(20))
    outputs: list[Any] = []
    while len(outputs) < 6:
        outputs += engine.step()
    state = engine.output_processor.request_states
    chunks = next(iter(state.values())).routed_experts_chunks
    rows = np.concatenate(chunks)
    last = outputs[-1]
    truth.check_rows(rows, [*last.prompt_token_ids, *last.outputs[0].token_ids])
    assert [len(c) for c in chunks[1:]] == [1] * (len(chunks) - 1), "new rows only"
    engine.abort_request(["r"])
    _run(engine)


def test_new_weights_void_the_cached_rows(llm: Any, truth: Any, session: Any) -> None:
    truth.check(_generate(llm, serving.prompts()[:1]))
    model = _worker(llm).model_runner.get_model()
    model.load_weights(iter(()))
    assert session.describe().weights == 1
    with pytest.raises(StaleRoutes):
        _generate(llm, serving.prompts()[:1])
    llm.reset_prefix_cache()
    truth.check(_generate(llm, serving.prompts()[:1]))


def test_a_request_that_loses_its_rows_has_none(llm: Any, session: Any) -> None:
    """Not those that were sent before: preempted after new weights came, its cached prefix is of the old ones."""
    engine, scheduler = llm.llm_engine, _core(llm).scheduler
    for i, prompt in enumerate(serving.prompts()[:3]):
        engine.add_request(f"r{i}", TokensPrompt(prompt), serving.sampling(12))
    for _ in range(9):
        engine.step()
    session.weights_changed("v2")
    while scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), 0.0)
    done = _run(engine)
    assert [c.routed_experts for o in done.values() for c in o.outputs] == [None] * 3
    # Their errors are not those of a later call.
    llm.reset_prefix_cache()
    assert _generate(llm, serving.prompts()[:1])[0].outputs[0].routed_experts is not None


@pytest.mark.parametrize("again", [False, True], ids=["detached", "attached again"])
def test_detach_in_the_middle_of_a_request(llm: Any, again: bool) -> None:
    llm.reset_prefix_cache()
    engine, scheduler = llm.llm_engine, _core(llm).scheduler
    session = r3_pass.runtime.attach(llm)
    engine.add_request("r", TokensPrompt(serving.prompts()[0]), serving.sampling(12))
    for _ in range(6):
        engine.step()
    session.detach()
    if again:
        session = r3_pass.runtime.attach(llm)
        llm.reset_prefix_cache(reset_running_requests=True)
    (output,) = _run(engine).values()
    rows = output.outputs[0].routed_experts
    assert rows is None if not again else len(rows) == len(output.prompt_token_ids) + 11
    session.detach()
    assert not scheduler.running


def test_running_requests_are_preempted_by_a_reset(llm: Any, truth: Any, session: Any) -> None:
    engine = llm.llm_engine
    for i, prompt in enumerate(serving.prompts()[:3]):
        engine.add_request(f"r{i}", TokensPrompt(prompt), serving.sampling(12))
    for _ in range(9):
        engine.step()
    assert engine.reset_prefix_cache(reset_running_requests=True)
    done = _run(engine)
    assert len(done) == 3
    truth.check(done.values())


def test_a_second_attach_is_refused(llm: Any, session: Any) -> None:
    with pytest.raises(RefusedConfiguration, match="attached to this engine already"):
        r3_pass.runtime.attach(llm)


def test_no_hook_on_a_router(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        vllm_routers.Router,
        "why_not",
        property(lambda self: "its kernel routes inside" if self.layer == 2 else ""),
    )
    with pytest.raises(
        RefusedConfiguration, match=r"1 of 2 MoE layers .*\n  layer 2 \(model.layers.2.mlp.experts\): its kernel"
    ):
        r3_pass.runtime.attach(llm)
    assert not _wrapped(llm)
    assert all(
        m.router.capture_fn is None for m in _worker(llm).model_runner.get_model().modules() if hasattr(m, "router")
    )


def test_a_worker_that_sends_no_rows(llm: Any, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = _worker(llm).model_runner
    hooked = runner.sample_tokens

    def lost(*args: Any) -> Any:
        output = hooked(*args)
        vars(output).pop("r3_pass")
        return output

    monkeypatch.setattr(runner, "sample_tokens", lost)
    with pytest.raises(MissingRoutes, match="no rows"):
        _generate(llm, serving.prompts()[:1])
    monkeypatch.undo()


@pytest.mark.parametrize("fault", ["slots", "hook"])
def test_a_step_that_cannot_be_recorded(llm: Any, truth: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests have no rows, and are named as their callers know them; the core serves on. What was cached has none either."""
    llm.reset_prefix_cache()
    plain = _generate(llm, new=20)
    llm.reset_prefix_cache()
    session = r3_pass.runtime.attach(llm)
    recorder = _worker(llm).r3_pass_recorder._recorder
    mapping, batch, seen = recorder._mapping, recorder._batch, []

    def two_in_one_slot(tokens: int, new: int) -> Any:
        slots = mapping(tokens, new)
        if len(seen) == 3:
            slots[1] = slots[0]
        return slots

    def other_ids(hook: Any) -> Any:
        return lambda ids: hook(ids[:, :1] if len(seen) == 3 else ids)

    monkeypatch.setattr(recorder, "_batch", lambda: (seen.append(batch()), seen[-1])[1])
    if fault == "slots":
        monkeypatch.setattr(recorder, "_mapping", two_in_one_slot)
    else:
        router = next(m.router for m in _worker(llm).model_runner.get_model().modules() if hasattr(m, "router"))
        monkeypatch.setattr(router, "capture_fn", other_ids(router.capture_fn))
    with pytest.raises(BufferLayoutError if fault == "slots" else PartialCapture) as raised:
        _generate(llm, new=20)
    outputs = raised.value.outputs  # type: ignore[attr-defined]
    assert _tokens(outputs) == _tokens(plain)
    cost = {name.rpartition("-")[0] for name in seen[2].ids}
    lost = [o for o in outputs if o.outputs[0].routed_experts is None]
    assert cost and cost <= {o.request_id for o in lost} and len(lost) < len(outputs)
    first = next(o.request_id for o in lost)
    assert str(raised.value).startswith(f"request {first!r} has no routed_experts ({len(lost)} in all): ")
    assert ("slot" if fault == "slots" else "hands over ids [") in str(raised.value)
    truth.check([o for o in outputs if o not in lost])
    monkeypatch.undo()
    llm.reset_prefix_cache()
    truth.check(_generate(llm, new=20))
    session.detach()


def test_two_engines_in_one_process(llm: Any, truth: Any, session: Any, start: Any) -> None:
    """DeepSeek-V3's routing: a dense first layer, groups, a bias, a shared expert."""
    other = start("glm4_moe", enforce_eager=True)
    its = r3_pass.runtime.attach(other)
    theirs = serving.Truth(serving.glm4_moe())
    assert its.describe().layers == (1, 2)
    for prompts in (serving.prompts()[:3], serving.prompts(seed=5)):
        truth.check(_generate(llm, prompts))
        theirs.check(_generate(other, prompts))
    assert (truth.ties, theirs.ties) == (0, 0)
    its.detach()
    truth.check(_generate(llm, serving.prompts(seed=6)))


def test_two_groups_of_kv_blocks(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding windows drop their blocks; rows lie in the slots of full attention. Held against each sequence by itself, cold."""
    llm = start("gpt_oss", enforce_eager=True, num_gpu_blocks_override=24)
    preempted = _watch(llm, monkeypatch, "_preempt_request")
    groups = _worker(llm).model_runner.kv_cache_config.kv_cache_groups
    assert [type(g.kv_cache_spec).__name__ for g in groups] == ["SlidingWindowSpec", "FullAttentionSpec"]
    session = r3_pass.runtime.attach(llm)
    mixed = _generate(llm, new=40)
    assert preempted and sum(o.num_cached_tokens for o in mixed)
    for output in mixed:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        llm.reset_prefix_cache()
        (alone,) = _generate(llm, [{"prompt_token_ids": tokens}], new=1)
        assert np.array_equal(output.outputs[0].routed_experts, alone.outputs[0].routed_experts[: len(tokens) - 1])
    session.detach()


def test_no_row_was_a_near_tie(truth: Any) -> None:
    """The last test: all comparisons above were exact."""
    assert truth.rows > 3000
    assert Counter({"ties": truth.ties}) == Counter({"ties": 0})
