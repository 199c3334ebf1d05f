"""Two ranks that serve as one, each request against a prefill on one process; on GPUs with NCCL and CUDA graphs.

The ranks of a test are processes of their own, which serve everything at once: what they returned is judged here.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from engine import Engine, ReferenceAdapter, Result
from engine.parallel import load
from processes import on_ranks
from ranks import prompts
from reference import Truth, nearly

import r3_pass
from r3_pass import RefusedConfiguration
from r3_pass.runtime import IdleSession

GPUS = [pytest.mark.cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
CASES = ("prefix hit", "concurrent", "chunked prefill", "1 draft", "3 drafts")
SPLITS = {"tensor parallel": CASES, "expert parallel": CASES[:3]}
"""Drafts are verified by the same graph, however the experts are split."""


def marks(split: str, device: str) -> list[Any]:
    """CI has the first on a CPU; what a rank of the second gets of a choice, tests/registry/test_partition.py asks of graphs."""
    return GPUS if device == "cuda" else [pytest.mark.slow] if split != "tensor parallel" else []


Served = tuple[list[int], Any, Any, str]


def serve(path: str, split: str, device: str) -> dict[str, Any]:
    """On one rank: its part of the model through everything that changes which slot a token has, and what it saw."""
    options = {"num_blocks": 24, "block_size": 4, "max_batch_tokens": 16, "max_num_seqs": 8}
    expert_parallel = split == "expert parallel"
    model: Any = load(path, ranks.WORLD, expert_parallel=expert_parallel, dtype=torch.float64)
    model.config._experts_implementation = "batched_mm"
    drafter = nearly(ranks.tiny().to(model.device))
    backend = r3_pass.backend("eager")
    seen: dict[str, Any] = {"device": model.device.type}

    def start(num_drafts: int = 0) -> tuple[Engine, Any]:
        engine = Engine(model, backend, drafter=drafter if num_drafts else None, num_drafts=num_drafts, **options)
        return engine, r3_pass.runtime.attach(ReferenceAdapter(engine))

    def warm(engine: Engine) -> None:
        if device == "cuda":
            engine.warm_up(max_model_len=64)
            assert len(engine.runner.graphs) == 3

    engine, session = start()
    seen |= {
        "idle": isinstance(session, IdleSession),
        "geometry": session.geometry,
        "self-test": str(session.self_test()),
    }
    warm(engine)
    (short,), (long,) = prompts(1, 13), prompts(1, 45, seed=1)
    with ranks.record_ops() as calls:
        seen["prefix hit"] = [engine.generate([short], max_tokens=20)[0] for _ in range(2)]
        seen["concurrent"] = engine.generate(prompts(12, 9, seed=2), max_tokens=24)
        seen["chunked prefill"] = engine.generate([long], max_tokens=4)
        seen["chunked prefill"] += engine.generate([long, [*long[:40], 1, 2]], max_tokens=8)
    engine.blocks.forget_prefixes = lambda: None  # type: ignore[method-assign]
    engine.update_weights(dict(model.state_dict()), 1)
    seen["stale"] = [_plain(result) for result in engine.generate([long, short[:5]], max_tokens=4)]
    seen |= {"calls": calls[0], "hits": engine.scheduler.num_hits, "preempted": engine.scheduler.num_preempted}
    session.check_integrity()
    session.detach()
    for name in SPLITS[split][3:]:
        engine, session = start(int(name[0]))
        warm(engine)
        seen[name] = engine.generate(prompts(6, 9, seed=3), max_tokens=20)
        seen[f"accepted, {name}"] = engine.num_accepted, engine.num_rejected
        session.detach()
    seen["refusal"] = "" if expert_parallel else other_router(model, start)
    return seen | {name: [_plain(result) for result in seen[name]] for name in SPLITS[split]}


def other_router(model: Any, start: Any) -> str:
    """What the start-up check says where the second rank has another router."""
    if dist.get_rank() == 1:
        gate = model.model.layers[1].mlp.gate.weight
        gate.copy_(gate.flip(0))
    _, session = start()
    try:
        session.self_test()
    except RefusedConfiguration as error:
        return str(error)
    finally:
        session.detach()
    return ""


def _plain(result: Result) -> Served:
    error = result.error and f"{type(result.error).__name__}: {result.error}"
    return result.prompt_token_ids + result.token_ids, result.routed_experts, error, result.finish_reason


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((split, device), id=f"{split}-{device}", marks=marks(split, device))
        for device in ("cpu", "cuda")
        for split in SPLITS
    ],
)
def served(request: Any, tmp_path_factory: Any) -> tuple[list[dict[str, Any]], Truth, str]:
    """What both ranks saw, the truth, and how the model was split."""
    split, device = request.param
    model = ranks.tiny()
    path = tmp_path_factory.mktemp("model")
    copy.deepcopy(model).save_pretrained(path)
    return on_ranks(ranks.WORLD, serve, str(path), split, device, device=device), Truth(model), split


def test_rows_are_those_of_a_prefill_on_one_process(served: Any) -> None:
    (first, second), truth, split = served
    for case in SPLITS[split]:
        for tokens, rows, error, reason in first[case]:
            assert error is None and reason == "length", case
            assert rows.dtype == np.int16 and np.array_equal(rows, truth.rows(tuple(tokens))[:-1]), case
        assert [tokens for tokens, *_ in second[case]] == [tokens for tokens, *_ in first[case]], case
    assert first["hits"] >= 2 and first["preempted"]
    assert all(min(first[f"accepted, {name}"]) > 0 for name in SPLITS[split][3:])


def test_the_first_rank_alone_records(served: Any) -> None:
    """The other allocates nothing, its graphs write nothing, and it charges the same bytes."""
    (first, second), _, split = served
    assert not first["idle"] and second["idle"] and first["geometry"] == second["geometry"]
    assert (first["calls"] > 20 or first["device"] == "cuda") and second["calls"] == 0
    for case in SPLITS[split]:
        assert all(rows is None and error is None for _, rows, error, _ in second[case])


def test_what_the_first_rank_finds_void_fails_on_both(served: Any) -> None:
    """Or they would part ways. On a GPU it is found by `finish`, when nothing is scheduled any more."""
    (first, second), truth, _ = served
    for seen in (first, second)[: 1 if first["device"] == "cuda" else 2]:
        assert "StaleRoutes" in seen["stale"][0][2] and seen["stale"][1][2] is None
    tokens, rows, *_ = first["stale"][1]
    assert np.array_equal(rows, truth.rows(tuple(tokens))[:-1]) and second["stale"][1][0] == tokens


def test_ranks_are_compared_at_start_up(served: Any) -> None:
    (first, second), _, split = served
    for seen in (first, second):
        assert "layer 1: 16 of 16 rows equal (topk" in seen["self-test"]
        if split == "tensor parallel":
            assert "choose different experts, rank 1 beside rank 0: for token" in seen["refusal"]
