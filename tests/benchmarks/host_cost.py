"""What recording costs the host in a decode step, beside a per-request Python loop.

    python tests/benchmarks/host_cost.py [--out results.json]

Batch 256, ids of 61 x 8 and 48 x 8 a token, contexts from short to long. The forward is one CUDA graph that routes (a call of the
compiled model where there is no GPU) and is not counted. Microseconds of host time, medians over the steps:

    enter       SegmentBatch and `session.step(...)` until it is entered: checks, the mapping's copy, rows that arrived taken in
    leave       until the step is left: requests extended, the snapshot and its copy queued
    loop        what it replaces: for each request, its row out of the step's block into an array of its own, which grows

The loop is given the rows on the host for nothing: no mapping, no copies. Enter takes in the rows of the step before, so that
enter + leave is all that a step costs, delivery included.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from capture_cost import HIDDEN, Routers, captured_with

import r3_pass
from r3_pass.runtime import SegmentBatch

BATCH = 256
GEOMETRIES = {"61 x 8 of 256": (61, 8, 256), "48 x 8 of 128": (48, 8, 128)}


class Loop:
    """The usual way: rows of each request in an array of its own, one slice copy a request and step."""

    def __init__(self, context: int, layers: int, top_k: int) -> None:
        self.rows = [np.zeros((context, layers, top_k), np.int16) for _ in range(BATCH)]
        self.ends = [context] * BATCH

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


def measure(name: str, context: int, steps: int) -> dict[str, Any]:
    layers, top_k, experts = GEOMETRIES[name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.reset()
    model = Routers(layers, top_k, experts).to(device).eval().requires_grad_(False)
    inner = "inductor" if device == "cuda" else "eager"
    compiled = torch.compile(model, backend=r3_pass.backend(inner), dynamic=False)
    room = context + steps + 1
    session = r3_pass.runtime.attach(compiled, num_slots=BATCH * room, max_tokens=BATCH)
    x = torch.randn(BATCH, HIDDEN, device=device)
    run: Callable[[], Any]
    if device == "cuda":
        run = captured_with(session, compiled, x, torch.full((BATCH,), -1, device=device)).replay
    else:
        with session.step(np.full(BATCH, -1)):
            compiled(x)

        def run() -> Any:
            return compiled(x)

    names = [f"req_{i}" for i in range(BATCH)]
    firsts = np.arange(BATCH) * room
    lengths = np.ones(BATCH, np.int64)
    fill = np.zeros((context, layers, top_k), np.int16)
    for i in range(BATCH):  # a context of rows for each request: its length is what matters here
        session._delivery.table.extend(SegmentBatch([names[i]], [0], [context]))  # type: ignore[union-attr]
        session._delivery.table.rows.fill(session._delivery.table.rows.reserve(0) - context, fill)  # type: ignore[union-attr]
    loop = Loop(context, layers, top_k)
    times: dict[str, list[float]] = {"enter": [], "leave": [], "loop": []}
    gc.disable()
    for step in range(steps):
        position = context + step
        slot_mapping = firsts + position
        if device == "cuda":
            torch.cuda.synchronize()
        t0 = time.perf_counter()
        starts = np.full(BATCH, position)
        entered = session.step(slot_mapping, SegmentBatch(names, starts, lengths))
        entered.__enter__()
        t1 = time.perf_counter()
        run()
        t2 = time.perf_counter()
        entered.__exit__(None, None, None)
        t3 = time.perf_counter()
        block = np.zeros((BATCH, layers, top_k), np.int16)
        listed = starts.tolist()
        t4 = time.perf_counter()
        loop.take(block, listed)
        t5 = time.perf_counter()
        for key, taken in (("enter", t1 - t0), ("leave", t3 - t2), ("loop", t5 - t4)):
            times[key].append(taken * 1e6)
    gc.enable()
    session.detach()
    row: dict[str, Any] = {"geometry": name, "context": context}
    row.update({key: statistics.median(seen[steps // 10 :]) for key, seen in times.items()})
    row["ratio"] = row["loop"] / (row["enter"] + row["leave"])
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 8192])
    parser.add_argument("--geometry", choices=list(GEOMETRIES), nargs="+", default=list(GEOMETRIES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = [measure(name, context, given.steps) for name in given.geometry for context in given.contexts]
    machine = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "torch": torch.__version__,
        "python": platform.python_version(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    print(json.dumps(machine))
    print("\n| geometry | context | enter | leave | step in all | per-request loop | loop / step |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['geometry']} | {row['context']} | {row['enter']:.0f} | {row['leave']:.0f} | "
            f"**{row['enter'] + row['leave']:.0f}** | {row['loop']:.0f} | {row['ratio']:.1f} |"
        )
    if given.out:
        given.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
