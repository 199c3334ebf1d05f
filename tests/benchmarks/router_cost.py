"""What routing costs on a GPU: as Inductor compiles it, with recording, and fused into one kernel a layer that is also recorded.

    python tests/benchmarks/router_cost.py [--out results.json]

Microseconds of GPU time per forward, in one CUDA graph of all layers' routing, from the logits on: what makes the logits (a matrix
product) and what uses ids and weights (the experts) is the same in all variants, and left out of all.

    off     as Inductor compiles it, nothing recorded
    on      the same, all ids recorded
    fused   `r3_pass.backend(fuse_router=True)`, all ids recorded

Each variant is captured several times; replays of all alternate, and a figure is the median over captures of each capture's
median. The floor is one more empty kernel a layer in a CUDA graph, and logits in, ids, weights and rows out over the bandwidth of a
copy. Weights of both are compared with float64, ids with each other.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bench import CUDA, DEVICE, Bench, arguments, inner, table
from graphs import Graph, alternate, floors, recording
from torch import Tensor, nn

import r3_pass
from r3_pass.passes.router import MARGIN

SLOTS = 65_536
LIMIT = 200.0
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


class Recording:
    """A compiled model with a session: captures that do not record, captures that do, and recorded ids [T, L, 8]."""

    def __init__(self, backend: Any, model: Routers, logits: list[Tensor], slots: np.ndarray, given: Any) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, dynamic=False)
        tokens = len(slots)
        self.session = r3_pass.runtime.attach(compiled, num_slots=SLOTS, max_tokens=tokens)
        run = functools.partial(compiled, logits[0][:, :1].clone(), logits)
        self.off = [Graph(run) for _ in range(given.captures)]
        self.on = [Graph(run, self.session, tokens) for _ in range(given.captures)]
        self.on[0].slots = slots
        with self.session.step(slots):
            if CUDA:
                self.on[0].replay()
            else:
                run()
        self.rows = torch.from_numpy(self.session.read(slots)).to(DEVICE).long()


def measure(bench: Bench, name: str, tokens: int, floor: dict[str, float]) -> None:
    given = bench.given
    layers, experts, dtype, route = GEOMETRIES[name]
    layers = 2 if given.tiny else layers
    torch.manual_seed(0)
    model, other = (Routers(layers, experts, route).to(DEVICE).eval() for _ in range(2))
    other.load_state_dict(model.state_dict())
    logits = [torch.randn(tokens, experts, device=DEVICE).to(dtype) for _ in range(layers)]
    slots = np.random.default_rng(0).permutation(SLOTS)[:tokens]
    compiler = inner(given)
    fusing = r3_pass.backend(compiler, fuse_router=True)
    with torch.no_grad():
        ours = Recording(r3_pass.backend(compiler), model, logits, slots, given)
        fused = Recording(fusing, other, logits, slots, given)
    assert all(entry.fused for entry in fusing.report().sites), fusing.report()
    row: dict[str, Any] = {"geometry": name, "tokens": tokens}
    row.update(compared(model, logits, ours, fused))
    on_device = torch.from_numpy(slots).to(DEVICE)
    steps = [recording(made.on, on_device) for made in (ours, fused)]
    graphs = {"off": ours.off, "on": ours.on, "fused": fused.on}
    level = alternate(graphs, given.rounds, given.replays)
    row.update({variant: statistics.median(found) for variant, found in level.items()})
    moved = tokens * layers * (experts * dtype.itemsize + 8 * (8 + dtype.itemsize + 2))
    row["floor"] = layers * floor["one more empty kernel, us"] + moved / floor["memory, GB/s"] / 1e3
    row["spread"] = {variant: max(found) - min(found) for variant, found in level.items()}
    bench.add("router", row)
    explain = {variant: found[0].replay for variant, found in graphs.items()}
    if "4 of 8 groups" in name and tokens == 256:
        bench.bar(f"fused routing, us, {name}, T = 256", row["fused"], "<=", LIMIT, explain=explain)
    figure = f"{name}, T = {tokens}"
    bench.bar(f"fused and recording / routing alone, {figure}", row["fused"] / row["off"], "<", 1.0, explain=explain)
    bench.bar(
        f"rows whose ids differ though no score is near, {figure}", row["rows that differ"], "<=", 0, anywhere=True
    )
    for made in (ours, fused):
        made.session.detach()
    del steps


def compared(model: Routers, logits: list[Tensor], ours: Recording, fused: Recording) -> dict[str, Any]:
    """Largest error of the weights, sorted, against float64; rows whose ids differ though no score is near another."""
    made = {"off": ours.off[0], "fused": fused.off[0]}
    for captured in made.values():
        captured.replay()
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


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1, 8192])
    parser.add_argument("--geometry", choices=list(GEOMETRIES), nargs="+", default=list(GEOMETRIES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--captures", type=int, default=2)
    given = parser.parse_args()
    if given.tiny:
        given.tokens, given.rounds, given.replays, given.captures = [4], 1, 1, 1
    elif not CUDA:
        raise SystemExit("this benchmark measures GPU time: it needs a CUDA device, or --tiny")
    bench = Bench(given)
    floor = floors()
    bench.add("floors", floor)
    for name in given.geometry:
        for tokens in given.tokens:
            measure(bench, name, tokens, floor)
    print(
        table(
            ["geometry", "T", "off", "on", "fused", "floor", "error of weights: off, fused", "ids that differ"],
            [
                (
                    row["geometry"], row["tokens"], f"{row['off']:.0f}", f"{row['on']:.0f}", f"**{row['fused']:.0f}**",
                    f"{row['floor']:.0f}", f"{row['error of off']:.1e}, {row['error of fused']:.1e}", row["rows that differ"],
                )
                for row in bench.rows["router"]
            ],
        )
    )  # fmt: skip
    print(f"\nmicroseconds of GPU time for the routing of all layers, in a CUDA graph. {floor}")
    bench.finish()


if __name__ == "__main__":
    main()
