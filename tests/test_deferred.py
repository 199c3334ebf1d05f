"""Layers that are compiled by themselves: one launch a forward, of what each router chose, whatever happens to the ids later."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from backend import operators
from decoder import D, Decoder, Moe, decoder, prompt, truth
from torch import Tensor, fx, nn
from torch.fx import symbolic_trace

import r3_pass
from r3_pass import streams
from r3_pass.deferred import Deferred
from r3_pass.inner import owns_outputs
from r3_pass.passes import ops

T, SLOTS = 9, 64


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The columns of each launch outside of graphs."""
    seen: list[list[int]] = []
    write = ops.write

    def watched(buffer: Tensor, state: Tensor, slots: Tensor, columns: Tensor, ids: Sequence[Tensor]) -> None:
        seen.append(columns.tolist())
        write(buffer, state, slots, columns, ids)

    monkeypatch.setattr(ops, "write", watched)
    return seen


def by_layer(model: nn.Module, inner: Any) -> Any:
    backend = r3_pass.backend(inner)
    for layer in model.layers:
        layer.compile(backend=backend)
    return r3_pass.runtime.attach(model, backend=backend, num_slots=SLOTS)


def step(session: Any, model: nn.Module, ids: Tensor) -> np.ndarray:
    with torch.no_grad(), session.step(range(ids.numel())):
        model(ids)
    return session.read(range(ids.numel()))


@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_one_launch_a_forward(inner: str, launches: list[list[int]]) -> None:
    model = decoder(layers=5, dense=(0, 3), top_k=(0, 3, 1, 0, 2))
    session = by_layer(model, inner)
    for tokens in (T, 4):
        launches.clear()
        assert (step(session, model, prompt(tokens)) == truth(model, prompt(tokens))).all()
        assert launches == [[0, 1, 2]]
    session.detach()


class StaticOutputs:
    """A compiler whose graphs return memory that their next call writes to, as one that replays CUDA graphs does."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, module: fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
        self.graphs.append(module)
        static: list[Any] = []

        def call(*args: Any) -> Any:
            results = module(*args)
            if not static or any(a.shape != b.shape for a, b in zip(static, results, strict=True)):
                static[:] = [r.clone() for r in results]
            for kept, result in zip(static, results, strict=True):
                kept.copy_(result)
            return tuple(static)

        return call


def test_a_compiler_that_is_not_known(launches: list[list[int]]) -> None:
    """What it returns may be written to by the next layer's call, so the record op stays in each layer's graph."""
    model, inner = decoder(layers=4), StaticOutputs()
    session = by_layer(model, inner)
    assert (step(session, model, prompt(T)) == truth(model, prompt(T))).all()
    assert not launches and sum(operators(g)["r3_pass::record"] for g in inner.graphs) > 0
    session.detach()


@pytest.mark.parametrize(
    ("inner", "options", "owns"),
    [
        ("eager", {}, True),
        ("inductor", {}, True),
        ("inductor", {"mode": "reduce-overhead"}, False),
        ("inductor", {"options": {"triton.cudagraphs": True}}, False),
        ("inductor", {"mode": "max-autotune-no-cudagraphs"}, True),
        ("inductor", {"options": {"cpp_wrapper": True}}, False),
        ("cudagraphs", {}, False),
        (StaticOutputs(), {}, False),
    ],
)
def test_whose_outputs_stay(inner: Any, options: dict[str, Any], owns: bool) -> None:
    assert owns_outputs(inner, symbolic_trace(lambda x: x), options) is owns


@pytest.mark.parametrize("on", [True, False])
def test_cuda_graphs_that_an_annotation_turns_on(on: bool) -> None:
    """`torch._dynamo.override_cudagraphs` tells Inductor so by the graph, whatever the options say."""
    module = symbolic_trace(lambda x: x)
    module.meta["cudagraph_annotation"] = SimpleNamespace(fwd=on, bwd=None)
    assert owns_outputs("inductor", module, {}) is not on


# ---- ids that others may write to -----------------------------------------------------------------------------------
class Broken(Moe):
    """The ids leave the graph before the experts, and their memory is used up in the next one."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        weights, ids = torch.topk(self.gate(flat).softmax(-1), self.top_k, dim=-1)
        torch._dynamo.graph_break()
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
        out = torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights).view(x.shape)
        ids.fill_(7)
        return out


class Chooses(Moe):
    def forward(self, x: Tensor) -> Any:
        flat = x.reshape(-1, D)
        weights, ids = torch.topk(self.gate(flat).softmax(-1), self.top_k, dim=-1)
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
        return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights).view(x.shape), ids.t()


class Told(nn.Module):
    """Its inner module returns a view of the ids, which is used up here."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.inner = Chooses(top_k=top_k)
        self.gate, self.top_k = self.inner.gate, top_k

    def forward(self, x: Tensor) -> Any:
        out, ids = self.inner(x)
        ids.fill_(7)
        return out


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", [Broken, Told])
def test_ids_that_the_caller_changes(kind: Any, inner: str, launches: list[list[int]]) -> None:
    model = decoder(moe=lambda k: kind(top_k=k))
    want = truth(model, prompt(T))
    backend = r3_pass.backend(inner)
    for layer in model.layers[1:]:
        (layer.mlp if kind is Broken else layer.mlp.inner).compile(backend=backend)
    session = r3_pass.runtime.attach(model, backend=backend, num_slots=SLOTS)
    assert (step(session, model, prompt(T)) == want).all()
    assert launches == [[0, 1]]
    session.detach()


KEPT: list[Tensor] = []


@torch.compiler.allow_in_graph
def keep(ids: Tensor) -> Tensor:
    KEPT.append(ids)
    return ids + 0


class Leaks(Moe):
    """The ids get out on a way of their own, and are used up before the next layer runs."""

    def __init__(self, top_k: int, how: str) -> None:
        super().__init__(top_k=top_k)
        self.how = how
        self.register_buffer("last", torch.zeros(1, dtype=torch.int64))
        self.held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        weights, ids = torch.topk(self.gate(flat).softmax(-1), self.top_k, dim=-1)
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
        out = torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights).view(x.shape)
        if self.how == "data of a buffer":
            self.last.data = ids
        elif self.how == "buffer":
            self.last = ids
        elif self.how == "other type":
            self.held = ids.view(torch.float64).t()
        elif self.how == "numpy":
            self.held = ids.numpy()
        elif self.how == "Python that is not traced":
            out = out + 0 * keep(ids).sum()
        return out

    def spoil(self) -> None:
        for held in (self.last, self.held, *KEPT):
            if isinstance(held, np.ndarray):
                held[...] = 7
            elif held is not None:
                (held.t().view(torch.int64) if held.is_floating_point() else held).fill_(7)


class Spoils(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer.mlp, Leaks):
                layer.mlp.spoil()
        return self.head(x)


@pytest.mark.parametrize(
    ("how", "inner"),
    [
        ("data of a buffer", "eager"),
        ("data of a buffer", "aot_eager"),
        pytest.param("data of a buffer", "inductor", marks=pytest.mark.inductor),
        ("buffer", "eager"),
        ("other type", "eager"),
        ("numpy", "eager"),
        ("Python that is not traced", "eager"),
    ],
)
def test_ids_that_get_out(how: str, inner: str) -> None:
    torch.manual_seed(0)
    model = Spoils(layers=4, moe=lambda k: Leaks(k, how)).eval().requires_grad_(False)
    want = truth(model, prompt(T))
    session = by_layer(model, inner)
    for _ in range(2):
        KEPT.clear()
        assert (step(session, model, prompt(T)) == want).all()
    session.detach()


class Sorts(Moe):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        weights, ids = torch.sort(self.gate(flat).softmax(-1), dim=-1, descending=True)
        weights, ids = weights[:, : self.top_k], ids[:, : self.top_k]
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
        return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights).view(x.shape)


@pytest.mark.parametrize("kind", [Sorts, Moe])
def test_no_more_is_kept_than_the_ids(kind: type[Moe], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the order of all experts, for every layer until the last one has run."""
    model = decoder(layers=3, moe=lambda k: kind(top_k=k))
    session = by_layer(model, "eager")
    kept: list[int] = []
    add = Deferred.add

    def watched(self: Deferred, column: int, ids: Tensor) -> bool:
        kept.append(ids.untyped_storage().nbytes())
        return add(self, column, ids)

    monkeypatch.setattr(Deferred, "add", watched)
    for tokens in (T, 4):  # the second one with dynamic shapes
        assert (step(session, model, prompt(tokens)) == truth(model, prompt(tokens))).all()
    assert kept == [T * 2 * 8] * 2 + [4 * 2 * 8] * 2
    session.detach()


def test_another_default_device() -> None:
    model = decoder(layers=4)
    session = by_layer(model, "eager")
    ids = prompt(T)
    step(session, model, ids)
    with torch.no_grad(), session.step(range(T)), torch.device("meta"):
        model(ids)
    assert (session.read(range(T)) == truth(model, ids)).all()
    session.detach()


class Pairs(Decoder):
    """Two blocks run as one function."""

    def pair(self, x: Tensor) -> Tensor:
        return self.layers[2](self.layers[1](x))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.pair(self.layers[0](self.embed(ids)))
        for layer in self.layers[3:]:
            x = layer(x)
        return self.head(x)


def test_layers_beside_a_graph_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two are recorded in their graph. The launch of the others reads columns that live on, for CUDA graphs read them again."""
    torch.manual_seed(0)
    model = Pairs(layers=6).eval().requires_grad_(False)
    backend = r3_pass.backend("eager")
    model.pair = torch.compile(model.pair, backend=backend)
    for layer in (model.layers[0], *model.layers[3:]):
        layer.compile(backend=backend)
    session = r3_pass.runtime.attach(model, backend=backend, num_slots=SLOTS)
    read: list[Tensor] = []
    write = ops.write

    def watched(buffer: Tensor, state: Tensor, slots: Tensor, columns: Tensor, ids: Sequence[Tensor]) -> None:
        read.append(columns)
        write(buffer, state, slots, columns, ids)

    monkeypatch.setattr(ops, "write", watched)
    for seed in range(3):
        assert (step(session, model, prompt(T, seed)) == truth(model, prompt(T, seed))).all()
    assert read[0].tolist() == [2, 3, 4] and len(read) == 3 and all(columns is read[0] for columns in read)
    session.detach()


class Workspace(Moe):
    """Chooses into one tensor for all layers."""

    ids = torch.zeros(T, 2, dtype=torch.int64)
    weights = torch.zeros(T, 2)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        weights, ids = torch.topk(self.gate(flat).softmax(-1), 2, dim=-1)
        self.ids.copy_(ids)
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[self.ids]))
        return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[self.ids], weights).view(x.shape)


class Given(Moe):
    """The same with `out=`."""

    ids = torch.zeros(T, 2, dtype=torch.int64)
    weights = torch.zeros(T, 2)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        weights, ids = torch.topk(self.gate(flat).softmax(-1), 2, dim=-1, out=(self.weights, self.ids))
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
        return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights).view(x.shape)


@pytest.mark.parametrize("kind", [Workspace, Given])
def test_ids_in_memory_that_all_layers_share(kind: type[Moe]) -> None:
    """Right rows, or a refusal; never the last layer's for all."""
    model = decoder(layers=4, moe=lambda k: kind(top_k=k))
    want = truth(model, prompt(T))
    session = by_layer(model, "eager")
    try:
        rows = step(session, model, prompt(T))
    except r3_pass.R3Error:
        pass
    else:
        assert (rows == want).all()
    session.detach()


# ---- forwards that do not end ---------------------------------------------------------------------------------------
class Stops(Decoder):
    stop = 0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            if self.stop and number == self.stop:
                raise RuntimeError("out of memory, say")
            x = layer(x)
        return self.head(x)


def test_a_forward_that_stops(monkeypatch: pytest.MonkeyPatch, launches: list[list[int]]) -> None:
    """Nothing of it is written, later or ever, and its ids are let go."""
    torch.manual_seed(0)
    model = Stops(layers=5).requires_grad_(False)
    session = by_layer(model, "eager")
    step(session, model, prompt(T))
    kept: list[Any] = []
    add = Deferred.add

    def watched(self: Deferred, column: int, ids: Tensor) -> bool:
        kept.append(weakref.ref(ids))
        return add(self, column, ids)

    monkeypatch.setattr(Deferred, "add", watched)
    launches.clear()
    model.stop = 3
    with pytest.raises(RuntimeError, match="out of memory"):
        step(session, model, prompt(T, 1))
    gc.collect()
    assert len(kept) == 2 and not any(reference() is not None for reference in kept) and not launches
    assert (session.read(range(T)) == -1).all()
    model.stop = 0
    assert (step(session, model, prompt(T, 2)) == truth(model, prompt(T, 2))).all()
    assert launches == [[0, 1, 2, 3]]
    session.detach()


def test_read_inside_the_step() -> None:
    model = decoder(layers=4)
    session = by_layer(model, "eager")
    with torch.no_grad(), session.step(range(T)):
        model(prompt(T))
        assert (session.read(range(T)) == truth(model, prompt(T))).all()
    session.detach()


# ---- CUDA graphs and streams, as a GPU would tell (test_cuda.py has them on one) ------------------------------------
class Gpu:
    """What is current: the capture (0 for none) and the stream; and what was ordered."""

    def __init__(self) -> None:
        self.capture, self.stream = 0, 1
        self.ordered: list[tuple[int, int]] = []
        self.recorded: list[int] = []

    def ids(self) -> Any:
        return SimpleNamespace(record_stream=self.recorded.append)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capture != 0)
    monkeypatch.setattr(streams, "current", lambda device: made.stream)
    monkeypatch.setattr(streams, "capture", lambda stream: made.capture)
    monkeypatch.setattr(streams, "stream", lambda handle, device: handle)
    monkeypatch.setattr(streams, "order", lambda later, earlier, device: made.ordered.append((later, earlier)))
    yield made


@pytest.mark.parametrize(("first", "second"), [(5, 6), (0, 6), (5, 0)])
def test_layers_in_graphs_of_their_own(gpu: Gpu, first: int, second: int) -> None:
    """A launch in one graph that reads what another one made would write another step's choices, were that not replayed."""
    deferred = Deferred(torch.device("cuda", 0))
    gpu.capture = first
    assert deferred.add(0, gpu.ids())
    gpu.capture = second
    with pytest.raises(
        r3_pass.RefusedConfiguration, match=r"several CUDA graphs[\s\S]*capture them again in a new step"
    ):
        deferred.add(1, gpu.ids())
    deferred.clear()
    for gpu.capture in (5, 6, 0):  # what runs in no graph, too: the last layer may be in one, and so the launch
        assert not deferred.add(0, gpu.ids()) and not deferred.columns


@pytest.mark.parametrize(("layers", "launch"), [(0, 6), (5, 0), (5, 6), (0, -1)])
def test_a_launch_in_another_graph_than_its_layers(gpu: Gpu, layers: int, launch: int) -> None:
    """The layer that ran last records itself, in a CUDA graph that does not hold those before it."""
    deferred = Deferred(torch.device("cuda", 0))
    gpu.capture = layers
    assert deferred.add(0, gpu.ids())
    gpu.capture = launch
    with pytest.raises(r3_pass.RefusedConfiguration, match="several CUDA graphs"):
        deferred.take()


def test_a_launch_on_another_stream_than_its_layers(gpu: Gpu) -> None:
    deferred = Deferred(torch.device("cuda", 0))
    deferred.add(0, gpu.ids())
    gpu.stream = 2
    assert len(deferred.take()) == 1
    assert gpu.ordered == [(2, 1)] and gpu.recorded == [2]


def test_one_graph_holds_all_layers(gpu: Gpu) -> None:
    deferred = Deferred(torch.device("cuda", 0))
    gpu.capture = 5
    ids = [gpu.ids() for _ in range(3)]
    for column in (2, 0, 1):
        assert deferred.add(column, ids[column])
    assert deferred.columns == [2, 0, 1] and deferred.take() == ids and not deferred.columns
    gpu.capture = 6
    assert deferred.add(0, gpu.ids())


def test_a_driver_that_does_not_tell(gpu: Gpu) -> None:
    deferred = Deferred(torch.device("cuda", 0))
    gpu.capture = -1
    assert not deferred.add(0, gpu.ids())


def test_layers_on_several_streams(gpu: Gpu) -> None:
    """The launch comes after all of them, and their memory is not handed out before it is over."""
    deferred = Deferred(torch.device("cuda", 0))
    deferred.add(0, gpu.ids())
    deferred.add(1, gpu.ids())
    gpu.stream = 2
    deferred.add(2, gpu.ids())
    assert gpu.ordered == [(2, 1)] and gpu.recorded == [2, 2]
    deferred.add(3, gpu.ids())
    assert gpu.ordered == [(2, 1)]
    gpu.stream = 1
    deferred.add(4, gpu.ids())
    assert gpu.ordered == [(2, 1), (1, 2)] and gpu.recorded == [2, 2, 1, 1, 1, 1]
