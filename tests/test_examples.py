"""The example of a new form: not found without it, every row right with it, and the four steps that it shows."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import r3_pass
from r3_pass.registry import RoutingForm, forms
from r3_pass.registry.forms import FORMS, registered

EXAMPLES = Path(__file__).parent.parent / "examples"
EXAMPLE = EXAMPLES / "add_form.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("add_form", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["add_form"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def only_built_in_forms() -> Iterator[None]:
    yield
    sys.modules["r3_pass.registry.forms"]._added.clear()  # a program that registers a form keeps it; a test must not
    assert forms() == FORMS


def test_it_runs(example: ModuleType, capsys: pytest.CaptureFixture[str], only_built_in_forms: None) -> None:
    """Its own comparison with the eager router raises where a row differs."""
    example.main([])
    out = capsys.readouterr().out
    assert "before: 0 sites" in out and "12 tokens x 2 layers equal to the eager router" in out
    assert "[(0, 'softmax_best_two', 8, 2), (1, 'softmax_best_two', 8, 2)]" in out


_ASK = """
import os, runpy, sys
for script in sys.argv[1:]:
    sys.path.insert(0, os.path.dirname(script))
    for option in ("--help", "--no-such-option"):
        sys.argv = [script, option]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stopped:
            print("exit", stopped.code)
        except ModuleNotFoundError as missing:
            print("needs", missing.name)
"""


def test_scripts_ask_before_they_run() -> None:
    """One of them trained whatever it was asked; an option that it does not know is no reason to run, either."""
    scripts = [str(path) for path in EXAMPLES.rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    done = subprocess.run([sys.executable, "-c", _ASK, *scripts], capture_output=True, text=True, check=True)
    said = [line for line in done.stdout.splitlines() if line.startswith(("exit", "needs", "usage"))]
    assert len(scripts) >= 7 and f"usage: {EXAMPLE.name} [-h]" in said
    ends = [line for line in said if not line.startswith("usage")]
    for script, answers in zip(scripts, zip(ends[::2], ends[1::2], strict=True), strict=True):
        asked = all(answer.startswith("needs") for answer in answers) or answers == ("exit 0", "exit 2")
        assert asked, (script, answers, done.stderr)


def test_without_the_form_the_operator_is_named(example: ModuleType) -> None:
    torch.manual_seed(0)
    model, x = example.Model().eval(), torch.randn(example.TOKENS, example.HIDDEN)
    report = r3_pass.explain(model, x)
    assert report.sites == [] and len(report.rejected) == 2
    assert all("examples::best_two is a custom operator" in r.reason for r in report.rejected)


def test_step_four_by_the_self_test(example: ModuleType) -> None:
    """The oracle sees what a custom operator returns, too."""
    torch.manual_seed(0)
    model, x = example.Model().eval(), torch.randn(example.TOKENS, example.HIDDEN)
    with registered(RoutingForm("best_two", example.find)):
        session = r3_pass.runtime.attach(torch.compile(model, backend=r3_pass.backend("eager")), num_slots=16)
        result = session.self_test(x)
        session.detach()
    assert [(r.equal, r.selection) for r in result.layers] == [(example.TOKENS, "examples::best_two")] * 2


def test_the_file_is_as_short_as_promised(example: ModuleType) -> None:
    """A form takes at most about 30 lines; this one's `find` is a handful."""
    assert len(inspect.getsource(example.find).splitlines()) <= 10
    steps = [line for line in (example.__doc__ or "").splitlines() if line[:2] in ("1.", "2.", "3.", "4.")]
    assert len(steps) == 4
