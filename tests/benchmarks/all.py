"""All benchmarks, each in a process of its own with a time limit, and at the end every figure beside its bar.

    python tests/benchmarks/all.py --out results --part 1        # nine minutes on one GPU; so do --part 2 and 3
    python tests/benchmarks/all.py --out results --only capture,host
    python tests/benchmarks/all.py --out results --tiny          # any machine: that they run, figures mean nothing

Goes on after a failure. Each one's raw results (`NAME.json`), output (`NAME.txt`) and, where a bar is missed, the profile that
explains it (`NAME.profile.txt`) lie in the folder. Fails if a bar was missed, or a benchmark did not end well.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A script, its arguments at full size, the part that it belongs to, and its limit in seconds."""

    script: str
    arguments: tuple[str, ...]
    part: int
    limit: int


BENCHMARKS = {
    "host": Benchmark("host_cost.py", (), 1, 60),
    "memory": Benchmark("memory_cost.py", (), 1, 60),
    "capture": Benchmark("capture_cost.py", (), 1, 320),
    "router": Benchmark("router_cost.py", ("--tokens", "256"), 1, 120),
    "decodes": Benchmark("decode_cost.py", (), 1, 150),
    "forward-blocks": Benchmark("forward_cost.py", ("--parts", "blocks", "--layers", "48"), 2, 120),
    "serving": Benchmark("serving_cost.py", ("--requests", "256", "--seconds", "125"), 2, 290),
    "forward": Benchmark("forward_cost.py", ("--layers", "8"), 2, 140),
    "compile": Benchmark("compile_cost.py", (), 3, 270),
    "replay": Benchmark("replay_cost.py", (), 3, 240),
    "traffic": Benchmark("traffic.py", (), 3, 120),
}
"""What is last in a part gets the time that is left. Part 3 has what a GPU says least of."""


def run(name: str, benchmark: Benchmark, out: Path, tiny: bool, limit: float) -> dict[str, Any]:
    """Run one of them, its output copied to ours. Returns: how it ended, and after how many seconds."""
    results = out / f"{name}.json"
    for stale in (results, results.with_suffix(".profile.txt")):
        stale.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / benchmark.script), "--out", str(results), *benchmark.arguments]
    command += ["--tiny"] if tiny else []
    print(f"\n# {name}: {' '.join(command[1:])} (at most {limit:.0f} s)", flush=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]))
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    copying = threading.Thread(target=_copy, args=(process.stdout, out / f"{name}.txt"))
    copying.start()
    try:
        code = process.wait(limit)
        how = "ended" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        how = "out of time"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # a compiler's workers may be left
    process.wait()
    copying.join()
    return {"how": how, "seconds": time.monotonic() - began}


def _copy(lines: Any, to: Path) -> None:
    with open(to, "w") as kept:
        for line in lines:
            print(line, end="", flush=True)
            kept.write(line)
            kept.flush()


def read(out: Path, name: str) -> list[dict[str, Any]]:
    """The bars of a benchmark, as far as it got."""
    try:
        bars: list[dict[str, Any]] = json.loads((out / f"{name}.json").read_text())["bars"]
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--part", type=int, choices=[1, 2, 3])
    parser.add_argument("--only", type=lambda names: names.split(","), help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all together; what is left bounds the next one")
    parser.add_argument("--tiny", action="store_true", help="at a size that any CPU runs")
    given = parser.parse_args()
    unknown = set(given.only or ()) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    chosen = {
        name: benchmark
        for name, benchmark in BENCHMARKS.items()
        if (given.part is None or benchmark.part == given.part) and (given.only is None or name in given.only)
    }
    given.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + given.minutes * 60
    endings = {}
    for name, benchmark in chosen.items():
        left = deadline - time.monotonic()
        if left < 10:
            endings[name] = {"how": "no time was left", "seconds": 0.0}
        else:
            endings[name] = run(name, benchmark, given.out, given.tiny, min(left, benchmark.limit))
    report(given.out, endings)


def report(out: Path, endings: dict[str, dict[str, Any]]) -> None:
    said = {True: "met", False: "MISSED", None: "not judged"}
    found = {name: read(out, name) for name in endings}
    print("\n# figures\n\n| benchmark | figure | value | bar | |\n| --- | --- | --- | --- | --- |")
    for name, bars in found.items():
        for bar in bars:
            print(f"| {name} | {bar['figure']} | {bar['value']:.4g} | {bar['bar']} | {said[bar['met']]} |")
    print("\n| benchmark | seconds | ended |\n| --- | --- | --- |")
    for name, ending in endings.items():
        print(f"| {name} | {ending['seconds']:.0f} | {ending['how']} |")
    missed = [bar["figure"] for bars in found.values() for bar in bars if bar["met"] is False]
    failed = [name for name, ending in endings.items() if ending["how"] != "ended"]
    if missed or failed:
        raise SystemExit(f"{len(missed)} figures missed; did not end well: {', '.join(failed) or 'none'}")


if __name__ == "__main__":
    main()
