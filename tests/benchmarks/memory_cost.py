"""What recording takes of a GPU's memory: bytes a token, KV capacity, and the peak of a long prefix hit.

    python tests/benchmarks/memory_cost.py [--out results.json]

Runs anywhere. The first table is what `r3_pass.runtime.plan` says for the published configs (models on the meta device: nothing is
allocated), beside an int32 buffer over all decoder layers, which is how it is done elsewhere. A token's KV bytes on one rank:

    DeepSeek-R1, fp8                 MLA: (kv_lora_rank 512 + rope 64) x 1 byte x 61 layers                         = 35,136
    Qwen3-235B-A22B, fp8, TP 8       2 x 1 of 4 KV heads (each held by two ranks) x 128 x 1 byte x 94 layers        = 24,064
    Qwen3-30B-A3B, bf16              2 x 4 KV heads x 128 x 2 bytes x 48 layers                                     = 98,304

What a buffer costs of the KV capacity is its bytes a token over those and the KV's own: so many fewer tokens fit. With
`placement="pinned"` the buffer lies in page-locked memory of the host and takes none of the GPU's.

The second table is a prefix hit of 100,000 tokens at 61 x 8: rows are recorded, and a request takes them all over. The peak is the
device memory above what was allocated before the hit; beside it what it would be in one piece, int32 gathered and cast to int16.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import transformers
from bench import CUDA, DEVICE, Bench, arguments, table
from routing_model import HIDDEN, Routers

import r3_pass

MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "DeepSeek-R1, fp8": (
        "deepseek_v3",
        {
            "hidden_size": 7168, "num_hidden_layers": 61, "first_k_dense_replace": 3, "n_routed_experts": 256,
            "num_experts_per_tok": 8, "n_shared_experts": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
            "intermediate_size": 18_432, "moe_intermediate_size": 2048, "vocab_size": 129_280,
        },
        (512 + 64) * 61,
    ),
    "Qwen3-235B-A22B, fp8, TP 8": (
        "qwen3_moe",
        {
            "hidden_size": 4096, "num_hidden_layers": 94, "num_experts": 128, "num_experts_per_tok": 8,
            "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 1536,
            "vocab_size": 151_936,
        },
        2 * 1 * 128 * 94,
    ),
    "Qwen3-30B-A3B, bf16": (
        "qwen3_moe",
        {
            "hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
            "vocab_size": 151_936,
        },
        2 * 4 * 128 * 2 * 48,
    ),
}  # fmt: skip
HIT = (61, 8, 256)
PEAK_MIB = 16.0
SHARES = {"DeepSeek-R1, fp8": 0.053, "Qwen3-235B-A22B, fp8, TP 8": 0.111}
"""What the int32 buffer over all layers is reported to take elsewhere: the arithmetic here has to give the same."""


def planned(model_type: str, config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **config))
    return r3_pass.runtime.plan(model, num_slots=1)


def capacity(bench: Bench) -> None:
    for name, (model_type, config, kv) in MODELS.items():
        geometry = planned(model_type, config)
        wide = geometry.num_layers * geometry.top_k * 4
        row = {
            "model": name, "layers": geometry.num_layers, "MoE layers": len(geometry.stored), "top-k": geometry.top_k,
            "KV bytes": kv, "bytes": geometry.bytes_per_slot, "share": geometry.bytes_per_slot / (kv + geometry.bytes_per_slot),
            "int32 bytes": wide, "int32 share": wide / (kv + wide), "pinned bytes": 0, "pinned host bytes": geometry.bytes_per_slot,
        }  # fmt: skip
        bench.add("capacity", row)
        bench.bar(f"bytes a token of int32 over all layers, {name}", row["bytes"] / wide, "<=", 0.5, anywhere=True)
        if abs(row["int32 share"] - SHARES.get(name, row["int32 share"])) > 0.002:
            raise SystemExit(f"{name}: an int32 buffer takes {row['int32 share']:.3f} here, {SHARES[name]} is reported")


class Hit:
    """Rows of a prompt in the slot buffer; requests take them over.

    Args:
        placement: of the buffer; memory: device bytes that the session allocated, None without a GPU.
    """

    def __init__(self, tokens: int, geometry: tuple[int, int, int], placement: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.tokens = tokens
        model = Routers(*geometry).to(DEVICE).eval().requires_grad_(False)
        compiled = torch.compile(model, backend=r3_pass.backend("eager"), dynamic=True)
        chunk = min(tokens, 8192)
        compiled(torch.randn(16, HIDDEN, device=DEVICE))  # what libraries allocate at first use is not the session's
        before = allocated()
        self.session = r3_pass.runtime.attach(
            compiled, num_slots=tokens, max_tokens=chunk, num_layers=geometry[0], placement=placement
        )
        with self.session.step(np.full(16, -1)):
            compiled(torch.randn(16, HIDDEN, device=DEVICE))
        self.memory = None if before is None else allocated() - before  # type: ignore[operator]
        for first in range(0, tokens, chunk):
            slots = np.arange(first, min(first + chunk, tokens))
            with self.session.step(slots):
                compiled(torch.randn(len(slots), HIDDEN, device=DEVICE))

    def take(self, name: str) -> dict[str, Any]:
        """One hit of all rows, which then are the buffer's: seconds until it is queued and until its rows are out, and its peak."""
        expected = self.session.read(np.arange(self.tokens))
        before = allocated()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        self.session.prefix_hit(name, 0, np.arange(self.tokens))
        queued = time.perf_counter() - began
        rows = self.session.finish(name, self.tokens + 1)
        out = time.perf_counter() - began
        peak = None if before is None else torch.cuda.max_memory_allocated() - before
        if not np.array_equal(rows, expected):
            raise SystemExit("a prefix hit returned other rows than the buffer's")
        return {"queued, ms": queued * 1e3, "finished, ms": out * 1e3, "peak, bytes": peak}


def allocated() -> int | None:
    """Bytes on the device after all that is queued; None without a GPU."""
    if not CUDA:
        return None
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def prefix(bench: Bench, tokens: int, geometry: tuple[int, int, int]) -> None:
    layers, top_k, _ = geometry
    for placement in ("device", "pinned") if CUDA else ("device",):
        hit = Hit(tokens, geometry, placement)
        row = {
            "placement": placement, "tokens": tokens, "rows": f"{layers} x {top_k}", "buffer, bytes": hit.memory,
            "in one piece, bytes": tokens * layers * top_k * (4 + 2), "host bytes": hit.session.host_bytes,
        }  # fmt: skip
        row |= hit.take("first") | {"again": hit.take("second")}
        bench.add("prefix hit", row)
        if CUDA:
            peak = max(row["peak, bytes"], row["again"]["peak, bytes"]) / 2**20
            bench.bar(f"peak of a prefix hit of {tokens} tokens, MiB, buffer {placement}", peak, "<=", PEAK_MIB)
        if placement == "pinned":
            bench.bar("device memory of a pinned buffer, MiB", (hit.memory or 0) / 2**20, "<=", 1.0)
        hit.session.detach()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=100_000, help="of the prefix hit")
    given = parser.parse_args()
    geometry = HIT
    if given.tiny:
        given.tokens, geometry = 200, (3, 2, 8)
    bench = Bench(given)
    capacity(bench)
    prefix(bench, given.tokens, geometry)
    report(bench)
    bench.finish()


def report(bench: Bench) -> None:
    headers = [
        "model",
        "KV bytes a token",
        "r3_pass, bytes a token",
        "of the KV capacity",
        "pinned",
        "int32, all layers",
        "of it",
    ]
    print(
        table(
            headers,
            [
                (
                    row["model"], row["KV bytes"], f"**{row['bytes']}**", f"**{100 * row['share']:.2f}%**",
                    f"0 (host: {row['pinned host bytes']})", row["int32 bytes"], f"{100 * row['int32 share']:.2f}%",
                )
                for row in bench.rows["capacity"]
            ],
        )
    )  # fmt: skip
    headers = [
        "buffer",
        "tokens",
        "peak, MiB",
        "in one piece, MiB",
        "session's device memory, MiB",
        "queued, ms",
        "rows out, ms",
    ]
    print(
        table(
            headers,
            [
                (
                    row["placement"], row["tokens"], _mib(row["peak, bytes"]), _mib(row["in one piece, bytes"]),
                    _mib(row["buffer, bytes"]), f"{row['again']['queued, ms']:.1f}", f"{row['again']['finished, ms']:.1f}",
                )
                for row in bench.rows["prefix hit"]
            ],
        )
    )  # fmt: skip


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


if __name__ == "__main__":
    main()
