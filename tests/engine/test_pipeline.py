"""Pipeline parallel, on processes of their own: merged rows are those of one process, or there are none.

On a CPU over gloo; with two GPUs over NCCL and in CUDA graphs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stages
import torch

ROOT = Path(__file__).parents[2]
Served = dict[str, list[tuple[list[int], Any, str, str]]]


def run(folder: Path, size: int, cases: list[str], device: str = "cpu") -> list[tuple[int, str, Served]]:
    """Exit status, output and results of each stage."""
    paths = [ROOT, ROOT / "tests/lib", ROOT / "examples"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    command = [sys.executable, str(ROOT / "tests/lib/stages.py")]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    started = [
        subprocess.Popen([*command, str(rank), str(size), str(folder), *cases, "--device", device], **pipes)
        for rank in range(size)
    ]
    found = []
    try:
        for rank, process in enumerate(started):
            output, _ = process.communicate(timeout=300)
            saved = folder / f"{rank}.pt"
            found.append((process.returncode, output, torch.load(saved, weights_only=False) if saved.exists() else {}))
    finally:
        for process in started:
            process.kill()
    return found


def truth(model: Any, tokens: list[int]) -> Any:
    """int16 [tokens, L, K] of an eager prefill in one process, by hooks on the routers."""
    rows = np.full((len(tokens), stages.LAYERS, 2), -1, np.int16)
    hooks = []
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            hooks.append(
                layer.mlp.gate.register_forward_hook(
                    lambda _, __, out, number=number: rows.__setitem__(
                        (slice(None), number), next(t for t in out if not t.is_floating_point()).reshape(-1, 2).numpy()
                    )
                )
            )
    assert len(hooks) == stages.LAYERS - 1
    with torch.no_grad():
        model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return rows


def check(found: list[tuple[int, str, Served]], cases: list[str]) -> None:
    model = stages.model()
    for status, output, served in found:
        assert status == 0 and list(served) == cases, output
        for name in cases:
            results = served[name]
            assert len(results) >= 2 or name == "new weights"
            for (tokens, rows, reason, error), (_, theirs, *_) in zip(results, found[0][2][name], strict=True):
                assert np.array_equal(rows, theirs)  # every stage built the same output
                if name == "stale" and reason == "error":
                    assert "StaleRoutes" in error
                    continue
                assert error == "None"
                assert len(rows) == len(tokens) - 1 or reason == "abort"
                assert np.array_equal(rows, truth(model, tokens)[: len(rows)])
    if "stale" in cases:
        assert [reason for _, _, reason, _ in found[0][2]["stale"]].count("error") == 1
    if "concurrent" in cases:
        aborted = [rows for _, rows, reason, _ in found[0][2]["concurrent"] if reason == "abort"]
        assert len(aborted) == 2 and len(aborted[0])


ALL = ["prefix hit", "concurrent", "chunked", "1 draft", "3 drafts", "new weights", "stale"]


def test_two_stages(tmp_path: Path) -> None:
    check(run(tmp_path, 2, ALL), ALL)


@pytest.mark.slow
def test_four_stages_of_which_one_is_dense(tmp_path: Path) -> None:
    check(run(tmp_path, 4, ALL[:3]), ALL[:3])


def test_a_stage_that_dies_leaves_no_partial_row(tmp_path: Path) -> None:
    (status, output, served), (_, _, gone) = run(tmp_path, 2, ["dies"])
    assert status == 0 and "the pipeline is torn" in output, output
    assert gone == {}
    ((tokens, rows, reason, error),) = served["dies"]  # what was delivered before, and nothing of the second request
    assert reason == "length" and error == "None"
    assert np.array_equal(rows, truth(stages.model(), tokens)[:-1])


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_stages_on_two_gpus(tmp_path: Path) -> None:
    cases = [name for name in ALL if name != "new weights"]
    check(run(tmp_path, 2, cases, "cuda"), cases)
