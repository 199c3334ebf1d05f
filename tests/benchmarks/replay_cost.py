"""What replay adds to a training step: the same compiled model, the context entered or not.

    python tests/benchmarks/replay_cost.py [--layers 6] [--tokens 8192] [--inner inductor] [--out results.json]

Layers of the geometry of Qwen3-30B-A3B (hidden 2048, 128 experts, top 8) in bfloat16 with random weights; forward, backward,
optimizer. Milliseconds of a whole step, checks and upload of the routes included: of several in a row, as a trainer runs them, and
of one alone, from an idle GPU to an idle GPU, which then waits for the host. Off and on alternate, and a figure is the median; what
is added, the median of what each round added.

`off` is live routing in the same function; `on, host` gets int16 numpy rows as a rollout hands them out, `on, GPU` a tensor that is
there already. The time to enter is until the model may be called: the routes are queued then, and looked at in the forward. The
routes are the model's own choice, so that all three do the same work.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
import transformers
from bench import CUDA, DEVICE, Bench, arguments, table

import r3_pass


def own_routes(model: Any, ids: torch.Tensor) -> np.ndarray:
    """int16 [tokens, layers, top_k] of an eager forward, by hooks."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda _, __, out: found.append(next(t for t in out if not t.is_floating_point()))
        )
        for layer in model.model.layers
    ]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack([rows.reshape(ids.numel(), -1) for rows in found], 1).to(torch.int16).cpu().numpy()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--steps", type=int, default=15, help="rounds")
    parser.add_argument("--row", type=int, default=4, help="steps in a row")
    parser.add_argument("--limit", type=float, default=1.0, help="percent that replay may cost")
    given = parser.parse_args()
    if given.tiny:
        given.layers, given.tokens, given.inner, given.steps, given.row = 2, 16, "aot_eager", 1, 1
    elif not CUDA:
        raise SystemExit("this benchmark measures a GPU: it needs a CUDA device, or --tiny")
    bench = Bench(given)
    measure(bench)
    bench.finish()


def build(given: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    }  # fmt: skip
    if given.tiny:
        sizes |= {"hidden_size": 64, "moe_intermediate_size": 16, "num_attention_heads": 4, "head_dim": 16}
    config: Any = transformers.Qwen3MoeConfig(**sizes, num_hidden_layers=given.layers, norm_topk_prob=True)
    config._experts_implementation = "batched_mm" if given.tiny else "grouped_mm"
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = transformers.Qwen3MoeForCausalLM(config).train()
    return model if given.tiny else model.bfloat16()


def settle() -> None:
    if CUDA:
        torch.cuda.synchronize()


def measure(bench: Bench) -> None:
    given = bench.given
    model = build(given)
    ids = torch.randint(8192, (max(given.tokens // 2048, 1), min(given.tokens, 2048)), device=DEVICE)
    backend = r3_pass.backend(given.inner, mode="replay")
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rows = own_routes(model, ids)
    routes = {"off": None, "on, host": rows, "on, GPU": torch.from_numpy(rows).to(DEVICE)}

    def update() -> None:
        logits = compiled(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    # From an idle GPU, one step; and steps in a row, as a trainer runs them: the host is ahead then.
    alone: dict[str, list[float]] = {variant: [] for variant in routes}
    in_a_row: dict[str, list[float]] = {variant: [] for variant in routes}
    entered: dict[str, list[float]] = {variant: [0.0] for variant in routes}
    for _ in range(given.steps + 3):
        for variant, chosen in routes.items():
            for count, seen in ((1, alone[variant]), (given.row, in_a_row[variant])):
                settle()
                start = time.perf_counter()
                for _ in range(count):
                    if chosen is None:
                        update()
                        continue
                    before = time.perf_counter()
                    with backend.replay(chosen):
                        entered[variant].append((time.perf_counter() - before) * 1e3)
                        update()
                settle()
                seen.append((time.perf_counter() - start) * 1e3 / count)
    level, added = {}, {}
    for way, times in (("alone", alone), ("in a row", in_a_row)):
        level[way] = {variant: statistics.median(seen[3:]) for variant, seen in times.items()}
        added[way] = {  # against the step beside it: the machine drifts more than replay costs
            variant: 100 * (statistics.median(on / off for on, off in zip(seen[3:], times["off"][3:], strict=True)) - 1)
            for variant, seen in times.items()
            if variant != "off"
        }
    entering = {variant: statistics.median(seen) for variant, seen in entered.items()}
    spread = max(in_a_row["off"][3:]) - min(in_a_row["off"][3:])
    for variant in routes:
        row: dict[str, Any] = {"variant": variant, "enter, ms": entering[variant], "spread of off, ms": spread}
        for way, times in (("in a row", in_a_row), ("alone", alone)):
            row |= {f"{way}, ms": level[way][variant], f"{way}, added, %": added[way].get(variant, 0.0)}
            row[f"{way}, all"] = times[variant]
        bench.add("replay", row)
        if variant != "off":
            bench.bar(f"replay adds to steps in a row, %, {variant}", added["in a row"][variant], "<=", given.limit)
    print(
        table(
            ["", "steps in a row, ms each", "added, %", "a step alone, ms", "added, %", "to enter, ms of the host"],
            [
                (
                    row["variant"], f"{row['in a row, ms']:.2f}", f"{row['in a row, added, %']:+.2f}", f"{row['alone, ms']:.2f}",
                    f"{row['alone, added, %']:+.2f}", f"{row['enter, ms']:.3f}",
                )
                for row in bench.rows["replay"]
            ],
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
