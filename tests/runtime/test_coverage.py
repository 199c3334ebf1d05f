"""`PartialCapture` names each missing layer, with the reason of each candidate in it that was rejected."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from decoder import D, Moe, decoder, prompt
from refusals import whole_moe
from torch import Tensor, nn

import r3_pass


class Hidden(Moe):
    """Router and experts inside one custom operator."""

    def forward(self, x: Tensor) -> Tensor:
        return whole_moe(x.reshape(-1, x.shape[-1]), self.gate.weight, self.up, self.down).view(x.shape)


class Unknown(Moe):
    """A router that no form knows, beside two selections that route nothing."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        probs = self.gate(flat).softmax(-1)
        ids = (probs.cumsum(-1) < 0.5).sum(-1, keepdim=True).clamp(max=7)
        best = probs.topk(3).values.sum() * 1e-3
        counted = probs.topk(3).indices.float().mean() * 1e-3
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
        return (torch.einsum("tkf,tkdf->td", hidden, self.down[ids]) + best + counted).view(x.shape)


class Gate(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x).softmax(-1).topk(2)


class Looped(Moe):
    """A loop over the experts of one bank: Dynamo gives up its function at `torch.where`, unless it may trace unknown sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Gate(D, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        weights, ids = self.router(flat)
        out = torch.zeros_like(flat)
        for number in range(len(self.up)):
            tokens, place = torch.where(ids == number)
            hidden = torch.relu(flat[tokens] @ self.up[number].T) @ self.down[number].T
            out.index_add_(0, tokens, hidden * weights[tokens, place, None])
        return out.view(x.shape)


class Bank(nn.Module):
    def __init__(self, moe: Looped) -> None:
        super().__init__()
        self.up, self.down = moe.up, moe.down

    def forward(self, flat: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(flat)
        for number in range(len(self.up)):
            tokens, place = torch.where(ids == number)
            hidden = torch.relu(flat[tokens] @ self.up[number].T) @ self.down[number].T
            out.index_add_(0, tokens, hidden * weights[tokens, place, None])
        return out


class LoopedApart(Looped):
    """The same loop in a module of its own: the graph ends at its call, with the ids in hand."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Bank(self)
        del self.up, self.down

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        return self.experts(flat, *self.router(flat)).view(x.shape)


class Separate(nn.Module):
    """A loop over experts that are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 8, bias=False), nn.ModuleList(nn.Linear(D, D) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        weights, ids = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            tokens, place = torch.where(ids == number)
            out.index_add_(0, tokens, expert(flat[tokens]) * weights[tokens, place, None])
        return out.view(x.shape)


CAUSES = (
    "inside the step", "not compiled with this backend", "recompile_limit", "output_router_logits",
    "capture_dynamic_output_shape_ops", "disabled region",
)  # fmt: skip


def failure(bad: type[Moe], good: int, per_layer: bool, layers: int = 5, told: bool = True) -> str:
    """The error of a step of a model whose layers from 1 on are `bad`, but for one; `told`: attach knows the backend."""
    made: list[nn.Module] = []

    def moe(k: int) -> nn.Module:
        made.append(Moe() if len(made) + 1 == good else bad())
        return made[-1]

    model = decoder(layers=layers, moe=moe)
    backend = r3_pass.backend("eager")
    call: Callable[..., Any] = model if per_layer else torch.compile(model, backend=backend)
    for layer in model.layers if per_layer else ():
        layer.compile(backend=backend)
    engine = model if per_layer or not told else call
    session = r3_pass.runtime.attach(engine, backend=backend if told else None, num_slots=16)
    try:
        with torch.no_grad(), pytest.raises(r3_pass.PartialCapture) as error, session.step(range(5)):
            call(prompt(5))
        assert any(entry.layer == good for entry in session.report().sites)
    finally:
        session.detach()
    return str(error.value)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("per_layer", [False, True])
def test_a_router_in_a_custom_operator_is_named(per_layer: bool, told: bool) -> None:
    """Also where `attach` was not told the backend, as by an adapter without `backends`: from the graphs that ran."""
    text = failure(Hidden, 2, per_layer, told=told)
    assert "1 of 4 MoE layers were captured" in text
    for layer in (1, 3, 4):
        line = next(line for line in text.splitlines() if f"layer {layer}:" in line)
        assert f"layers.{layer}.mlp.up holds 8 experts" in line
        assert "tiny::whole_moe is a custom operator: a router's choice inside it is not in the graph" in line


@pytest.mark.parametrize("per_layer", [False, True])
def test_each_candidate_of_a_missing_layer_is_named(per_layer: bool) -> None:
    """Both decoys of each layer, with their reasons; nothing of the other layers."""
    text = failure(Unknown, 3, per_layer)
    for layer in (1, 2, 4):
        line = next(line for line in text.splitlines() if f"layer {layer}:" in line)
        assert "its indices are not used, only its values" in line and "its ids choose no parameters" in line
        assert line.count("rejected:") == 2
        assert len(re.findall(r"\btopk\w*", line)) == 2, line
    assert "layer 3:" not in text


def test_rejected_candidates_are_named_whatever_the_forward_calls_its_model() -> None:
    """Dynamo names modules by the variable that holds the model: `self` in most forwards, but not in a function."""
    model = decoder(layers=2, moe=lambda _: Unknown())
    backend = r3_pass.backend("eager")
    forward = torch.compile(lambda net, x: net(x), backend=backend)
    session = r3_pass.runtime.attach(model, backend=backend, num_slots=16)
    with (
        torch.no_grad(),
        pytest.raises(r3_pass.NoRouterFound, match=r"layer 1: .*topk\w* rejected: "),
        session.step(range(5)),
    ):
        forward(model, prompt(5))
    session.detach()


def test_no_missing_layer_is_left_out() -> None:
    """Not the first few of them: whoever compiled 40 of 62 layers has to see which."""
    text = failure(Hidden, 2, per_layer=True, layers=24)
    assert [int(n) for n in re.findall(r"^  layer (\d+):", text, re.M)] == [1, *range(3, 24)]


def test_a_layer_that_was_not_compiled_is_not_charged_with_what_another_rejects() -> None:
    """The sort of the experts' tokens stands in a graph of layer 1, which routes: it says nothing of layer 2."""

    class Sorted(Moe):
        def forward(self, x: Tensor) -> Tensor:
            order = x.reshape(-1, x.shape[-1]).sum(-1).sort().indices
            return super().forward(x) + order.float().mean() * 1e-6

    model, backend = decoder(layers=3, moe=lambda _: Sorted()), r3_pass.backend("eager")
    model.layers[1].compile(backend=backend)
    with torch.no_grad():
        model(prompt(4))  # a graph that no step runs, and that so names no layer
    session = r3_pass.runtime.attach(model, backend=backend, num_slots=16)
    with torch.no_grad(), pytest.raises(r3_pass.PartialCapture) as error, session.step(range(5)):
        model(prompt(5))
    assert any("sort" in entry.node for entry in session.report().rejected)
    line = next(line for line in str(error.value).splitlines() if "layer 2:" in line)
    assert line.endswith("no graph of it that routes ran")
    causes = [line for line in str(error.value).splitlines() if line.startswith("  - ")]
    assert [words in cause for words, cause in zip(CAUSES, causes, strict=True)] == [True] * len(CAUSES)
    assert max(map(len, causes)) < 300
    session.detach()


def test_separate_experts_are_told_first_to_compile_in_a_step() -> None:
    """What was compiled before any step lacks the graphs: the other causes are less likely, and the option is set by the step."""
    model = decoder(layers=2, moe=lambda _: Separate())
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=16)
    with torch.no_grad():
        compiled(prompt(5))
        with pytest.raises(r3_pass.NoRouterFound) as error, session.step(range(5)):
            compiled(prompt(5))
        causes = [line for line in str(error.value).splitlines() if line.startswith("  - ")]
        assert "torch._dynamo.reset()" in causes[0] and len(causes) == len(CAUSES)
        assert "capture_dynamic_output_shape_ops" not in str(error.value)
        torch._dynamo.reset()
        with session.step(range(5)):
            compiled(prompt(5))
    session.detach()


def test_a_loop_over_a_bank_is_told_how_to_be_traced() -> None:
    """Its graphs did run: that nothing was compiled would be wrong. What the message says to do works."""
    model = decoder(layers=2, moe=lambda _: Looped())
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=16)
    with torch.no_grad(), pytest.raises(r3_pass.NoRouterFound) as error, session.step(range(5)):
        compiled(prompt(5))
    assert "rejected: its ids choose no parameters: they are returned" in str(error.value)
    assert "capture_dynamic_output_shape_ops" in str(error.value) and "No graph that r3_pass compiled" not in str(
        error.value
    )
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad(), session.step(range(5)):
        compiled(prompt(5))
    assert (session.read(range(5))[:, 1] == chosen(model)).all()
    session.detach()


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_loop_over_a_bank_in_a_module_of_its_own_is_recorded(per_layer: bool) -> None:
    """The other thing that the message says to do."""
    model, backend = decoder(layers=2, moe=lambda _: LoopedApart()), r3_pass.backend("eager")
    call: Callable[..., Any] = model if per_layer else torch.compile(model, backend=backend)
    for layer in model.layers if per_layer else ():
        layer.compile(backend=backend)
    session = r3_pass.runtime.attach(call, backend=backend, num_slots=16)
    with torch.no_grad(), session.step(range(5)):
        call(prompt(5))
    assert (session.read(range(5))[:, 1] == chosen(model)).all()
    session.detach()


def chosen(model: nn.Module) -> npt.NDArray[np.int64]:
    """The ids of layer 1, by its router run eagerly."""
    seen: list[Tensor] = []
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        model.get_submodule("layers.1.mlp.router").register_forward_hook(lambda _m, _x, out: seen.append(out[1])),
    ):
        model(prompt(5))
    return seen[0].numpy()
