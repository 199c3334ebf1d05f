"""Reading a graph: spellings, in-place updates, views, nested graphs, kinds and shapes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from backend import named, traced
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from r3_pass.passes.match import is_weight
from r3_pass.registry.dataflow import DataFlow, subgraph_of
from r3_pass.registry.operators import argument, is_opaque, spelling
from r3_pass.registry.shapes import dims
from r3_pass.registry.writes import is_inplace, written

aten = torch.ops.aten
library = torch.library.Library("r3_test_dataflow", "DEF")
library.define("topk(Tensor x, int k) -> (Tensor, Tensor)")
library.define("align(Tensor ids, Tensor(a!) out) -> ()")
library.impl("align", lambda ids, out: (out.copy_(ids), None)[1], "CPU")
library.impl("align", lambda ids, out: None, "Meta")


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """One hand-built node: a method if the target is text."""
    graph = fx.Graph()
    made = [graph.placeholder(f"x{n}") if isinstance(a, Tensor) else a for n, a in enumerate(args)]
    return (
        graph.call_method(target, tuple(made), kwargs)
        if isinstance(target, str)
        else graph.call_function(target, tuple(made), kwargs)
    )


def flow_of(module: fx.GraphModule) -> DataFlow:
    return DataFlow(module.graph, is_weight)


X = torch.empty(2, 2)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("topk", [torch.topk, "topk", aten.topk.default, aten.topk]),
        ("softmax", [torch.softmax, F.softmax, "softmax", aten._softmax.default, aten.softmax.int]),
        ("add", [torch.add, operator.add, operator.iadd, "add", "add_", "__add__", aten.add.Tensor, aten.add_.Tensor]),
        ("mul", [torch.mul, torch.multiply, operator.mul, operator.imul, "mul_", aten.mul.Tensor]),
        ("div", [torch.div, operator.truediv, operator.itruediv, "div_", torch.true_divide]),
        ("getitem", [operator.getitem, "__getitem__", aten.index.Tensor]),
        ("matmul", [operator.matmul, torch.matmul, "matmul", "__matmul__"]),
        (
            "view",
            [
                "view",
                "reshape",
                torch.flatten,
                "squeeze",
                torch.unsqueeze,
                aten.view.default,
                aten._unsafe_view.default,
            ],
        ),
        ("scatter", ["scatter", "scatter_", torch.scatter, aten.scatter_.value]),
        ("and", [operator.and_, "__and__", torch.logical_and, operator.iand]),
    ],
)
def test_one_operator_has_one_spelling(name: str, targets: list[Any]) -> None:
    """A router written with another spelling of the same operator would be missed."""
    assert [spelling(call(t, X)) for t in targets] == [name] * len(targets)


def test_an_operator_of_a_library_keeps_its_namespace() -> None:
    """Near miss: `mylib::topk` may return anything; taken for aten's, its second result would be recorded as ids."""
    node = call(torch.ops.r3_test_dataflow.topk.default, X, 2)
    assert spelling(node) == "r3_test_dataflow::topk" == spelling(call(torch.ops.r3_test_dataflow.topk, X, 2))
    assert is_opaque(node) and not is_opaque(call(torch.topk, X, 2))


@pytest.mark.parametrize(
    "target",
    ["add_", "masked_fill_", "__setitem__", operator.setitem, operator.iadd, F.relu_, aten.add_.Tensor, torch.relu_],
)
def test_inplace_operators(target: Any) -> None:
    """A reader behind an in-place update would be tied to the value before it."""
    assert is_inplace(call(target, X, X))


@pytest.mark.parametrize("name", ["__iadd__", "__imul__", "__ior__"])
def test_inplace_operators_by_their_method(name: str) -> None:
    """`ids.__iadd__(1)`: the method that `+=` calls has no trailing underscore of its own."""
    assert is_inplace(call(name, X, X))


def test_functions_that_are_told_to_work_in_place() -> None:
    assert is_inplace(call(F.hardtanh, X, 0, 3, inplace=True)) and is_inplace(call(F.hardtanh, X, 0, 3, True))
    assert not is_inplace(call(F.hardtanh, X, 0, 3)) and not is_inplace(call(F.relu, X, inplace=False))
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert written(graph.call_function(F.relu, (), {"input": x, "inplace": True})) == [x]


@pytest.mark.parametrize(
    "target", ["add", "__and__", "__getitem__", torch.topk, operator.add, aten.add.Tensor, aten.topk.default]
)
def test_no_inplace_operators(target: Any) -> None:
    """Near miss: a trailing underscore of a dunder is no in-place mark; readers would be tied to a value that never was."""
    assert not is_inplace(call(target, X, X))


def test_what_an_operator_writes() -> None:
    """Ids that an operator changes by `out=` or by its schema would be recorded after the change."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    assert written(graph.call_function(torch.add, (a, 1), {"out": b})) == [b]
    assert written(graph.call_function(torch.topk, (a, 2), {"out": (a, b)})) == [a, b]
    assert written(graph.call_function(torch.ops.r3_test_dataflow.align.default, (a, b))) == [b]
    assert written(graph.call_function(torch.ops.r3_test_dataflow.align, (a,), {"out": b})) == [b]
    assert written(graph.call_method("mul_", (a, b))) == [a]
    assert written(graph.call_function(torch.add, (a, b))) == []


def test_arguments_by_position_keyword_and_default() -> None:
    """`topk(x, k=2, dim=0)` read as if dim were -1 would record ids of another dimension."""
    node = call(torch.topk, X, 2, dim=0)
    assert argument(node, 0, "input") is node.args[0]
    assert argument(node, 1, "k") == 2 and argument(node, 2, "dim", default=-1) == 0
    assert argument(node, 3, "largest", "biggest", default=True) is True
    assert argument(call(torch.amax, X, axis=1), 1, "dim", "axis") == 1


# ---- in-place updates and views -------------------------------------------------------------------------------------
def test_a_reader_sees_the_update_before_it_and_none_behind() -> None:
    """A mask applied in place after the group selection would be invisible to the trace of the second selection."""

    def f(x: Tensor) -> Tensor:
        a = x + 1
        before = a * 2
        a.masked_fill_(x > 0, 0.0)
        return before + a * 3

    module = traced(f, torch.randn(3))
    flow = flow_of(module)
    add, fill = named(module, "add"), named(module, "masked_fill")
    assert add in flow.inputs(named(module, "mul", 0)) and fill in flow.inputs(named(module, "mul", 1))
    assert add not in flow.inputs(named(module, "mul", 1))
    assert flow.operand(named(module, "mul", 1), named(module, "mul", 1).args[0]) is fill


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.view(-1).mul_(2),
        lambda a: a[:, :1].mul_(2),
        lambda a: a.transpose(0, 1).detach().mul_(2),
        lambda a: a.__setitem__((slice(None), 0), 2.0),
        lambda a: torch.mul(a, 2, out=a),
        lambda a: a[0].unsqueeze(0).mul_(2),
    ],
)
def test_an_update_of_a_view_is_one_of_its_base(change: Callable[[Tensor], Any]) -> None:
    """`scores.view(T, G, -1)[...] = -inf` changes `scores`; its next reader would be tied to the unmasked ones."""

    def f(x: Tensor) -> Tensor:
        a = x + 1
        change(a)
        return a.exp()

    module = traced(f, torch.randn(3, 4))
    read = flow_of(module).inputs(named(module, "exp"))
    assert {spelling(n) for n in read} & {"mul", "setitem"}


def test_an_update_of_a_copy_is_none_of_its_source() -> None:
    """Near miss: `a[index_tensor]` and `a.clone()` are copies."""

    def f(x: Tensor, i: Tensor) -> Tensor:
        a = x + 1
        a[i].mul_(2)
        a.clone().mul_(3)
        return a.exp()

    module = traced(f, torch.randn(3, 4), torch.tensor([0, 1]))
    assert flow_of(module).inputs(named(module, "exp")) == (named(module, "add"),)


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids.add_(4),
        lambda ids: ids[:, 0].clamp_(max=1),
        lambda ids: ids.__setitem__(ids > 2, 0),
        lambda ids: torch.add(ids, 1, out=ids),
        lambda ids: torch.sort(ids, out=(ids, torch.empty_like(ids))),
        lambda ids: torch.ops.r3_test_dataflow.align(ids + 1, ids),
        lambda ids: F.hardtanh(ids, 0, 3, inplace=True),
        lambda ids: F.hardtanh(ids, 0, 3, True),
        lambda ids: ids.__iadd__(1),
        lambda ids: ids.numpy().fill(2),
        lambda ids: ids.numpy().__setitem__(..., 2),
        lambda ids: np.fill_diagonal(ids.numpy(), 2),
        lambda ids: ids.view(torch.complex64).real.fill_(0.0),
        lambda ids: torch.view_as_real(ids.view(torch.complex64)).fill_(0.0),
        lambda ids: ids.view(torch.float64)[:, :1].fill_(0.0),
    ],
)
def test_ids_that_are_changed_later_are_overwritten(change: Callable[[Tensor], Any]) -> None:
    """Ids shifted in place to an expert's local number would be recorded shifted: the record op stands at the end."""

    def f(x: Tensor) -> Tensor:
        ids = x.topk(2).indices
        change(ids)
        return ids + 0

    module = traced(f, torch.randn(3, 4))
    assert flow_of(module).overwritten(named(module, "getitem"))


def test_what_is_not_overwritten() -> None:
    """Near misses: changed before, out of place, a neighbour, or once sorted (grouped_mm of transformers 5.17).

    Each would cost a copy per layer, and its fusion.
    """

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + 1
        x.mul_(2)
        values, ids = x.topk(2)
        values.div_(2)
        by_expert, _ = torch.sort(ids.reshape(-1))
        by_expert.clamp_(max=3)
        torch.from_numpy(np.sort(ids.numpy())).to(torch.float32).mul_(2)
        ids.float().add_(1)
        return ids + 4, values, by_expert

    module = traced(f, torch.randn(3, 4))
    ids = next(n for n in module.graph.nodes if spelling(n) == "getitem" and n.args[1] == 1)
    assert not flow_of(module).overwritten(ids)


# ---- nested graphs --------------------------------------------------------------------------------------------------
def test_values_pass_the_border_of_a_checkpoint() -> None:
    """Under activation checkpointing the router's linear and the hidden states stand in different graphs."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda t: t @ self.w, x.exp(), use_reentrant=False).relu()

    module = traced(Layer(), torch.randn(2, 4))
    flow = flow_of(module)
    product = named(module, "matmul")
    assert named(module, "exp") in flow.inputs(product)
    assert named(module, "relu") in flow.users(product)
    (weight,) = [n for n in flow.inputs(product) if flow.kind(n) == "weight"]
    assert weight.graph is module.graph


def test_a_graph_called_twice_is_read_as_its_first_call() -> None:
    """Were the second call's result the first call's value, the second layer would get the ids of the first."""

    @torch.compiler.nested_compile_region
    def inner(x: Tensor) -> Tensor:
        return x.sin()

    module = traced(lambda x: inner(inner(x).exp()).neg(), torch.randn(4))
    flow = flow_of(module)
    (calls,) = flow.calls.values()
    assert len(calls) == 2
    assert flow.inputs(named(module, "exp")) == (named(module, "sin"),)
    (read,) = flow.inputs(named(module, "neg"))
    assert read.args[0] is calls[1]


def test_a_branch_is_no_nested_graph() -> None:
    """Near miss: what stands in one branch of a `cond` may not run; read as inlined, its ids would be recorded every time."""

    def f(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x.topk(2)[1], lambda x: x.topk(2)[1] + 1, (x,))

    module = traced(f, torch.randn(4))
    call = next(n for n in module.graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator))
    assert subgraph_of(call) is None
    assert "topk" not in {spelling(n) for n in flow_of(module).nodes}


# ---- kinds and shapes -----------------------------------------------------------------------------------------------
class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("b", torch.randn(4))
        self.plain = torch.randn(4)

    def forward(self, x: Tensor) -> Any:
        weight = (self.w * 2).t().cos()
        const = torch.zeros_like(x).exp() + torch.arange(x.shape[0]).unsqueeze(1)
        return x.sin() + weight, self.b.tan(), self.plain.sqrt(), const


def test_kinds_of_values() -> None:
    """A weight taken for data hides the router; data taken for a weight makes a router of any product of activations."""
    module = traced(Kinds(), torch.randn(4, 4))
    flow = flow_of(module)
    kinds = {
        name: flow.kind(named(module, name)) for name in ("sin", "cos", "tan", "sqrt", "exp", "zeros_like", "arange")
    }
    assert kinds == {
        "sin": "data", "cos": "weight", "tan": "weight", "sqrt": "weight", "exp": "const", "zeros_like": "const", "arange": "const",
    }  # fmt: skip
    assert flow.kind(named(module, "add", 1)) == "data" or flow.kind(named(module, "add", 0)) == "data"
    (leaf,) = flow.weights(named(module, "cos"))
    assert leaf.op == "placeholder" and dims(leaf) == (4, 4)
    assert flow.weights(named(module, "sin")) == ()


def test_dims_compare_symbols_without_guards() -> None:
    """A guard added while matching would make Dynamo recompile for every token count, or fix the graph to one."""
    module = traced(lambda x: x.view(-1, 4).exp(), torch.randn(3, 5, 4), dynamic=True)
    node = named(module, "exp")
    environment = node.meta["example_value"].fake_mode.shape_env
    before = len(environment.guards)
    tokens, width = dims(node)
    assert isinstance(width, int | type(tokens)) and tokens != width
    assert not isinstance(tokens, int) and tokens == dims(named(module, "view"))[0]
    assert len(environment.guards) == before
