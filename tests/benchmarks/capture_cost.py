"""What recording costs inside a compiled graph that also routes, beside one `index_put_` per layer.

    python tests/benchmarks/capture_cost.py [--out results.json]

On a GPU. All variants route with the same model (`routing_model.py`), "put" and "alive" compiled by the inner compiler alone, and
differ in what they do with the ids:

    off         nothing: the same compiled model outside a step
    r3_pass     the record op that the backend inserts: one launch for all layers, int16
    to requests the same in a step as an engine's: slots from the host, and the rows also go to a request, which the kernel writes
                over the bus (up to 1 MiB of rows; more are copied beside the next step)
    pinned      into a slot buffer in page-locked memory of the host (`placement="pinned"`)
    put         `view.index_put_((slots,), ids)` into an int32 buffer, once per layer, with the cast to int32 left to Inductor
    alive       the ids of all layers are returned, and nobody reads them: what it costs that they stay in memory (but of one token)

Three tables: GPU time in a CUDA graph, of a model that is compiled as one; the same of one whose layers are compiled by
themselves; and the host's time of a forward without CUDA graphs, from an idle GPU. Microseconds per forward. Each variant is
captured several times, since two captures of the same code differ by some microseconds; replays of all alternate, and a figure
is the median over captures of each capture's median. But for "to requests", slot mappings lie on the device and rows stay in the
buffer.

The floor is one more kernel in a CUDA graph, and the bytes that must move over the bandwidth of a copy: ids in (int64), rows out
(int16; over the bus for "pinned" and "to requests").
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bench import CUDA, DEVICE, Bench, arguments, inner, table
from graphs import Graph, alternate, floors, recording
from routing_model import HIDDEN, Routers

import r3_pass
from r3_pass.runtime import Segment

GEOMETRIES = {"R1 (62 x 8 of 256)": (62, 8, 256), "Qwen3-30B-A3B (48 x 8 of 128)": (48, 8, 128)}
TOKENS = {"R1 (62 x 8 of 256)": [256, 8192, 1], "Qwen3-30B-A3B (48 x 8 of 128)": [256]}
TINY = {"tiny (3 x 2 of 8)": (3, 2, 8)}
LIMITS = {256: 6.5, 8192: 20.0}
SHARE, HOST = 1 / 3, 30.0
DIRECT = 1024
"""Tokens whose rows the kernel itself writes to their requests."""
ROUNDED = 1e-3
"""Choices that two compilations may make differently, where scores are next to one another."""


class Setting:
    """A geometry's model, rows' slots and inputs.

    Args:
        geometry: layers, top-k, experts.

    Attributes:
        effort: rounds, and replays of each variant in a round.
    """

    def __init__(self, given: Any, geometry: tuple[int, int, int], tokens: int) -> None:
        torch._dynamo.reset()  # nothing that was compiled before is alive: graphs of a measurement do not outlive it
        torch.manual_seed(0)
        self.inner, self.tokens, self.shape = inner(given), tokens, geometry
        # Inductor would time configurations of reductions that are shorter than their launch: the same one has come out at 1.2 us
        # in one compilation and 5.7 in the next. (As an option: what is assigned to its config lasts for one compilation.)
        pinned = {"options": {"deterministic": True}} if self.inner == "inductor" else {}
        self.compilation: dict[str, Any] = {"dynamic": False, **pinned}
        self.num_slots = 64 if given.tiny else 65_536
        few = 3 if tokens > 1024 else 1  # a replay takes far longer
        self.effort = max(given.rounds // few, 1), max(given.replays // few, 1)
        self.model = Routers(*geometry).to(DEVICE).eval().requires_grad_(False)
        self.x = torch.randn(tokens, HIDDEN, device=DEVICE)
        self.slots = np.random.default_rng(0).permutation(self.num_slots)[:tokens]
        self.on_device = torch.from_numpy(self.slots).to(DEVICE)
        layers, top_k, _ = geometry
        self.buffer = torch.full((self.num_slots + 1, layers, top_k), -1, dtype=torch.int32, device=DEVICE)

    def attach(self, engine: Any, **options: Any) -> r3_pass.runtime.Session:
        return r3_pass.runtime.attach(engine, num_slots=self.num_slots, max_tokens=self.tokens, **options)

    def check(self, session: r3_pass.runtime.Session, ours: Graph, put: Graph | None) -> None:
        """What a replay of ours records is what a replay of the other puts; leaves the session without an open step."""
        ours.slots = self.slots
        with session.step(self.slots):
            if CUDA:
                ours.replay()
            else:
                ours.run()
        if put is not None:
            put.replay()
        differ = float((session.read(self.slots) != self.buffer[self.on_device].cpu().numpy()).any(-1).mean())
        if differ > ROUNDED:
            raise SystemExit(f"the two ways recorded different ids, in {100 * differ:.2f}% of all choices")


def whole(bench: Bench, name: str, geometry: tuple[int, int, int], tokens: int, floor: dict[str, float]) -> None:
    """A model that is compiled as one: in CUDA graphs, and at T = 256 the host's time."""
    given = bench.given
    setting = Setting(given, geometry, tokens)
    model, x = setting.model, setting.x
    backend = r3_pass.backend(setting.inner)
    plain = torch.compile(model, backend=setting.inner, **setting.compilation)
    on = torch.compile(model, backend=backend, **setting.compilation)
    session = setting.attach(on)
    put = functools.partial(plain, x, setting.buffer, setting.on_device)
    sessions = {"r3_pass": (session, on)}
    options = {"pinned": {"placement": "pinned"}} if CUDA else {}
    if CUDA and tokens <= DIRECT:
        options["to requests"] = {}
    for (
        variant,
        chosen,
    ) in options.items():  # of the same class under the same backend: the same compiled code serves all
        beside = torch.compile(copy.deepcopy(model), backend=backend, **setting.compilation)
        sessions[variant] = setting.attach(beside, **chosen), beside
    runs: dict[str, Callable[[], Graph]] = {
        "off": lambda: Graph(functools.partial(on, x)),
        "put": lambda: Graph(put),
    }
    if tokens > 1:
        runs["alive"] = lambda: Graph(functools.partial(plain, x, keep=True))
    for variant, (there, compiled) in sessions.items():
        runs[variant] = functools.partial(Graph, functools.partial(compiled, x), there, tokens)
    graphs = {variant: [make() for _ in range(given.captures)] for variant, make in runs.items()}
    setting.buffer.fill_(-1)
    for variant, (there, _) in sessions.items():
        for graph in graphs[variant]:
            setting.check(there, graph, graphs["put"][0])
    prompt = [Segment("a request", 0, tokens)]
    steps = [
        recording(graphs[variant], setting.slots, prompt)
        if variant == "to requests"
        else recording(graphs[variant], setting.on_device)
        for variant in sessions
    ]
    level = alternate(graphs, *setting.effort)
    off = statistics.median(level["off"])
    row: dict[str, Any] = {"geometry": name, "tokens": tokens, "off": off}
    row |= {variant: statistics.median(found) - off for variant, found in level.items() if variant != "off"}
    ids = tokens * geometry[0] * geometry[1]
    row["floor"] = floor["one more empty kernel, us"] + ids * (8 + 2) / floor["memory, GB/s"] / 1e3
    row["floor of pinned"] = floor["one more empty kernel, us"] + ids * 2 / floor["bus, GB/s"] / 1e3
    row["spread"] = {variant: found[-1] - found[0] for variant, found in level.items()}
    bench.add("capture", row)
    if tokens in LIMITS:
        explain = {
            variant: graphs[variant][0].replay for variant in ("off", "r3_pass", "to requests") if variant in graphs
        }
        bench.bar(f"recording adds, us, {name}, T = {tokens}", row["r3_pass"], "<=", LIMITS[tokens], explain=explain)
    for there, _ in sessions.values():
        there.detach()
    del steps
    if tokens not in (1, 8192):
        session = setting.attach(on)  # the one before has a step open
        ways = {"off": lambda: plain(x), "outside": lambda: on(x), "r3_pass": lambda: on(x), "put": put}
        host(bench, name, setting, session, "as one", ways)
        session.detach()


def by_layer(bench: Bench, name: str, geometry: tuple[int, int, int], tokens: int, floor: dict[str, float]) -> None:
    """A model whose layers are compiled by themselves: in CUDA graphs, and the host's time."""
    given = bench.given
    setting = Setting(given, geometry, tokens)
    model, other = setting.model, copy.deepcopy(setting.model)
    backend = r3_pass.backend(setting.inner)
    for module, compiler in ((model, backend), (other, setting.inner)):
        for layer in module.layers:
            layer.compile(backend=compiler, **setting.compilation)
    session = setting.attach(model, backend=backend)
    views = [setting.buffer[:, number] for number in range(geometry[0])]
    on = functools.partial(model.one_by_one, setting.x)
    off = functools.partial(other.one_by_one, setting.x)
    put = functools.partial(other.one_by_one, setting.x, views, setting.on_device)
    runs = {
        "off": lambda: Graph(off),
        "r3_pass": lambda: Graph(on, session, tokens),
        "put": lambda: Graph(put),
    }
    graphs = {variant: [make() for _ in range(given.captures)] for variant, make in runs.items()}
    setting.buffer.fill_(-1)
    for graph in graphs["r3_pass"]:
        setting.check(session, graph, graphs["put"][0])
    host(bench, name, setting, session, "by layer", {"off": off, "outside": on, "r3_pass": on, "put": put})
    step = recording(graphs["r3_pass"], setting.on_device)
    level = {variant: statistics.median(found) for variant, found in alternate(graphs, *setting.effort).items()}
    row = {"geometry": name, "tokens": tokens, "off": level["off"]}
    row |= {variant: level[variant] - level["off"] for variant in ("r3_pass", "put")}
    row["share"] = row["r3_pass"] / row["put"]
    moved = tokens * geometry[0] * geometry[1] * (8 + 2)
    row["floor"] = floor["one more empty kernel, us"] + moved / floor["memory, GB/s"] / 1e3
    bench.add("by layer", row)
    explain = {variant: graphs[variant][0].replay for variant in ("r3_pass", "put")}
    bench.bar(f"layers compiled by themselves, of index_put_, {name}", row["share"], "<=", SHARE, explain=explain)
    session.detach()
    del step


def host(
    bench: Bench,
    name: str,
    setting: Setting,
    session: r3_pass.runtime.Session,
    how: str,
    runs: dict[str, Callable[[], Any]],
) -> None:
    """Host time of a forward without CUDA graphs."""
    found = host_time(session, setting.slots, runs, bench.given.calls)
    bench.add("host", {"geometry": name, "tokens": setting.tokens, "compiled": how, **found})
    if how != "as one":
        return

    def once() -> None:
        with session.step(setting.slots):
            runs["r3_pass"]()

    explain = {"a forward inside its step": once, "a forward without r3_pass": runs["off"]}
    figure = f"host adds to a forward without CUDA graphs, us, {name}"
    bench.bar(figure, found["r3_pass"], "<=", HOST, explain=explain, host=True)


def host_time(
    session: r3_pass.runtime.Session, slots: np.ndarray, runs: dict[str, Callable[[], Any]], calls: int
) -> dict[str, float]:
    """Microseconds until a call returns, from an idle GPU; the others as what they add, the median over rounds of all."""
    times: dict[str, list[float]] = {variant: [] for variant in runs}

    def once(variant: str) -> None:
        if CUDA:
            torch.cuda.synchronize()
        began = time.perf_counter()
        runs[variant]()
        times[variant].append((time.perf_counter() - began) * 1e6)

    for _ in range(calls):
        for variant in runs:
            if variant == "r3_pass":
                with session.step(slots):
                    once(variant)
            else:
                once(variant)
    kept = {variant: seen[calls // 5 :] for variant, seen in times.items()}
    found = {"off": statistics.median(kept["off"])}
    for variant in runs:
        if variant != "off":
            pairs = zip(kept[variant], kept["off"], strict=True)
            found[variant] = statistics.median(one - off for one, off in pairs)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="for every geometry; by default 256, 8192 and 1 for R1 and 256"
    )
    parser.add_argument("--geometry", choices=list(GEOMETRIES), nargs="+", default=list(GEOMETRIES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--calls", type=int, default=200, help="forwards of each way for the host's time")
    parser.add_argument(
        "--captures", type=int, default=3, help="CUDA graphs of each variant: two of the same differ, too"
    )
    given = parser.parse_args()
    geometries = {name: GEOMETRIES[name] for name in given.geometry}
    if given.tiny:
        geometries, given.tokens, given.rounds, given.replays, given.calls, given.captures = TINY, [4], 1, 1, 5, 1
    elif not CUDA:
        raise SystemExit("this benchmark measures GPU time: it needs a CUDA device, or --tiny")
    bench = Bench(given)
    floor = floors()
    bench.add("floors", floor)
    for name, geometry in geometries.items():
        by_layer(bench, name, geometry, (given.tokens or TOKENS[name])[0], floor)
        for tokens in given.tokens or TOKENS[name]:
            whole(bench, name, geometry, tokens, floor)
    report(bench, floor)
    bench.finish()


def report(bench: Bench, floor: dict[str, float]) -> None:
    rows = bench.rows
    headers = [
        "geometry",
        "T",
        "routing alone",
        "r3_pass adds",
        "floor",
        "above it",
        "to requests",
        "pinned adds",
        "floor of both",
        "put adds",
        "ids alive add",
        "spread",
    ]
    print(
        table(
            headers,
            [
                (
                    row["geometry"], row["tokens"], f"{row['off']:.0f}", f"**{row['r3_pass']:.1f}**", f"{row['floor']:.1f}",
                    f"{row['r3_pass'] - row['floor']:.1f}",
                    *(f"{row[variant]:.1f}" if variant in row else "-" for variant in ("to requests", "pinned")),
                    f"{row['floor of pinned']:.1f}", f"{row['put']:.1f}", f"{row['alive']:.1f}" if "alive" in row else "-",
                    f"{row['spread']['off']:.1f}, {row['spread']['r3_pass']:.1f}",
                )
                for row in rows["capture"]
            ],
        )
    )  # fmt: skip
    print(f"\nGPU microseconds per forward, compiled as one, in a CUDA graph; put: int32 index_put_ per layer. {floor}")
    print(
        table(
            ["geometry", "T", "routing alone", "r3_pass adds", "floor", "above it", "put adds", "share"],
            [
                (
                    row["geometry"], row["tokens"], f"{row['off']:.0f}", f"**{row['r3_pass']:.1f}**", f"{row['floor']:.1f}",
                    f"{row['r3_pass'] - row['floor']:.1f}", f"{row['put']:.1f}", f"{row['share']:.2f}",
                )
                for row in rows["by layer"]
            ],
        )
    )  # fmt: skip
    print("\nthe same, each layer compiled by itself, all of them in one CUDA graph")
    print(
        table(
            ["geometry", "T", "compiled", "without r3_pass", "outside a step adds", "recording adds", "put adds"],
            [
                (
                    row["geometry"], row["tokens"], row["compiled"], f"{row['off']:.0f}", f"{row['outside']:.1f}",
                    f"**{row['r3_pass']:.1f}**", f"{row['put']:.1f}",
                )
                for row in rows["host"]
            ],
        )
    )  # fmt: skip
    print(
        "\nhost microseconds until a forward without CUDA graphs returns, from an idle GPU; the floor is one launch: "
        f"{floor['a launch on the host, us']:.1f}"
    )


if __name__ == "__main__":
    main()
