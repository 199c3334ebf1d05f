"""Serve a small MoE with transformers' continuous batching, get `routed_experts`, and prove every row.

    python examples/quickstart.py

Builds a seeded Qwen3-MoE (random weights, nothing is downloaded; its first layer is dense), serves eight text prompts with shared
prefixes, checks each request's rows against an eager prefill of the same tokens, and draws the load of the experts. Runs
as it stands on a CPU and on a GPU.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers import logging as transformers_logging

import r3_pass

LAYERS, EXPERTS, TOP_K = 4, 32, 4
END, PAD = 256, 257  # a token is a byte; two more for the end of a text and for padding
SYSTEM = "You are a careful assistant. Answer in one short sentence.\n"
PROMPTS = [
    SYSTEM + "Why is the sky blue?",
    SYSTEM + "Why is the sky red at dusk?",
    SYSTEM + "What does a compiler pass do?",
    SYSTEM + "What does a compiler pass do to a graph?",
    SYSTEM + "Why is the sky blue?",
    "def fibonacci(n):\n    return n if n < 2 else",
    "def fibonacci(n):\n    a, b = 0, 1\n    for",
    "Mixture-of-experts models route each token to a few experts.",
]


def build_model(device: str) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE with random weights; router weights large enough that choices differ from token to token."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=258, hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, moe_intermediate_size=32, num_experts=EXPERTS, num_experts_per_tok=TOP_K, mlp_only_layers=[0],
        max_position_embeddings=512, eos_token_id=END, pad_token_id=PAD, bos_token_id=None,
    )  # fmt: skip
    config._attn_implementation = "paged|sdpa"
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.to(device)


def eager_routes(model: Qwen3MoeForCausalLM, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """What the uncompiled router chooses in one prefill: ids [tokens, layers, top_k], and the margin of each row's choice."""
    ids = np.full((len(tokens), LAYERS, TOP_K), -1, np.int16)
    margins = np.full((len(tokens), LAYERS), np.inf)
    handles = []
    for layer, block in enumerate(model.model.layers):
        gate = getattr(block.mlp, "gate", None)
        if gate is None:
            continue

        def keep(_: Any, __: Any, output: Any, layer: int = layer) -> None:
            scores = output[0].float().softmax(-1).sort(-1, descending=True).values
            ids[:, layer] = output[2].cpu().numpy()
            margins[:, layer] = (scores[:, :TOP_K] - scores[:, 1 : TOP_K + 1]).amin(-1).cpu().numpy()

        handles.append(gate.register_forward_hook(keep))
    with torch.no_grad():
        model(torch.tensor([tokens], device=model.device), use_cache=False)
    for handle in handles:
        handle.remove()
    return ids, margins


def progress(total: int) -> Iterator[None]:
    """A bar on one line; advance it with next()."""
    for done in range(total + 1):
        print(
            f"\rproving rows [{'#' * (20 * done // total):20}] {done}/{total}",
            end="\n" if done == total else "",
            flush=True,
        )
        yield


def draw_load(routes: list[np.ndarray], path: Path) -> str:
    """Expert load of each layer as a picture; without matplotlib, says so."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: pip install matplotlib"
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = np.concatenate(routes)
    load = np.stack([np.bincount(rows[:, layer][rows[:, layer] >= 0], minlength=EXPERTS) for layer in range(LAYERS)])
    figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
    shown = np.where(load.sum(1, keepdims=True) > 0, load / np.maximum(load.sum(1, keepdims=True), 1), np.nan)
    image = axes.imshow(shown, aspect="auto", cmap="viridis")
    axes.set(
        xlabel="expert", ylabel="layer", yticks=range(LAYERS), title="share of choices per expert (layer 0 is dense)"
    )
    figure.colorbar(image)
    figure.savefig(path, dpi=120)
    return f"expert load drawn in {path}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--inner", default="aot_eager", help="compiler behind the pass, e.g. inductor (minutes on a CPU)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--picture", type=Path, default=Path("expert_load.png"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    torch.backends.cuda.matmul.allow_tf32 = False

    model = build_model(given.device)
    backend = r3_pass.backend(given.inner)
    compiler = CompileConfig(backend=backend, dynamic=True, mode=None, options={}, fullgraph=False)
    batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=128, varlen_compile_config=compiler)
    generation = GenerationConfig(max_new_tokens=given.new_tokens, do_sample=False, eos_token_id=END, pad_token_id=PAD)

    session = r3_pass.runtime.attach(model)
    started = time.perf_counter()
    prompts = [list(text.encode()) for text in PROMPTS]
    outputs = model.generate_batch(
        prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=True
    )
    seconds = time.perf_counter() - started
    print(f"\n{len(outputs)} requests in {seconds:.1f} s, compilation included ({given.inner}, {given.device})\n")
    print(f"{backend.report()}\n")
    session.detach()

    model.set_attn_implementation("sdpa")
    bar = progress(len(outputs))
    next(bar)
    lines, equal, total, smallest = [], 0, 0, np.inf
    for name, output in outputs.items():
        tokens = [*output.prompt_ids, *output.generated_tokens]
        rows = output.routed_experts
        expected, margins = eager_routes(model, tokens[:-1])
        right = int((rows == expected).all(axis=(1, 2)).sum())
        equal, total, smallest = equal + right, total + len(rows), min(smallest, float(margins.min()))
        used = len(np.unique(rows[:, 1:]))
        lines.append(
            f"{name}: {rows.dtype}{list(rows.shape)}  {right}/{len(rows)} rows equal  {used}/{EXPERTS} experts used  "
            f"last row, layer 1: {rows[-1, 1].tolist()}"
        )
        next(bar)
    print("\n".join(lines))
    print(f"\n{equal} of {total} rows equal to an eager prefill (smallest margin between two scores: {smallest:.1e})")
    print(draw_load([o.routed_experts for o in outputs.values()], given.picture))
    if equal != total:
        raise SystemExit("some rows differ")


if __name__ == "__main__":
    main()
