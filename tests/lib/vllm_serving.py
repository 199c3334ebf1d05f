"""Tiny models for vLLM, saved locally, and the truth of a request from one eager prefill by transformers' own model.

Imported by tests/vllm only: it sets what vLLM reads from the environment before vLLM is imported.

Legend: T tokens, L decoder layers, E experts, K top-k.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

VOCAB, EXPERTS, TOP_K = 128, 8, 2
MARGIN = 1e-4
"""Neighbours among the choices of a router that are nearer than this may change places: other kernels sum in another order."""

Rows = npt.NDArray[np.int16]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 2, "max_position_embeddings": 512, "num_experts_per_tok": TOP_K, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def qwen3_moe() -> Any:
    """Layer 1 is dense."""
    config = transformers.Qwen3MoeConfig(
        **_SIZES, num_key_value_heads=1, head_dim=32, num_experts=EXPERTS, mlp_only_layers=[1]
    )
    return _seeded(transformers.Qwen3MoeForCausalLM(config))


def glm4_moe() -> Any:
    """DeepSeek-V3's routing behind plain attention: layer 0 is dense; sigmoid scores with a bias, in groups; a shared expert."""
    config = transformers.Glm4MoeConfig(
        **_SIZES, num_key_value_heads=1, head_dim=32, n_routed_experts=EXPERTS, n_group=4, topk_group=2, n_shared_experts=1,
        first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.0, use_qk_norm=True,
    )  # fmt: skip
    return _seeded(transformers.Glm4MoeForCausalLM(config))


def gpt_oss() -> Any:
    """Two groups of KV blocks, of which that of full attention is the second."""
    sizes = {k: v for k, v in _SIZES.items() if k not in ("moe_intermediate_size", "num_hidden_layers")}
    config = transformers.GptOssConfig(
        **sizes, num_hidden_layers=4, num_key_value_heads=1, head_dim=32, num_local_experts=EXPERTS, sliding_window=32,
        layer_types=["full_attention", "sliding_attention"] * 2,
    )  # fmt: skip
    return _seeded(transformers.GptOssForCausalLM(config))


def dense() -> Any:
    sizes = {k: v for k, v in _SIZES.items() if "moe" not in k and "experts" not in k}
    return _seeded(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, num_key_value_heads=1, head_dim=32)))


@torch.no_grad()
def _seeded(model: Any) -> Any:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1.0 if "gate.weight" in name else 0.3)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.normal_(0, 0.1)
    model.set_attn_implementation("eager")
    return model.eval()


def saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


class Truth:
    """What an eager prefill of the same tokens chooses.

    Attributes:
        rows, ties: how many rows were compared so far; of these, those in which only near-ties differ.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows = 0
        self.ties = 0
        self._routers = {
            layer: gate for layer, block in enumerate(model.model.layers) if (gate := getattr(block.mlp, "gate", None)) is not None
        }  # fmt: skip
        self._known: dict[tuple[int, ...], tuple[Rows, npt.NDArray[np.float32]]] = {}

    def of(self, tokens: Sequence[int]) -> tuple[Rows, npt.NDArray[np.float32]]:
        """int16 [T, L, K], ids ascending (vLLM's CPU kernels do not sort by score), and by token how near the nearest tie is."""
        known = self._known.get(tuple(tokens))
        if known is not None:
            return known
        rows = np.full((len(tokens), len(self.model.model.layers), TOP_K), -1, np.int16)
        margins = np.full(len(tokens), np.inf, np.float32)

        def keep(layer: int) -> Callable[..., None]:
            def hook(gate: Any, inputs: Any, output: Any) -> None:
                scores, ids = _choice(gate, inputs[0].reshape(-1, gate.weight.shape[1]))
                rows[:, layer] = ids.sort(-1).values.numpy()
                best = scores.sort(-1, descending=True).values
                nearest = (best[:, TOP_K - 1] - best[:, TOP_K]).numpy()
                np.minimum(margins, nearest, out=margins)

            return hook

        hooks = [gate.register_forward_hook(keep(layer)) for layer, gate in self._routers.items()]
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        self._known[tuple(tokens)] = rows, margins
        return rows, margins

    def check(self, outputs: Iterable[Any]) -> int:
        """Every row of every sequence. Returns how many there were."""
        count = 0
        for output in outputs:
            for completion in output.outputs:
                tokens = [*output.prompt_token_ids, *completion.token_ids]
                count += self.check_rows(completion.routed_experts, tokens, output.request_id)
        return count

    def check_rows(self, rows: Any, tokens: Sequence[int], name: str = "") -> int:
        assert isinstance(rows, np.ndarray), (name, rows)
        want, margins = self.of(tokens)
        assert rows.dtype == np.int16 and rows.shape == (len(tokens) - 1, *want.shape[1:]), (
            name,
            rows.dtype,
            rows.shape,
        )
        differ = (np.sort(rows, -1) != want[:-1]).any((1, 2))
        # A near-tie in one token changes what the later ones attend to, a little: their own margins still hold.
        wrong = np.flatnonzero(differ & (margins[:-1] > MARGIN))
        assert not len(wrong), f"{name}: rows {wrong} of {len(rows)} are not those of its tokens"
        self.rows += len(rows)
        self.ties += int(differ.sum())
        return len(rows)


def _choice(gate: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [T, E] that are chosen by, -inf in the groups left out, and the ids chosen [T, K]."""
    logits = nn.functional.linear(x.float(), gate.weight.float())
    bias = getattr(gate, "e_score_correction_bias", None)
    if bias is None:
        return logits, logits.topk(TOP_K).indices
    scores = logits.sigmoid() + bias
    groups = scores.view(len(x), 4, -1).topk(2).values.sum(-1)
    kept = torch.zeros_like(groups).scatter_(1, groups.topk(2).indices, 1.0)
    masked = scores.masked_fill(kept.repeat_interleave(EXPERTS // 4, 1) == 0, -torch.inf)
    return masked, masked.topk(TOP_K).indices


def settings(**more: Any) -> dict[str, Any]:
    """Arguments of LLM: 48-token chunks, a prefix cache, fp32, no tokenizer."""
    return {
        "skip_tokenizer_init": True, "dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "max_model_len": 256,
        "max_num_batched_tokens": 48, "block_size": 32, "enable_prefix_caching": True, "seed": 0, "disable_log_stats": True,
    } | more  # fmt: skip


def __getattr__(name: str) -> Any:
    """`vllm_serving.without_code_generation`: our backend, seconds faster."""
    if name != "without_code_generation":
        raise AttributeError(name)
    from r3_pass.runtime.engines.vllm_compile import VllmBackend

    return VllmBackend("aot_eager")


FAST = {"mode": 2, "backend": f"{__name__}.without_code_generation"}


def prompts(number: int = 10, seed: int = 1) -> list[dict[str, list[int]]]:
    """Lengths 3 to 130; most begin like others, one is whole blocks, the last two repeat earlier ones."""
    draw = np.random.default_rng(seed)
    shared = [draw.integers(1, VOCAB, n).tolist() for n in (70, 33, 16)]
    made = [
        shared[i % 3][: draw.integers(1, 80)] + draw.integers(1, VOCAB, draw.integers(2, 60)).tolist()
        for i in range(max(number - 3, 2))
    ]
    made += [shared[0][:64], list(made[0]), list(made[1])]
    return [{"prompt_token_ids": tokens} for tokens in made]


def sampling(new: int = 12, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**({"max_tokens": new, "temperature": 0.0, "detokenize": False, "ignore_eos": True} | more))
