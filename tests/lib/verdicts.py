"""Run one case under the pass, and say what it came to: the one judgement behind the tests and the table of architectures.

Legend: T tokens in the step, L decoder layers, K top-k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from architectures import build
from recording import Recorder, Rows, recording, same_outputs, same_rows
from tiny import Case, Inputs, seeded_call
from torch import Tensor, nn

import r3_pass

ENCODER_DECODERS = frozenset({"switch_transformers"})
"""Architectures of which a refusal is right: two stacks number their layers from 0, a row has one axis of layers."""


@dataclasses.dataclass
class Outcome:
    """What recording came to.

    Attributes:
        expected: verdicts that are right, the best one first.
        verdict: captured, refused, nothing or wrong.
        rows, equal: tokens of all calls, and those of which every layer is what the router chose and all else -1.
        layers, captured: layers with experts that the eager run showed, and those of which anything was recorded.
        forms: of the sites, by name.
        unfused: for each site, why its router is not fused; "" if it is.
        error: name of the refusal.
        detail: its text, or what shows that rows are wrong.
    """

    name: str
    expected: tuple[str, ...]
    verdict: str = "captured"
    rows: int = 0
    equal: int = 0
    layers: int = 0
    captured: int = 0
    forms: tuple[str, ...] = ()
    unfused: tuple[str, ...] = ()
    error: str = ""
    detail: str = ""

    @property
    def right(self) -> bool:
        whole = self.equal == self.rows > 0 and self.captured == self.layers
        return self.verdict in self.expected and (self.verdict != "captured" or whole)

    def add(self, rows: Rows, truth: dict[int, Tensor], ordered: bool) -> None:
        """Judge the rows of one call."""
        self.rows += len(rows)
        self.equal += sum(same_rows(rows[t : t + 1], _of_token(truth, t), ordered) == "" for t in range(len(rows)))
        self.layers = max(self.layers, len(truth))
        self.captured = max(self.captured, int((rows >= 0).any(axis=(0, 2)).sum()))
        wrong = same_rows(rows, truth, ordered)
        if wrong:
            self.verdict, self.detail = "wrong", wrong

    def refuse(self, error: r3_pass.R3Error) -> None:
        dense = isinstance(error, r3_pass.NoRouterFound) and self.expected[0] == "nothing"
        self.verdict, self.error, self.detail = "nothing" if dense else "refused", type(error).__name__, str(error)


def _of_token(truth: dict[int, Tensor], token: int) -> dict[int, Tensor]:
    return {layer: ids[token : token + 1] for layer, ids in truth.items()}


def architecture(name: str, inner: str = "aot_eager", experts: str | None = None) -> Outcome:
    """Record both calls of an architecture of transformers."""
    built = build(name, experts)
    outcome = Outcome(name, ("refused",) if name in ENCODER_DECODERS else ("captured",))

    def record(recorder: Recorder) -> None:
        for inputs in built.inputs:
            call = _calls(recorder.compiled, inputs)
            output, rows = recorder.rows(inputs["input_ids"].numel(), call)
            outcome.add(rows, built.truth(inputs), built.architecture.ordered)
            if not same_outputs(call(), output):
                outcome.verdict, outcome.detail = "wrong", "recording changed the outputs"

    return _observed(outcome, built.model, inner, record)


def _calls(compiled: Callable[..., Any], inputs: dict[str, Any]) -> Callable[[], Any]:
    return lambda: compiled(**inputs)[0]


def router(
    case: Case, model: nn.Module, inputs: Inputs, inner: str = "aot_eager", fuse_router: bool = False
) -> Outcome:
    """Record the calls of a hand-written router or look-alike."""
    outcome = Outcome(case.name, (case.verdict, *case.also))
    return _observed(
        outcome, model, inner, lambda recorder: record_calls(outcome, case, model, recorder, inputs), fuse_router
    )


def record_calls(
    outcome: Outcome, case: Case, model: nn.Module, recorder: Recorder, inputs: Iterable[tuple[Tensor, ...]]
) -> None:
    """Record and judge calls of a router in a session that is open."""
    for args in inputs:
        if outcome.verdict == "wrong":
            return
        truth = case.truth(model, args) if "captured" in outcome.expected else {}
        call = _seeded(recorder.compiled, args)
        outputs, rows = recorder.rows(args[0].shape[0] * args[0].shape[1], call)
        if not same_outputs(call(), outputs):
            outcome.verdict, outcome.detail = "wrong", "recording changed the outputs"
        elif (rows == np.int16(-1)).all():
            outcome.verdict, outcome.detail = "nothing", "every row is -1"
        else:
            outcome.add(rows, truth, case.ordered)


def _seeded(compiled: Callable[..., Any], args: tuple[Tensor, ...]) -> Callable[[], Any]:
    return lambda: seeded_call(compiled, args)


def _observed(
    outcome: Outcome, model: nn.Module, inner: str, record: Callable[[Recorder], None], fuse_router: bool = False
) -> Outcome:
    try:
        with torch.no_grad(), recording(model, inner, fuse_router=fuse_router) as recorder:
            record(recorder)
            sites = recorder.backend.report().sites
            outcome.forms = tuple(sorted({site.form for site in sites}))
            outcome.unfused = tuple(site.unfused for site in sites)
    except r3_pass.R3Error as error:
        outcome.refuse(error)
    return outcome
