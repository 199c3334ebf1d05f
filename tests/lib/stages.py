"""One process of a pipeline: the reference engine with its stage, serving the cases of tests/engine/test_pipeline.py.

    python stages.py RANK SIZE FOLDER CASE [--device cuda]

Every process makes the same calls. Results go to FOLDER/RANK.pt: tokens, rows and errors by request.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from engine import Engine, ReferenceAdapter, Result
from engine.pipeline import Pipeline
from reference import VOCAB, nearly, tiny
from torch import nn

import r3_pass

LAYERS = 4
PATIENCE = datetime.timedelta(seconds=60)


def model(device: str = "cpu") -> nn.Module:
    return tiny(num_hidden_layers=LAYERS).to(device)


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    found: list[list[int]] = np.random.default_rng(seed).integers(0, VOCAB, (count, length)).tolist()
    return found


def prefix_hit(engine: Engine) -> list[Result]:
    (prompt,) = prompts(1, 13)
    return engine.generate([prompt], max_tokens=20) + engine.generate([prompt], max_tokens=20)


def concurrent(engine: Engine) -> list[Result]:
    """More than fit: some are preempted; one is aborted, one sleeps in the middle."""
    results = engine.generate(prompts(6, 9, seed=1), max_tokens=18)
    names = [engine.add_request(prompt, max_tokens=12) for prompt in prompts(2, 5, seed=2)]
    for _ in range(4):
        engine.step()
    return [*results, engine.abort(names[0]), *engine.sleep()]


def chunked(engine: Engine) -> list[Result]:
    """Chunks of a long prompt, then a prefix hit on it; blocks move in between."""
    (prompt,) = prompts(1, 40, seed=3)
    first = engine.generate([prompt], max_tokens=6)
    engine.add_request(prompt[:30], max_tokens=6)
    engine.step()
    engine.compact()
    results: list[Result] = []
    while engine.requests:
        results += engine.step()
    return first + results


def drafted(engine: Engine) -> list[Result]:
    return engine.generate(prompts(3, 10, seed=4), max_tokens=16)


def new_weights(engine: Engine) -> list[Result]:
    """The same weights again, in the middle: what was cached is void, and what was emitted stays."""
    state = {name: value.clone() for name, value in model().state_dict().items()}
    engine.add_request(prompts(1, 9, seed=5)[0], max_tokens=10)
    for _ in range(4):
        engine.step()
    engine.update_weights(state, 1)
    results: list[Result] = []
    while engine.requests:
        results += engine.step()
    return results


def stale(engine: Engine) -> list[Result]:
    """KV of a cached prefix was written by somebody else on the last stage only: that request fails on all of them, and alone."""
    (prompt,) = prompts(1, 13)
    first = engine.generate([prompt], max_tokens=4)
    if dist.get_rank() == dist.get_world_size() - 1:
        engine.session.assign(np.arange(8))  # type: ignore[attr-defined]
    return first + engine.generate([prompt, prompts(1, 7, seed=6)[0]], max_tokens=4)


def dies(engine: Engine) -> list[Result]:
    """The last stage is gone in the middle of a request."""
    results = engine.generate(prompts(1, 9), max_tokens=6)
    engine.add_request(prompts(1, 9, seed=7)[0], max_tokens=10)
    for _ in range(3):
        engine.step()
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(9)
    try:
        while engine.requests:
            results += engine.step()
    except RuntimeError as error:
        print(f"the pipeline is torn: {str(error)[:80]}")
    return results


CASES: dict[str, tuple[Callable[[Engine], list[Result]], int]] = {
    "prefix hit": (prefix_hit, 0),
    "concurrent": (concurrent, 0),
    "chunked": (chunked, 0),
    "1 draft": (drafted, 1),
    "3 drafts": (drafted, 3),
    "new weights": (new_weights, 0),
    "stale": (stale, 0),
    "dies": (dies, 0),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    device = f"cuda:{given.rank}" if given.device == "cuda" else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device != "cpu" else "gloo", init_method=f"file://{given.folder / 'meeting'}",
        rank=given.rank, world_size=given.size, timeout=PATIENCE,
    )  # fmt: skip
    served = {}
    for name in given.cases:
        case, num_drafts = CASES[name]
        torch._dynamo.reset()
        target = model(device)
        drafter = nearly(target) if num_drafts else None
        engine = Engine(
            target, r3_pass.backend("eager"), drafter=drafter, num_drafts=num_drafts, num_blocks=20, block_size=4,
            max_batch_tokens=16, max_num_seqs=8, pipeline=Pipeline(device),
        )  # fmt: skip
        session = r3_pass.runtime.attach(ReferenceAdapter(engine))
        engine.session = session  # type: ignore[attr-defined]
        if device != "cpu":
            engine.warm_up(max_model_len=64)
        results = case(engine)
        session.check_integrity()
        session.detach()
        served[name] = [
            (r.prompt_token_ids + r.token_ids, r.routed_experts, r.finish_reason, repr(r.error)) for r in results
        ]
        torch.save(served, given.folder / f"{given.rank}.pt")
    print(f"stage {given.rank}: {len(served)} cases")
    sys.stdout.flush()
    os._exit(0)  # the other process may be gone: nothing to tear down together


if __name__ == "__main__":
    main()
