"""`explain`: what would be captured, without weights, without touching what the user compiled."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from decoder import D, Decoder, Moe, decoder, prompt, truth
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import r3_pass
from r3_pass.marks import owner_of

BROKEN: dict[str, Any] = {"after_selection": torch._dynamo.graph_break}


def layers(report: Any) -> list[int | None]:
    return [s.layer for s in report.sites]


def test_sites_and_rejections() -> None:
    """One entry for each candidate, the layer by the weights, as recording would have it."""
    report = r3_pass.explain(decoder(layers=4, dense=(0, 2), top_k=(0, 1, 0, 3)), prompt(5))
    assert [(s.layer, s.module, s.top_k) for s in report.sites] == [
        (1, "layers.1.mlp.gate", 1),
        (3, "layers.3.mlp.gate", 3),
    ]
    assert report.rejected == []


def test_keyword_arguments() -> None:
    assert layers(r3_pass.explain(decoder(), ids=prompt(5))) == [1, 2]


def test_without_weights() -> None:
    """On the meta device: for a model that does not fit here (failure class 13)."""
    with torch.device("meta"):
        model = Decoder().requires_grad_(False)
    assert layers(r3_pass.explain(model, prompt(5).to("meta"))) == [1, 2]


def test_under_a_fake_mode() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        model = Decoder().requires_grad_(False)
        ids = torch.zeros(1, 5, dtype=torch.int64)
        assert layers(r3_pass.explain(model, ids)) == [1, 2]


@pytest.mark.parametrize("how", ["plain", "compiled", "per layer", "breaks"])
def test_however_it_is_compiled(how: str) -> None:
    """The same answer for a compiled model, and for one whose graphs serve several layers."""
    model = decoder(moe=(lambda k: Moe(top_k=k, **BROKEN)) if how == "breaks" else None)
    call: Any = model
    if how == "compiled":
        call = torch.compile(model, backend=r3_pass.backend("eager"))
        call(prompt(5))
    elif how == "per layer":
        for layer in model.layers:
            layer.compile(backend=r3_pass.backend("eager"))
        model(prompt(5))
    assert layers(r3_pass.explain(call, prompt(5))) == [1, 2]


def test_the_model_is_not_changed() -> None:
    """No mark on a weight, no mode switched."""
    model = decoder().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    r3_pass.explain(model, prompt(5))
    assert model.training and all(owner_of(p) is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("breaks", [False, True])
def test_compiled_code_stays(breaks: bool) -> None:
    """Code traced by `explain` counted against the limit of the user's: in the end the model ran eagerly, unrecorded."""
    model, backend = decoder(moe=(lambda k: Moe(top_k=k, **BROKEN)) if breaks else None), r3_pass.backend("eager")
    compiled = torch.compile(model, backend=backend)
    session = r3_pass.runtime.attach(compiled, num_slots=64)

    def step(tokens: int) -> None:
        with torch.no_grad(), session.step(range(tokens)):
            compiled(prompt(tokens))
        assert (session.read(range(tokens)) == truth(model, prompt(tokens))).all()

    step(5)
    graphs = backend.report().num_graphs
    for _ in range(9):
        r3_pass.explain(compiled, prompt(5))
    step(5)
    assert backend.report().num_graphs == graphs
    step(7)
    session.detach()


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="only known to be there from torch 2.13 on")
def test_the_option_that_keeps_code_apart_is_used() -> None:
    """Without it, code that is traced by `explain` counts against the limit of the user's."""
    assert r3_pass.explain.__globals__["_BESIDE"] == {"isolate_recompiles": True}


def test_an_attached_session_sees_nothing() -> None:
    """Inside a step, too: the forward of `explain` is no forward of the step."""
    model = decoder()
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=64)
    with torch.no_grad(), session.step(range(5)):
        compiled(prompt(5))
        r3_pass.explain(model, prompt(5, 1))
    assert (session.read(range(5)) == truth(model, prompt(5))).all()
    session.detach()


def test_the_model_can_go() -> None:
    """Dynamo keeps compiled code for as long as the process lives: it kept the whole model with it."""
    model = decoder(moe=lambda k: Moe(top_k=k, **BROKEN))
    report = r3_pass.explain(model, prompt(5))
    gone = weakref.ref(model.layers[1].mlp.up)
    del model
    gc.collect()
    assert gone() is None and layers(report) == [1, 2]


class Twice(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in (*self.layers, self.layers[1]):
            x = layer(x)
        return self.head(x)


class Halved(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](self.embed(ids)))
        return self.head(self.layers[2](x[:, -1:]))


@pytest.mark.parametrize(
    ("model", "reason"), [(Twice, "layer 1 routes twice"), (Halved, "different numbers of tokens")]
)
def test_refusals_are_told(model: type[Decoder], reason: str) -> None:
    """What attach and the first step would refuse is in the report, not raised from it."""
    report = r3_pass.explain(model(), prompt(5))
    assert f"REFUSED: {reason}" in str(report) or ("REFUSED: " in str(report) and reason in str(report))


def test_routing_that_cannot_be_recorded() -> None:
    """Marked as routing, with the reason."""

    class Sinkhorn(Moe):
        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, D)
            probs = self.gate(flat).exp()
            ids = (probs / probs.sum(0, keepdim=True)).topk(1)[1][:, 0]
            return torch.bmm(self.down[ids], torch.bmm(self.up[ids], flat.unsqueeze(-1))).view(x.shape)

    report = r3_pass.explain(decoder(moe=lambda k: Sinkhorn(top_k=1)), prompt(5))
    assert report.sites == [] and [r.routing for r in report.rejected] == [True, True]
    assert str(report).count("NOT RECORDED: layers.") == 2


def test_a_model_without_routing() -> None:
    """An empty report, no error."""
    report = r3_pass.explain(nn.Linear(4, 4), torch.ones(2, 4))
    assert report.sites == [] == report.rejected and report.num_graphs == 1


def test_an_error_of_the_model_is_the_models() -> None:
    """Not wrapped into one of ours; and the next call works."""
    model = decoder()
    with pytest.raises(TypeError):
        r3_pass.explain(model)
    assert layers(r3_pass.explain(model, prompt(5))) == [1, 2]
