"""Each benchmark runs from end to end at a tiny size; their figures are for a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

BENCHMARKS = Path(__file__).parent / "benchmarks"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    """Whatever a benchmark sets, other tests have it as it was."""
    limit, tuned = torch._dynamo.config.recompile_limit, inductor.triton.autotune_pointwise
    with torch._dynamo.config.patch(recompile_limit=limit), inductor.patch("triton.autotune_pointwise", tuned):
        yield


@pytest.mark.parametrize(
    ("name", "arguments", "tables"),
    [
        ("capture_cost", [], {"floors", "capture", "by layer", "host"}),
        ("host_cost", [], {"host"}),
        ("memory_cost", [], {"capacity", "prefix hit"}),
        ("router_cost", [], {"floors", "router"}),
        pytest.param("forward_cost", ["--parts", "model"], {"floors", "forward"}, marks=pytest.mark.slow),
        pytest.param("forward_cost", ["--parts", "blocks"], {"floors", "forward"}, marks=pytest.mark.slow),
        pytest.param("serving_cost", ["--parts", "model"], {"runs", "serving"}, marks=pytest.mark.slow),
        pytest.param("serving_cost", ["--parts", "blocks"], {"runs", "serving"}, marks=pytest.mark.slow),
        pytest.param("decode_cost", [], {"steps"}, marks=pytest.mark.slow),
        pytest.param("compile_cost", [], {"compile"}, marks=pytest.mark.slow),
        pytest.param("replay_cost", [], {"replay"}, marks=pytest.mark.slow),
        pytest.param("traffic", [], {"scale", "real", "entropy"}, marks=pytest.mark.slow),
    ],
)
def test_runs(
    name: str, arguments: list[str], tables: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", [name, "--tiny", "--out", str(out), *arguments])
    load(name).main()
    found = json.loads(out.read_text())
    assert set(found["rows"]) == tables
    assert not [bar for bar in found["bars"] if bar["met"] is False]


def test_kernels_that_differ() -> None:
    """Those of one side only count in full; the last row is all of them."""
    text = load("bench").difference({"record": 5.0, "same": 1.0, "slow": 3.5}, {"same": 1.0, "slow": 3.0, "gone": 2.0})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert rows[2:] == [
        ["record", "0.0", "+5.0"], ["gone", "2.0", "-2.0"], ["slow", "3.0", "+0.5"], ["same", "1.0", "+0.0"],
        ["all", "6.0", "+3.5"],
    ]  # fmt: skip


def test_a_missed_bar_fails_and_is_profiled(tmp_path: Path) -> None:
    bench = load("bench")
    out = tmp_path / "results.json"
    given = bench.arguments("A benchmark.").parse_args(["--tiny", "--out", str(out)])
    measured = bench.Bench(given)
    measured.bar("met", 1.0, "<=", 1.0, anywhere=True)
    measured.bar("missed", 1.0, "<", 1.0, anywhere=True, host=True, explain={"sorting": lambda: sorted(range(9))})
    with pytest.raises(SystemExit, match="missed: missed"):
        measured.finish()
    assert [bar["met"] for bar in json.loads(out.read_text())["bars"]] == [True, False]
    assert "sorted" in out.with_suffix(".profile.txt").read_text()


def test_what_takes_too_long_is_stopped_and_keeps_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = load("all")
    script = tmp_path / "slow.py"
    script.write_text(
        "import json, sys, time\n"
        "bar = {'figure': 'first', 'value': 2.0, 'bar': '<= 1', 'met': False}\n"
        "open(sys.argv[2], 'w').write(json.dumps({'bars': [bar]}))\n"
        "print('begun', flush=True)\n"
        "time.sleep(60)\n"
    )
    benchmark = driver.Benchmark(str(script), (), 1, 60)
    ending = driver.run("slow", benchmark, tmp_path, tiny=False, limit=3.0)
    assert ending["how"] == "out of time" and ending["seconds"] < 30
    assert (tmp_path / "slow.txt").read_text() == "begun\n"
    assert [bar["figure"] for bar in driver.read(tmp_path, "slow")] == ["first"]
    with pytest.raises(SystemExit, match="1 figures missed; did not end well: slow"):
        driver.report(tmp_path, {"slow": ending})
