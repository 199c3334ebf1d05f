"""What recording and replay add to compilation: the pass itself, and the further flavours of each graph.

    python tests/benchmarks/compile_cost.py [--inner aot_eager inductor] [--layers 2] [--out results.json]

A Qwen3-MoE with small dimensions, `layers` deep: its operators matter here, its dimensions do not. Seconds of the first call, with
Inductor's caches empty (cold) and with what that left on the disk (warm, caches in memory cleared), for

    plain       the compiler without r3_pass
    record      r3_pass.backend(): each graph that routes also with the record op
    both        r3_pass.backend(mode="both"): also taking given routes

The pass is matching and rewriting; the rest of what is added is the flavours, which the same compiler compiles one after the other
(Dynamo's own part, tracing, is there once). Beside the seconds,
the number of graphs that Dynamo made at the first call and after calls with other lengths, in and out of steps: recording changes
neither. The pass has a bar: at most 2% of a plain compilation in aot_eager, the hard case.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from bench import DEVICE, Bench, arguments, table
from torch._dynamo.utils import counters
from torch._inductor.utils import clear_caches, fresh_inductor_cache

import r3_pass

VARIANTS = ["plain", "record", "both"]
FLAVOURS = {"plain": (), "record": ("recording", "live"), "both": ("given routes", "recording", "live")}
"""What is compiled of the one graph, in this order."""
LENGTHS = (8, 12, 20)
SHARE = 0.02
_PASS = ("match", "rewrite", "force")


def build(layers: int, model_type: str) -> Any:
    config = transformers.AutoConfig.for_model(
        model_type, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=64, moe_intermediate_size=16, vocab_size=128,
    )  # fmt: skip
    if model_type.startswith("deepseek"):
        config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim = 16, 16, 8, 8
        config.v_head_dim = 16
    config._experts_implementation = "batched_mm"
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(DEVICE).eval().requires_grad_(False)


@contextlib.contextmanager
def stopwatch() -> Iterator[dict[str, list[float]]]:
    """Seconds of each call of a part of the backend, while it is open: the pass's, and `compile_with` once for each flavour."""
    module: Any = sys.modules["r3_pass.backend"]  # the package's attribute of that name is the function
    spent: dict[str, list[float]] = {name: [] for name in (*_PASS, "compile_with")}
    held = {name: getattr(module, name) for name in spent}

    def timed(name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = held[name](*args, **kwargs)
            spent[name].append(time.perf_counter() - began)
            return result

        return run

    for name in spent:
        setattr(module, name, timed(name))
    try:
        yield spent
    finally:
        for name, function in held.items():
            setattr(module, name, function)


def compiled_once(model: Any, variant: str, inner: str) -> dict[str, Any]:
    """Seconds of the first call, and the graphs made by then and after all calls."""
    torch._dynamo.reset()
    counters.clear()
    modes = {"record": "record", "both": "both"}
    backend: Any = inner if variant == "plain" else r3_pass.backend(inner, mode=modes[variant])  # type: ignore[arg-type]
    compiled = torch.compile(model, backend=backend, dynamic=True)
    ids = {length: torch.ones(1, length, dtype=torch.int64, device=DEVICE) for length in LENGTHS}

    def call(length: int) -> None:
        compiled(ids[length], use_cache=False)

    with stopwatch() as spent, torch.no_grad():
        began = time.perf_counter()
        call(LENGTHS[0])
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    found: dict[str, Any] = {"seconds": seconds, "graphs": counters["stats"]["unique_graphs"]}
    found |= {name: sum(spent[name]) for name in _PASS}
    names, calls = FLAVOURS[variant], spent["compile_with"]
    found["flavours"] = {name: sum(calls[n :: len(names)]) for n, name in enumerate(names)}
    found["cache hits"] = counters["inductor"]["fxgraph_cache_hit"]
    found["cache misses"] = counters["inductor"]["fxgraph_cache_miss"]
    with torch.no_grad():
        for length in LENGTHS:
            call(length)
        if variant != "plain":
            session = r3_pass.runtime.attach(compiled, num_slots=max(LENGTHS))
            for length in LENGTHS:
                with session.step(np.arange(length)):
                    call(length)
            session.detach()
            call(LENGTHS[-1])
    found["graphs after all calls"] = counters["stats"]["unique_graphs"]
    return found


def measure(bench: Bench, inner: str) -> None:
    given = bench.given
    model = build(given.layers[inner], given.model_type)
    compiled_once(
        build(1, given.model_type), "both", inner
    )  # what is imported and set up at first use counts for none of them
    for variant in VARIANTS:
        with fresh_inductor_cache():
            for cache in ("cold", "warm") if inner == "inductor" else ("cold",):  # no other compiler keeps anything
                row = {"inner": inner, "layers": given.layers[inner], "variant": variant, "cache": cache}
                bench.add("compile", row | compiled_once(model, variant, inner))
                clear_caches()  # in memory; what is on the disk stays
    rows = {(row["variant"], row["cache"]): row for row in bench.rows["compile"] if row["inner"] == inner}
    for (variant, cache), row in rows.items():
        plain = rows["plain", cache]
        row["pass"] = sum(row[name] for name in _PASS)
        row["added"] = row["seconds"] - plain["seconds"]
        if variant == "plain":
            continue
        bench.bar(
            f"graphs more than without r3_pass, {variant}, {cache}, {inner}",
            row["graphs after all calls"] - plain["graphs after all calls"], "<=", 0, anywhere=True,
        )  # fmt: skip
    if inner == "aot_eager":
        plain, record = rows["plain", "cold"], rows["record", "cold"]
        bench.bar("matching, of a plain compilation, aot_eager", record["match"] / plain["seconds"], "<=", SHARE)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--inner", nargs="+", choices=["aot_eager", "inductor"], default=["aot_eager", "inductor"])
    parser.add_argument("--layers", type=int, help="by default 8 with aot_eager, 2 with Inductor")
    parser.add_argument("--model-type", default="qwen3_moe")
    given = parser.parse_args()
    if given.tiny:
        given.inner, given.layers = ["aot_eager"], 2
    given.layers = {"aot_eager": given.layers or 8, "inductor": given.layers or 2}
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    bench = Bench(given)
    for inner in given.inner:
        measure(bench, inner)
    report(bench)
    bench.finish()


def report(bench: Bench) -> None:
    seconds = ["first call, s", "added, s", "the pass, s", "each flavour, s"]
    print(
        table(
            ["inner, layers", "cache", "", *seconds, "graphs", "after all calls", "cache hits"],
            [
                (
                    f"{row['inner']}, {row['layers']}", row["cache"], row["variant"], f"{row['seconds']:.1f}",
                    f"{row['added']:.1f}", f"{row['pass']:.2f}",
                    ", ".join(f"{name} {spent:.1f}" for name, spent in row["flavours"].items()),
                    row["graphs"], row["graphs after all calls"], row["cache hits"],
                )
                for row in bench.rows["compile"]
            ],
        )
    )  # fmt: skip
    print(f"\n{bench.given.model_type}; graphs after all calls: of {len(LENGTHS)} lengths, in and out of steps")


if __name__ == "__main__":
    main()
