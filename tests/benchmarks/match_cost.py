"""What matching and rewriting add to the compilation of a deep model.

    python tests/benchmarks/match_cost.py [--layers 60] [--model-type qwen3_moe] [--inner aot_eager]

Compiles a model with small dimensions twice in one process, without r3_pass and with it, and prints the seconds of each
part. A model of 60 layers has 60 routers; its dimensions do not matter here, its operators do. aot_eager is the hard
case: a code generator behind it takes minutes, of which matching is a smaller share.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import time
import warnings
from typing import Any

import torch
import transformers

import r3_pass


def build(model_type: str, layers: int) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(
        model_type, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=64, moe_intermediate_size=16, vocab_size=128,
    )  # fmt: skip
    if model_type.startswith("deepseek"):
        config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim = 16, 16, 8, 8
        config.v_head_dim = 16
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def compile_seconds(model: torch.nn.Module, backend: Any) -> float:
    torch._dynamo.reset()
    started = time.perf_counter()
    torch.compile(model, backend=backend)(torch.ones(1, 8, dtype=torch.int64), use_cache=False)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--model-type", default="qwen3_moe")
    parser.add_argument("--inner", default="aot_eager")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    seconds = {"match": 0.0, "rewrite": 0.0}

    def timed(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[name] += time.perf_counter() - started
            return result

        return run

    backend_module: Any = sys.modules["r3_pass.backend"]  # the package's attribute of that name is the function
    backend_module.match = timed("match", backend_module.match)
    backend_module.rewrite = timed("rewrite", backend_module.rewrite)
    model = build(given.model_type, given.layers)
    compile_seconds(model, given.inner)  # what is imported and cached on first use counts for neither
    plain = compile_seconds(model, given.inner)
    backend = r3_pass.backend(given.inner)
    total = compile_seconds(model, backend)
    print(f"{given.model_type}, {given.layers} layers, {len(backend.report().sites)} sites, inner {given.inner}")
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {datetime.date.today()}")
    print(f"without r3_pass {plain:.1f} s; with it {total:.1f} s, both flavours")
    for name, spent in seconds.items():
        print(f"{name:8} {spent:6.2f} s = {100 * spent / plain:.1f}% of the compilation without r3_pass")
    if seconds["match"] > 0.02 * plain:
        raise SystemExit("matching adds more than 2%")


if __name__ == "__main__":
    main()
