"""Custom operators that return nothing and fill a tensor: `gemm(out!, x, packed) -> ()`, as serving engines spell their kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import r3_pass

TOKENS, HIDDEN, EXPERTS, TOP_K = 5, 6, 8, 2
_PACKED: list[Tensor] = []


@pytest.fixture
def operators() -> Iterator[None]:
    """A product with a weight that is packed behind a handle, and a mixture of experts in one kernel."""
    library = torch.library.Library("r3_test_filled", "DEF")
    library.define("gemm(Tensor(a!) out, Tensor x, Tensor handle) -> ()")
    library.define("experts(Tensor(a!) out, Tensor x, Tensor w, Tensor scores, Tensor ids) -> ()")

    def gemm(out: Tensor, x: Tensor, handle: Tensor) -> None:
        out.copy_(x @ _PACKED[int(handle)].t())

    def experts(out: Tensor, x: Tensor, w: Tensor, scores: Tensor, ids: Tensor) -> None:
        out.copy_(torch.einsum("tk,tkoi,ti->to", scores, w[ids.long()], x))

    for name, function in (("gemm", gemm), ("experts", experts)):
        library.impl(name, function, "CPU")
        library.impl(name, lambda *_: None, "Meta")
    yield
    library._destroy()
    _PACKED.clear()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        _PACKED.append(torch.randn(EXPERTS, HIDDEN))
        self.handle = torch.tensor(len(_PACKED) - 1)  # no parameter, as in an engine
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.empty(x.shape[0], EXPERTS)
        torch.ops.r3_test_filled.gemm(logits, x, self.handle)
        scores, ids = torch.topk(logits, TOP_K, dim=-1, sorted=False)
        return (scores - torch.logsumexp(logits, -1, keepdim=True)).exp(), ids.to(torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.route(x)
        out = torch.empty_like(x)
        torch.ops.r3_test_filled.experts(out, x, self.experts, scores, ids)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@torch.no_grad()
def test_a_packed_router_and_a_kernel_of_experts(operators: None) -> None:
    model = Model()
    backend = r3_pass.backend("eager")
    session = r3_pass.runtime.attach(torch.compile(model, backend=backend), num_slots=TOKENS, backend=backend)
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(TOKENS, HIDDEN)
    with session.step(range(TOKENS)):
        out = compiled(x)
    assert torch.equal(out, model(x))
    assert [(s.layer, s.num_experts, s.top_k) for s in backend.report().sites] == [
        (0, EXPERTS, TOP_K),
        (1, EXPERTS, TOP_K),
    ]
    rows = session.read(range(TOKENS))
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        assert (torch.from_numpy(rows[:, number]) == layer.route(x)[1]).all()
        x = x + layer(x)


class Unrouted(Layer):
    """The kernel is handed other ids than the router's."""

    def forward(self, x: Tensor) -> Tensor:
        scores, _ = self.route(x)
        out = torch.empty_like(x)
        torch.ops.r3_test_filled.experts(
            out, x, self.experts, scores, torch.zeros(x.shape[0], TOP_K, dtype=torch.int32)
        )
        return out


@torch.no_grad()
def test_ids_that_reach_no_experts(operators: None) -> None:
    model = Model()
    model.layers = nn.ModuleList([Unrouted()])
    backend = r3_pass.backend("eager")
    torch.compile(model, backend=backend)(torch.randn(TOKENS, HIDDEN))
    assert not backend.report().sites
