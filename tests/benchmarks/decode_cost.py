"""What a server's decodes cost with recording, step by step, and what the GPU does in them.

    python tests/benchmarks/decode_cost.py [--layers 48] [--out results.json]

The engines of `serving_cost.py` (Qwen3-30B-A3B's geometry, each MoE block compiled by itself), all requests at once and past their
prompts: two engines without r3_pass (off) and two with it and with sessions (on), made in turn. They take turns of some steps each.
Three tables:

    steps       microseconds a step, of the mean of both off; then once more after the sessions were detached: what is left then is
                no recording, but what two compilations and two engines differ by
    timeline    the GPU's time in a step from a trace of some in a row: busy, idle between kernels
    kernels     those that differ most between engines, microseconds a step, less the mean of both off
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
from bench import CUDA, Bench, arguments, inner, table
from qwen3 import BLOCK, attach, backend_of, build, engine_of, settle, sharing_weights

ENGINES = ["off 1", "on 1", "off 2", "on 2"]  # in the order in which they are made
OFF = ["off 1", "off 2"]
SHOWN, TRACED = 15, 5  # kernels, steps


class Decodes:
    """An engine whose requests are all past their prompts."""

    def __init__(self, variant: str, model: Any, given: Any, prompts: list[list[int]], new: int) -> None:
        backend = backend_of(variant, inner(given))
        blocks = -(-(given.prompt + new) // BLOCK)
        self.engine = engine_of(
            sharing_weights(model), backend, "blocks", True, num_blocks=given.requests * blocks + 64,
            max_batch_tokens=given.max_batch_tokens, max_num_seqs=given.requests,
        )  # fmt: skip
        self.session = attach(self.engine, backend)
        if CUDA:
            self.engine.runner.capture(given.requests, blocks)
        for prompt in prompts:
            self.engine.add_request(prompt, new)
        scheduler = self.engine.scheduler
        while scheduler.waiting or any(seq.num_computed < given.prompt for seq in scheduler.running):
            self.engine.step()
        self.run(3)

    def run(self, steps: int) -> float:
        """Microseconds a step."""
        began = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        settle()
        return (time.perf_counter() - began) / steps * 1e6


def level(bench: Bench, made: dict[str, Decodes], when: str) -> None:
    given = bench.given
    times: dict[str, list[float]] = {name: [] for name in made}
    for number in range(given.rounds):
        turn = number % len(ENGINES)
        for name in ENGINES[turn:] + ENGINES[:turn]:
            times[name].append(made[name].run(given.steps))
    off = np.mean([times[name] for name in OFF], axis=0)
    for name, seen in times.items():
        of = (np.array(seen) / off).tolist()
        row = {
            "when": when,
            "engine": name,
            "us": statistics.median(seen),
            "of off": statistics.median(of),
            "rounds": of,
        }
        bench.add("steps", row)


def trace(decodes: Decodes) -> tuple[dict[str, float], Counter[str]]:
    """Microseconds of a step, in all and by kernel: from one step's sampling to the next one's."""
    decodes.engine.step()
    settle()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(TRACED):
            decodes.engine.step()
        settle()
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    ends = [number for number, (_, _, name) in enumerate(events) if "ArgMax" in name]
    first, last, steps = ends[0], ends[-1], len(ends) - 1
    kernels: Counter[str] = Counter()
    for start, end, name in events[first + 1 : last + 1]:
        kernels[name] += (end - start) / steps
    pairs = zip(events[first:last], events[first + 1 : last + 1], strict=True)
    idle = sum(max(0.0, after[0] - before[1]) for before, after in pairs) / steps
    return {"step": (events[last][1] - events[first][1]) / steps, "busy": kernels.total(), "idle": idle}, kernels


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="of an engine's turn")
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    given = parser.parse_args()
    if given.tiny:
        given.layers, given.requests, given.prompt = 2, 4, 12
        given.rounds, given.steps, given.max_batch_tokens = 2, 2, 16
    elif not CUDA:
        raise SystemExit("this benchmark measures a GPU's decodes: it needs a CUDA device, or --tiny")
    bench = Bench(given)
    with torch.no_grad():
        measure(bench, build(given.layers, given.tiny))
    report(bench)
    bench.finish()


def measure(bench: Bench, model: Any) -> None:
    given = bench.given
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (given.requests, given.prompt)).tolist()
    new = 2 * given.rounds * given.steps + TRACED + 10
    made = {}
    for name in ENGINES:
        made[name] = Decodes(name.split()[0], model, given, prompts, new)
        print(f"{name}: past its prompts", flush=True)
    gc.collect()
    gc.freeze()
    level(bench, made, "in steps")
    if CUDA:
        found = {name: trace(decodes) for name, decodes in made.items()}
        for name, (timeline, _) in found.items():
            bench.add("timeline", {"engine": name, **timeline})
        base = {
            kernel: sum(found[name][1][kernel] for name in OFF) / len(OFF) for _, by in found.values() for kernel in by
        }
        most = sorted(base, key=lambda kernel: -max(abs(by[kernel] - base[kernel]) for _, by in found.values()))
        for kernel in most[:SHOWN]:
            more = {name: by[kernel] - base[kernel] for name, (_, by) in found.items()}
            bench.add("kernels", {"kernel": kernel[:90], "us": base[kernel], **more})
    for decodes in made.values():
        if decodes.session is not None:
            decodes.session.detach()
        decodes.run(1)
    level(bench, made, "detached")


def report(bench: Bench) -> None:
    steps = [(row["when"], row["engine"], f"{row['us']:.0f}", f"{row['of off']:.4f}") for row in bench.rows["steps"]]
    print(table(["", "engine", "us a step", "of both off"], steps))
    if not CUDA:
        return
    timeline = [
        (row["engine"], *(f"{row[name]:.0f}" for name in ("step", "busy", "idle"))) for row in bench.rows["timeline"]
    ]
    print(table(["engine", "a step of the trace, us", "busy", "idle"], timeline))
    kernels = [
        (row["kernel"], f"{row['us']:.1f}", *(f"{row[name]:+.1f}" for name in ENGINES)) for row in bench.rows["kernels"]
    ]
    print(table(["kernel", "us in a step", *ENGINES], kernels))


if __name__ == "__main__":
    main()
