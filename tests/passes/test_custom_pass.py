"""The rewrite as an Inductor pass: on a graph that has the inputs, and a uuid that changes with what it does."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from backend import operators, traced
from decoder import Decoder, decoder, prompt, truth
from torch import Tensor, fx, nn

from r3_pass.passes import RecordPass, custom_pass
from r3_pass.passes.inputs import add_input, fake_mode_of
from r3_pass.passes.match import is_weight
from r3_pass.passes.ops import HEADER, STATE_CALLS
from r3_pass.registry import RoutingForm, registered
from r3_pass.registry.shapes import value

RECORD = "r3_pass::record"


def with_inputs(module: fx.GraphModule, sites: int) -> fx.GraphModule:
    """A copy of a Dynamo graph with the record op's inputs, as a pipeline of one's own would make it."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, mapping := {}))
    copy = fx.GraphModule(module, graph)
    for old, new in mapping.items():
        if old.op == "placeholder":
            new._dynamo_source = old._dynamo_source
    copy.meta, copy._param_name_to_source = dict(module.meta), module._param_name_to_source
    mode = fake_mode_of(copy.graph)
    assert mode is not None
    cpu = torch.device("cpu")
    add_input(copy.graph, mode, "buffer", (7, 5, 3), torch.int16, cpu)
    add_input(copy.graph, mode, "state", (11,), torch.int32, cpu)
    add_input(copy.graph, mode, "slots", (13,), torch.int64, cpu)
    add_input(copy.graph, mode, "columns", (-sites,), torch.int64, cpu)
    copy.recompile()
    return copy


class Pipeline:
    """A Dynamo backend with a compiler of its own, which hands each call's tensors to the added inputs."""

    def __init__(self, compiler: Callable[..., Any]) -> None:
        self.compiler = compiler
        self.buffer = torch.full((65, 2, 2), -1, dtype=torch.int16)
        self.state = torch.zeros(STATE_CALLS + 2, dtype=torch.int32)
        self.slots = torch.full((HEADER + 16,), -1)

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        copy = with_inputs(module, 2)
        fakes = [value(n) for n in copy.graph.nodes if n.op == "placeholder"][-4:]
        compiled = self.compiler(copy, [*example_inputs, *fakes])
        return lambda *args: compiled(*args, self.buffer, self.state, self.slots, torch.tensor([0, 1]))

    def step(self, tokens: int) -> None:
        self.slots[0] = tokens
        self.slots[HEADER : HEADER + tokens] = torch.arange(tokens) + 20


def apply_and_run(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    RecordPass()(module.graph)
    module.recompile()
    return module.forward


def inductor(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, example_inputs, config_patches={"pre_grad_custom_pass": RecordPass()})


@pytest.mark.parametrize("compiler", [apply_and_run, pytest.param(inductor, marks=pytest.mark.inductor)])
def test_a_pipeline_of_ones_own(compiler: Callable[..., Any]) -> None:
    """Those who compile for themselves get the same rows; the layers are theirs to name, by the order of sites."""
    model, pipeline = decoder(), Pipeline(compiler)
    compiled = torch.compile(model, backend=pipeline)
    with torch.no_grad():
        want = model(prompt(9))
        pipeline.step(9)
        got = compiled(prompt(9))
    torch.testing.assert_close(got, want)
    assert (pipeline.buffer[20:29].numpy() == truth(model, prompt(9))[:, 1:]).all()
    assert (pipeline.buffer[:20] == -1).all() and pipeline.state.tolist() == [0, 1, 1]


def test_once_is_enough() -> None:
    """Inductor may run a pass on a graph again; twice recorded, every layer would be counted twice."""
    module = with_inputs(traced(decoder(), prompt(5)), 2)
    record = RecordPass()
    record(module.graph)
    record(module.graph)
    assert operators(module)[RECORD] == 1
    assert record.last is not None and [s.layer for s in record.last.sites] == [1, 2]


def test_a_graph_without_routing_is_left_alone() -> None:
    """Inductor hands over every graph: one without routing has no inputs, and needs none."""
    module = traced(nn.Linear(4, 4), torch.randn(2, 4))
    before = str(module.graph)
    RecordPass()(module.graph)
    assert str(module.graph) == before


def test_missing_inputs_are_named() -> None:
    """Skipped in silence, nothing would be recorded."""
    with pytest.raises(ValueError, match=r"2 sites.*r3_buffer.*r3_columns"):
        RecordPass()(traced(decoder(), prompt(5)).graph)


def test_nested_routing_is_refused() -> None:
    """A pass sees one graph; ids inside a checkpoint would be out of reach of the op at its end."""
    module = with_inputs(traced(Decoder(checkpoint=True), prompt(5)), 2)
    with pytest.raises(ValueError, match="nested"):
        RecordPass()(module.graph)


def test_different_token_counts_are_refused() -> None:
    """As in the backend: a step has one slot a token."""

    class Halved(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.layers[1](self.layers[0](self.embed(ids)))
            return self.head(self.layers[2](x[:, -1:]))

    module = with_inputs(traced(Halved(), prompt(5)), 2)
    with pytest.raises(ValueError, match="different numbers of tokens"):
        RecordPass()(module.graph)


# ---- uuid -----------------------------------------------------------------------------------------------------------
def test_the_uuid_holds() -> None:
    """Inductor's cache is keyed by it: one that changes by itself caches nothing."""
    assert RecordPass().uuid() == RecordPass().uuid() is not None


def test_the_uuid_is_the_same_in_another_process() -> None:
    """It was made of `repr`s with addresses in them: a warm cache was cold in every new process."""
    code = (
        "from r3_pass.passes import RecordPass\n"
        "print(RecordPass(lambda node: any(node.name == n for n in ['gate'])).uuid())"
    )  # fmt: skip
    found = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(found) == 1 and len(found.pop()) == 65


def find_none(flow: Any, node: fx.Node) -> None:
    return None


def find_nothing(flow: Any, node: fx.Node) -> None:
    node.name.strip()


def by_name(names: Sequence[str], node: fx.Node) -> bool:
    return node.name in names


def named(*names: str) -> Callable[[fx.Node], bool]:
    return lambda node: node.name in names


def test_the_uuid_changes_with_the_forms() -> None:
    """Another form matches other graphs: the code that Inductor cached for the old ones is wrong."""
    seen = [RecordPass().uuid()]
    with registered(RoutingForm("mine", find_none)):
        seen.append(RecordPass().uuid())
    with registered(RoutingForm("mine", find_nothing)):
        seen.append(RecordPass().uuid())
    assert len(set(seen)) == 3
    assert RecordPass().uuid() == seen[0]


def test_the_uuid_changes_with_what_tells_weights() -> None:
    """The same bytecode with another attribute name, default or closed-over value decides otherwise."""
    predicates: list[Callable[..., bool]] = [
        is_weight,
        lambda node: node.name == "gate",
        lambda node: node.op == "gate",
        lambda node: node.name == "experts",
        lambda node, wanted="gate": node.name == wanted,
        lambda node, wanted="bank": node.name == wanted,
        lambda node: any(node.name == n for n in ("a", "b")),
        lambda node: any(node.op == n for n in ("a", "b")),
        named("gate"),
        named("gate", "up"),
    ]
    found = [RecordPass(p).uuid() for p in predicates]
    assert None not in found and len(set(found)) == len(predicates)
    assert RecordPass(named("gate")).uuid() == RecordPass(named("gate")).uuid()


def test_what_cannot_be_told_is_not_cached() -> None:
    """None is Inductor's word for it: a partial or an object might decide anything."""
    assert RecordPass(functools.partial(by_name, ["gate"])).uuid() is None
    holder = Pipeline(inductor)
    assert RecordPass(lambda node: node.name in holder.__dict__).uuid() is None


@pytest.mark.parametrize("file", ["match.py", "ops.py", "../registry/scores.py"])
def test_the_uuid_changes_with_the_sources(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade of this library that matches otherwise must not meet the old version's cached code."""
    here = Path(custom_pass.__file__).parent
    shutil.copytree(here, tmp_path / "passes", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(here.parent / "registry", tmp_path / "registry", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(custom_pass, "__file__", str(tmp_path / "passes" / "custom_pass.py"))
    before = RecordPass().uuid()
    changed = tmp_path / "passes" / file
    changed.write_text(changed.read_text() + "# changed\n")
    assert RecordPass().uuid() != before
