"""The report: one entry a candidate, each once, and the graphs in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decoder import D, Decoder, Moe, decoder, prompt
from torch import Tensor

import r3_pass
from r3_pass.report import Report


class Chatty(Moe):
    """Beside its routing, a top-k for a log line."""

    def forward(self, x: Tensor) -> Tensor:
        best = self.gate(x.reshape(-1, D)).topk(4)[0]
        return super().forward(x) + best.sum() * 0


def report_of(model: Decoder, *tokens: int, attached: bool = False) -> Report:
    backend = r3_pass.backend("eager")
    compiled = torch.compile(model, backend=backend, dynamic=False)
    session = r3_pass.runtime.attach(compiled, num_slots=64) if attached else None
    for n in tokens or (5,):
        if session is None:
            compiled(prompt(n))
        else:
            with session.step(range(n)):
                compiled(prompt(n))
    if session is not None:
        session.detach()
    return backend.report()


@pytest.mark.parametrize("attached", [False, True])
def test_one_entry_for_each_site(attached: bool) -> None:
    """A report that is empty until rows were recorded is no help to those whose rows are missing."""
    report = report_of(decoder(layers=4, dense=(0, 2)), attached=attached)
    assert [(s.layer, s.form, s.num_experts, s.top_k, s.graph, s.proved) for s in report.sites] == [
        (1, "softmax_topk", 8, 2, 0, True),
        (3, "softmax_topk", 8, 2, 0, True),
    ]
    assert [s.module.removesuffix(".gate") for s in report.sites] == ["layers.1.mlp", "layers.3.mlp"]
    assert report.rejected == [] and report.num_graphs == 1


@pytest.mark.parametrize("attached", [False, True])
def test_recompilations_are_no_new_sites(attached: bool) -> None:
    """Graphs of three shapes hold the same two layers."""
    report = report_of(decoder(), 5, 7, 9, attached=attached)
    assert report.num_graphs == 3 and [s.layer for s in report.sites] == [1, 2]


def test_rejections_have_a_reason() -> None:
    """Once each, with the module, and marked as no routing."""
    report = report_of(decoder(moe=lambda k: Chatty(top_k=k)), 5, 7)
    assert [(r.module, r.routing) for r in report.rejected] == [("layers.1.mlp", False), ("layers.2.mlp", False)]
    assert all("indices are not used" in r.reason for r in report.rejected)


def test_a_layer_that_is_not_known_yet() -> None:
    """A graph that serves several layers knows none before its first recorded call."""
    model, backend = decoder(), r3_pass.backend("eager")
    for layer in model.layers:
        layer.compile(backend=backend)
    model(prompt(5))
    assert [s.layer for s in backend.report().sites] == [None]
    assert backend.report().table()[1][0] == "?"
    session = r3_pass.runtime.attach(model, backend=backend, num_slots=8)
    with session.step(range(5)):
        model(prompt(5))
    session.detach()
    assert [s.layer for s in backend.report().sites] == [1, 2]


def test_the_text() -> None:
    """One row a layer, and what is not recorded said in words."""
    text = str(report_of(decoder(moe=lambda k: Chatty(top_k=k))))
    heading, first, second, summary = text.splitlines()
    assert heading.split() == ["layer", "module", "form", "experts", "top-k", "graph"]
    assert first.split()[:1] + first.split()[2:] == ["1", "softmax_topk", "8", "2", "0"]
    assert second.startswith("2") and summary == "2 sites in 1 graphs; 2 other candidates rejected"


def test_an_empty_report() -> None:
    """Of a model that was not called."""
    report = r3_pass.backend("eager").report()
    assert report.sites == [] == report.rejected and "0 sites in 0 graphs" in str(report)


def test_a_report_is_of_its_time() -> None:
    """Graphs compiled later do not appear in it."""
    model, backend = decoder(), r3_pass.backend("eager")
    compiled = torch.compile(model, backend=backend, dynamic=False)
    compiled(prompt(5))
    report = backend.report()
    compiled(prompt(7))
    assert report.num_graphs == 1 and backend.report().num_graphs == 2


def test_dump(tmp_path: Path) -> None:
    """The graphs before and after, readable: one line an operator, with shape and dtype; the record op in the second only."""
    report = report_of(decoder(moe=lambda k: Chatty(top_k=k)), 5, 7)
    folder = report.dump(tmp_path / "new" / "folder")
    files = {f.name: f.read_text() for f in folder.iterdir()}
    assert {"report.txt", "rejected.txt"} <= set(files)
    assert files["report.txt"] == f"{report}\n"
    assert files["rejected.txt"].count("not routing: ") == 2
    for number in (0, 1):
        before, after = files[f"graph_{number}_before.txt"], files[f"graph_{number}_after.txt"]
        assert "r3_pass.record" not in before and after.count("r3_pass.record") == 1
        assert "int64[5, 2]" in before or "int64[7, 2]" in before
        assert "int16[" in after and "return" in after
        caller = files[f"graph_{number}_caller.py"]
        assert "def " in caller and "__compiled_fn" in caller, "what Dynamo made around the graph, by depyf"
        compile(caller, "caller", "exec")
    assert report.dump(folder) == folder, "a second time into the same folder"


def test_dump_of_a_nested_graph(tmp_path: Path) -> None:
    """Under activation checkpointing the routing stands in a nested graph: a dump without it shows nothing of it."""
    report = report_of(Decoder(checkpoint=True))
    folder = report.dump(tmp_path)
    text = (folder / "graph_0_before.txt").read_text()
    assert "tag_activation_checkpoint" in text and "topk" in text


def test_graphs_without_routing_are_not_dumped(tmp_path: Path) -> None:
    """A model with breaks has dozens of them."""
    model: Any = torch.nn.Linear(4, 4)
    backend = r3_pass.backend("eager")
    torch.compile(model, backend=backend)(torch.ones(2, 4))
    assert sorted(f.name for f in backend.report().dump(tmp_path).iterdir()) == ["rejected.txt", "report.txt"]
