"""On a GPU: CUDA graphs of both kinds, what the device checks, and that a step never waits for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import r3_pass
from r3_pass.runtime import Segment, Session
from r3_pass.runtime.memory import Placement
from r3_pass.runtime.rows import RowLog
from r3_pass.runtime.sequences import SequenceTable
from r3_pass.runtime.slots import Geometry, SlotBuffer

pytestmark = pytest.mark.cuda

HIDDEN, EXPERTS, TOP_K, LAYERS, SLOTS = 32, 16, 4, 4, 128


class Moe(nn.Module):
    """Gathered experts behind a softmax router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 24) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 24, HIDDEN) * 24**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(torch.softmax(self.gate(x), -1), TOP_K, dim=-1)
        hidden = torch.relu(torch.einsum("td,tkdf->tkf", x, self.up[ids]))
        return torch.einsum("tkf,tkfd,tk->td", hidden, self.down[ids], weights)


class Block(nn.Module):
    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Linear(HIDDEN, HIDDEN) if dense else Moe()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dense=i == 0) for i in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build() -> Decoder:
    torch.manual_seed(0)
    model = Decoder().cuda().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def truth(model: Decoder, x: Tensor) -> np.ndarray:
    """int16 [T, LAYERS, TOP_K] by hooks on the gates of an eager run; the choice must not hang on rounding."""
    rows = np.full((len(x), LAYERS, TOP_K), -1, np.int16)
    hooks = []
    for number, layer in enumerate(model.layers):
        if isinstance(layer.mlp, Moe):

            def keep(_: Any, __: Any, logits: Tensor, number: int = number) -> None:
                scores, ids = torch.topk(logits.softmax(-1), TOP_K + 1, dim=-1)
                assert (scores[:, :-1] - scores[:, 1:]).min() > 1e-6
                rows[:, number] = ids[:, :TOP_K].cpu().numpy()

            hooks.append(layer.mlp.gate.register_forward_hook(keep))
    model(x)
    for hook in hooks:
        hook.remove()
    return rows


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    torch._dynamo.reset()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def captured(session: Session, compiled: Any, x: Tensor) -> torch.cuda.CUDAGraph:
    padding = np.full(len(x), -1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            with session.step(padding):
                compiled(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with session.step(padding), torch.cuda.graph(graph):
        compiled(x)
    return graph


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_rows_equal_the_eager_router(inner: str) -> None:
    """Two token counts, dynamic shapes, slots in any order."""
    model = build()
    compiled = torch.compile(model, backend=r3_pass.backend(inner), dynamic=True)
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    for tokens in (24, 7):
        x = torch.randn(tokens, HIDDEN, device="cuda")
        slots = np.random.default_rng(tokens).permutation(SLOTS)[:tokens]
        with session.step(slots):
            compiled(x)
        assert (session.read(slots) == truth(model, x)).all()
    session.detach()


@pytest.mark.parametrize("placement", ["device", "pinned"])
def test_engine_cuda_graph_replays_any_step(placement: Placement) -> None:
    """An engine captures the forward once and replays it with other inputs, slots and padding."""
    model = build()
    compiled = torch.compile(model, backend=r3_pass.backend("inductor"))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS, placement=placement)
    static = torch.randn(16, HIDDEN, device="cuda")
    graph = captured(session, compiled, static)
    assert (session.read(np.arange(SLOTS)) == -1).all(), "warm-up and capture wrote rows"
    for step in range(5):
        real = 16 - step
        static.copy_(torch.randn(16, HIDDEN, device="cuda"))
        slots = np.random.default_rng(step).permutation(SLOTS)[:16]
        slots[real:] = -1
        with session.step(slots, [Segment(f"r{step}", 0, real)]):
            graph.replay()
        expected = truth(model, static)[:real]
        assert (session.finish(f"r{step}", real + 1) == expected).all()
        assert (session.read(slots[:real]) == expected).all()
        session.prefix_hit(f"again{step}", 0, slots[:real])
        assert (session.finish(f"again{step}", real + 1) == expected).all()
        session.assign(slots[:2])
        assert (session.read(slots[:2]) == -1).all()
    session.detach()


def by_layer(model: Decoder, inner: str, **options: Any) -> Session:
    backend = r3_pass.backend(inner)
    for layer in model.layers:
        layer.compile(backend=backend)
    return r3_pass.runtime.attach(model, backend=backend, num_slots=SLOTS, **options)


def launches(run: Any) -> int:
    """How often the record kernel runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if "record_kernel" in event.key)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_layers_compiled_by_themselves(inner: str) -> None:
    """One launch a forward, in a CUDA graph and without; rows of either."""
    model = build()
    plain = copy.deepcopy(model)  # a hook on what is compiled would be compiled, too
    session = by_layer(model, inner)
    static = torch.randn(16, HIDDEN, device="cuda")
    graph = captured(session, model, static)
    for number in range(4):
        static.copy_(torch.randn(16, HIDDEN, device="cuda"))
        slots = np.random.default_rng(number).permutation(SLOTS)[:16]
        with session.step(slots, [Segment(f"r{number}", 0, 16)]):
            assert launches(graph.replay if number % 2 else lambda: model(static)) == 1
        assert (session.finish(f"r{number}", 17) == truth(plain, static)).all()
        assert (session.read(slots) == truth(plain, static)).all()
    session.detach()


def test_layers_in_cuda_graphs_of_their_own() -> None:
    """Refused at first, since one launch for all of them would stand in the last one; then each graph writes its own layer."""
    model = build()
    plain = copy.deepcopy(model)
    session = by_layer(model, "eager")
    static, padding = torch.randn(16, HIDDEN, device="cuda"), np.full(16, -1)
    with session.step(padding):
        model(static)

    def capture() -> list[tuple[torch.cuda.CUDAGraph, Tensor]]:
        made, x = [], static
        with session.step(padding):
            for layer in model.layers:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    out = layer(x)
                made.append((graph, out))
                x = out
        return made

    with pytest.raises(r3_pass.RefusedConfiguration, match="several CUDA graphs"):
        capture()
    torch.cuda.synchronize()
    graphs = capture()
    for number in range(3):
        static.copy_(torch.randn(16, HIDDEN, device="cuda"))
        slots = np.random.default_rng(number).permutation(SLOTS)[:16]
        with session.step(slots, [Segment(number, 0, 16)]):
            for graph, _ in graphs:
                graph.replay()
        assert (session.finish(number, 17) == truth(plain, static)).all()
    with session.step(np.arange(16), [Segment("skips", 0, 16)]):
        for graph, _ in (*graphs[:2], graphs[3]):
            graph.replay()
    with pytest.raises(r3_pass.PartialCapture, match="written"):
        session.finish("skips", 17)
    session.detach()


class Pairs(Decoder):
    def pair(self, x: Tensor) -> Tensor:
        return self.layers[2](self.layers[1](x))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[3](self.pair(self.layers[0](x)))


@pytest.mark.parametrize("warm", [1, 3])
def test_captured_layers_beside_a_graph_of_two(warm: int) -> None:
    """The launch of some layers reads columns and addresses of its own, at every replay."""
    torch.manual_seed(0)
    model = Pairs().cuda().requires_grad_(False)
    plain = copy.deepcopy(model)
    backend = r3_pass.backend("eager")
    model.pair = torch.compile(model.pair, backend=backend)
    for layer in (model.layers[0], model.layers[3]):
        layer.compile(backend=backend)
    session = r3_pass.runtime.attach(model, backend=backend, num_slots=SLOTS)
    static, padding = torch.randn(16, HIDDEN, device="cuda"), np.full(16, -1)
    for _ in range(warm):
        with session.step(padding):
            model(static)
    graphs: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with session.step(padding), torch.cuda.graph(graph, pool=graphs[0][0].pool() if graphs else None):
            graphs.append((graph, model(static)))
    torch.cuda.synchronize()
    others = [torch.zeros(1024, dtype=torch.int64, device="cuda") for _ in range(200)]
    others += [torch.full((64,), 9).pin_memory() for _ in range(200)]
    for number in range(4):
        static.copy_(torch.randn(16, HIDDEN, device="cuda"))
        with session.step(np.arange(16), [Segment(number, 0, 16)]):
            graphs[number % 2][0].replay()
        assert (session.finish(number, 17) == truth(plain, static)).all()
    session.detach()


def test_another_default_device() -> None:
    model = build()
    plain = copy.deepcopy(model)
    session = by_layer(model, "eager")
    torch.set_default_device("cuda")
    try:
        x = torch.randn(16, HIDDEN)
        with session.step(np.arange(16)):
            model(x)
    finally:
        torch.set_default_device(None)
    assert (session.read(np.arange(16)) == truth(plain, x)).all()
    session.detach()


def test_layers_on_two_streams() -> None:
    """The launch waits for both, and nobody gets the ids' memory before it is over."""
    model = build()
    plain = copy.deepcopy(model)
    session = by_layer(model, "eager")
    x, other = torch.randn(16, HIDDEN, device="cuda"), torch.cuda.Stream()
    with session.step(np.arange(16)):
        model(x)
    for number in range(5):
        x = torch.randn(16, HIDDEN, device="cuda")
        y = x
        with session.step(np.arange(16), [Segment(number, 0, 16)]):
            for index, layer in enumerate(model.layers):
                if index == 2:
                    other.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(other):
                        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
                        y = layer(y)
                    torch.cuda.current_stream().wait_stream(other)
                else:
                    y = layer(y)
            for _ in range(20):
                torch.full((16, TOP_K), 3, device="cuda")
        assert (session.finish(number, 17) == truth(plain, x)).all()
    session.detach()


def test_a_graph_without_the_record_op_is_found_out() -> None:
    """A graph captured under `paused` writes nothing: the device's count tells, at the next call, and rows are not invented."""
    model = build()
    compiled = torch.compile(model, backend=r3_pass.backend("inductor"))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    static = torch.randn(16, HIDDEN, device="cuda")
    captured(session, compiled, static)
    plain = torch.cuda.CUDAGraph()
    with session.paused(), torch.cuda.graph(plain):
        compiled(static)
    with session.step(np.arange(16), [Segment("r", 0, 16)]):
        plain.replay()
    with pytest.raises(r3_pass.PartialCapture, match="written"):
        session.finish("r", 17)
    with pytest.raises(r3_pass.R3Error):
        session.finish("r", 17)
    session.detach()


def test_replay_outside_a_step_writes_nothing() -> None:
    model = build()
    compiled = torch.compile(model, backend=r3_pass.backend("inductor"))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    static = torch.randn(16, HIDDEN, device="cuda")
    graph = captured(session, compiled, static)
    with session.step(np.arange(16)):
        graph.replay()
    before = session.read(np.arange(16))
    static.normal_()
    graph.replay()
    assert (session.read(np.arange(16)) == before).all()
    session.detach()


def test_inductor_cuda_graphs_stay_on() -> None:
    """`triton.cudagraphs`: the mutated buffer neither disables them nor is copied into their pool."""
    from torch._dynamo.utils import counters

    model = build()
    compiled = torch.compile(model, backend=r3_pass.backend("inductor"), options={"triton.cudagraphs": True})
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    counters.clear()
    for step in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(16, HIDDEN, device="cuda")
        slots = np.random.default_rng(step).permutation(SLOTS)[:16]
        with session.step(slots):
            compiled(x)
        assert (session.read(slots) == truth(model, x)).all()
    assert counters["inductor"]["cudagraph_skips"] == 0
    session.detach()


@pytest.mark.parametrize(
    ("slots", "words"),
    [([0, 1, SLOTS, 3], "out of range"), ([0, 1, 1, 3], "twice"), ([0, -7, 2, 3], "out of range")],
)
def test_device_mappings_are_checked_on_the_device(slots: list[int], words: str) -> None:
    """A mapping that lies on the device is checked there, without waiting; the fault is raised by the next step or finish."""
    model = build()
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    x = torch.randn(4, HIDDEN, device="cuda")
    with session.step(torch.arange(4, device="cuda"), [Segment("good", 0, 4)]):
        compiled(x)
    with session.step(torch.tensor(slots, device="cuda"), [Segment("bad", 0, 4)]):
        compiled(x)
    with pytest.raises(r3_pass.BufferLayoutError, match=words):
        session.finish("bad", 5)
    assert (session.finish("good", 5) == truth(model, x)).all()
    with pytest.raises(r3_pass.R3Error):
        session.finish("bad", 5)
    assert session.abort("bad", 5).shape[0] == 0
    session.detach()


def test_a_step_never_waits_for_the_device() -> None:
    """No synchronisation from entering a step to leaving it, mapping on the host, rows exported."""
    model = build()
    compiled = torch.compile(model, backend=r3_pass.backend("inductor"))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    x = torch.randn(16, HIDDEN, device="cuda")
    for position in range(3):
        with session.step(np.arange(16), [Segment(i, position, 1) for i in range(16)]):
            compiled(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with session.step(np.arange(16), [Segment(i, 3, 1) for i in range(16)]):
            compiled(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (session.finish(3, 5) == truth(model, x)[3]).all()
    session.detach()


def test_the_buffer_is_bound_again_without_recompilation() -> None:
    model = build()
    backend = r3_pass.backend("inductor")
    compiled = torch.compile(model, backend=backend)
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    x = torch.randn(16, HIDDEN, device="cuda")
    for slots in (SLOTS, 1000, 17):
        session.release()
        session.wake(slots)
        with session.step(np.arange(16)):
            compiled(x)
        assert (session.read(np.arange(16)) == truth(model, x)).all()
    assert backend.report().num_graphs == 1
    session.detach()


def test_a_long_prefix_hit_takes_little_memory() -> None:
    """100,000 tokens of 61 x 8, through a session: below 16 MiB on the device beside the buffer."""
    model = build()
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    x = torch.randn(4, HIDDEN, device="cuda")
    with session.step(np.arange(4), [Segment("before", 0, 4)]):
        compiled(x)
    session.abort("before", 5)  # its copy has arrived: the table below has rows of another shape
    # The geometry of a large model, beside the small one that runs.
    geometry = Geometry(num_slots=100_000, num_layers=61, stored=tuple(range(61)), top_k=8)
    large = SlotBuffer(geometry, "cuda")
    large.data[:-1] = (torch.arange(100_000, device="cuda") % 30_000).to(torch.int16).view(-1, 1, 1)
    slots = np.random.default_rng(0).permutation(100_000)
    held = session._store.buffer, session._delivery.table
    session._store.buffer, session._delivery.table = large, SequenceTable(RowLog(geometry.row_shape))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    session.prefix_hit("hit", 0, slots)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 16 * 2**20
    rows = session.finish("hit", 100_001)
    assert (rows == (slots % 30_000).astype(np.int16)[:, None, None]).all()
    session._store.buffer, session._delivery.table = held
    session.check_integrity()
    session.detach()


def test_a_neighbour_finishes_before_a_prefix_has_arrived() -> None:
    """The host takes in the step's copy without that of the prefix before it."""
    model = build()
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    x, y = torch.randn(4, HIDDEN, device="cuda"), torch.randn(3, HIDDEN, device="cuda")
    for ids in (x, y, x):  # whatever is compiled for these lengths is compiled now
        with session.step(np.arange(len(ids)), [Segment("before", 0, len(ids))]):
            compiled(ids)
    session.finish("before", 5)
    want = truth(model, y)
    stream = session._delivery.exporter._prefix_stream
    assert stream is not None
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # type: ignore[no-untyped-call]
    session.prefix_hit("hit", 0, np.arange(4))
    (piece,) = session._delivery.arrivals._pieces
    with session.step(np.arange(10, 13), [Segment("b", 0, 3)]):
        compiled(y)
    assert (session.finish("b", 4) == want).all()
    assert not piece.pending.done()
    assert (session.finish("hit", 5) == truth(model, x)).all()
    session.check_integrity()
    session.detach()


def test_a_pinned_buffer_takes_no_memory_of_the_gpu() -> None:
    model = build()
    slots = 1_000_000
    model(torch.randn(8, HIDDEN, device="cuda"))  # a process's first product makes a workspace of 32 MiB
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    session = r3_pass.runtime.attach(
        torch.compile(model, backend=r3_pass.backend("eager")), num_slots=slots, max_tokens=64, placement="pinned"
    )
    x = torch.randn(8, HIDDEN, device="cuda")
    last = np.arange(slots - 8, slots)
    compiled = session._call
    with session.step(last):
        compiled(x)
    nbytes = session.geometry.nbytes
    assert torch.cuda.max_memory_allocated() - before < nbytes / 2
    assert session.host_bytes >= nbytes
    assert (session.read(last) == truth(model, x)).all()
    session.release()
    assert session.host_bytes < nbytes
    session.wake(SLOTS)
    with session.step(range(8)):
        compiled(x)
    assert (session.read(range(8)) == truth(model, x)).all()
    session.detach()


def test_a_buffer_larger_than_the_device() -> None:
    """Refused by its bytes before anything is allocated."""
    model = build()
    before = torch.cuda.memory_allocated()
    with pytest.raises(r3_pass.RefusedConfiguration, match=r"does not fit on cuda:0: \d+ bytes"):
        r3_pass.runtime.attach(model, num_slots=10**12)
    assert torch.cuda.memory_allocated() == before
    assert not any(vars(p) for p in model.parameters())
