"""Hand-written routers and look-alikes: each comes to its verdict, and what is recorded is what was routed."""

from __future__ import annotations

import re

import pytest
import torch
from all_routers import ALL_ROUTERS, LISTS
from altered_routers import ALTERED_ROUTERS
from hostile_routers import HOSTILE_ROUTERS
from recording import recording
from tiny import Case, seeded_call
from torch import Tensor, nn
from verdicts import Outcome, record_calls, router

import r3_pass


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch.set_num_threads(1)
    torch._dynamo.reset()


def test_every_case_stands_in_one_list() -> None:
    assert len(ALL_ROUTERS) == sum(map(len, LISTS))


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=name, marks=pytest.mark.slow if c.slow else ()) for name, c in ALL_ROUTERS.items()],
)
def test_verdict(case: Case) -> None:
    """The hostile ones are about matching alone, so they go without AOT here; all_architectures.py records them with it."""
    model, inputs = case.build()
    outcome = router(case, model, inputs, "eager" if case.name in HOSTILE_ROUTERS | ALTERED_ROUTERS else "aot_eager")
    assert outcome.right, f"{case.why}\n{outcome.verdict} instead of {case.verdict}: {outcome.detail}"
    if case.verdict == "nothing":
        sites = sites_without_a_session(model, inputs[0])
        assert not sites, f"{case.why}\nnothing is routed, but the report has {sites}"
    if outcome.verdict == "refused" == case.verdict:
        assert re.search(case.reason, outcome.detail, re.DOTALL), f"not {case.reason!r}: {outcome.detail}"


def sites_without_a_session(model: nn.Module, args: tuple[Tensor, ...]) -> list[object]:
    """What the matcher alone says: a session may have refused a dense model before anything was compiled."""
    torch._dynamo.reset()
    backend = r3_pass.backend("eager")
    with torch.no_grad():
        seeded_call(torch.compile(model, backend=backend), args)
    return list(backend.report().sites)


def test_a_loop_over_experts_after_a_call_outside_of_any_step() -> None:
    """A warm-up before the first step leaves Dynamo with a frame that it runs eagerly from then on: refused, with the way out."""
    case = ALL_ROUTERS["loop_over_experts"]
    model, inputs = case.build()
    with torch.no_grad(), recording(model) as recorder:
        seeded_call(recorder.compiled, inputs[0])
        with pytest.raises(r3_pass.R3Error, match=r"call torch\._dynamo\.reset\(\) and run the step again"):
            record_calls(Outcome(case.name, ("captured",)), case, model, recorder, inputs[:1])
        torch._dynamo.reset()
        outcome = Outcome(case.name, ("captured",))
        record_calls(outcome, case, model, recorder, inputs[:1])
        assert outcome.right, outcome.detail
