"""vLLM with its engine core and its worker in processes of their own: each mode is a script that asserts, and prints what it saw.

    python tests/lib/vllm_processes.py MODE FOLDER

Modes: graph, eager, async, off, ngram, dense, native. FOLDER holds a saved model.
"""

# ruff: noqa: E402
from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

MODE, FOLDER = sys.argv[1:3] if len(sys.argv) > 2 else ("", "")
if MODE and MODE not in ("off", "native"):
    os.environ["R3_PASS_VLLM"] = "1"
if MODE == "ngram":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
if MODE == "native":  # vLLM's own flag needs Model Runner V2, which needs Triton: its interpreter stands in
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="1", TRITON_INTERPRET="1")
    import triton.backends

    triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

sys.path.insert(0, str(Path(__file__).parent))

import vllm_serving as serving

import r3_pass
from r3_pass.errors import RefusedConfiguration, StaleRoutes


def truth() -> Any:
    return serving.Truth(serving.qwen3_moe())


def generate(llm: Any, **sampling: Any) -> Any:
    return llm.generate(serving.prompts(), serving.sampling(**sampling), use_tqdm=False)


def refused(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except RefusedConfiguration as error:
        return str(error)
    raise AssertionError("nothing was refused")


def sync(**more: Any) -> None:
    import vllm

    llm = vllm.LLM(FOLDER, **serving.settings(num_gpu_blocks_override=14, **more))
    session: Any = r3_pass.runtime.attach(llm)
    report = session.report()
    print(report)
    print(session.describe())
    known = truth()
    print("rows", known.check(generate(llm, new=60)), "near-ties", known.ties)
    print("rows", known.check(generate(llm, n=3, temperature=1.0)), "near-ties", known.ties)
    assert "attached to this engine already" in refused(r3_pass.runtime.attach, llm)
    session.weights_changed("v2")
    assert session.describe().weights == "v2"
    try:
        generate(llm)
    except StaleRoutes as error:
        assert any(c.routed_experts is None for o in error.__dict__["outputs"] for c in o.outputs)
    else:
        raise AssertionError("cached blocks of old weights have no rows")
    assert llm.reset_prefix_cache()
    known.check(generate(llm))
    session.detach()
    assert all(o.outputs[0].routed_experts is None for o in generate(llm))
    llm.reset_prefix_cache()
    again: Any = r3_pass.runtime.attach(llm)
    print("rows", known.check(generate(llm)), "near-ties", known.ties)
    # Shut down with requests in flight.
    for i, prompt in enumerate(serving.prompts()):
        llm.llm_engine.add_request(str(i), prompt, serving.sampling(200))
    llm.llm_engine.step()
    assert again.errors() == {}
    routes = {(s.layer, s.form) for s in report.sites}
    print("routes", sorted(routes))


async def served() -> None:
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = AsyncEngineArgs(model=FOLDER, **serving.settings(enforce_eager=True, num_gpu_blocks_override=14))
    llm = vllm.AsyncLLMEngine.from_engine_args(config)
    session: Any = await r3_pass.runtime.attach(llm)  # type: ignore[misc]
    known = truth()

    async def one(name: str, prompt: Any, new: int) -> Any:
        last = None
        async for output in llm.generate(prompt, serving.sampling(new), request_id=name):
            last = output
        return last

    for run in range(2):
        outputs = await asyncio.gather(*[one(f"{run}-{i}", p, 60) for i, p in enumerate(serving.prompts())])
        print("rows", known.check(outputs), "near-ties", known.ties)
        ended = asyncio.create_task(one(f"ended-{run}", serving.prompts(seed=7)[2], 200))
        await asyncio.sleep(0.05)
        ended.cancel()  # in the middle of its prefill, or of its decoding
        await asyncio.gather(ended, return_exceptions=True)
    assert await session.errors() == {}
    print(await session.report())
    for i in (0, 2):
        await one(f"new-{i}", serving.prompts()[i], 4)
    await session.weights_changed("v2")
    lost = await asyncio.gather(
        *[one(f"old-{i}", serving.prompts()[i], 4) for i in (0, 2)], return_exceptions=True
    )  # each is told, also where both end in one step
    assert [type(e) for e in lost] == [StaleRoutes] * 2 and "request 'old-2' has" in str(lost[1]), lost
    await llm.reset_prefix_cache()
    left = asyncio.create_task(one("left", serving.prompts()[0], 100))
    while not llm.output_processor.request_states or not any(
        s.routed_experts_chunks for s in llm.output_processor.request_states.values()
    ):
        await asyncio.sleep(0.01)
    await session.detach()
    assert (await left).outputs[0].routed_experts is None, "not those that were sent before"
    assert (await one("after", serving.prompts()[0], 4)).outputs[0].routed_experts is None
    llm.shutdown()


def off() -> None:
    """Installed, and not asked for: vLLM's classes are as they were, and `attach` says what to do."""
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    llm = vllm.LLM(FOLDER, **serving.settings(enforce_eager=True))
    changed = [
        f"{c.__name__}.{name}"
        for c in (Scheduler, EngineCore, WorkerWrapperBase)
        for name, value in vars(c).items()
        if getattr(value, "__module__", "").startswith("r3_pass")
    ]
    assert changed == [], changed
    message = refused(r3_pass.runtime.attach, llm)
    assert "R3_PASS_VLLM=1" in message
    os.environ["R3_PASS_VLLM"] = "1"  # too late
    assert "did not load r3_pass's plug-in" in refused(r3_pass.runtime.attach, llm)
    assert all(o.outputs[0].routed_experts is None for o in generate(llm))


def ngram() -> None:
    """Speculation, under preemption; the core in this process, so that drafts can be counted."""
    import vllm

    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    more: Any = {"enforce_eager": True, "num_gpu_blocks_override": 14, "speculative_config": speculation}
    llm: Any = vllm.LLM(FOLDER, **serving.settings(**more))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    seen: dict[str, int] = {"drafts": 0, "kept": 0, "preempted": 0}
    update, preempt = scheduler.update_from_output, scheduler._preempt_request

    def count(scheduled: Any, output: Any) -> Any:
        for request_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
            seen["drafts"] += len(drafts)
            seen["kept"] += len(output.sampled_token_ids[output.req_id_to_index[request_id]]) - 1
        return update(scheduled, output)

    def preempted(*args: Any, **kwargs: Any) -> Any:
        seen["preempted"] += 1
        return preempt(*args, **kwargs)

    scheduler.update_from_output, scheduler._preempt_request = count, preempted
    session: Any = r3_pass.runtime.attach(llm)
    known = truth()
    print("rows", known.check(generate(llm, new=60)), "near-ties", known.ties, seen)
    assert 0 < seen["kept"] < seen["drafts"] and seen["preempted"]
    session.detach()


def native() -> None:
    import vllm

    llm = vllm.LLM(FOLDER, **serving.settings(enforce_eager=True, enable_return_routed_experts=True))
    print(refused(r3_pass.runtime.attach, llm))
    rows = {o.request_id: o.outputs[0].routed_experts for o in generate(llm)}
    np.savez(Path(FOLDER) / "native.npz", **rows)


def main() -> None:
    if MODE == "graph":
        sync(compilation_config=serving.FAST)
    elif MODE == "eager":
        sync(enforce_eager=True)
    elif MODE == "async":
        asyncio.run(served())
    elif MODE == "dense":
        import vllm

        vllm.LLM(FOLDER, **serving.settings(enforce_eager=True))
    else:
        {"off": off, "ngram": ngram, "native": native}[MODE]()
    print("done", MODE)


if __name__ == "__main__":
    main()
