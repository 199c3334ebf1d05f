"""One router of each form through Inductor's code generation: every row, and the outputs of the graph without the pass."""

from __future__ import annotations

import pytest
from all_routers import ALL_ROUTERS
from verdicts import router

from r3_pass.registry import forms

CASES = {
    "renormalised_in_place": "topk",
    "groups_by_top2_sum": "topk",
    "smallest_of_negated": "topk",
    "top1_by_max": "top1",
    "repeated_max": "top1",
    "argsort_then_slice": "sort",
    "drawn": "sampled",
    "hash_by_table": "table",
    "single_neuron_experts": "product_keys",
}


def test_every_form_has_a_case() -> None:
    assert set(CASES.values()) == {form.name for form in forms()}


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("name", CASES)
def test_rows(name: str) -> None:
    case = ALL_ROUTERS[name]
    outcome = router(case, *case.build(), "inductor")
    assert outcome.verdict == "captured" and outcome.right, outcome.detail
    assert all(CASES[name] in form for form in outcome.forms)
