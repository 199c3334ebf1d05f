"""What the benchmarks share: arguments, the record of the machine, tables, figures beside their bars, raw results.

    given = arguments(__doc__).parse_args()
    bench = Bench(given)
    bench.add("capture", row)                                        # kept, and written at once: a run that is killed has it
    bench.bar("us at T = 256", row["adds"], "<=", 6.5, explain={"on": graph.replay})
    bench.finish()                                                   # writes --out; fails if a bar was missed

A bar is judged on a GPU and at full size only, unless it says `anywhere`. Where one is missed, what explains it is profiled then
and there, into a file beside the results.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import datetime
import importlib.metadata
import io
import json
import operator
import os
import platform
import pstats
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor

import r3_pass

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

_HOLDS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}
_PROFILED, _PROFILED_CALLS = 15, 3  # rows of a profile
_CALLS, _SECONDS = 30, 5.0  # of Python's, whichever is reached first


def arguments(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="run all of it in seconds, on any CPU: the figures mean nothing"
    )
    parser.add_argument("--out", type=Path, help="raw results as JSON; profiles of what misses its bar lie beside it")
    return parser


def inner(given: argparse.Namespace) -> str:
    """Inductor; for a small run what compiles in no time."""
    return "inductor" if CUDA and not given.tiny else "aot_eager"


def machine(given: argparse.Namespace) -> dict[str, Any]:
    found = {
        "gpu": torch.cuda.get_device_name() if CUDA else "none", "cpus": os.cpu_count(), "processor": platform.machine(),
        "torch": torch.__version__, "python": platform.python_version(), "r3_pass": r3_pass.__version__,
    }  # fmt: skip
    for name in ("triton", "transformers"):  # by what is installed: importing them takes seconds
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    options = {name: value for name, value in vars(given).items() if name != "out"}
    return {**found, "date": datetime.date.today().isoformat(), **options}


class Bench:
    """The rows of each table, and the bars.

    Args:
        given: as `arguments` parsed them.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
        # Variants are compared by what they do, not by luck: Inductor times configurations of small kernels in each compilation (by
        # the host, where launches take longer).
        inductor.triton.autotune_pointwise = False
        if given.tiny:
            torch.set_num_threads(1)  # its products are too small to be shared among threads
        self.given = given
        self.judged = CUDA and not given.tiny
        self.machine = machine(given)
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.bars: list[dict[str, Any]] = []
        print(json.dumps(self.machine, default=str), flush=True)

    def add(self, table: str, row: Mapping[str, Any]) -> None:
        """Keep a row of a table."""
        self.rows.setdefault(table, []).append(dict(row))
        print(table, json.dumps(row, default=str), flush=True)
        self._write()

    def bar(
        self,
        figure: str,
        value: float,
        must: str,
        limit: float,
        *,
        explain: Mapping[str, Callable[[], Any]] | None = None,
        host: bool = False,
        anywhere: bool = False,
    ) -> None:
        """Hold a figure against its bar.

        Args:
            must: "<=", "<" or ">=".
            explain: what to profile if it is missed, by name; host: by host time, not the GPU's.
            anywhere: judged on every machine and at every size.
        """
        met = _HOLDS[must](value, limit) if self.judged or anywhere else None
        self.bars.append({"figure": figure, "value": value, "bar": f"{must} {limit:g}", "met": met})
        self._write()
        if met is False and explain:
            self._explain(figure, explain, host)

    def _explain(self, figure: str, explain: Mapping[str, Callable[[], Any]], host: bool) -> None:
        seen: list[dict[str, float]] = []
        for name, run in explain.items():
            try:
                text, kernels = profiled(run, host)
                seen.append(kernels)
            except (
                RuntimeError,
                ValueError,
                r3_pass.R3Error,
            ) as error:  # no reason to lose the figures that are still to come
                text = f"not profiled: {error}"
            self._keep(f"{figure}: {name}", text)
        if CUDA and len(seen) > 1:
            self._keep(f"{figure}: {list(explain)[-1]} less {next(iter(explain))}", difference(seen[-1], seen[0]))

    def _keep(self, title: str, text: str) -> None:
        text = f"## {title}\n\n{text}\n"
        print(text, flush=True)
        if self.given.out:
            with open(self.given.out.with_suffix(".profile.txt"), "a") as kept:
                kept.write(text)

    def finish(self) -> None:
        """Raises: SystemExit if a bar was missed."""
        self._write()
        if self.bars:
            print(verdicts(self.bars))
        missed = [bar["figure"] for bar in self.bars if bar["met"] is False]
        if missed:
            raise SystemExit(f"missed: {'; '.join(missed)}")

    def _write(self) -> None:
        if self.given.out:
            found = {"machine": self.machine, "rows": self.rows, "bars": self.bars}
            self.given.out.write_text(json.dumps(found, indent=2, default=str) + "\n")


def profiled(run: Callable[[], Any], host: bool = False) -> tuple[str, dict[str, float]]:
    """The 15 operators or kernels that take most of three calls, by GPU time; by host time with Python's functions beside them.

    Returns: the text, and each kernel's microseconds of GPU time in a call.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if CUDA else [])]
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(_PROFILED_CALLS):
            run()
        if CUDA:
            torch.cuda.synchronize()
    by_host = host or not CUDA
    order = "self_cpu_time_total" if by_host else "self_device_time_total"
    averages = seen.key_averages()
    text = str(averages.table(sort_by=order, row_limit=_PROFILED, max_name_column_width=90))
    kernels: dict[str, float] = {}
    for entry in averages:
        if entry.device_type == torch.autograd.DeviceType.CUDA:
            kernels[entry.key] = kernels.get(entry.key, 0.0) + entry.self_device_time_total / _PROFILED_CALLS
        if entry.key.startswith("record_kernel"):  # ours, however little it is
            text += f"\n{entry.key}: {entry.self_device_time_total:.1f} us in {entry.count} launches"
    if not host:
        return text, kernels
    python = cProfile.Profile()
    began, calls = time.perf_counter(), 0
    python.enable()
    while calls < _CALLS and time.perf_counter() - began < _SECONDS:
        run()
        calls += 1
    python.disable()
    stream = io.StringIO()
    pstats.Stats(python, stream=stream).strip_dirs().sort_stats("tottime").print_stats(_PROFILED)
    return f"{text}\nPython, {calls} calls:\n{stream.getvalue()}", kernels


def difference(ours: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    """The kernels whose GPU time differs most, microseconds in a call, and all of them together."""
    by = {kernel: ours.get(kernel, 0.0) - theirs.get(kernel, 0.0) for kernel in {*ours, *theirs}}
    most = sorted(by, key=lambda kernel: -abs(by[kernel]))[:_PROFILED]
    rows = [(kernel[:90], f"{theirs.get(kernel, 0.0):.1f}", f"{by[kernel]:+.1f}") for kernel in most]
    rows.append(("all", f"{sum(theirs.values()):.1f}", f"{sum(by.values()):+.1f}"))
    return table(["kernel, GPU us in a call", "without", "more"], rows)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """In Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n" + "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def verdicts(bars: Iterable[Mapping[str, Any]]) -> str:
    """Each figure, its bar, and whether it is met."""
    said = {True: "met", False: "**missed**", None: "not judged here"}
    return table(
        ["figure", "value", "bar", ""],
        [(bar["figure"], f"{bar['value']:.4g}", bar["bar"], said[bar["met"]]) for bar in bars],
    )
