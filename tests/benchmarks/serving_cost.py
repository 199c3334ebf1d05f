"""What recording costs a server: throughput, time to the first token and time per token, off against on.

    python tests/benchmarks/serving_cost.py [--layers 48] [--seconds 150] [--out results.json]

Qwen3-30B-A3B's geometry with random weights in bfloat16 behind the reference engine (`examples/engine`), decodes in CUDA graphs:
random prompts, `concurrency` requests at a time, the next one as soon as one ends. Four engines live side by side over the same
weights: two compiled without r3_pass (off), and two with it, each with a session that hands out every request's rows (on): engines
of the same code differ, for their memory lies elsewhere. Runs over the same prompts take turns, and each round begins with another
one. A ratio is the median over the rounds of each round's own, the mean of the two engines over that of the others.

`--parts blocks` (all 48 layers, 61 GB) compiles each layer's MoE block by itself and leaves the rest eager; `--parts model`
compiles the model as one, minutes for a few layers. As many rounds are run as fit into `seconds`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from bench import CUDA, Bench, arguments, inner, table
from qwen3 import BLOCK, PARTS, attach, backend_of, build, engine_of, settle, sharing_weights

LIMITS = {"tokens/s": (">=", 0.998), "TTFT P50, ms": ("<=", 1.01), "TTFT P99, ms": ("<=", 1.01)}
PHASES = ["until all have a token, s", "after that, s"]  # with all requests asked at once: prefills, and decodes alone
ENGINES = ["off 1", "on 1", "off 2", "on 2"]  # in the order in which they are made
MEASURES = ["tokens/s", "TTFT P50, ms", "TTFT P99, ms", "TPOT P50, ms", "TPOT P99, ms", *PHASES]


class Server:
    """An engine, its compiled code and its session, warmed up."""

    def __init__(self, variant: str, model: Any, given: Any) -> None:
        began = time.perf_counter()
        self.backend = backend_of(variant, inner(given))
        blocks = -(-(given.prompt + given.new) // BLOCK)
        self.engine = engine_of(
            sharing_weights(model), self.backend, given.parts, True, num_blocks=given.concurrency * blocks + 64,
            max_batch_tokens=given.max_batch_tokens, max_num_seqs=given.concurrency,
        )  # fmt: skip
        self.session = attach(self.engine, self.backend)
        if CUDA:  # the largest first: what is compiled for it serves all others
            size = 1 << (given.concurrency - 1).bit_length()
            while size >= 2:
                self.engine.runner.capture(size, blocks)
                size //= 2
        settle()
        self.seconds = time.perf_counter() - began

    def serve(self, prompts: list[list[int]], new: int, concurrency: int) -> tuple[dict[str, float], list[Any]]:
        """What was measured, and all results."""
        engine, waiting = self.engine, deque(prompts)
        asked: dict[str, float] = {}
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        results: list[Any] = []

        def seen(name: str, _: int) -> None:
            last[name] = time.perf_counter()
            first.setdefault(name, last[name])

        def ask() -> None:
            now = time.perf_counter()
            asked[engine.add_request(waiting.popleft(), new, on_token=seen)] = now

        gc.collect()
        settle()
        began = time.perf_counter()
        for _ in range(min(concurrency, len(prompts))):
            ask()
        while engine.requests:
            done = engine.step()
            results += done
            for _ in range(min(len(done), len(waiting))):
                ask()
        results += engine.step()  # nothing is left to launch: what the last forward made
        seconds = time.perf_counter() - began
        wait = np.array([first[name] - at for name, at in asked.items()]) * 1e3
        each = np.array([(last[name] - first[name]) / max(new - 1, 1) for name in asked]) * 1e3
        measured = {
            "tokens/s": len(prompts) * new / seconds,
            "TTFT P50, ms": float(np.quantile(wait, 0.5)), "TTFT P99, ms": float(np.quantile(wait, 0.99)),
            "TPOT P50, ms": float(np.quantile(each, 0.5)), "TPOT P99, ms": float(np.quantile(each, 0.99)),
            "seconds": seconds,
        }  # fmt: skip
        started = max(first.values()) - began
        measured |= zip(PHASES, (started, seconds - started), strict=True)
        self._check(results, len(prompts), new)
        return measured, results

    def _check(self, results: list[Any], count: int, new: int) -> None:
        """Every request has all its tokens, and with a session all its rows."""
        if len(results) != count or any(r.error is not None or len(r.token_ids) != new for r in results):
            raise SystemExit(f"{len(results)} of {count} requests ended: {[r.error for r in results if r.error][:3]}")
        if self.session is None:
            return
        layers = list(self.session.describe().layers)
        for result in results:
            rows = result.routed_experts
            if len(rows) != len(result.prompt_token_ids) + new - 1 or not (rows[:, layers] >= 0).all():
                raise SystemExit(f"{result.request_id} has {len(rows)} rows, or void ones")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--parts", choices=PARTS, default="blocks", help="what is compiled")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens that a request generates")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--requests", type=int, default=512, help="of a run")
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=150.0, help="for all rounds: as many as fit")
    parser.add_argument("--rounds", type=int, default=2, help="at least, however long they take")
    given = parser.parse_args()
    if given.tiny:
        given.layers, given.prompt, given.new, given.concurrency, given.requests = 2, 12, 4, 4, 6
        given.max_batch_tokens, given.seconds, given.rounds = 16, 0.0, 1
    elif not CUDA:
        raise SystemExit("this benchmark serves from a GPU: it needs a CUDA device, or --tiny")
    bench = Bench(given)
    with torch.no_grad():
        measure(bench, build(given.layers, given.tiny))
    report(bench)
    bench.finish()


def measure(bench: Bench, model: Any) -> None:
    given = bench.given
    vocabulary = model.config.vocab_size
    servers: dict[str, Server] = {}
    for engine in ENGINES:
        servers[engine] = Server(engine.split()[0], model, given)
        print(f"{engine}: compiled and captured in {servers[engine].seconds:.0f} s", flush=True)
    # A whole run each that nobody counts: whoever meets a size first makes the kernels' plans for all (a first run took twice as
    # long as the second, whoever had it).
    first = np.random.default_rng(1000).integers(0, vocabulary, (given.requests, given.prompt)).tolist()
    for server in servers.values():
        server.serve(first, given.new, given.concurrency)
    gc.collect()
    gc.freeze()  # all engines, which every full collection would look at, whoever's allocation it is that starts it
    runs: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    began, same, number = time.perf_counter(), [], 0
    spent = 0.0
    while number < given.rounds or spent * (number + 1) / number <= given.seconds:
        prompts = np.random.default_rng(number).integers(0, vocabulary, (given.requests, given.prompt)).tolist()
        tokens = {}
        turn = number % len(ENGINES)
        for engine in ENGINES[turn:] + ENGINES[:turn]:
            measured, results = servers[engine].serve(prompts, given.new, given.concurrency)
            runs[engine].append(measured)
            tokens[engine] = {tuple(r.prompt_token_ids): r.token_ids for r in results}
            bench.add("runs", {"round": number, "engine": engine, **measured})
        for engine in ENGINES[1:]:
            same.append(statistics.mean(tokens[engine][prompt] == ids for prompt, ids in tokens["off 1"].items()))
        number += 1
        spent = time.perf_counter() - began
    ratios: dict[str, float] = {}
    for name in MEASURES:
        found = np.array([[run[name] for run in runs[engine]] for engine in ENGINES])  # by engine and round
        off, on = found[0::2], found[1::2]
        each = on.mean(0) / off.mean(0)
        ratios[name] = float(np.median(each))
        row = {"measure": name, "rounds": number, "equal tokens": statistics.mean(same)}
        row |= {
            "off": float(np.median(off)),
            "on": float(np.median(on)),
            "on / off": ratios[name],
            "ratios": each.tolist(),
        }
        row["off 2 / off 1"] = float(np.median(off[1] / off[0]))
        row["on 2 / on 1"] = float(np.median(on[1] / on[0]))
        row["spread of off"] = float(np.ptp(off)) / row["off"]
        bench.add("serving", row)
    fresh = np.random.default_rng(2000)  # what was served before lies in the prefix cache

    def served(variant: str) -> Any:
        def few() -> None:
            prompts = fresh.integers(0, vocabulary, (16, given.prompt)).tolist()
            servers[f"{variant} 1"].serve(prompts, min(given.new, 4), given.concurrency)

        return few

    explain = {variant: served(variant) for variant in ("off", "on")}
    for name, (must, limit) in LIMITS.items():
        bench.bar(f"serving, {name}, on / off", ratios[name], must, limit, explain=explain, host=True)
        explain = explain if bench.bars[-1]["met"] is not False else {}  # one profile explains them all


def report(bench: Bench) -> None:
    given, rows = bench.given, bench.rows["serving"]
    print(
        table(
            ["", "off", "on", "on / off", "one off of the other", "one on of the other", "spread of off"],
            [
                (
                    row["measure"], f"{row['off']:.2f}", f"{row['on']:.2f}", f"**{row['on / off']:.4f}**",
                    f"{row['off 2 / off 1']:.4f}", f"{row['on 2 / on 1']:.4f}",
                    f"{100 * row['spread of off']:.1f}%",
                )
                for row in rows
            ],
        )
    )  # fmt: skip
    compiled = "the model compiled as one" if given.parts == "model" else "compiled by MoE block"
    print(
        f"\n{given.layers} of 48 layers, {compiled}; {given.requests} requests of {given.prompt} + {given.new} tokens, "
        f"{given.concurrency} at a time; {rows[0]['rounds']} rounds; {100 * rows[0]['equal tokens']:.0f}% of answers equal"
    )


if __name__ == "__main__":
    main()
