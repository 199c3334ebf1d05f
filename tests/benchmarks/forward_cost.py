"""What recording adds to a whole decode forward, and what the fused router takes off it again.

    python tests/benchmarks/forward_cost.py [--layers 48] [--batch 256] [--out results.json]

Qwen3-30B-A3B's geometry with random weights in bfloat16, served by the reference engine (`examples/engine`): the CUDA graph of a
decode of `batch` sequences of `context` tokens, Inductor inside. Milliseconds of GPU time per replay, medians of the rounds;
replays of each variant alternate with those of "off", and a ratio is the median of the rounds' own:

    off      backend="inductor", no session
    on       r3_pass.backend(), inside a step: ids of all layers recorded
    fused    r3_pass.backend(fuse_router=True), inside a step

`--variants` leaves some out: each is a compilation of its own, of a minute or more.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from capture_cost import microseconds
from engine import Engine, ReferenceAdapter

import r3_pass

BLOCK = 16
LIMITS = {"on": 1.002, "fused": 1.0}


def build(layers: int, hidden: int, experts: int) -> Any:
    config: Any = transformers.Qwen3MoeConfig(
        vocab_size=32_768, hidden_size=hidden, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=experts, num_experts_per_tok=8,
        norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return transformers.Qwen3MoeForCausalLM(config).eval().requires_grad_(False)


def backend_of(variant: str) -> Any:
    if variant == "off":
        return "inductor"
    return r3_pass.backend("inductor", **({"fuse_router": True} if variant == "fused" else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--variants", nargs="+", choices=["off", "on", "fused"], default=["off", "on", "fused"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark measures GPU time: it needs a CUDA device")
    if "fuse_router" not in inspect.signature(r3_pass.backend).parameters:
        given.variants = [variant for variant in given.variants if variant != "fused"]
    model = build(given.layers, given.hidden, given.experts)
    blocks = -(-given.context // BLOCK)
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    times: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for variant in given.variants:
        torch._dynamo.reset()
        began = time.perf_counter()
        engine = Engine(
            model, backend_of(variant), num_blocks=given.batch * blocks, block_size=BLOCK, max_num_seqs=given.batch,
        )  # fmt: skip
        session = r3_pass.runtime.attach(ReferenceAdapter(engine)) if variant != "off" else None
        engine.runner.capture(given.batch, blocks)
        graphs[variant] = engine.runner.graphs[given.batch][0]
        torch.cuda.synchronize()
        seconds[variant] = time.perf_counter() - began
        print(f"{variant}: compiled and captured in {seconds[variant]:.0f} s", flush=True)
        if session is None:
            times[variant] = [microseconds(graphs[variant], 5) / 1e3 for _ in range(given.rounds)]
            continue
        slots = np.arange(given.batch) * BLOCK
        with session.step(slots):
            graphs[variant].replay()
        assert (session.read(slots).max((0, 2))[list(session.describe().layers)] >= 0).all(), "a layer was not recorded"
        opened = session.step(slots)
        opened.__enter__()  # open while its graph is timed: every replay records
        pairs = [
            [microseconds(graphs[name], 5) / 1e3 for name in ("off", variant) if name in graphs]
            for _ in range(given.rounds)
        ]
        times[variant] = [pair[-1] for pair in pairs]
        if "off" in graphs:
            ratios[variant] = statistics.median(pair[1] / pair[0] for pair in pairs)
        session.detach()  # two sessions of one model would write each other's rows
    level = {variant: statistics.median(seen) for variant, seen in times.items()}
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "transformers": transformers.__version__, "date": datetime.date.today().isoformat(), **vars(given),
    }  # fmt: skip
    print(json.dumps(machine, default=str))
    print("\n| | a decode, ms | of off | spread, ms | compiled in, s |\n|---|---|---|---|---|")
    for variant, value in level.items():
        spread = statistics.quantiles(times[variant], n=10)
        ratio = f"{ratios[variant]:.4f}" if variant in ratios else "-"
        print(f"| {variant} | {value:.3f} | {ratio} | {spread[-1] - spread[0]:.3f} | {seconds[variant]:.0f} |")
    if given.out:
        found = {"machine": machine, "ms": level, "of off": ratios, "compile seconds": seconds, "all": times}
        given.out.write_text(json.dumps(found, indent=2, default=str) + "\n")
    missed = [
        f"{v}/off is {ratios[v]:.4f}, at most {LIMITS[v]}" for v in LIMITS if v in ratios and ratios[v] > LIMITS[v]
    ]
    if missed:
        raise SystemExit("; ".join(missed))


if __name__ == "__main__":
    main()
