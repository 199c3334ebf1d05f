"""Tiny models for transformers' continuous batching, their truth, and a manager driven the same way in every run.

    model = compiled(qwen3_moe())
    with recording(model, settings(blocks=24)) as run:
        run.serve(prompts(12))
        Truth(qwen3_moe()).check(run.outputs)

Requests are queued before the manager's thread starts, so that two runs schedule, and sample, alike.

Legend: L decoder layers, K top-k.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import r3_pass
from r3_pass.runtime import Session
from r3_pass.runtime.engines.base import WrapPoints

VOCAB, EXPERTS, TOP_K = 64, 8, 2
MARGIN = 1e-5
"""Least distance between neighbours among the K + 1 best logits of a router; they are a few units wide."""

FIELDS = ContinuousBatchingConfig.__dataclass_fields__
OLD = "page_size" not in FIELDS
"""transformers 5.17, whose pages are called blocks."""

Outputs = dict[str, Any]

logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


# ---- models -----------------------------------------------------------------------------------------------------------
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def qwen3_moe(**config: Any) -> Any:
    """The first layer is dense."""
    sizes = SIZES | {
        "moe_intermediate_size": 16, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "mlp_only_layers": [0],
        "bos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    return _seeded(Qwen3MoeForCausalLM, Qwen3MoeConfig(**(sizes | config)))


def sliding_qwen3_moe() -> Any:
    """No layer with full attention."""
    return qwen3_moe(layer_types=["sliding_attention"] * 3, sliding_window=6, use_sliding_window=True)


def gpt_oss() -> Any:
    """Two groups of KV blocks: sliding and full attention."""
    types = ["full_attention", "sliding_attention", "full_attention"]
    sizes = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "layer_types": types, "sliding_window": 6}
    return _seeded(GptOssForCausalLM, GptOssConfig(**(SIZES | sizes | {"intermediate_size": 16})))


def dense() -> Any:
    return _seeded(Qwen3ForCausalLM, Qwen3Config(**SIZES))


@torch.no_grad()
def _seeded(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1.0 if "gate.weight" in name or "router.weight" in name else 0.3)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=8)
    eager = isinstance(model, GptOssForCausalLM)  # attention sinks
    model.set_attn_implementation("paged|eager" if eager else "paged|sdpa" if OLD else "sdpa")
    return model.eval()


def compiled(model: Any, inner: str = "eager") -> Any:
    """The same model; each MLP is a graph of its own, which compiles in a second or two."""
    backend = r3_pass.backend(inner)
    for layer in model.model.layers:
        layer.mlp.compile(backend=backend, dynamic=True)
    return model


# ---- truth ------------------------------------------------------------------------------------------------------------
class Truth:
    """What an eager prefill of the same tokens chooses.

    Args:
        model: a twin of the served model, not compiled.
    """

    def __init__(self, model: Any) -> None:
        model.set_attn_implementation("eager")
        self.model = model
        self.routers = {
            layer: router
            for layer, block in enumerate(model.model.layers)
            if (router := getattr(block.mlp, "gate", None) or getattr(block.mlp, "router", None)) is not None
            and hasattr(router, "top_k")
        }
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def rows(self, tokens: Sequence[int]) -> np.ndarray:
        """int16 [len(tokens), L, K]. Asserts that no choice is a near-tie."""
        known = self._known.get(tuple(tokens))
        if known is not None:
            return known
        rows = np.full((len(tokens), len(self.model.model.layers), TOP_K), -1, np.int16)

        def keep(layer: int) -> Callable[..., None]:
            def hook(router: Any, inputs: Any, _: Any) -> None:
                x = inputs[0].reshape(-1, router.weight.shape[1])
                logits = nn.functional.linear(x, router.weight, getattr(router, "bias", None))
                best, ids = torch.topk(logits, TOP_K + 1)
                margin = float((best[:, :-1] - best[:, 1:]).min())
                assert margin > MARGIN, f"a near-tie in layer {layer} ({margin}): give the test another seed"
                rows[:, layer] = ids[:, :TOP_K].numpy()

            return hook

        hooks = [router.register_forward_hook(keep(layer)) for layer, router in self.routers.items()]
        try:
            with torch.no_grad():
                self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        self._known[tuple(tokens)] = rows
        return rows

    def check(self, outputs: Outputs | Iterable[Any], complete: bool = True) -> int:
        """Each output's rows, all of them (`complete`) or as far as they go. Returns how many rows were equal."""
        equal = 0
        for output in outputs.values() if isinstance(outputs, dict) else outputs:
            assert not complete or output.status.name == "FINISHED", (output.request_id, output.error)
            tokens = [*output.prompt_ids, *output.generated_tokens]
            rows, want = output.routed_experts, self.rows(tokens)[:-1]
            assert rows.dtype == np.int16 and rows.flags.c_contiguous and not rows.flags.writeable
            assert rows.shape == want.shape if complete else rows.shape[1:] == want.shape[1:]
            wrong = np.flatnonzero((rows != want[: len(rows)]).any((1, 2)))
            assert not len(wrong), f"{output.request_id}: rows {wrong} of {len(rows)} are not those of its tokens"
            equal += len(rows)
        return equal


# ---- serving ----------------------------------------------------------------------------------------------------------
def settings(page: int = 4, blocks: int = 64, tokens: int = 16, **more: Any) -> ContinuousBatchingConfig:
    """Prompts longer than `tokens` are prefilled in chunks."""
    name = "block_size" if OLD else "page_size"
    return ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=tokens, **{name: page}, **more)


def sampled(sequences: int = 1, eos: int | list[int] = -1) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, eos_token_id=eos, max_new_tokens=8, num_return_sequences=sequences if sequences > 1 else None
    )


def prompts(number: int = 8, seed: int = 1) -> list[list[int]]:
    """Lengths 2 to 40; most begin like others, some are whole pages, the last is the first once more."""
    draw = np.random.default_rng(seed)
    shared = [draw.integers(1, VOCAB, n).tolist() for n in (20, 13, 9)]
    made = [
        shared[i % 3][: draw.integers(1, 24)] + draw.integers(1, VOCAB, draw.integers(1, 20)).tolist()
        for i in range(number - 2)
    ]
    return [*made, made[1][: len(made[1]) // 4 * 4] or made[1], list(made[0])]


class Run:
    """A manager and its session.

    Attributes:
        calls: how often the adapter called each method of the session.
    """

    def __init__(self, manager: Any, session: Session) -> None:
        self.manager = manager
        self.session = session
        self.outputs: Outputs = {}
        self.calls: Counter[str] = Counter()
        self._watch = WrapPoints()
        self._at_step: dict[int, Callable[[], Any]] = {}
        for name in ("step", "prefix_hit", "assign", "move", "extract", "insert", "preempt", "finish", "abort"):
            self._watch.wrap(session, name, self._count(name))

    def _count(self, name: str) -> Callable[..., Any]:
        def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            action = self._at_step.pop(self.calls["step"], None) if name == "step" else None
            if action is not None:
                action()
            return original(*args, **kwargs)

        return hook

    def at_step(self, number: int, action: Callable[[], Any]) -> None:
        """Called in the engine's thread before that step, counted from 1."""
        self._at_step[number] = action

    def add(self, requests: Sequence[list[int]], new: int = 8, name: str = "q", **more: Any) -> None:
        eos = self.manager.generation_config.eos_token_id
        for i, prompt in enumerate(requests):
            self.manager.add_request(prompt, request_id=f"{name}{i}", max_new_tokens=new, eos_token_id=eos, **more)

    def collect(self, number: int, seconds: float = 60.0) -> Outputs:
        """Until this many outputs are there, the manager has stopped, or time is up."""
        end = time.monotonic() + seconds
        running = True
        while len(self.outputs) < number and running and time.monotonic() < end:
            running = self.manager.is_running()
            self.drain(0.05)
        return self.outputs

    def drain(self, seconds: float = 0.0) -> None:
        queue = self.manager.output_router.output_queue
        end = time.monotonic() + seconds
        while not queue.empty() or time.monotonic() < end:
            if queue.empty():
                time.sleep(0.002)
                continue
            output = queue.get()
            if output.is_finished() or output.status.name == "FAILED":
                self.outputs[output.request_id] = output

    def serve(self, requests: Sequence[list[int]], new: int = 8, restart: bool = False) -> Outputs:
        """All of these requests, and their children, queued before the manager starts; one that was stopped drops what is
        queued before."""
        if restart:
            self.outputs.clear()
            self.manager.start()
        self.add(requests, new)
        self.manager.start()
        expected = len(requests) * self.manager.num_return_sequences
        assert len(self.collect(expected)) == expected, (list(self.outputs), self.manager.background_thread_status)
        return self.outputs

    def stop(self) -> None:
        self.manager.stop(block=True, timeout=20)


@contextmanager
def recording(
    model: Any, config: ContinuousBatchingConfig, generation: GenerationConfig | None = None
) -> Iterator[Run]:
    """A manager, attached before it starts; stopped and detached behind, with nothing left on any object."""
    manager = model.init_continuous_batching(
        generation_config=generation or model.generation_config, continuous_batching_config=config
    )
    session = r3_pass.runtime.attach(manager)
    run = Run(manager, session)
    try:
        yield run
        session.check_integrity()
    finally:
        run.stop()
        session.detach()
    assert not wrapped(model, manager)


def wrapped(model: Any, manager: Any) -> list[str]:
    """Methods that an adapter has put over the engine's, on any of its objects."""
    owners = [model, manager, manager.output_router]
    processor = manager.batch_processor
    if processor is not None:
        cache = processor.cache
        pool = getattr(cache, "pool", None) or cache._block_manager
        owners += [processor, cache, pool, processor.scheduler, processor.model_runner, processor.offloading_manager]
    return [
        f"{type(owner).__name__}.{name}"
        for owner in owners
        for name, value in vars(owner).items()
        if getattr(value, "__qualname__", "").startswith("WrapPoints")
    ]
