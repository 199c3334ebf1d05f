"""Record every architecture of transformers that is under test, and every hand-written router if asked: one line for each.

    python tests/lib/all_architectures.py [--only PATTERN] [--inner aot_eager] [--routers] [--write docs/architectures.md]

A line says `rows equal / rows` against the eager run, the layers captured of the layers with experts, and the forms. A case that
is to be refused is right if it is refused, and its line has the error's name. Exits with 1 unless every case is right.

`--write` puts the results into a JSON file, and the tables that are made of it into the Markdown file beside it. With `--only`, the
other results in it stay. `--tables` makes the tables from the JSON file as it is, without a run.
"""

from __future__ import annotations

import argparse
import datetime
import gc
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

README = Path(__file__).resolve().parents[2] / "README.md"
DOCUMENT = README.parent / "docs" / "architectures.md"
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
    file = given.write.with_suffix(".json") if given.write else None
    ran = {} if given.tables else run(given.inner, given.routers, re.compile(given.only), file)
    if given.write:
        results = json.loads(file.read_text())
        given.write.write_text(with_tables(given.write.read_text(), results))
        if given.write.resolve() == DOCUMENT:
            README.write_text(with_text(README.read_text(), "architectures", summary(results)))
    wrong = [case["name"] for kind in ran.values() for case in kind if not case["right"]]
    if wrong:
        print(f"{len(wrong)} are not right: {', '.join(wrong)}")
    return 1 if wrong else 0


def run(inner: str, routers: bool, only: re.Pattern[str], file: Path | None = None) -> dict[str, list[dict[str, Any]]]:
    """Record all cases whose name fits; prints a line for each, and puts its result into a file of results."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    todo: list[tuple[str, str, Callable[[], Outcome]]] = [
        ("architectures", name, lambda name=name: architecture(name, inner)) for name in ARCHITECTURES
    ]
    if routers:
        todo += [("routers", case.name, lambda case=case: _router(case, inner)) for case in ALL_ROUTERS.values()]
    ran: dict[str, list[dict[str, Any]]] = {}
    for kind, name, record in todo:
        if only.search(name):
            case = _case(name, record)
            ran.setdefault(kind, []).append(case)
            if file is not None:
                file.write_text(json.dumps(updated(file, kind, case, inner), indent=1) + "\n")
    return ran


def updated(file: Path, kind: str, case: dict[str, Any], inner: str) -> dict[str, Any]:
    """The results in a file with one case replaced; those of other versions, and of cases that are gone, are left out."""
    versions = {
        "inner": inner, "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(),
    }  # fmt: skip
    before = json.loads(file.read_text()) if file.exists() else {}
    same = {key: before.get(key) for key in versions} == versions
    results: dict[str, Any] = dict(versions)
    for each, names in {"architectures": ARCHITECTURES, "routers": ALL_ROUTERS}.items():
        held = {c["name"]: c for c in before.get(each, [])} if same else {}
        if each == kind:
            held[case["name"]] = case
        results[each] = [held[name] for name in names if name in held]
    return results


def _router(case: Case, inner: str) -> Outcome:
    return router(case, *case.build(), inner)


def _case(name: str, record: Callable[[], Outcome]) -> dict[str, Any]:
    torch._dynamo.reset()
    gc.collect()  # what the cases before left behind slows down the compilation of the next ones
    started = time.perf_counter()
    with torch._dynamo.config.patch(recompile_limit=64):
        outcome = record()
    case = {
        "name": name, "forms": list(outcome.forms), "layers": outcome.layers, "captured": outcome.captured,
        "rows": outcome.rows, "equal": outcome.equal, "status": status(outcome), "right": outcome.right,
        "date": str(datetime.date.today()),
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
    """Markdown with the tables of all kinds of cases that were run, each between its marker and `<!-- end -->`."""
    for kind, heading in HEADINGS.items():
        if results.get(kind):
            text = with_text(text, kind, table(heading, results, results[kind]))
    return text


def with_text(text: str, name: str, made: str) -> str:
    """Markdown with what is made between the markers `<!-- name -->` and `<!-- end -->`."""
    before, marker, after = text.partition(f"<!-- {name} -->\n")
    _, end, rest = after.partition("<!-- end -->")
    if not end:
        raise SystemExit(f"no markers '<!-- {name} -->' and '<!-- end -->' to write between")
    return before + marker + made + end + rest


def summary(results: dict[str, Any]) -> str:
    """The README's line about the tables."""
    counts = [f"{sum(c['right'] for c in results[kind])} of {len(results[kind])}" for kind in HEADINGS]
    when = max(case["date"] for kind in HEADINGS for case in results[kind])
    return (
        f"{counts[0]} architectures of transformers {results['transformers']} and {counts[1]} hand-written routers and look-alikes "
        f"came out as expected\n({when}, `{results['inner']}`, torch {results['torch']}): "
        "[form, layers and rows of each](docs/architectures.md).\n"
    )


def table(heading: Sequence[str], results: dict[str, Any], cases: Sequence[dict[str, Any]]) -> str:
    dates = sorted({case["date"] for case in cases}) or ["never"]
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    how = f"{when}, inner `{results['inner']}`, torch {results['torch']}, transformers {results['transformers']}"
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
