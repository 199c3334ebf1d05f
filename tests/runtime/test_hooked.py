"""Routers that no graph shows: an engine's callback hands over the ids of each layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import r3_pass
from r3_pass.errors import NoRouterFound, PartialCapture, RefusedConfiguration
from r3_pass.runtime import Segment
from r3_pass.structure import Block, inspect

EXPERTS, TOP_K = 4, 2


class Layer(nn.Module):
    """Its router's weight is packed elsewhere, so that the modules show no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(0))
        self.experts = nn.Parameter(torch.randn(EXPERTS, 3, 3))
        self.hook: Any = None

    def forward(self, ids: Tensor) -> None:
        if self.hook is not None:
            self.hook(ids)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), Layer(), Layer()])

    def forward(self, ids: Tensor) -> None:
        for layer in self.layers[1:]:
            layer(ids)


def attached(hooked: tuple[int, ...] = (1, 2)) -> tuple[Any, Any]:
    model: Any = Model()
    session = r3_pass.runtime.attach(model, num_slots=8, backend=r3_pass.backend("eager"))
    for n in hooked:
        layer = model.layers[n]
        layer.hook = session.hook(n, lambda layer=layer: layer.experts, f"layers.{n}", EXPERTS, TOP_K)
    return model, session


def test_rows_are_what_the_hooks_were_given() -> None:
    model, session = attached()
    ids = torch.tensor([[3, 0], [1, 2], [0, 1]], dtype=torch.int32)
    model(ids)  # outside of a step: nothing
    with session.step([5, 1, -1], [Segment("a", 0, 2)]):
        model(ids)
    rows = session.finish("a", 3)
    assert rows.shape == (2, 3, TOP_K) and (rows[:, 0] == -1).all()
    assert np.array_equal(rows[:, 1], ids[:2].numpy()) and np.array_equal(rows[:, 2], ids[:2].numpy())
    assert session.written == (1, 2)
    entries = [(s.layer, s.form, s.graph, s.num_experts, s.top_k) for s in session.report().sites]
    assert entries == [(1, "router_hook", None, EXPERTS, TOP_K), (2, "router_hook", None, EXPERTS, TOP_K)]
    assert "router_hook" in str(session.report())
    session.check_integrity()


def test_shared_experts_among_the_columns() -> None:
    model, session = attached()
    with pytest.raises(RefusedConfiguration, match=r"\[3, 3\], expected \[tokens, 2\]"), session.step([0, 1, 2]):
        model(torch.zeros(3, 3, dtype=torch.int32))


def test_a_layer_that_is_called_twice() -> None:
    model, session = attached()
    ids = torch.zeros(1, TOP_K, dtype=torch.int32)
    with pytest.raises(RefusedConfiguration, match="routes a second time"), session.step([0]):
        model(ids)
        model(ids)


def test_a_hook_that_was_not_called() -> None:
    model, session = attached()
    with session.step([0]):
        model(torch.zeros(1, TOP_K, dtype=torch.int32))
    model.layers[2].hook = None
    with pytest.raises(PartialCapture, match="layer 2"), session.step([0]):
        model(torch.zeros(1, TOP_K, dtype=torch.int32))
    assert session.written == (1,)
    model.layers[1].hook = None
    with pytest.raises(NoRouterFound), session.step([0]):
        model(torch.zeros(1, TOP_K, dtype=torch.int32))
    assert session.written == ()


def test_experts_that_an_engine_tells() -> None:
    model = Model()
    assert not inspect(model).experts, "a packed router scores nothing that could be seen"
    told = inspect(model, {"layers.1.experts": EXPERTS, "layers.2.experts": EXPERTS})
    assert {block: e.count for block, e in told.experts.items()} == {
        Block("layers", 1): EXPERTS,
        Block("layers", 2): EXPERTS,
    }
    assert told.may_route and told.main_container == "layers" and told.expected("layers") == (1, 2)
    assert not inspect(model, {}).may_route
