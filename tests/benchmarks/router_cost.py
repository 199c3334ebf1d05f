"""What routing costs on a GPU: as Inductor compiles it, with recording, and fused into one kernel a layer that is also recorded.

    python tests/benchmarks/router_cost.py [--out results.json]

Microseconds of GPU time per forward, in one CUDA graph of all layers' routing, from the logits on: what makes the logits (a matrix
product) and what uses ids and weights (the experts) is the same in all variants, and left out of all.

    off     as Inductor compiles it, nothing recorded
    on      the same, all ids recorded
    fused   `r3_pass.backend(fuse_router=True)`, all ids recorded

Each variant is captured several times; replays of all alternate, and a figure is the median over captures of each capture's
median. The floor is one empty kernel a layer in a CUDA graph, measured in the same run. Weights of both are compared with float64,
ids with each other.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import r3_pass
from r3_pass.passes.router import MARGIN

SLOTS = 65_536
Route = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_ops = torch.library.Library("r3_bench", "FRAGMENT")
if not hasattr(torch.ops.r3_bench, "take"):  # pytest imports this file once more
    _ops.define("take(Tensor x, Tensor ids, Tensor w, Tensor bank) -> Tensor")
    _ops.impl("take", lambda x, ids, w, bank: torch.empty_like(x), "CompositeExplicitAutograd")  # no kernel


def grouped(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3 and R1: the best 8 in the best 4 of 8 groups."""
    scores = logits.sigmoid()
    choice = scores + bias
    group_scores = choice.view(-1, 8, 32).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(group_scores, k=4, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(group_scores)
    mask.scatter_(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, 8, 32).reshape(-1, 256)
    ids = torch.topk(choice.masked_fill(~mask.bool(), float("-inf")), k=8, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * 2.5, ids


def plain(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Qwen3-MoE: softmax in float32, the best 8, normalised."""
    weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), 8, dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True)).to(logits.dtype), ids


GEOMETRIES: dict[str, tuple[int, int, torch.dtype, Route]] = {
    "R1 (62 x 8 of 256, 4 of 8 groups)": (62, 256, torch.float32, grouped),
    "R1 (62 x 8 of 256), softmax": (62, 256, torch.float32, plain),
    "Qwen3-30B-A3B (48 x 8 of 128), softmax": (48, 128, torch.bfloat16, plain),
}


class Layer(nn.Module):
    """Routing, and, where the experts would be, an operator that launches nothing."""

    def __init__(self, experts: int, route: Route) -> None:
        super().__init__()
        self.route = route
        self.register_buffer("bias", torch.randn(experts) * 0.05)
        self.bank = nn.Parameter(torch.zeros(experts, 1, 1), requires_grad=False)

    def forward(self, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.route(logits, self.bias)
        return torch.ops.r3_bench.take(x, ids, weights, self.bank), weights


class Routers(nn.Module):
    """All layers, each with its own logits; returns the weights as well, which costs nothing."""

    def __init__(self, layers: int, experts: int, route: Route) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(experts, route) for _ in range(layers))

    def forward(self, x: Tensor, logits: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        weights = []
        for layer, rows in zip(self.layers, logits, strict=True):
            x, of_layer = layer(x, rows)
            weights.append(of_layer)
        return x, weights


class Captured:
    """A CUDA graph of one call, and what the call returned."""

    def __init__(self, run: Callable[[], Any], session: Any = None, padding: Tensor | None = None) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._once(run, session, padding)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        if session is None:
            with torch.cuda.graph(self.graph):
                self.result = run()
        else:
            with session.step(padding), torch.cuda.graph(self.graph):
                self.result = run()

    @staticmethod
    def _once(run: Callable[[], Any], session: Any, padding: Tensor | None) -> None:
        if session is None:
            run()
        else:
            with session.step(padding):
                run()

    def microseconds(self, replays: int) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            self.graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3 / replays


def alternate(graphs: dict[str, list[Captured]], rounds: int, replays: int) -> dict[str, list[float]]:
    """The median of each capture, by variant."""
    times: dict[str, list[list[float]]] = {variant: [[] for _ in found] for variant, found in graphs.items()}
    for _ in range(rounds):
        for variant, found in graphs.items():
            for captured, seen in zip(found, times[variant], strict=True):
                seen.append(captured.microseconds(replays))
    return {variant: [statistics.median(seen) for seen in found] for variant, found in times.items()}


class Recording:
    """A compiled model with a session: captures that record, captures that do not, and recorded ids [T, L, 8]."""

    def __init__(self, backend: Any, model: Routers, logits: list[Tensor], slots: Tensor, captures: int) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, dynamic=False)
        self.session = r3_pass.runtime.attach(compiled, num_slots=SLOTS, max_tokens=len(slots))
        padding = torch.full_like(slots, -1)
        run = functools.partial(compiled, logits[0][:, :1].clone(), logits)
        self.off = [Captured(run) for _ in range(captures)]
        self.on = [Captured(run, self.session, padding) for _ in range(captures)]
        with self.session.step(slots):
            self.on[0].graph.replay()
        self.rows = torch.from_numpy(self.session.read(slots)).cuda().long()


def measure(name: str, token_counts: Sequence[int], rounds: int, replays: int, captures: int) -> list[dict[str, Any]]:
    layers, experts, dtype, route = GEOMETRIES[name]
    results = []
    for tokens in token_counts:
        torch.manual_seed(0)
        model, other = (Routers(layers, experts, route).cuda().eval() for _ in range(2))
        other.load_state_dict(model.state_dict())
        logits = [torch.randn(tokens, experts, device="cuda").to(dtype) for _ in range(layers)]
        slots = torch.randperm(SLOTS, device="cuda")[:tokens]
        fusing = r3_pass.backend(fuse_router=True)
        with torch.no_grad():
            ours = Recording(r3_pass.backend(), model, logits, slots, captures)
            fused = Recording(fusing, other, logits, slots, captures)
        assert all(entry.fused for entry in fusing.report().sites), fusing.report()
        row: dict[str, Any] = {"geometry": name, "tokens": tokens}
        row.update(compared(model, logits, ours, fused))
        steps = [made.session.step(slots) for made in (ours, fused)]
        for step in steps:
            step.__enter__()  # what is timed is a step that records; it is never left, since it runs many times
        level = alternate({"off": ours.off, "on": ours.on, "fused": fused.on}, rounds, replays)
        for made in (ours, fused):
            made.session.detach()
        row.update({variant: statistics.median(found) for variant, found in level.items()})
        row["spread"] = {variant: max(found) - min(found) for variant, found in level.items()}
        results.append(row)
        print(json.dumps(row), flush=True)
        del ours, fused, steps
    return results


def compared(model: Routers, logits: list[Tensor], ours: Recording, fused: Recording) -> dict[str, Any]:
    """Largest error of the weights, sorted, against float64; rows whose ids differ though no score is near another."""
    made = {"off": ours.off[0], "fused": fused.off[0]}
    for captured in made.values():
        captured.graph.replay()
    errors = dict.fromkeys(made, 0.0)
    different = 0
    for number, (layer, values) in enumerate(zip(model.layers, logits, strict=True)):
        wide, bias = values.double(), layer.bias.double()
        weights, near = grouped64(wide, bias) if layer.route is grouped else plain64(wide)
        true = weights.sort(-1).values
        for variant, captured in made.items():
            seen = captured.result[1][number].double().sort(-1).values
            errors[variant] = max(errors[variant], float((seen - true).abs().max()))
        one, other = (found.rows[:, number].sort(-1).values for found in (ours, fused))
        different += int(((one != other).any(-1) & ~near).sum())
    return {"error of off": errors["off"], "error of fused": errors["fused"], "rows that differ": different}


def grouped64(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weights in float64, and whether scores or group scores are near one another."""
    scores = logits.sigmoid() + bias
    groups = scores.view(-1, 8, 32).topk(2, dim=-1)[0].sum(-1)
    return grouped(logits, bias)[0], is_near(scores) | is_near(groups)


def plain64(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    weights = scores.topk(8, dim=-1)[0]
    return weights / weights.sum(dim=-1, keepdim=True), is_near(scores.topk(9, dim=-1)[0])


def is_near(scores: Tensor) -> Tensor:
    best = scores.sort(-1, descending=True).values
    return (best[:, :-1] - best[:, 1:]).min(-1).values <= MARGIN


def empty_kernels(count: int, replays: int) -> float:
    """As many kernels as layers that do nothing to speak of, in one CUDA graph: the floor of one kernel a layer."""
    x = torch.zeros(1, device="cuda")
    captured = Captured(lambda: [x.add_(1) for _ in range(count)])
    return statistics.median(captured.microseconds(replays) for _ in range(10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1, 8192])
    parser.add_argument("--geometry", choices=list(GEOMETRIES), nargs="+", default=list(GEOMETRIES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--captures", type=int, default=2)
    parser.add_argument(
        "--limit", type=float, default=200.0, help="fail if fused R1 takes more microseconds at T = 256"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark measures GPU time: it needs a CUDA device")
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "62 empty kernels": empty_kernels(62, given.replays), "48 empty kernels": empty_kernels(48, given.replays),
    }  # fmt: skip
    print(json.dumps(machine), flush=True)
    rows: list[dict[str, Any]] = []
    for name in given.geometry:
        rows.extend(measure(name, given.tokens, given.rounds, given.replays, given.captures))
        if given.out:
            given.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    print("\n| geometry | T | off | on | fused | error of weights: off, fused | ids that differ |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['geometry']} | {row['tokens']} | {row['off']:.0f} | {row['on']:.0f} | **{row['fused']:.0f}** | "
            f"{row['error of off']:.1e}, {row['error of fused']:.1e} | {row['rows that differ']} |"
        )
    print(
        f"\nmicroseconds of GPU time per forward; one empty kernel a layer: {machine['62 empty kernels']:.0f} (62 layers)"
    )
    slow = [r for r in rows if "4 of 8 groups" in r["geometry"] and r["tokens"] == 256 and r["fused"] > given.limit]
    if slow:
        raise SystemExit(f"fused routing of R1 takes {slow[0]['fused']:.0f} us at T = 256, more than {given.limit}")
    if any(r["fused"] >= r["off"] for r in rows):
        raise SystemExit("fused routing with recording is slower than routing without")
    if any(r["rows that differ"] for r in rows):
        raise SystemExit("fused routing chose other experts where no score is near another")


if __name__ == "__main__":
    main()
