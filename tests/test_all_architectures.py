"""The table of architectures is made from a run, and the command fails where a case is not right."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import all_architectures
import pytest
from all_routers import ALL_ROUTERS
from architectures import ARCHITECTURES


@pytest.fixture
def results() -> dict[str, Any]:
    return json.loads(all_architectures.DOCUMENT.with_suffix(".json").read_text())


def test_the_tables_are_those_of_the_results(results: dict[str, Any]) -> None:
    text = all_architectures.DOCUMENT.read_text()
    assert all_architectures.with_tables(text, results) == text, "make architectures, or --write ... --tables"
    text = all_architectures.README.read_text()
    assert all_architectures.with_text(text, "architectures", all_architectures.summary(results)) == text


def test_every_architecture_has_a_line_and_every_line_is_right(results: dict[str, Any]) -> None:
    assert {case["name"] for case in results["architectures"]} == set(ARCHITECTURES)
    assert {case["name"] for case in results["routers"]} == set(ALL_ROUTERS)
    assert [case["name"] for kind in ("architectures", "routers") for case in results[kind] if not case["right"]] == []


def test_a_line_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert all_architectures.main(["--only", "^(switch_top1|top_p|topk_attention)$", "--routers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["top_p", "topk_attention", "switch_top1"]
    assert "refused: RefusedConfiguration" in lines[0] and "nothing to record" in lines[1]
    assert "27 /  27 rows  2 of 2 layers  captured  softmax_top1" in lines[2]


def test_a_row_that_differs_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The truth of one token is another: one row less is equal, and the exit status says so."""
    real = type(ALL_ROUTERS["switch_top1"]).truth

    def shifted(case: Any, *args: Any) -> dict[int, Any]:
        found = real(case, *args)
        found[1][0] = (found[1][0] + 1) % 8
        return found

    monkeypatch.setattr(type(ALL_ROUTERS["switch_top1"]), "truth", shifted)
    assert all_architectures.main(["--only", "^switch_top1$", "--routers"]) == 1
    out = capsys.readouterr().out
    assert "11 /  12 rows" in out and "WRONG" in out and "1 are not right: switch_top1" in out


def test_a_refusal_that_is_not_expected_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = dataclasses.replace(ALL_ROUTERS["sinkhorn"], verdict="captured")
    monkeypatch.setitem(ALL_ROUTERS, "sinkhorn", case)
    assert all_architectures.main(["--only", "^sinkhorn$", "--routers"]) == 1
    assert "NOT RIGHT, expected captured" in capsys.readouterr().out


def test_one_case_is_run_again(tmp_path: Path) -> None:
    """Its result and its line are replaced, the others stay; results of another version do not."""
    document = tmp_path / "table.md"
    document.write_text("before\n<!-- architectures -->\n<!-- end -->\n<!-- routers -->\n<!-- end -->\nbehind\n")
    file = document.with_suffix(".json")
    for name in ("top_p", "relu_routing"):
        assert all_architectures.main(["--only", f"^{name}$", "--routers", "--write", str(document)]) == 0
    held = json.loads(file.read_text())
    assert [case["name"] for case in held["routers"]] == ["top_p", "relu_routing"]
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("behind\n")
    assert "2 of 2 as expected" in text and "| `top_p` |  |  |  | refused: RefusedConfiguration |" in text
    file.write_text(json.dumps({**held, "torch": "2.0.0"}))
    assert all_architectures.main(["--only", "^top_p$", "--routers", "--write", str(document)]) == 0
    assert [case["name"] for case in json.loads(file.read_text())["routers"]] == ["top_p"]
