"""`python examples/engine`: what it serves, it proves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine import __main__ as demo
from engine import proof

FOLDER = Path(__file__).parents[2] / "examples" / "engine"


def test_every_row_of_it_is_proved(capsys: Any) -> None:
    demo.main(["--device", "cpu", "--inner", "eager", "--new-tokens", "10"])
    shown = capsys.readouterr().out
    counts = [int(word) for word in shown.splitlines()[-1].replace(",", "").split() if word.isdigit()]
    assert len(counts) == 4 and all(counts), (
        shown
    )  # hits, preemptions, drafts accepted and rejected: all of it happened
    rows = [line.split() for line in shown.splitlines() if " of " in line and line[0] in "a"]
    assert [row[-4] for row in rows] == ["12", "1", "6"] and all(row[-3] == row[-1] for row in rows), shown


def test_wrong_rows_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is no ornament: one id that is altered on its way out is found."""
    generate = demo.Engine.generate

    def altered(self: Any, *args: Any) -> Any:
        results = generate(self, *args)
        results[0].routed_experts = results[0].routed_experts.copy()
        results[0].routed_experts[3, 1, 0] ^= 1
        return results

    monkeypatch.setattr(demo.Engine, "generate", altered)
    monkeypatch.setattr(proof, "TAILS", proof.TAILS[:2])
    with pytest.raises(SystemExit, match="2 rows differ"):
        demo.main(["--device", "cpu", "--inner", "eager", "--new-tokens", "4"])


def test_it_starts_as_a_folder_and_as_a_module() -> None:
    """Where Python puts the folder itself, whose engine.py is no package, in front of all."""
    for how, cwd in (([str(FOLDER)], Path.cwd()), (["-m", "engine"], FOLDER.parent)):
        done = subprocess.run([sys.executable, *how, "--help"], cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0 and "python examples/engine" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("split", ["--tensor-parallel", "--expert-parallel"])
def test_two_ranks_prove_their_rows(split: str) -> None:
    how = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(FOLDER), split]
    done = subprocess.run(
        [*how, "--device", "cpu", "--inner", "eager", "--new-tokens", "6"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "2 ranks choose alike" in done.stdout, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if " of " in line and line[0] in "a"]
    assert len(rows) == 3 and all(row[-3] == row[-1] for row in rows), done.stdout
