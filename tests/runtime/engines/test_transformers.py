"""transformers' continuous batching, really served: every row equals an eager prefill of the same tokens.

The served model is compiled once for all tests, each MLP by itself with the eager inner backend; what is compiled whole, by the
engine's own `varlen_compile_config`, stands at the end. Each scenario asserts that what it is about did happen.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", minversion="5.17", reason="needs r3_pass[transformers]")

from serving import (
    OLD,
    Run,
    Truth,
    compiled,
    dense,
    gpt_oss,
    prompts,
    qwen3_moe,
    recording,
    sampled,
    settings,
    sliding_qwen3_moe,
    wrapped,
)
from transformers import CompileConfig

import r3_pass
from r3_pass import MissingRoutes, NoRouterFound, PartialCapture, RefusedConfiguration, StaleRoutes
from r3_pass.runtime import Session

PROMPTS = prompts(10)
FEW = PROMPTS[:4]


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Instead of the one for all tests: the compiled model is shared."""
    torch.set_num_threads(1)
    yield


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    torch._dynamo.reset()
    yield compiled(qwen3_moe())
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(qwen3_moe())


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU offload pins its host memory, which needs a GPU's driver."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs))


# ---- scenarios --------------------------------------------------------------------------------------------------------
EOS = [3, 9, 20, 31, 40, 50, 60]
OFFLOAD = {"cpu_offload_space": 0.001}
SCENARIOS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "shared prefixes, prefill in chunks": ({}, None, ("prefix_hit",)),
    "nothing shared": ({"allow_block_sharing": False}, None, ()),
    "few blocks, recomputed": ({"blocks": 24, "tokens": 64}, None, ("preempt",)),
    "few blocks, offloaded": ({"blocks": 24, "tokens": 64} | OFFLOAD, None, ("extract", "insert")),
    "prefill first": ({"blocks": 30, "scheduler_type": "prefill_first"}, None, ("prefix_hit",)),
    "two sequences each": ({"blocks": 100, "tokens": 80}, sampled(2), ("move", "prefix_hit")),
    "three each, few blocks": ({"blocks": 40, "tokens": 64}, sampled(3), ("move", "preempt")),
    "three each, offloaded": ({"blocks": 40, "tokens": 64} | OFFLOAD, sampled(3), ("move", "extract", "insert")),
    "end of text": ({}, sampled(1, EOS), ()),
}


@pytest.mark.usefixtures("unpinned")
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_row(model: Any, truth: Truth, name: str) -> None:
    config, generation, happened = SCENARIOS[name]
    with recording(model, settings(**config), generation) as run:
        outputs = run.serve(PROMPTS, new=20 if name == "end of text" else 8)
        assert truth.check(outputs) > 200
        assert all(run.calls[what] for what in happened), run.calls
        assert run.calls["finish"] == len(outputs)
    assert name != "end of text" or min(len(o.generated_tokens) for o in outputs.values()) < 20
    assert max(map(len, PROMPTS)) > 16, "no prompt is prefilled in chunks"


def test_streaming(model: Any, truth: Truth) -> None:
    """Rows come with the last output of a stream, and to a handler in an event loop."""
    with recording(model, settings()) as run:
        run.manager.start()
        run.add(FEW[:1], name="s", streaming=True)
        stream = list(run.manager.request_id_iter("s0"))
        assert [hasattr(o, "routed_experts") for o in stream[:-1]] == [False] * (len(stream) - 1)
        truth.check(stream[-1:])

        async def handled() -> Any:
            queue: asyncio.Queue[Any] = asyncio.Queue()
            run.manager.register_result_handler("h0", queue.put_nowait)
            run.add(FEW[1:2], name="h")
            return await asyncio.wait_for(queue.get(), 30)

        truth.check([asyncio.run(handled())])


@pytest.mark.usefixtures("unpinned")
@pytest.mark.parametrize("offload", [{}, OFFLOAD], ids=["recomputed", "offloaded"])
def test_cancelled(model: Any, truth: Truth, offload: dict[str, Any]) -> None:
    """The rows of cancelled requests are dropped, those of their neighbours stay; an id may come back."""
    with recording(model, settings(blocks=24, tokens=32, **offload)) as run:
        gone = {"q1", "q3", "q5"}
        for step, name in enumerate(sorted(gone)):
            run.at_step(3 + 2 * step, lambda name=name: run.manager.cancel_request(name))
        if not OLD:  # 5.17 mixes two requests of one id up by itself
            run.at_step(12, lambda: run.manager.add_request(FEW[2], request_id="q1", max_new_tokens=6, eos_token_id=-1))
            gone.remove("q1")
        run.add(PROMPTS, new=16)
        run.manager.start()
        outputs = run.collect(len(PROMPTS) - len(gone))
        assert {f"q{i}" for i in range(len(PROMPTS))} - set(outputs) == gone
        truth.check(outputs)
        assert run.calls["abort"], "none of them had run"
        assert [run.session.abort(f"q{i}", 99).shape[0] for i in range(len(PROMPTS))] == [0] * len(PROMPTS)


def test_hard_stop(model: Any, truth: Truth) -> None:
    """What was computed comes with the failed outputs, as far as it goes."""
    with recording(model, settings()) as run:
        run.at_step(9, threading.Thread(target=lambda: run.manager.stop(hard_stop=True, timeout=20)).start)
        run.add(PROMPTS, new=200)
        run.manager.start()
        run.collect(len(PROMPTS))
        run.drain()
        assert {o.status.name for o in run.outputs.values()} == {"FAILED"}
        rows = [o for o in run.outputs.values() if hasattr(o, "routed_experts")]
        assert rows and truth.check(rows, complete=False) > 20


# ---- attaching and detaching ------------------------------------------------------------------------------------------
def test_attached_to_a_model(model: Any, truth: Truth) -> None:
    """One session, one `generate_batch` after the other, in inference mode and outside of it."""
    session = r3_pass.runtime.attach(model)
    for inference in (True, False) if not OLD else (False, False):
        with torch.inference_mode(inference):
            outputs = model.generate_batch(FEW, continuous_batching_config=settings(), max_new_tokens=5)
        assert len(outputs) == len(FEW) and truth.check(outputs)
        with pytest.raises(RefusedConfiguration, match="no KV cache"):
            _ = session.geometry
    session.detach()
    assert not [name for name in vars(model) if "batch" in name]


def test_attached_for_steps_of_ones_own(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing would record what the engine runs: said at once."""
    r3_pass.runtime.attach(model, num_slots=8).detach()
    assert "generate_batch, say) is not recorded" in caplog.text
    caplog.clear()
    r3_pass.runtime.attach(model, backend=r3_pass.backend("aot_eager"), num_slots=8).detach()
    assert not caplog.text


def test_a_manager_that_stays(model: Any, truth: Truth) -> None:
    """`persistent_manager`: its cache, and prefixes in it, live on; a second session knows the rows of none of them."""
    session = r3_pass.runtime.attach(model)

    def generate(**more: Any) -> Any:
        return model.generate_batch(FEW, continuous_batching_config=settings(), max_new_tokens=5, **more)

    for _ in range(2):
        truth.check(generate(persistent_manager=True))
    manager = model._cached_continuous_batching_manager
    session.detach()
    assert not wrapped(model, manager)
    session = r3_pass.runtime.attach(model)
    try:
        with pytest.raises(StaleRoutes, match="void") as caught:
            generate(persistent_manager=True)
        outputs = caught.value.outputs  # type: ignore[attr-defined]
        assert len(outputs) == len(FEW) and all(len(o.generated_tokens) == 5 for o in outputs.values())
        truth.check(o for o in outputs.values() if o.status.name == "FINISHED")
        model.destroy_cached_continuous_batching_manager()
        truth.check(generate())
    finally:
        session.detach()


def test_attached_after_start(model: Any, truth: Truth) -> None:
    """Before any request: nothing is missing. And the same manager started again."""
    manager = model.init_continuous_batching(continuous_batching_config=settings())
    manager.start()
    run = Run(manager, r3_pass.runtime.attach(manager))
    run.add(FEW)
    assert truth.check(run.collect(len(FEW)))
    for _ in range(2):
        manager.stop(timeout=20)
        assert truth.check(run.serve(FEW, restart=True))
    run.stop()
    run.session.detach()
    assert not wrapped(model, manager)


def test_attached_while_it_runs(model: Any, truth: Truth) -> None:
    """Requests that were past their first token fail by themselves, with the reason; later ones are whole."""
    manager = model.init_continuous_batching(continuous_batching_config=settings())
    for i, prompt in enumerate(FEW):
        manager.add_request(prompt, request_id=f"early{i}", max_new_tokens=80, eos_token_id=-1)
    manager.start()
    while manager.batch_processor is None or not any(
        state.generated_tokens for state in list(manager.batch_processor.scheduler.active_requests.values())
    ):
        time.sleep(0.002)
    run = Run(manager, r3_pass.runtime.attach(manager))
    run.add([[*reversed(p)] for p in FEW], name="late")
    outputs = run.collect(2 * len(FEW))
    run.stop()
    run.session.detach()
    early = [outputs.pop(f"early{i}") for i in range(len(FEW))]
    failed = [o for o in early if o.status.name == "FAILED"]
    assert failed and all("MissingRoutes" in o.error and "Attach before" in o.error for o in failed)
    assert all(len(o.generated_tokens) == 80 for o in failed), "the engine's own work is lost"
    assert len(outputs) == len(FEW)
    truth.check(outputs)
    truth.check(o for o in early if o not in failed)


def test_detached_while_it_runs(model: Any) -> None:
    """Every method is the engine's own again, and its requests end as if there had been no session."""
    with recording(model, settings()) as run:
        detached = threading.Event()
        run.at_step(8, threading.Thread(target=lambda: (run.session.detach(), detached.set())).start)
        run.add(PROMPTS, new=30)
        run.manager.start()
        assert detached.wait(20)
        assert not wrapped(model, run.manager)
        steps = run.calls["step"]
        outputs = run.collect(len(PROMPTS))
        assert run.calls["step"] == steps and len(outputs) == len(PROMPTS)
        assert {o.status.name for o in outputs.values()} == {"FINISHED"}
        assert not all(hasattr(o, "routed_experts") for o in outputs.values())


def test_attached_twice(model: Any, truth: Truth) -> None:
    """The second session is refused and the first goes on."""
    session = r3_pass.runtime.attach(model)
    with pytest.raises(RefusedConfiguration, match="session"):
        r3_pass.runtime.attach(model)
    truth.check(model.generate_batch(FEW, continuous_batching_config=settings(), max_new_tokens=5))
    session.detach()
    assert not [name for name in vars(model) if "batch" in name]


# ---- errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("at", [1, 7], ids=["first forward", "later"])
def test_a_forward_that_raises(model: Any, truth: Truth, at: int) -> None:
    """The engine fails its requests, with the rows that they have; started again, it records as before."""
    with recording(model, settings()) as run:
        forwards = []

        def fails(*_: Any) -> None:
            forwards.append(0)
            if len(forwards) == at:
                raise ValueError("the weather")

        hook = model.model.layers[2].register_forward_pre_hook(fails)
        try:
            outputs = run.serve(FEW)
            run.manager.join(0)
        finally:
            hook.remove()
        run.drain(0.1)
        failed = [o for o in outputs.values() if o.status.name == "FAILED"]
        assert failed and all("the weather" in o.error for o in failed)
        truth.check((o for o in failed if hasattr(o, "routed_experts")), complete=False)
        truth.check(o for o in outputs.values() if o not in failed)
        assert truth.check(run.serve(FEW, restart=True))


def test_one_request_that_has_no_rows(model: Any, truth: Truth) -> None:
    """It fails with its tokens kept; the others are served; `generate_batch` raises, with all outputs in hand."""
    session = r3_pass.runtime.attach(model)
    run = Run(None, session)
    finish = session.finish

    def refuse(request: str, num_tokens: int) -> Any:
        if request == "req_2":
            raise MissingRoutes("request 'req_2': a gap")
        return finish(request, num_tokens)

    session.finish = refuse  # type: ignore[method-assign]
    with pytest.raises(MissingRoutes, match="a gap") as caught:
        model.generate_batch(FEW, continuous_batching_config=settings(), max_new_tokens=5)
    outputs = dict(caught.value.outputs)  # type: ignore[attr-defined]
    failed = outputs.pop("req_2")
    assert failed.status.name == "FAILED" and "MissingRoutes" in failed.error and len(failed.generated_tokens) == 5
    assert len(outputs) == len(FEW) - 1 and truth.check(outputs) and truth.check([failed], complete=False)
    session.finish = finish  # type: ignore[method-assign]
    truth.check(model.generate_batch(FEW, continuous_batching_config=settings(), max_new_tokens=5))
    assert run.calls["finish"]
    session.detach()


def test_nothing_is_compiled(truth: Truth) -> None:
    """Every layer runs eagerly: the first step says so, and `generate_batch` raises it."""
    model = qwen3_moe()
    session = r3_pass.runtime.attach(model)
    with pytest.raises(NoRouterFound, match="no compiled MoE layer of Qwen3MoeForCausalLM ran") as caught:
        model.generate_batch(FEW, continuous_batching_config=settings(), max_new_tokens=5)
    outputs = caught.value.outputs  # type: ignore[attr-defined]
    assert {o.status.name for o in outputs.values()} <= {"FAILED"}
    session.detach()
    assert len(model.generate_batch(FEW, continuous_batching_config=settings(), max_new_tokens=5)) == len(FEW)


def test_one_layer_is_not_compiled(truth: Truth) -> None:
    """Rows without layer 1 would pass for complete ones."""
    model = qwen3_moe()
    model.model.layers[2].mlp.compile(backend=r3_pass.backend("eager"), dynamic=True)
    session = r3_pass.runtime.attach(model)
    with pytest.raises(PartialCapture, match="layer 1"):
        model.generate_batch(FEW, continuous_batching_config=settings(), max_new_tokens=5)
    session.detach()


def test_a_dense_model() -> None:
    """Refused before anything changes: no method is wrapped, no cache is made."""
    model = dense()
    manager = model.init_continuous_batching(continuous_batching_config=settings())
    before = dict(vars(manager))
    for engine in (model, manager):
        with pytest.raises(NoRouterFound, match="Qwen3ForCausalLM is dense"):
            r3_pass.runtime.attach(engine)
    assert not wrapped(model, manager) and vars(manager) == before


# ---- rows that move with their blocks -----------------------------------------------------------------------------------
def nothing(*_: Any) -> None:
    return None


def refuses(*_: Any) -> None:
    raise RefusedConfiguration("saved under other weights")


@pytest.mark.usefixtures("unpinned")
@pytest.mark.parametrize(
    ("config", "lost"),
    [
        ({"blocks": 100, "tokens": 80}, {"move": nothing}),
        ({"blocks": 24, "tokens": 64} | OFFLOAD, {"insert": nothing}),
        ({"blocks": 24, "tokens": 64} | OFFLOAD, {"insert": refuses}),
    ],
    ids=["not moved", "not restored", "restored under other weights"],
)
def test_rows_that_are_lost(
    model: Any, truth: Truth, monkeypatch: pytest.MonkeyPatch, config: Any, lost: dict[str, Callable[..., None]]
) -> None:
    """KV went to other blocks and the rows did not: who reads those blocks is told, and nobody gets wrong rows."""
    for name, method in lost.items():
        monkeypatch.setattr(Session, name, method)
    with recording(model, settings(**config), sampled(3 if "move" in lost else 1)) as run:
        outputs = run.serve(PROMPTS + PROMPTS[:6])
        failed = [o for o in outputs.values() if o.status.name == "FAILED"]
        assert failed and all("StaleRoutes" in o.error and "void" in o.error for o in failed)
        assert all(o.generated_tokens for o in failed)
        truth.check(o for o in outputs.values() if o not in failed)


def test_the_truth_has_teeth(model: Any, truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither moved nor voided, the rows of a block's last owner come out: these tests must see that."""
    monkeypatch.setattr(Session, "move", nothing)
    monkeypatch.setattr(Session, "assign", nothing)
    with recording(model, settings(blocks=40, tokens=64), sampled(3)) as run:
        outputs = run.serve(PROMPTS)
        with pytest.raises(AssertionError, match="not those of its tokens"):
            truth.check(o for o in outputs.values() if o.status.name == "FINISHED")


# ---- other caches -------------------------------------------------------------------------------------------------------
def test_sliding_window_only() -> None:
    """No block outlives its window, so no slot does; a fork, whose blocks would name nothing, is refused."""
    model, truth = compiled(sliding_qwen3_moe()), Truth(sliding_qwen3_moe())
    with recording(model, settings(blocks=60)) as run:
        assert truth.check(run.serve(FEW)) > 50
    manager = model.init_continuous_batching(generation_config=sampled(2), continuous_batching_config=settings())
    with pytest.raises(RefusedConfiguration, match="num_return_sequences"):
        r3_pass.runtime.attach(manager)
    assert not wrapped(model, manager)
    session = r3_pass.runtime.attach(model)
    with pytest.raises(RefusedConfiguration, match="num_return_sequences"):
        model.generate_batch(FEW, generation_config=sampled(2), continuous_batching_config=settings())
    session.detach()


@pytest.fixture(scope="module")
def gpt_oss_model() -> tuple[Any, Truth]:
    return compiled(gpt_oss()), Truth(gpt_oss())


@pytest.mark.usefixtures("unpinned")
@pytest.mark.parametrize(
    ("config", "sequences", "happened"),
    [
        ({"blocks": 60}, 1, ()),
        ({"blocks": 24, "tokens": 32} | OFFLOAD, 1, ("extract", "insert")),
        ({"blocks": 100}, 2, ("move",)),
    ],
    ids=["plain", "offloaded", "two sequences each"],
)
def test_two_groups_of_blocks(
    gpt_oss_model: tuple[Any, Truth], config: Any, sequences: int, happened: tuple[str, ...]
) -> None:
    """gpt-oss: the slots are those of its full-attention group, whichever comes first."""
    model, truth = gpt_oss_model
    with recording(model, settings(**config), sampled(sequences)) as run:
        outputs = run.serve(PROMPTS)
        truth.check(outputs)
        assert all(run.calls[what] for what in happened), run.calls


# ---- compiled by the engine ---------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_engines_own_compilation() -> None:
    """`varlen_compile_config`, whole model, padded batches: padding has no row, and warm-up leaves none."""
    torch._dynamo.reset()
    model, truth = qwen3_moe(num_hidden_layers=2), Truth(qwen3_moe(num_hidden_layers=2))
    compilation = CompileConfig(backend=r3_pass.backend("aot_eager"), dynamic=True, mode=None)
    config = settings(varlen_compile_config=compilation, q_padding_interval_size=8, kv_padding_interval_size=64)
    with recording(model, config) as run:
        run.manager.warmup()
        warm = run.calls["step"]
        assert (run.session.read(np.arange(run.session.geometry.num_slots)) == -1).all()
        assert truth.check(run.serve(FEW)) > 50
        assert run.calls["step"] > warm
    torch._dynamo.reset()
