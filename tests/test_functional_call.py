"""Layers that run with other weights than their own: which row says what they chose, and when there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import MoE, gate, softmax_topk, stack, tokens
from torch import Tensor, nn
from torch.func import functional_call

import r3_pass

T = 12


def model() -> nn.Module:
    return stack(lambda: MoE(softmax_topk, gate=gate()), n=3).eval().requires_grad_(False)


def exchanged(target: nn.Module) -> dict[str, Tensor]:
    """The model's weights, with those of the first two layers' MLPs exchanged."""
    other = {"layers.0.mlp": "layers.1.mlp", "layers.1.mlp": "layers.0.mlp"}
    held = dict(target.named_parameters())
    return {name: held[other.get(name[:12], name[:12]) + name[12:]] for name in held}


def chosen(target: nn.Module, weights: dict[str, Tensor], ids: Tensor) -> np.ndarray:
    """int64 [T, 3, 2]: what the model chooses with these weights, by hooks."""
    found: dict[int, Tensor] = {}
    hooks = [
        block.mlp.gate.register_forward_hook(
            lambda _, __, scores, layer=layer: found.update({layer: scores.softmax(-1).topk(2).indices})
        )
        for layer, block in enumerate(target.layers)  # type: ignore[arg-type]
    ]
    functional_call(target, weights, (ids,))
    for hook in hooks:
        hook.remove()
    return torch.stack([found[layer] for layer in range(3)], 1).numpy()


@pytest.mark.parametrize("before", [False, True], ids=["first", "after_a_step_of_its_own"])
def test_layers_that_run_with_each_others_weights(before: bool) -> None:
    """By the compiled model's own parameters: the row says what each layer did with what it was given."""
    target, ((ids,),) = model(), tokens((2, 6))
    compiled = torch.compile(target, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=T)
    truth = chosen(target, exchanged(target), ids)
    assert not np.array_equal(truth[:, 0], truth[:, 1])
    if before:
        with session.step(range(T)):
            compiled(ids)
        assert np.array_equal(session.read(range(T)), chosen(target, dict(target.named_parameters()), ids))
    with session.step(range(T)):
        functional_call(compiled, {f"_orig_mod.{k}": v for k, v in exchanged(target).items()}, (ids,))
    assert np.array_equal(session.read(range(T)), truth)
    session.detach()


def test_compiled_layers_that_run_with_each_others_weights() -> None:
    torch._dynamo.reset()
    target, ((ids,),) = model(), tokens((2, 6))
    truth = chosen(target, exchanged(target), ids)  # before they are compiled, with hooks on them
    for block in target.layers:  # type: ignore[union-attr]
        block.compile(backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(target, num_slots=T)
    with session.step(range(T)):
        functional_call(target, exchanged(target), (ids,))
    assert np.array_equal(session.read(range(T)), truth)
    session.detach()


def test_weights_that_are_not_the_models() -> None:
    """Copies of a model's weights: nothing says that they are this model's."""
    torch._dynamo.reset()
    target, ((ids,),) = model(), tokens((2, 6))
    compiled = torch.compile(target, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=T)
    copies = {f"_orig_mod.{name}": weight.clone() for name, weight in exchanged(target).items()}
    with pytest.raises(r3_pass.NoRouterFound, match="of Net ran in this step"), session.step(range(T)):
        functional_call(compiled, copies, (ids,))
    session.detach()


def test_weights_that_are_exchanged_inside_of_a_graph() -> None:
    """A limit: inside of a compiled function a layer is told by the weights that it is given, not by its place."""
    torch._dynamo.reset()
    target, ((ids,),) = model(), tokens((2, 6))
    run = torch.compile(lambda weights, x: functional_call(target, weights, (x,)), backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(target, num_slots=T)
    with session.step(range(T)):
        run(exchanged(target), ids)
    truth = chosen(target, exchanged(target), ids)
    assert np.array_equal(session.read(range(T)), truth[:, [1, 0, 2]])
    session.detach()
