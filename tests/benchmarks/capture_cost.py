"""What recording costs inside a compiled graph that also routes, beside one `index_put_` per layer.

    python tests/benchmarks/capture_cost.py [--out results.json]

On a GPU, in CUDA graphs, microseconds of GPU time per forward. All variants route with the same compiled code (linear, softmax,
top-k, normalise, then a custom op in the place of the experts, so that nothing else hides the cost) and differ in what
they do with the ids:

    off         nothing
    r3_pass     the record op that the backend inserts: one launch for all layers, int16
    pinned      the same into a slot buffer in page-locked memory of the host (`placement="pinned"`)
    per layer   `view.index_put_((slots,), ids)` into an int32 buffer, once per layer, with the cast to int32 left to Inductor
    per layer 8 the same into an int64 buffer: no cast, twice the memory

"off" is the same compiled model outside a step. Each variant is captured several times, since two captures of the same
code differ by some microseconds; replays of all alternate, and a figure is the median over captures of each capture's
median. The floor is one empty kernel in a CUDA graph, measured in the same run.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import r3_pass

HIDDEN, SLOTS = 64, 65_536
GEOMETRIES = {"R1 (62 x 8 of 256)": (62, 8, 256), "Qwen3-30B-A3B (48 x 8 of 128)": (48, 8, 128)}

_ops = torch.library.Library("r3_bench", "FRAGMENT")
if not hasattr(torch.ops.r3_bench, "experts"):  # pytest imports this file once more
    _ops.define("experts(Tensor x, Tensor ids, Tensor w, Tensor bank) -> Tensor")
    _ops.impl("experts", lambda x, ids, w, bank: x + 1, "CompositeExplicitAutograd")
    _ops.define("put(Tensor(a!) buffer, int layer, Tensor slots, Tensor ids) -> ()")
    _ops.impl("put", lambda buffer, layer, slots, ids: (buffer[:, layer].index_put_((slots,), ids), None)[1], "CUDA")
    _ops.impl("put", lambda buffer, layer, slots, ids: None, "Meta")


class Layer(nn.Module):
    """A router and, where the experts would be, an operator that does next to nothing."""

    def __init__(self, top_k: int, experts: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(HIDDEN, experts, bias=False)
        self.bank = nn.Parameter(torch.zeros(experts, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(torch.softmax(self.gate(x).float(), -1), self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return torch.ops.r3_bench.experts(x, ids, weights, self.bank), ids


class Routers(nn.Module):
    """All layers; with a buffer, the ids of each are put into it one layer at a time."""

    def __init__(self, layers: int, top_k: int, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(top_k, experts) for _ in range(layers))

    def forward(self, x: Tensor, buffer: Tensor | None = None, slots: Tensor | None = None) -> Tensor:
        for number, layer in enumerate(self.layers):
            x, ids = layer(x)
            if buffer is not None:
                torch.ops.r3_bench.put(buffer, number, slots, ids.to(buffer.dtype))
        return x


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call, warmed up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3 / replays


def measure(name: str, token_counts: list[int], rounds: int, replays: int, captures: int) -> list[dict[str, Any]]:
    layers, top_k, experts = GEOMETRIES[name]
    torch.manual_seed(0)
    model = Routers(layers, top_k, experts).cuda().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    off = torch.compile(model, backend="inductor", dynamic=False)
    on = torch.compile(model, backend=r3_pass.backend("inductor"), dynamic=False)
    beside = torch.compile(copy.deepcopy(model), backend=r3_pass.backend("inductor"), dynamic=False)
    wide = {
        dtype: torch.full((SLOTS + 1, layers, top_k), -1, dtype=dtype, device="cuda")
        for dtype in (torch.int32, torch.int64)
    }
    results = []
    for tokens in token_counts:
        torch._dynamo.reset()  # the variants share one code object: its limit on recompilations counts them all
        x = torch.randn(tokens, HIDDEN, device="cuda")
        slots = torch.randperm(SLOTS, device="cuda")[:tokens]
        session = r3_pass.runtime.attach(on, num_slots=SLOTS, max_tokens=max(token_counts))
        host = r3_pass.runtime.attach(beside, num_slots=SLOTS, max_tokens=max(token_counts), placement="pinned")
        padding = torch.full((tokens,), -1, dtype=torch.int64, device="cuda")
        graphs: dict[str, list[torch.cuda.CUDAGraph]] = {
            "off": [captured(functools.partial(on, x)) for _ in range(captures)],
            "per layer": [captured(functools.partial(off, x, wide[torch.int32], slots)) for _ in range(captures)],
            "per layer 8": [captured(functools.partial(off, x, wide[torch.int64], slots)) for _ in range(captures)],
            "r3_pass": [captured_with(session, on, x, padding) for _ in range(captures)],
            "pinned": [captured_with(host, beside, x, padding) for _ in range(captures)],
        }
        for graph in graphs["r3_pass"]:
            with session.step(slots):
                graph.replay()
        recorded = torch.from_numpy(session.read(slots)).cuda()
        graphs["per layer"][0].replay()
        assert torch.equal(recorded.int(), wide[torch.int32][slots]), "the two ways recorded different ids"
        with host.step(slots):
            graphs["pinned"][0].replay()
        assert torch.equal(recorded, torch.from_numpy(host.read(slots)).cuda()), "the two buffers hold different ids"
        for opened in (session.step(slots), host.step(slots)):
            opened.__enter__()
        times: dict[str, list[list[float]]] = {variant: [[] for _ in found] for variant, found in graphs.items()}
        for _ in range(rounds):
            for variant, found in graphs.items():
                for graph, seen in zip(found, times[variant], strict=True):
                    seen.append(microseconds(graph, replays))
        session.detach()
        host.detach()
        level = {variant: sorted(statistics.median(seen) for seen in found) for variant, found in times.items()}
        off_level = statistics.median(level["off"])
        row: dict[str, Any] = {"geometry": name, "tokens": tokens, "off": off_level}
        row.update(
            {variant: statistics.median(seen) - off_level for variant, seen in level.items() if variant != "off"}
        )
        row["spread of off"] = level["off"][-1] - level["off"][0]
        row["spread of r3_pass"] = level["r3_pass"][-1] - level["r3_pass"][0]
        results.append(row)
        print(json.dumps(row), flush=True)
    return results


def captured_with(session: r3_pass.runtime.Session, model: Any, x: Tensor, padding: Tensor) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            with session.step(padding):
                model(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with session.step(padding), torch.cuda.graph(graph):
        model(x)
    return graph


def empty_kernel(replays: int) -> float:
    """One kernel that does nothing to speak of, in a CUDA graph: the floor of any single launch."""
    x = torch.zeros(1, device="cuda")
    return microseconds(captured(lambda: x.add_(1)), replays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1, 8192])
    parser.add_argument("--geometry", choices=list(GEOMETRIES), nargs="+", default=list(GEOMETRIES))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument(
        "--captures", type=int, default=3, help="CUDA graphs of each variant: two of the same differ, too"
    )
    parser.add_argument(
        "--limit", type=float, default=15.0, help="fail if recording at T = 256 costs more microseconds (R1 geometry)"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark measures GPU time: it needs a CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    floor = empty_kernel(given.replays)
    rows = [
        row
        for name in given.geometry
        for row in measure(name, given.tokens, given.rounds, given.replays, given.captures)
    ]
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "date": datetime.date.today().isoformat(), "empty kernel in a CUDA graph": floor,
    }  # fmt: skip
    print(json.dumps(machine))
    print(
        "\n| geometry | T | routing alone | r3_pass adds | pinned | int32 index_put_ per layer | int64, no cast | spread |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['geometry']} | {row['tokens']} | {row['off']:.0f} | **{row['r3_pass']:.1f}** | {row['pinned']:.1f} | "
            f"{row['per layer']:.1f} | "
            f"{row['per layer 8']:.1f} | {row['spread of off']:.1f}, {row['spread of r3_pass']:.1f} |"
        )
    print(f"\nmicroseconds of GPU time per forward; one empty kernel in a CUDA graph: {floor:.1f}")
    if given.out:
        given.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    checked = [r for r in rows if r["geometry"].startswith("R1") and r["tokens"] == 256]
    if any(r["r3_pass"] > given.limit for r in checked):
        raise SystemExit(f"recording costs more than {given.limit} us at T = 256")


if __name__ == "__main__":
    main()
