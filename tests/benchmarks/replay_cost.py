"""What replay adds to a training step: the same compiled model, the context entered or not.

    python tests/benchmarks/replay_cost.py [--layers 6] [--tokens 8192] [--inner inductor] [--out results.json]

Layers of the geometry of Qwen3-30B-A3B (hidden 2048, 128 experts, top 8) in bfloat16 with random weights; forward, backward,
optimizer. Milliseconds of a whole step from an idle GPU to an idle GPU, checks and upload of the routes included; off and on
alternate, and a figure is the median; what is added, the median of what each round added.

`off` is live routing in the same function; `on, host` gets int16 numpy rows as a rollout hands them out, `on, GPU` a tensor that is
there already. The time to enter is until the model may be called: the routes are queued then, and looked at in the forward. The
routes are the model's own choice, so that all three do the same work.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--limit", type=float, default=1.0, help="fail if replay costs more percent")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark measures a GPU: it needs a CUDA device")
    torch.manual_seed(0)
    config: Any = transformers.Qwen3MoeConfig(
        vocab_size=8192, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=given.layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with torch.device("cuda"):
        model: Any = transformers.Qwen3MoeForCausalLM(config).bfloat16().train()
    ids = torch.randint(8192, (max(given.tokens // 2048, 1), min(given.tokens, 2048)), device="cuda")
    backend = r3_pass.backend(given.inner, mode="replay")
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rows = own_routes(model, ids)
    routes = {"off": None, "on, host": rows, "on, GPU": torch.from_numpy(rows).cuda()}

    def update() -> None:
        logits = compiled(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    times: dict[str, list[float]] = {variant: [] for variant in routes}
    enter: dict[str, list[float]] = {variant: [] for variant in routes if variant != "off"}
    for _ in range(given.steps + 3):
        for variant, chosen in routes.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            if chosen is None:
                update()
            else:
                with backend.replay(chosen):
                    enter[variant].append((time.perf_counter() - start) * 1e3)
                    update()
            torch.cuda.synchronize()
            times[variant].append((time.perf_counter() - start) * 1e3)
    level = {variant: statistics.median(seen[3:]) for variant, seen in times.items()}
    entered = {variant: statistics.median(seen[3:]) for variant, seen in enter.items()}
    added = {  # against the step beside it: the machine drifts more than replay costs
        variant: 100 * (statistics.median(on / off for on, off in zip(times[variant], times["off"], strict=True)) - 1)
        for variant in level
        if variant != "off"
    }
    spread = max(times["off"][3:]) - min(times["off"][3:])
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "transformers": transformers.__version__, "date": datetime.date.today().isoformat(), "inner": given.inner,
        "layers": given.layers, "tokens": given.tokens, "spread of off, ms": spread,
    }  # fmt: skip
    print(json.dumps(machine))
    print("\n| | a step, ms | added, % | of it on the host, to enter, ms |\n|---|---|---|---|")
    for variant, value in level.items():
        print(f"| {variant} | {value:.2f} | {added.get(variant, 0.0):+.2f} | {entered.get(variant, 0.0):.3f} |")
    if given.out:
        given.out.write_text(
            json.dumps(
                {"machine": machine, "ms": level, "percent": added, "enter, ms": entered, "all": times}, indent=2
            )
            + "\n"
        )
    if max(added.values()) > given.limit:
        raise SystemExit(f"replay costs more than {given.limit} %")


if __name__ == "__main__":
    main()
