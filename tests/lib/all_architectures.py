"""Record every architecture of transformers that is under test, and every hand-written router if asked: one line for each.

    python tests/lib/all_architectures.py [--only PATTERN] [--inner aot_eager] [--routers] [--write docs/architectures.md]

A line says `rows equal / rows` against the eager run, the layers captured of the layers with experts, and the forms. A case that
is to be refused is right if it is refused, and its line has the error's name. Exits with 1 unless every case is right.

`--write` puts the results into a JSON file and the tables in the Markdown file beside it that are made of it; `--tables` makes
the tables from the JSON file as it is, without a run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from all_routers import ALL_ROUTERS
from architectures import ARCHITECTURES
from tiny import Case
from verdicts import Outcome, architecture, router

HEADINGS = {
    "architectures": ("architecture", "form", "layers captured of layers present", "rows equal / rows", "status"),
    "routers": ("router", "form", "layers captured of layers present", "rows equal / rows", "status"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression that names must contain")
    parser.add_argument("--inner", default="aot_eager", help="what compiles the rewritten graphs")
    parser.add_argument("--routers", action="store_true", help="hand-written routers and look-alikes, too")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the tables there, the results in FILE.json")
    parser.add_argument("--tables", action="store_true", help="with --write: no run, the tables of FILE.json")
    given = parser.parse_args(arguments)
    if given.tables and not given.write:
        parser.error("--tables needs --write")
    if given.write and given.only:
        parser.error("--write is for all cases: leave --only out")
    if not given.tables:
        results = run(given.inner, given.routers, re.compile(given.only))
        if given.write:
            given.write.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    else:
        results = json.loads(given.write.with_suffix(".json").read_text())
    if given.write:
        given.write.write_text(with_tables(given.write.read_text(), results))
    wrong = [case["name"] for kind in HEADINGS for case in results.get(kind, []) if not case["right"]]
    if wrong:
        print(f"{len(wrong)} are not right: {', '.join(wrong)}")
    return 1 if wrong else 0


def run(inner: str, routers: bool, only: re.Pattern[str]) -> dict[str, Any]:
    """Record all cases whose name fits; prints a line for each."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "date": str(datetime.date.today()),
        "inner": inner,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "architectures": [_case(n, lambda n=n: architecture(n, inner)) for n in ARCHITECTURES if only.search(n)],
    }
    if routers:
        cases = [case for case in ALL_ROUTERS.values() if only.search(case.name)]
        results["routers"] = [_case(case.name, lambda case=case: _router(case, inner)) for case in cases]
    return results


def _router(case: Case, inner: str) -> Outcome:
    return router(case, *case.build(), inner)


def _case(name: str, record: Callable[[], Outcome]) -> dict[str, Any]:
    torch._dynamo.reset()
    started = time.perf_counter()
    with torch._dynamo.config.patch(recompile_limit=64):
        outcome = record()
    case = {
        "name": name, "forms": list(outcome.forms), "layers": outcome.layers, "captured": outcome.captured,
        "rows": outcome.rows, "equal": outcome.equal, "status": status(outcome), "right": outcome.right,
    }  # fmt: skip
    counts = f"{outcome.equal:3} / {outcome.rows:3} rows  {outcome.captured} of {outcome.layers} layers"
    forms = f"  {', '.join(outcome.forms)}" if outcome.forms else ""
    print(f"{name:34} {counts}  {case['status']}{forms}  ({time.perf_counter() - started:.0f} s)", flush=True)
    if not outcome.right:
        print(f"    NOT RIGHT, expected {' or '.join(outcome.expected)}: {outcome.detail}", flush=True)
    return case


def status(outcome: Outcome) -> str:
    """`captured`, `refused: RefusedConfiguration`, `nothing to record`, `WRONG`."""
    if outcome.verdict == "refused":
        return f"refused: {outcome.error}"
    return {"captured": "captured", "nothing": "nothing to record"}.get(outcome.verdict, "WRONG")


def with_tables(text: str, results: dict[str, Any]) -> str:
    """Markdown with a table between the markers `<!-- architectures -->` and `<!-- end -->`, and so for routers."""
    for kind, heading in HEADINGS.items():
        if kind in results:
            before, marker, after = text.partition(f"<!-- {kind} -->\n")
            _, end, rest = after.partition("<!-- end -->")
            if not end:
                raise SystemExit(f"no markers '<!-- {kind} -->' and '<!-- end -->' for a table")
            text = before + marker + table(heading, results, results[kind]) + end + rest
    return text


def table(heading: Sequence[str], results: dict[str, Any], cases: Sequence[dict[str, Any]]) -> str:
    how = f"{results['date']}, inner `{results['inner']}`, torch {results['torch']}, transformers {results['transformers']}"
    right = sum(case["right"] for case in cases)
    lines = [f"{right} of {len(cases)} as expected ({how}, Python {results['python']}).", ""]
    lines += ["| " + " | ".join(heading) + " |", "|---" * len(heading) + "|"]
    for case in cases:
        recorded = case["rows"] > 0
        counts = (
            (f"{case['captured']} of {case['layers']}", f"{case['equal']} / {case['rows']}") if recorded else ("", "")
        )
        forms = ", ".join(f"`{form}`" for form in case["forms"])
        lines.append("| " + " | ".join((f"`{case['name']}`", forms, *counts, case["status"])) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
