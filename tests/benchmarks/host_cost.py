"""What recording costs the host in a decode step, beside a per-request Python loop.

    python tests/benchmarks/host_cost.py [--out results.json]

Batch 256, ids of 61 x 8 and 48 x 8 a token, contexts from short to long. The forward is one CUDA graph that routes (a call of the
compiled model where there is no GPU) and is not counted. Microseconds of host time, medians over the steps but for "mean":

    enter       SegmentBatch and `session.step(...)` until it is entered: checks, the mapping's copy, rows that arrived taken in
    leave       until the step is left: requests extended, the mapping closed, an event recorded behind their rows, which the record
                kernel itself writes to the host
    loop        what it replaces: for each request, its row out of the step's block into an array of its own, which grows

Without recording there is no step: off is nothing. The loop is given the rows on the host for nothing: no mapping, no copies. Enter
takes in the rows of the step before, so that enter + leave is all that a step costs, delivery included. The floor is what no step
can be without, timed between the others: the calls into CUDA, and nothing of our own.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from bench import CUDA, DEVICE, Bench, arguments, table
from graphs import Graph
from routing_model import HIDDEN, Routers

import r3_pass
from r3_pass.runtime import SegmentBatch

GEOMETRIES = {"R1 (61 x 8 of 256)": (61, 8, 256), "Qwen3-30B-A3B (48 x 8 of 128)": (48, 8, 128)}
TINY = {"tiny (3 x 2 of 8)": (3, 2, 8)}
LIMIT, LIMITED = 30.0, 4096  # microseconds, at this context
FLAT = 1.1


class Loop:
    """The usual way: rows of each request in an array of its own, one slice copy a request and step."""

    def __init__(self, batch: int, context: int, layers: int, top_k: int) -> None:
        self.rows = [np.zeros((context, layers, top_k), np.int16) for _ in range(batch)]
        self.ends = [context] * batch

    def take(self, block: npt.NDArray[np.int16], starts: list[int]) -> None:
        for i, start in enumerate(starts):
            rows, end = self.rows[i], self.ends[i]
            if start > end:
                raise AssertionError("a gap")
            stop = start + 1
            if stop > len(rows):
                grown = np.empty((2 * len(rows), *rows.shape[1:]), np.int16)
                grown[:end] = rows[:end]
                self.rows[i] = rows = grown
            rows[start:stop] = block[i : i + 1]
            self.ends[i] = max(end, stop)


class Decodes:
    """Requests that all have a context of rows, and the decode steps that follow.

    The rows of one prompt are recorded once; every request takes them over as a prefix hit: the length is what matters here.
    """

    def __init__(self, compiled: Any, batch: int, context: int, steps: int) -> None:
        self.batch, self.context = batch, context
        room = steps + 1
        chunk = min(context, 4096)
        self.session = r3_pass.runtime.attach(compiled, num_slots=context + batch * room, max_tokens=max(chunk, batch))
        for first in range(0, context, chunk):
            slots = np.arange(first, min(first + chunk, context))
            with self.session.step(slots):
                compiled(torch.randn(len(slots), HIDDEN, device=DEVICE))
        self.names = [f"req_{i}" for i in range(batch)]
        for name in self.names:
            self.session.prefix_hit(name, 0, np.arange(context))
        self.firsts = context + np.arange(batch) * room
        self.lengths = np.ones(batch, np.int64)
        x = torch.randn(batch, HIDDEN, device=DEVICE)
        graph = Graph(lambda: compiled(x), self.session, batch)
        self.forward: Callable[[], Any] = graph.replay if CUDA else graph.run
        self.done = 0

    def step(self) -> tuple[float, float]:
        """One decode. Returns: microseconds to enter and to leave the step."""
        slot_mapping = self.firsts + self.done
        starts = np.full(self.batch, self.context + self.done)
        if CUDA:
            torch.cuda.synchronize()
        t0 = time.perf_counter()
        entered = self.session.step(slot_mapping, SegmentBatch(self.names, starts, self.lengths))
        entered.__enter__()
        t1 = time.perf_counter()
        self.forward()
        t2 = time.perf_counter()
        entered.__exit__(None, None, None)
        t3 = time.perf_counter()
        self.done += 1
        return (t1 - t0) * 1e6, (t3 - t2) * 1e6

    def check(self) -> None:
        """Every request has every row."""
        for name in self.names:
            rows = self.session.finish(name, self.context + self.done + 1)
            if len(rows) != self.context + self.done or not (rows >= 0).all():
                raise SystemExit(f"{name} has {len(rows)} rows of {self.context + self.done}, or void ones")


class Floor:
    """What no step can be without: a mapping up, the mapping closed, an event after the rows, and a look at the one before."""

    def __init__(self, batch: int) -> None:
        self.host = torch.zeros(batch + 4, dtype=torch.int64, pin_memory=CUDA)
        self.there = torch.zeros_like(self.host, device=DEVICE)
        self.first = self.there[:1]  # sliced once, as a session does
        self.event = torch.cuda.Event() if CUDA else None

    def take(self) -> None:
        if self.event is not None:
            self.event.query()
        self.there.copy_(self.host, non_blocking=True)
        self.first.fill_(-1)
        if self.event is not None:
            self.event.record()


def measure(bench: Bench, name: str, geometry: tuple[int, int, int], compiled: Any, context: int) -> dict[str, Any]:
    given = bench.given
    shape = (given.batch, *geometry[:2])
    decodes = Decodes(compiled, given.batch, context, given.steps + 60)  # 60: what a profile runs
    loop = Loop(given.batch, context, *geometry[:2])
    floor = Floor(given.batch)
    times: dict[str, list[float]] = {"enter": [], "leave": [], "step": [], "loop": [], "floor": []}
    gc.collect()
    gc.disable()
    for step in range(given.steps):
        enter, leave = decodes.step()
        block = np.zeros(shape, np.int16)
        listed = [context + step] * given.batch
        began = time.perf_counter()
        loop.take(block, listed)
        taken = (time.perf_counter() - began) * 1e6
        if CUDA:
            torch.cuda.synchronize()
        began = time.perf_counter()
        floor.take()
        least = (time.perf_counter() - began) * 1e6
        for key, spent in zip(times, (enter, leave, enter + leave, taken, least), strict=True):
            times[key].append(spent)
    gc.enable()
    row: dict[str, Any] = {"geometry": name, "context": context, "off": 0.0}
    row |= {key: statistics.median(seen[given.steps // 10 :]) for key, seen in times.items()}
    row |= {f"mean {key}": statistics.mean(times[key][given.steps // 10 :]) for key in ("step", "loop")}
    row["loop / step"] = row["loop"] / row["step"]
    bench.add("host", row)
    if context == LIMITED or given.tiny:
        figure = f"a decode step on the host, us, {name}, context {context}"
        bench.bar(figure, row["step"], "<=", LIMIT, explain={"steps": decodes.step}, host=True)
    decodes.check()
    decodes.session.detach()
    return row


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--geometry", choices=list(GEOMETRIES), nargs="+", default=list(GEOMETRIES))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    geometries = {name: GEOMETRIES[name] for name in given.geometry}
    if given.tiny:
        geometries, given.contexts, given.batch, given.steps = TINY, [8, 16], 4, 10
    bench = Bench(given)
    for name, geometry in geometries.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Routers(*geometry).to(DEVICE).eval().requires_grad_(False)
        compiled = torch.compile(model, backend=r3_pass.backend("eager"), dynamic=True)
        rows = [measure(bench, name, geometry, compiled, context) for context in given.contexts]
        longest, shortest = (choose(rows, key=lambda row: row["context"])["step"] for choose in (max, min))
        if len(rows) > 1:
            bench.bar(f"a step at the longest context / at the shortest, {name}", longest / shortest, "<=", FLAT)
    print(
        table(
            ["geometry", "context", "off", "enter", "leave", "step in all", "mean", "floor", "per-request loop", "loop / step"],
            [
                (
                    row["geometry"], row["context"], "0", f"{row['enter']:.0f}", f"{row['leave']:.0f}",
                    f"**{row['step']:.0f}**", f"{row['mean step']:.0f}", f"{row['floor']:.0f}", f"{row['loop']:.0f}",
                    f"{row['loop / step']:.1f}",
                )
                for row in bench.rows["host"]
            ],
        )
    )  # fmt: skip
    print(f"\nmicroseconds of host time per decode step of {given.batch} requests")
    bench.finish()


if __name__ == "__main__":
    main()
