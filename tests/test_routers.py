"""Hand-written routers and look-alikes: each comes to its verdict, and what is recorded is what was routed."""

from __future__ import annotations

import re

import pytest
import torch
from dispatches import DISPATCHES
from lookalikes import LOOKALIKES
from more_routers import MORE_ROUTERS
from recording import Recorder, recording, same_outputs, same_rows
from refusals import REFUSALS
from routers import ROUTERS
from tiny import Case, Inputs, seeded_call
from torch import Tensor, nn

import r3_pass

LISTS = [ROUTERS, MORE_ROUTERS, DISPATCHES, REFUSALS, LOOKALIKES]
CASES = {name: case for cases in LISTS for name, case in cases.items()}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch.set_num_threads(1)
    torch._dynamo.reset()


def test_every_case_stands_in_one_list() -> None:
    assert len(CASES) == sum(map(len, LISTS))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_verdict(case: Case) -> None:
    model, inputs = case.build()
    outcome, detail = observe(case, model, inputs)
    assert outcome in (case.verdict, *case.also), f"{case.why}\n{outcome} instead of {case.verdict}: {detail}"
    if case.verdict == "nothing":
        sites = sites_without_a_session(model, inputs[0])
        assert not sites, f"{case.why}\nnothing is routed, but the report has {sites}"
    if outcome == "refused" == case.verdict:
        assert re.search(case.reason, detail, re.DOTALL), f"the reason should match {case.reason!r}: {detail}"


def observe(case: Case, model: nn.Module, inputs: Inputs) -> tuple[str, str]:
    """Record the case: captured (compared with the truth), refused, nothing, or wrong; and what shows it."""
    try:
        with torch.no_grad(), recording(model) as recorder:
            outcomes = [record(case, model, recorder, args) for args in inputs]
    except r3_pass.NoRouterFound as error:
        return "refused" if case.verdict == "refused" else "nothing", str(error)
    except r3_pass.R3Error as error:
        return "refused", f"{type(error).__name__}: {error}"
    return next((o for o in outcomes if o[0] == "wrong"), outcomes[0])


def sites_without_a_session(model: nn.Module, args: tuple[Tensor, ...]) -> list[object]:
    """What the matcher alone says: a session may have refused a dense model before anything was compiled."""
    torch._dynamo.reset()
    backend = r3_pass.backend("eager")
    with torch.no_grad():
        seeded_call(torch.compile(model, backend=backend), args)
    return list(backend.report().sites)


def record(case: Case, model: nn.Module, recorder: Recorder, args: tuple[Tensor, ...]) -> tuple[str, str]:
    truth = case.truth(model, args) if case.verdict == "captured" or "captured" in case.also else {}
    tokens = args[0].shape[0] * args[0].shape[1]
    outputs, rows = recorder.rows(tokens, lambda: seeded_call(recorder.compiled, args))
    plain = seeded_call(recorder.compiled, args)
    assert same_outputs(plain, outputs), f"{case.name}: recording changed the outputs"
    if (rows == -1).all():
        return "nothing", "every row is -1"
    wrong = same_rows(rows, truth, case.ordered)
    return ("wrong", wrong) if wrong else ("captured", "")


def test_a_loop_over_experts_after_a_call_outside_of_any_step() -> None:
    """A warm-up before the first step leaves Dynamo with a frame that it runs eagerly from then on: refused, with the way out."""
    case = CASES["loop_over_experts"]
    model, inputs = case.build()
    with torch.no_grad(), recording(model) as recorder:
        seeded_call(recorder.compiled, inputs[0])
        with pytest.raises(r3_pass.R3Error, match=r"call torch\._dynamo\.reset\(\) and run the step again"):
            record(case, model, recorder, inputs[0])
        torch._dynamo.reset()
        assert record(case, model, recorder, inputs[0]) == ("captured", "")
