"""The forms: what each claims and what it leaves alone, and the way to add one."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend import traced
from torch import Tensor, fx, nn

import r3_pass.registry
from r3_pass.passes.match import is_weight, match
from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.form import RoutingForm, Selection
from r3_pass.registry.forms import FORMS, forms, register, registered
from r3_pass.registry.operators import spelling
from r3_pass.registry.shapes import dims

T, D, E = 6, 8, 4


class Holder(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.use, self.gate = use, nn.Linear(D, E, bias=False)
        self.weights = nn.Parameter(torch.randn(E, D, D))
        self.register_buffer("table", torch.randint(E, (50, 2)))
        self.register_buffer("flat_table", torch.randint(E, (50,)))
        self.register_buffer("values", torch.randn(50, 2))
        self.register_buffer("cube", torch.randint(E, (50, 2, 2)))

    def forward(self, x: Tensor, tokens: Tensor) -> Any:
        return self.use(self, x, tokens)


def claims(use: Callable[..., Any]) -> list[tuple[str, Selection]]:
    module = traced(Holder(use), torch.randn(T, D), torch.randint(50, (T,)))
    flow = DataFlow(module.graph, is_weight)
    return [
        (form.name, s)
        for n in flow.nodes
        if n.op in ("call_function", "call_method")
        for form in forms()
        if (s := form.find(flow, n))
    ]


@pytest.mark.parametrize(
    ("use", "name", "dim", "shapes"),
    [
        (lambda m, x, t: torch.topk(m.gate(x), 2)[1], "topk", -1, [(T, 2)]),
        (lambda m, x, t: m.gate(x).topk(k=2, dim=1).indices, "topk", 1, [(T, 2)]),
        (lambda m, x, t: torch.topk(m.gate(x).t(), 2, 0, sorted=False)[1], "topk", 0, [(2, T)]),
        (lambda m, x, t: torch.topk(m.gate(x), 2)[0], "topk", -1, []),
        (lambda m, x, t: m.gate(x).argmax(dim=-1), "top1", -1, [(T,)]),
        (lambda m, x, t: torch.argmax(m.gate(x), 1, keepdim=True), "top1", 1, [(T, 1)]),
        (lambda m, x, t: m.gate(x).max(dim=1).indices, "top1", 1, [(T,)]),
        (lambda m, x, t: torch.max(m.gate(x), -1, True)[1], "top1", -1, [(T, 1)]),
        (lambda m, x, t: torch.cdist(x, m.gate.weight).argmin(-1), "top1", -1, [(T,)]),
        (lambda m, x, t: m.gate(x).argsort(-1, descending=True), "sort", -1, [(T, E)]),
        (lambda m, x, t: torch.sort(m.gate(x), dim=1, descending=True)[1], "sort", 1, [(T, E)]),
        (lambda m, x, t: torch.multinomial(m.gate(x).softmax(-1), 2), "sampled", -1, [(T, 2)]),
        (lambda m, x, t: m.table[t], "table", -1, [(T, 2)]),
        (lambda m, x, t: F.embedding(t, m.table), "table", -1, [(T, 2)]),
        (lambda m, x, t: m.flat_table.index_select(0, t), "table", -1, [(T,)]),
    ],
)
def test_a_form_claims(use: Callable[..., Any], name: str, dim: int, shapes: list[tuple[int, ...]]) -> None:
    """Each line is a spelling; one that no form claims is routing that nobody looks at."""
    ((found, selection),) = claims(use)
    assert (found, selection.dim, [dims(i) for i in selection.ids]) == (name, dim, shapes)
    assert (selection.scores is None) is (name == "table")


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x, t: m.gate(x).max(),
        lambda m, x, t: m.gate(x).amax(-1),
        lambda m, x, t: torch.max(m.gate(x), x[:, :E]),
        lambda m, x, t: m.gate(x).argmax(),
        lambda m, x, t: m.values[t],
        lambda m, x, t: m.cube[t],
        lambda m, x, t: m.table[0],
        lambda m, x, t: m.table[:T] + 1,
        lambda m, x, t: m.gate(x)[t % T],
        lambda m, x, t: t[:2],
        lambda m, x, t: m.gate(x).kthvalue(2)[1],
    ],
)
def test_no_form_claims(use: Callable[..., Any]) -> None:
    """Near misses: a maximum over all, a table of floats, rows of constants, activations picked. Claimed, they are false alarms."""
    assert claims(use) == []


def test_choices_of_one_are_made_together() -> None:
    """Two argmax of one router are its two columns; a topk is complete by itself."""
    ((_, one),) = claims(lambda m, x, t: m.gate(x).argmax(-1))
    ((_, all_of_them),) = claims(lambda m, x, t: m.gate(x).topk(2)[1])
    ((_, ordered),) = claims(lambda m, x, t: m.gate(x).argsort(-1))
    assert (one.alone, all_of_them.alone, ordered.needs_slice, all_of_them.needs_slice) == (False, True, True, False)


def find_kth(flow: DataFlow, node: fx.Node) -> Selection | None:
    scores = flow.operand(node, node.args[0]) if spelling(node) == "kthvalue" else None
    return None if scores is None else Selection(node, scores, -1, tuple(flow.users(node)), alone=False)


def routed_by_kth(m: Holder, x: Tensor, t: Tensor) -> Tensor:
    ids = torch.kthvalue(m.gate(x), E)[1]
    return torch.bmm(m.weights[ids], x.unsqueeze(-1))


def test_a_form_added_for_a_while() -> None:
    """A test's form that stayed registered would match in every later test; one that was not used would be no extension."""
    module = traced(Holder(routed_by_kth), torch.randn(T, D), torch.randint(50, (T,)))
    assert match(module.graph).sites == ()
    with registered(RoutingForm("kth", find_kth)) as form:
        assert forms() == (*FORMS, form)
        (site,) = match(module.graph).sites
        assert (site.form, site.num_experts, site.top_k) == ("kth", E, 1)
    assert forms() == FORMS and match(module.graph).sites == ()


def test_a_name_is_given_once() -> None:
    """Two forms of one name could not be told apart in a report."""
    with pytest.raises(ValueError, match="topk"):
        register(RoutingForm("topk", find_kth))
    with registered(RoutingForm("kth", find_kth)), pytest.raises(ValueError, match="kth"):
        register(RoutingForm("kth", find_kth))
    assert forms() == FORMS


def test_a_scope_ends_with_its_error() -> None:
    """A form left behind by a block that raised would match from then on."""
    with pytest.raises(KeyError), registered(RoutingForm("kth", find_kth)):
        raise KeyError
    assert forms() == FORMS


def test_two_forms_for_one_operator_are_a_refusal() -> None:
    """Which of the two is right nobody can know: taking the first would be a guess."""

    def find_topk(flow: DataFlow, node: fx.Node) -> Selection | None:
        return FORMS[0].find(flow, node)

    def use(m: Holder, x: Tensor, t: Tensor) -> Tensor:
        return torch.bmm(m.weights[m.gate(x).topk(2)[1][:, 0]], x.unsqueeze(-1))

    module = traced(Holder(use), torch.randn(T, D), torch.randint(50, (T,)))
    with registered(RoutingForm("mine", find_topk)):
        found = match(module.graph)
    assert found.sites == ()
    (refusal,) = found.rejected
    assert refusal.routing and "topk" in refusal.reason and "mine" in refusal.reason


def test_the_module_is_one_copy() -> None:
    """`import registry` from the root would hold a second list of forms, in which registered ones are missing."""
    assert r3_pass.registry.forms is forms
    with pytest.raises(ImportError, match=r"r3_pass\.registry"):
        runpy.run_path(r3_pass.registry.__file__, run_name="registry")
