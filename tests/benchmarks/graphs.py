"""Calls captured as CUDA graphs, and the GPU time of their replays. Without a GPU, the calls themselves and the host's time."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from bench import CUDA, DEVICE

import r3_pass


class Graph:
    """One call, captured, and what it returned. Its tensors have to outlive its last replay: `run` holds on to them.

    Args:
        session: whose steps the call records in; captured in one that is all padding.
        tokens: of the call.
    """

    def __init__(self, run: Callable[[], Any], session: r3_pass.runtime.Session | None = None, tokens: int = 0) -> None:
        self.run = run
        self.session = session
        self.slots: Any = np.full(tokens, -1)
        if not CUDA:
            self.result = self._once()
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._once()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with self._step(), torch.cuda.graph(self.graph):
            self.result = run()

    def _step(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.session is None else self.session.step(self.slots)

    def _once(self) -> Any:
        with self._step():
            return self.run()

    def replay(self) -> None:
        if CUDA:
            self.graph.replay()
        else:
            self._once()


def recording(graphs: Sequence[Graph], slots: Any, segments: Any = None) -> Any:
    """Have replays of one session's graphs record into `slots`, in a step that is never left: keep it until the last of them.

    Args:
        segments: whose tokens they are; the graphs' kernels then write the rows to the host as well.
    """
    session = graphs[0].session
    assert session is not None
    for graph in graphs:
        graph.slots = slots
    step = session.step(slots, segments)
    if CUDA:
        step.__enter__()
        if segments is not None and step.staged is None:
            raise SystemExit(
                "the rows of this step are not written to the host by the kernel: there is nothing to measure"
            )
    return step


def microseconds(replay: Callable[[], Any], replays: int) -> float:
    """Of one replay, of so many in a row."""
    if not CUDA:
        began = time.perf_counter()
        for _ in range(replays):
            replay()
        return (time.perf_counter() - began) * 1e6 / replays
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3 / replays


def alternate(graphs: Mapping[str, Sequence[Graph]], rounds: int, replays: int) -> dict[str, list[float]]:
    """Microseconds of each variant's captures, sorted, each the median of its rounds. All take turns in every round."""
    times = {variant: [[] for _ in captures] for variant, captures in graphs.items()}  # type: dict[str, list[list[float]]]
    for _ in range(rounds):
        for variant, captures in graphs.items():
            for graph, seen in zip(captures, times[variant], strict=True):
                seen.append(microseconds(graph.replay, replays))
    return {variant: sorted(statistics.median(seen) for seen in found) for variant, found in times.items()}


def floors(replays: int = 20) -> dict[str, float]:
    """What no kernel goes below here: us of an empty kernel in a CUDA graph, alone and as one more of many; GB/s of copies."""
    x = torch.zeros(1, device=DEVICE)

    def empty(count: int) -> float:
        graph = Graph(lambda: [x.add_(1) for _ in range(count)])
        return statistics.median(microseconds(graph.replay, replays) for _ in range(20))

    def launch() -> float:
        if CUDA:
            torch.cuda.synchronize()
        began = time.perf_counter()
        x.add_(1)
        return (time.perf_counter() - began) * 1e6

    size = 2**30 if CUDA else 2**20
    source, target = (torch.zeros(size, dtype=torch.int8, device=DEVICE) for _ in range(2))
    host = torch.zeros(size // 4, dtype=torch.int8, pin_memory=CUDA)

    def rate(to: torch.Tensor, moved: int) -> float:
        copy = Graph(lambda: to.copy_(source[: len(to)], non_blocking=True))
        return moved / min(microseconds(copy.replay, 3) for _ in range(5)) / 1e3

    return {
        "empty kernel alone, us": empty(1),
        "one more empty kernel, us": (empty(128) - empty(64)) / 64,
        "a launch on the host, us": statistics.median(launch() for _ in range(100)),
        "memory, GB/s": rate(target, 2 * size),
        "bus, GB/s": rate(host, size // 4),
    }
