"""The Dynamo backend: rows of every layer and model to the right place, under all the ways to compile, and nothing left behind."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.backends.debugging
from backend import operators
from decoder import Block, D, Decoder, Moe, decoder, prompt, truth
from torch import Tensor, fx, nn

import r3_pass
from r3_pass.binding import Binding
from r3_pass.runtime import Session

SLOTS, T = 64, 9


@pytest.fixture
def sessions() -> Iterator[Callable[..., Session]]:
    """`attach`, and `detach` at the end."""
    made: list[Session] = []

    def attach(*args: Any, **options: Any) -> Session:
        made.append(r3_pass.runtime.attach(*args, num_slots=options.pop("num_slots", SLOTS), **options))
        return made[-1]

    yield attach
    for session in made:
        session.check_integrity()
        session.detach()


Attach = Callable[..., Session]


def step(session: Session, call: Callable[..., Any], ids: Tensor, first: int = 0) -> np.ndarray:
    """The rows of one recorded forward, into slots from `first` on."""
    slots = np.arange(first, first + ids.numel())
    with torch.no_grad(), session.step(slots):
        call(ids)
    return session.read(slots)


def per_layer(model: Decoder, backend: Any) -> Decoder:
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def marks(model: nn.Module) -> set[str]:
    return {name for p in (*model.parameters(), *model.buffers()) for name in vars(p) if "r3" in name}


# ---- ways to compile ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_rows_and_outputs(inner: str, sessions: Attach) -> None:
    """Every row as the eager router chose, outputs bit for bit those of the same inner backend."""
    model = decoder()
    with torch.no_grad():
        want = torch.compile(model, backend=inner)(prompt(T))
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=r3_pass.backend(inner))
        session = sessions(compiled)
        with session.step(range(T)):
            got = compiled(prompt(T))
        outside = compiled(prompt(T))
    assert torch.equal(got, want) and torch.equal(outside, want)
    assert (session.read(range(T)) == truth(model, prompt(T))).all()


@pytest.mark.parametrize(
    "how", ["name", "model.compile", "function", "fullgraph", "module of the model", "backend function as inner"]
)
def test_ways_to_compile(how: str, sessions: Attach) -> None:
    """CONTRACT.md names each; the model is found behind whatever wraps it."""
    model, backend = decoder(), r3_pass.backend("eager")
    call: Any = model
    if how == "name":
        call = torch.compile(model, backend="r3_pass", options={"inner": "aot_eager"})
        session = sessions(call)
    elif how == "model.compile":
        model.compile(backend=backend)
        session = sessions(model, backend=backend)
    elif how == "function":
        call = torch.compile(lambda ids: model(ids).argmax(-1), backend=backend)
        session = sessions(model, backend="r3_pass")
    elif how == "fullgraph":
        call = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        session = sessions(call)
    elif how == "module of the model":
        holder = nn.Module()
        holder.add_module("inner", model)
        call = torch.compile(model, backend=backend)
        session = sessions(holder, backend=backend)
    else:
        call = torch.compile(model, backend=r3_pass.backend(torch._dynamo.lookup_backend("aot_eager")))
        session = sessions(call)
    assert (step(session, call, prompt(T)) == truth(model, prompt(T))).all()


def test_a_compiled_function_shows_no_model() -> None:
    """Guessed at, another model's rows would be recorded; the message says what to pass."""
    model = decoder()
    with pytest.raises(r3_pass.RefusedConfiguration, match="attach\\(model, backend="):
        r3_pass.runtime.attach(torch.compile(lambda ids: model(ids), backend="eager"), num_slots=SLOTS)


def test_token_counts_and_shapes(sessions: Attach) -> None:
    """Dynamic shapes: few graphs, every count its own rows, prefill after decode and back."""
    model, backend = decoder(), r3_pass.backend("aot_eager")
    compiled = torch.compile(model, backend=backend)
    session = sessions(compiled)
    for tokens in (T, 7, 1, 12, 1, 7):
        assert (step(session, compiled, prompt(tokens, tokens)) == truth(model, prompt(tokens, tokens))).all()
    assert backend.report().num_graphs <= 3
    ids = torch.cat([prompt(4), prompt(4, 1)])
    assert (step(session, compiled, ids) == truth(model, ids)).all()


def test_padding_and_slots_in_any_order(sessions: Attach) -> None:
    """Slots are where the engine put the KV, not 0 .. T - 1."""
    model = decoder()
    compiled = torch.compile(model, backend=r3_pass.backend("aot_eager"))
    session = sessions(compiled)
    slots = np.array([63, 0, -1, 17, 2, -1, 40, 41, 5])
    with torch.no_grad(), session.step(slots):
        compiled(prompt(T))
    want = truth(model, prompt(T))
    assert (session.read(slots[slots >= 0]) == want[slots >= 0]).all()
    assert (session.read(np.setdiff1d(np.arange(SLOTS), slots)) == -1).all()


def test_nothing_is_recorded_outside_a_step(sessions: Attach) -> None:
    """A forward of an evaluation between two steps would overwrite slots of running requests."""
    model = decoder()
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = sessions(compiled)
    before = step(session, compiled, prompt(T))
    compiled(prompt(T, 1))
    with session.paused():
        compiled(prompt(T, 2))
    assert (session.read(range(T)) == before).all()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("layers", [False, True])
def test_attach_before_or_after_the_first_call(when: str, layers: bool, sessions: Attach) -> None:
    """An engine compiles while it warms up, long before or after somebody attaches."""
    model, backend = decoder(), r3_pass.backend("aot_eager")
    call: Any = per_layer(model, backend) if layers else torch.compile(model, backend=backend)
    if when == "after":
        with torch.no_grad():
            call(prompt(T))
    session = sessions(model, backend=backend)
    graphs = backend.report().num_graphs
    assert (step(session, call, prompt(T)) == truth(model, prompt(T))).all()
    assert when == "before" or backend.report().num_graphs == graphs


def test_a_compile_in_another_thread(sessions: Attach) -> None:
    """State in a thread is invisible to the engine's compile thread, and to autograd's."""
    model, backend = decoder(), r3_pass.backend("aot_eager")
    compiled = torch.compile(model, backend=backend)
    session = sessions(compiled)
    found: list[Any] = []

    def work() -> None:
        with torch.no_grad():
            found.append(compiled(prompt(T)))

    thread = threading.Thread(target=work)
    with session.step(range(T)):
        thread.start()
        thread.join()
    assert found and (session.read(range(T)) == truth(model, prompt(T))).all()
    graphs = backend.report().num_graphs
    assert (step(session, compiled, prompt(T, 1)) == truth(model, prompt(T, 1))).all()
    assert backend.report().num_graphs == graphs


def test_another_number_of_slots_needs_no_compilation(sessions: Attach) -> None:
    """Sleep and wake with a cache of another size: a recompilation of a large model takes minutes."""
    model, backend = decoder(), r3_pass.backend("aot_eager")
    compiled = torch.compile(model, backend=backend)
    session = sessions(compiled)
    for slots in (SLOTS, 1000, 17):
        session.release()
        session.wake(slots)
        assert (step(session, compiled, prompt(T)) == truth(model, prompt(T))).all()
        assert session.geometry.num_slots == slots
    assert backend.report().num_graphs == 1


# ---- no copy of the buffer ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("training", [False, True])
def test_aot_graphs_hold_no_copy_of_the_buffer(
    training: bool, monkeypatch: pytest.MonkeyPatch, sessions: Attach
) -> None:
    """Functionalised, the op works on a clone and copies it back: megabytes at every step (FACTS.md: 1 ms)."""
    kept: list[fx.GraphModule] = []
    real = torch._dynamo.backends.debugging.boxed_nop
    monkeypatch.setattr(torch._dynamo.backends.debugging, "boxed_nop", lambda g, i: (kept.append(g), real(g, i))[1])
    model = decoder().train(training).requires_grad_(training)
    compiled = torch.compile(model, backend=r3_pass.backend("aot_eager"))
    session = sessions(compiled)
    with torch.set_grad_enabled(training), session.step(range(T)):
        compiled(prompt(T))
    (recording,) = [g for g in kept if "r3_pass::record" in operators(g)]
    assert operators(recording)["r3_pass::record"] == 1
    (op,) = [n for n in recording.graph.nodes if n.target is torch.ops.r3_pass.record.default]
    for persistent in op.args[:4]:
        assert persistent.op == "placeholder" and list(persistent.users) == [op]
    assert not any("functionalized" in str(n.target) for n in recording.graph.nodes)
    assert (session.read(range(T)) == truth(model, prompt(T))).all()


@pytest.mark.inductor
def test_inductor_code_calls_the_op_once_and_copies_nothing(sessions: Attach) -> None:
    """The generated code is what runs: one call on the argument itself, no copy of anything int16."""
    from torch._inductor.utils import run_and_get_code

    model = decoder()
    compiled = torch.compile(model, backend=r3_pass.backend("inductor"))
    session = sessions(compiled)

    def run() -> None:
        with torch.no_grad(), session.step(range(T)):
            compiled(prompt(T))

    _, codes = run_and_get_code(run)
    (code,) = [c for c in codes if "r3_pass.record" in c]
    (line,) = [part for part in code.splitlines() if "torch.ops.r3_pass.record.default(" in part]
    buffer = line.partition("record.default(")[2].split(",")[0].strip()
    assert buffer.startswith("arg") or buffer.startswith("primals")
    uses = [part for part in code.splitlines() if buffer in part.replace("(", " ").replace(",", " ").split()]
    assert not any("copy_" in part or "clone" in part or "empty_strided" in part for part in uses), uses
    assert (session.read(range(T)) == truth(model, prompt(T))).all()


def test_an_inner_backend_that_cannot_be() -> None:
    with pytest.raises(
        r3_pass.RefusedConfiguration, match=r"inner='inducter' is no Dynamo backend.*inductor"
    ) as raised:
        r3_pass.backend("inducter")
    assert "TESTING_ONLY" not in str(raised.value) and "r3_pass," not in str(raised.value)
    for ours in ("r3_pass", r3_pass.backend("eager")):
        with pytest.raises(r3_pass.RefusedConfiguration, match="recorded twice"):
            r3_pass.backend(ours)


@pytest.mark.parametrize("mode", [None, "max-autotune"])
def test_a_backend_that_was_not_called(mode: str | None) -> None:
    """It was Python's complaint about arguments, of a call that no one wrote."""
    compiled = torch.compile(nn.Linear(D, D), backend=r3_pass.backend, mode=mode)
    with pytest.raises(Exception, match=r"Call it: torch\.compile\(model, backend=r3_pass\.backend\(\)\)") as error:
        compiled(torch.ones(2, D))
    causes = [error.value, error.value.__cause__, getattr(error.value, "inner_exception", None)]
    assert any(isinstance(cause, r3_pass.RefusedConfiguration) for cause in causes)
    with pytest.raises(TypeError, match="inner alone by position"):
        r3_pass.backend("eager", "replay")


# ---- layers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_one_graph_for_all_layers(inner: str, sessions: Attach) -> None:
    """`layer.compile`: the layer is known at the call only, by the weights that arrive."""
    model, backend = decoder(layers=5, dense=(0, 3)), r3_pass.backend(inner)
    call = per_layer(model, backend)
    session = sessions(call, backend=backend)
    for tokens in (T, 5):
        assert (step(session, call, prompt(tokens)) == truth(model, prompt(tokens))).all()
    assert [s.layer for s in backend.report().sites] == [1, 2, 4]
    moe_graphs = {s.graph for s in backend.report().sites}
    assert len(moe_graphs) < 3


def test_layers_of_different_top_k(sessions: Attach) -> None:
    """Graphs of their own for each k; the row is as wide as the widest, which the config need not say."""
    model, backend = decoder(layers=4, top_k=(0, 1, 3, 2), config={"num_experts_per_tok": 2}), r3_pass.backend("eager")
    session = sessions(per_layer(model, backend), backend=backend)
    rows = step(session, model, prompt(T))
    assert session.geometry.top_k == 3
    assert (rows == truth(model, prompt(T))).all()


class Unseen(Moe):
    """Experts in one flat matrix: nothing of its modules shows a bank of experts."""

    def __init__(self, top_k: int) -> None:
        super().__init__(top_k=top_k)
        self.up, self.down = nn.Parameter(self.up.data.flatten(0, 1)), nn.Parameter(self.down.data.flatten(0, 1))
        self.more = nn.ParameterList([nn.Parameter(torch.ones(1))])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        weights, ids = torch.topk(self.gate(flat).softmax(-1), self.top_k, dim=-1)
        up, down = self.up.view(8, -1, D)[ids], self.down.view(8, D, -1)[ids]
        return torch.einsum("tkf,tkdf,tk->td", torch.relu(torch.einsum("td,tkfd->tkf", flat, up)), down, weights).view(
            x.shape
        )


@pytest.mark.parametrize("top_k", [2, (0, 1, 2, 3)])
def test_layers_that_only_their_graphs_show(top_k: Any, sessions: Attach) -> None:
    """The buffer grows from graph to graph in the first step; rows and counts of the layers before went with the old one."""
    model, backend = decoder(layers=4, top_k=top_k, moe=lambda k: Unseen(k)), r3_pass.backend("eager")
    session = sessions(per_layer(model, backend), backend=backend)
    with pytest.raises(r3_pass.RefusedConfiguration, match="not laid out"):
        session.geometry  # noqa: B018
    want = truth(model, prompt(T))
    assert (step(session, model, prompt(T)) == want).all()
    assert (step(session, model, prompt(T), first=20) == want).all()
    assert session.geometry.stored == (1, 2, 3)


class Reversed(Decoder):
    """The last layer runs first."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


def test_layers_that_run_in_another_order(sessions: Attach) -> None:
    """A layer that is found after one behind it moves that one's column: where it was placed before does not hold any more."""
    torch.manual_seed(0)
    model, backend = Reversed(layers=4, moe=lambda k: Unseen(k)).requires_grad_(False), r3_pass.backend("eager")
    session = sessions(per_layer(model, backend), backend=backend)
    for first in (0, 20):
        assert (step(session, model, prompt(T), first) == truth(model, prompt(T))).all()


def test_a_layer_like_the_captured_ones_is_expected(sessions: Attach) -> None:
    """Experts of no known structure, one layer not compiled: it would read -1 in silence, as if it were dense."""
    model, backend = decoder(layers=4, moe=lambda k: Unseen(k)), r3_pass.backend("eager")
    for layer in model.layers[:3]:
        layer.compile(backend=backend)
    session = sessions(model, backend=backend)
    with pytest.raises(r3_pass.PartialCapture, match="layer 3"):
        step(session, model, prompt(T))
    model.layers[3].compile(backend=backend)
    step(session, model, prompt(T))


def test_blocks_that_hang_in_a_sequential(sessions: Attach) -> None:
    """`nn.Sequential(*blocks)` names its layers "0", "1", ...: the list has no name of its own."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(Moe()) for _ in range(3))).requires_grad_(False)
    compiled = torch.compile(blocks, backend=r3_pass.backend("eager"))
    session = sessions(compiled)
    x = torch.randn(1, T, D)
    with session.step(range(T)):
        compiled(x)
    rows = session.read(range(T))
    for n, block in enumerate(blocks):
        logits = block.mlp.gate(block.norm(blocks[:n](x)).view(-1, D))
        assert (rows[:, n] == logits.softmax(-1).topk(2)[1].numpy()).all()


class Tied(Decoder):
    """One MLP in two layers."""

    def __init__(self) -> None:
        super().__init__(layers=3, dense=())
        self.layers[2].mlp = self.layers[1].mlp


def test_a_shared_mlp_is_told_by_its_path(sessions: Attach) -> None:
    """The weights name both layers; in a graph of the whole model, the module path says which of them runs."""
    torch.manual_seed(0)
    model = Tied().requires_grad_(False)
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = sessions(compiled)
    rows = step(session, compiled, prompt(T))
    seen: list[Tensor] = []
    hook = model.layers[1].mlp.gate.register_forward_hook(lambda m, i, o: seen.append(o.softmax(-1).topk(2)[1]))
    model(prompt(T))
    hook.remove()
    assert (rows[:, 1] == seen[0].numpy()).all() and (rows[:, 2] == seen[1].numpy()).all()


def test_a_shared_mlp_that_nothing_tells_is_an_error(sessions: Attach) -> None:
    """Compiled by itself, its calls for both layers bring the same weights: whatever was recorded would be a guess."""
    model, backend = Tied().requires_grad_(False), r3_pass.backend("eager")
    for layer in model.layers:
        layer.mlp.compile(backend=backend)
    session = sessions(model, backend=backend)
    for _ in range(2):
        with pytest.raises(r3_pass.PartialCapture, match="shared by"):
            step(session, model, prompt(T))
    assert (session.read(range(T)) == -1).all()


class Residual(Decoder):
    """Each router adds the logits of the one before."""

    def forward(self, ids: Tensor) -> Tensor:
        x, before = self.embed(ids), 0
        for layer in self.layers:
            flat = layer.norm(x).reshape(-1, D)
            before = layer.mlp.gate(flat) + before
            weights, chosen = torch.topk(before.softmax(-1), 2, dim=-1)
            hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, layer.mlp.up[chosen]))
            x = x + torch.einsum("tkf,tkdf,tk->td", hidden, layer.mlp.down[chosen], weights).view(x.shape)
        return self.head(x)


def test_routers_that_add_earlier_logits(sessions: Attach) -> None:
    """Every gate so far is behind the scores of layer 2: its experts say which layer it is."""
    torch.manual_seed(0)
    model = Residual(dense=()).requires_grad_(False)
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = sessions(compiled)
    rows = step(session, compiled, prompt(T))
    assert (rows >= 0).all()
    logits: list[Tensor] = []
    hooks = [b.mlp.gate.register_forward_hook(lambda m, i, o: logits.append(o)) for b in model.layers]
    model(prompt(T))
    for hook in hooks:
        hook.remove()
    for layer in range(3):
        assert (rows[:, layer] == sum(logits[: layer + 1]).softmax(-1).topk(2)[1].numpy()).all()


# ---- graph breaks ---------------------------------------------------------------------------------------------------
BREAKS = {
    "gate|topk+experts": {"before_selection": torch._dynamo.graph_break},
    "gate+topk|experts": {"after_selection": torch._dynamo.graph_break},
}


@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.parametrize("layers", [False, True])
def test_graph_breaks_inside_a_layer(breaks: str, layers: bool, sessions: Attach) -> None:
    """One graph serves all layers behind a break; where gate and selection part, the experts name the layer."""
    model = decoder(layers=4, moe=lambda k: Moe(top_k=k, **BREAKS[breaks]))
    backend = r3_pass.backend("aot_eager")
    call: Any = per_layer(model, backend) if layers else torch.compile(model, backend=backend)
    session = sessions(model, backend=backend)
    for tokens in (T, 5):
        assert (step(session, call, prompt(tokens)) == truth(model, prompt(tokens))).all()


def test_a_selection_alone_in_its_graph_is_an_error(sessions: Attach) -> None:
    """gate | top-k | experts: no weight in the graph of the selection, so nothing says whose it is."""
    model = decoder(moe=lambda k: Moe(top_k=k, **BREAKS["gate|topk+experts"], **BREAKS["gate+topk|experts"]))
    backend = r3_pass.backend("eager")
    compiled = torch.compile(model, backend=backend)
    session = sessions(compiled)
    for _ in range(2):
        with pytest.raises(r3_pass.NoRouterFound, match="layer 1"):
            step(session, compiled, prompt(T))


@pytest.mark.parametrize("config", [None, {"num_experts_per_tok": 2}])
def test_a_layer_that_is_not_compiled_is_an_error(config: Any, sessions: Attach) -> None:
    """Its rows would be -1, as a dense layer's. Without a top-k in the config the layers that ran were taken for all there are."""
    model, backend = decoder(layers=4, config=config), r3_pass.backend("eager")
    for layer in (0, 1, 3):
        model.layers[layer].compile(backend=backend)
    session = sessions(model, backend=backend)
    for _ in range(2):
        with pytest.raises(
            r3_pass.PartialCapture, match=r"2 of 3 MoE layers[\s\S]*layer 2: layers\.2\.mlp\.up holds 8 experts"
        ):
            step(session, model, prompt(T))
        assert (session.read(range(T)) == -1).all(), "rows of two layers of three are no rows"
    model.layers[2].compile(backend=backend)
    assert (step(session, model, prompt(T)) == truth(model, prompt(T))).all()


class DenseWithTopK(nn.Module):
    """A dense layer that selects something by a linear and hands it to code outside of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.probe, self.out = nn.Linear(D, 8, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.probe(x.reshape(-1, D)).topk(2)[1]
        torch._dynamo.graph_break()
        return self.out(x) * (chosen.sum() > 0)


def test_ids_that_leave_a_layer_without_experts_are_no_routing(sessions: Attach) -> None:
    """Taken for routing since they escape by a break, the dense layer would get rows. An error: nothing can prove either."""
    model = decoder()
    model.layers[0].mlp = DenseWithTopK().requires_grad_(False)
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = sessions(compiled)
    with pytest.raises(r3_pass.PartialCapture, match="none are seen in the layer's modules"):
        step(session, compiled, prompt(T))


# ---- models ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layers", [False, True])
def test_two_models_two_sessions(layers: bool, sessions: Attach) -> None:
    """Target and drafter of one class run the same compiled graph: the second overwrote the first's rows (FACTS.md)."""
    backend = r3_pass.backend("aot_eager")
    models = [decoder(seed=s) for s in (0, 1)]
    calls: list[Any] = [per_layer(m, backend) if layers else torch.compile(m, backend=backend) for m in models]
    held = [sessions(m, backend=backend) for m in models]
    for seed in (0, 1):
        with torch.no_grad(), held[0].step(range(T)), held[1].step(range(10, 10 + T)):
            for call in calls:
                call(prompt(T, seed))
        for n, session in enumerate(held):
            mine, others = (range(T), range(10, 10 + T)) if n == 0 else (range(10, 10 + T), range(T))
            assert (session.read(mine) == truth(models[n], prompt(T, seed))).all()
            assert (session.read(others) == -1).all()


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("first", ["target", "drafter"])
def test_a_drafter_without_a_session_writes_nothing(
    layers: bool, first: str, sessions: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failure class 2. Its weights are looked for once, not at every call: a search through a large model takes milliseconds."""
    backend = r3_pass.backend("aot_eager")
    target, drafter = decoder(seed=0), decoder(seed=1)
    calls: list[Any] = [
        per_layer(m, backend) if layers else torch.compile(m, backend=backend) for m in (target, drafter)
    ]
    if first == "drafter":
        with torch.no_grad():
            calls[1](prompt(T))
    session = sessions(target, backend=backend)
    claims: list[int] = []
    real = Binding.claim
    monkeypatch.setattr(Binding, "claim", lambda self: (claims.append(1), real(self))[1])
    for seed in range(3):
        with torch.no_grad(), session.step(range(T)):
            calls[1](prompt(T, seed + 5))
            calls[0](prompt(T, seed))
            calls[1](prompt(T, seed + 6))
        assert (session.read(range(T)) == truth(target, prompt(T, seed))).all()
    assert len(claims) <= 2 * len(target.layers)
    assert not marks(drafter)


def test_the_drafter_is_attached_later(sessions: Attach) -> None:
    """A model that was once told a stranger may get a session of its own."""
    backend = r3_pass.backend("eager")
    target, drafter = decoder(seed=0), decoder(seed=1)
    calls = [torch.compile(m, backend=backend) for m in (target, drafter)]
    session = sessions(target, backend=backend)
    step(session, calls[0], prompt(T))
    with torch.no_grad():
        calls[1](prompt(T))
    assert (step(sessions(drafter, backend=backend), calls[1], prompt(T)) == truth(drafter, prompt(T))).all()


# ---- weights that are replaced --------------------------------------------------------------------------------------
@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("tell", [False, True])
def test_weights_assigned_after_compilation(layers: bool, tell: bool, sessions: Attach) -> None:
    """`load_state_dict(assign=True)`: with bare ids recycled, wrong layers were named, without recompilation (FACTS.md)."""
    model, backend = decoder(layers=4), r3_pass.backend("aot_eager")
    call: Any = per_layer(model, backend) if layers else torch.compile(model, backend=backend)
    session = sessions(model, backend=backend)
    step(session, call, prompt(T))
    for seed in (1, 2, 3):
        model.load_state_dict(decoder(seed=seed, layers=4).state_dict(), assign=True)
        model.requires_grad_(False)
        if tell:
            session.weights_changed(seed)
        assert (step(session, call, prompt(T)) == truth(model, prompt(T))).all()


@pytest.mark.parametrize("layers", [False, True])
def test_one_layers_weights_assigned(layers: bool, sessions: Attach) -> None:
    """A trainer that sends one bucket of weights at a time: rows of that layer right, or a clear error, never wrong rows."""
    model, backend = decoder(layers=4), r3_pass.backend("eager")
    call: Any = per_layer(model, backend) if layers else torch.compile(model, backend=backend)
    session = sessions(model, backend=backend)
    step(session, call, prompt(T))
    model.layers[2].load_state_dict(decoder(seed=5, layers=4).layers[2].state_dict(), assign=True)
    model.requires_grad_(False)
    assert (step(session, call, prompt(T)) == truth(model, prompt(T))).all()


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("what", ["layers", "gates", "moes"])
def test_weights_that_change_places(layers: bool, what: str, sessions: Attach) -> None:
    """The same parameters at other places in the model: a mark that says where a weight hung names the wrong layer."""
    model, backend = decoder(layers=4), r3_pass.backend("eager")
    call: Any = per_layer(model, backend) if layers else torch.compile(model, backend=backend)
    session = sessions(model, backend=backend)
    step(session, call, prompt(T))
    one, two = model.layers[1], model.layers[3]
    if what == "layers":
        held = one.state_dict(keep_vars=True), two.state_dict(keep_vars=True)
        one.load_state_dict(held[1], assign=True)
        two.load_state_dict(held[0], assign=True)
    elif what == "gates":
        one.mlp.gate.weight, two.mlp.gate.weight = two.mlp.gate.weight, one.mlp.gate.weight
    else:
        one.mlp, two.mlp = two.mlp, one.mlp
    for seed in (0, 1):
        assert (step(session, call, prompt(T, seed)) == truth(model, prompt(T, seed))).all()


def test_weights_of_another_model_are_taken_over(sessions: Attach) -> None:
    """A stranger's parameters, met before by the same graph, become the model's own."""
    backend = r3_pass.backend("eager")
    model, other = decoder(seed=0), decoder(seed=1)
    compiled, beside = torch.compile(model, backend=backend), torch.compile(other, backend=backend)
    session = sessions(model, backend=backend)
    step(session, compiled, prompt(T))
    beside(prompt(T))
    model.load_state_dict(other.state_dict(keep_vars=True), assign=True)
    assert (step(session, compiled, prompt(T)) == truth(model, prompt(T))).all()


# ---- detach, copies, files ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layers", [False, True])
def test_detach_leaves_nothing(layers: bool, sessions: Attach) -> None:
    """A detached session that took the weights back at the next call blocked every later attach."""
    model, backend = decoder(), r3_pass.backend("eager")
    call: Any = per_layer(model, backend) if layers else torch.compile(model, backend=backend)
    session = r3_pass.runtime.attach(model, backend=backend, num_slots=SLOTS)
    step(session, call, prompt(T))
    assert marks(model)
    session.detach()
    assert not marks(model)
    with torch.no_grad():
        call(prompt(T))
    assert not marks(model)
    with pytest.raises(r3_pass.RefusedConfiguration, match="detached"):
        session.step(range(T)).__enter__()
    again = sessions(model, backend=backend)
    assert (step(again, call, prompt(T)) == truth(model, prompt(T))).all()


def test_a_copied_backend_is_the_same() -> None:
    """Engines copy the configs that hold a backend: a copy would split the report, and lose the sessions."""
    backend = r3_pass.backend("eager")
    assert copy.deepcopy({"backend": backend})["backend"] is backend


def test_a_copied_model_is_a_stranger(sessions: Attach) -> None:
    """`copy.deepcopy(model)` of an attached model: the copy's forward must not write the original's rows."""
    model, backend = decoder(), r3_pass.backend("eager")
    model.register_buffer("counts", torch.zeros(3))
    compiled = torch.compile(model, backend=backend)
    session = sessions(compiled)
    step(session, compiled, prompt(T))
    twin = copy.deepcopy(model)
    with session.step(range(T)):
        torch.compile(twin, backend=backend)(prompt(T, 1))
        compiled(prompt(T))
    assert (session.read(range(T)) == truth(model, prompt(T))).all()
    assert (
        step(sessions(twin, backend=backend), torch.compile(twin, backend=backend), prompt(T)) == truth(twin, prompt(T))
    ).all()


def test_a_saved_model_carries_nothing_of_the_session(sessions: Attach) -> None:
    """Saved parameters could not be loaded with `weights_only=True`: the mark pickled to a type that torch refuses."""
    model = decoder()
    model.register_buffer("counts", torch.zeros(3))
    session = sessions(torch.compile(model, backend=r3_pass.backend("eager")))
    for thing, safe in (
        (list(model.parameters()), True),
        (dict(model.named_buffers()), True),
        (model.state_dict(), True),
        (model, False),
    ):
        file = io.BytesIO()
        torch.save(thing, file)
        assert b"r3_pass" not in file.getvalue() and len(file.getvalue()) < 200_000
        file.seek(0)
        torch.load(file, weights_only=safe)
    loaded = pickle.loads(pickle.dumps(model))
    assert (truth(loaded, prompt(T)) == truth(model, prompt(T))).all()
    with torch.no_grad():
        fresh = sessions(loaded, backend="r3_pass")
    session.detach()
    assert marks(loaded) and not marks(model)
    fresh.detach()
    assert not marks(loaded)


# ---- samplers beside the model --------------------------------------------------------------------------------------
class Generates(nn.Module):
    """The next token is chosen in the model's frame, which a graph break ends."""

    def __init__(self, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.choose = Decoder(layers=2, dense=()), choose

    def forward(self, ids: Tensor) -> Tensor:
        token = self.choose(self.model(ids))
        torch._dynamo.graph_break()
        return token + 1


def sampled(logits: Tensor) -> Tensor:
    values, ids = logits.topk(5)
    return ids.gather(-1, torch.multinomial(values.softmax(-1), 1))


@pytest.mark.parametrize("mode", ["record", "both"])
@pytest.mark.parametrize(
    "choose",
    [
        lambda logits: sampled(logits[0]),
        lambda logits: sampled(logits[:, -1]),
        lambda logits: sampled(logits[0, torch.tensor([-1])]),
        lambda logits: logits[:, -1].topk(5).indices + 3,
        lambda logits: logits[:, -1].topk(5).indices[:, 0],
        lambda logits: logits[:, -1].topk(1).indices.squeeze_(-1),
    ],
)
def test_a_sampler_in_the_frame_of_the_model(choose: Any, mode: Any, sessions: Attach) -> None:
    """It chooses among the outputs of a linear, too, by ids that leave the graph: no reason to refuse the model."""
    torch.manual_seed(0)
    model = Generates(choose).eval().requires_grad_(False)
    compiled = torch.compile(model, backend=r3_pass.backend("eager", mode=mode))
    session = sessions(compiled)
    with session.step(range(T)):
        compiled(prompt(T))
    assert (session.read(range(T)) == truth(model.model, prompt(T))).all()


# ---- training -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_of_a_plain_run(inner: str, checkpointed: bool, sessions: Attach) -> None:
    """The recompute of a checkpoint in the backward must neither write rows again nor lose a gradient."""

    def gradients(call: Callable[..., Tensor], model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        call(prompt(T)).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    model = Decoder(checkpoint=checkpointed).train()
    want = gradients(torch.compile(model, backend=inner), model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=r3_pass.backend(inner))
    session = sessions(compiled)
    with session.step(range(T)):
        loss = compiled(prompt(T)).square().mean()
    rows = session.read(range(T))
    session.assign(range(T))
    model.zero_grad()
    loss.backward()
    got = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert (rows == truth(model, prompt(T))).all()
    assert (session.read(range(T)) == -1).all(), "the backward wrote rows"


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_backward_inside_of_the_step(inner: str) -> None:
    """Layers compiled by themselves, checkpointed from outside: what the backward runs again is no second forward of the step."""
    torch.manual_seed(0)
    model = Decoder(layers=4, checkpoint=True).train()
    backend = r3_pass.backend(inner)
    for layer in model.layers:
        layer.compile(backend=backend)
    session = r3_pass.runtime.attach(model, backend=backend, num_slots=SLOTS)
    for seed in range(3):
        with session.step(range(T)):
            model(prompt(T, seed)).square().mean().backward()
        assert (session.read(range(T)) == truth(model, prompt(T, seed))).all()
    earlier = model(prompt(T, 7)).square().mean()
    with session.step(range(T)):
        earlier.backward()
        model(prompt(T, 8))
    assert (session.read(range(T)) == truth(model, prompt(T, 8))).all()
    session.detach()


# ---- graphs that are refused ----------------------------------------------------------------------------------------
class Sinkhorn(Moe):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        probs = self.gate(flat).exp()
        weights, ids = torch.topk(probs / probs.sum(0, keepdim=True), self.top_k, dim=-1)
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
        return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights).view(x.shape)


@pytest.mark.parametrize("mixed", [False, True])
def test_routing_that_cannot_be_recorded_refuses_the_step(mixed: bool, sessions: Attach) -> None:
    """Left out in silence, these layers would look dense. Without a session the model runs as ever."""
    makes = iter([lambda: Moe(), lambda: Sinkhorn()] if mixed else [lambda: Sinkhorn(), lambda: Sinkhorn()])
    model = decoder(moe=lambda k: next(makes)(), config={"num_experts_per_tok": 2})
    backend = r3_pass.backend("eager")
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        want = compiled(prompt(T))
    session = sessions(compiled)
    for _ in range(2):
        with pytest.raises(r3_pass.RefusedConfiguration, match="depend on the other tokens"):
            step(session, compiled, prompt(T))
    assert (session.read(range(T)) == -1).all()
    assert any(r.routing for r in backend.report().rejected)
    session.detach()
    with torch.no_grad():
        assert torch.equal(compiled(prompt(T)), want)


def test_a_model_that_moved_is_refused(sessions: Attach) -> None:
    """Offloaded weights at attach put the buffer on the host; the kernel would write to an address of the other device."""
    model = decoder(config={"num_experts_per_tok": 2})
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = sessions(compiled)
    session._binding.device = torch.device("meta")
    with pytest.raises(r3_pass.RefusedConfiguration, match="ids are on cpu, the session's slot buffer is on meta"):
        step(session, compiled, prompt(T))
    session._binding.device = torch.device("cpu")
    assert (step(session, compiled, prompt(T)) == truth(model, prompt(T))).all()


# ---- caches ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.inductor
def test_a_warm_cache_reports_and_records_all(tmp_path: Path) -> None:
    """FACTS.md: with Inductor's caches warm a custom pass does not run; whatever only the pass fills is then empty."""
    code = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent / "lib")!r})
        import torch, r3_pass
        from torch._dynamo.utils import counters
        from decoder import decoder, prompt, truth
        torch.set_num_threads(1)
        model, backend = decoder(layers=2), r3_pass.backend()
        compiled = torch.compile(model, backend=backend)
        session = r3_pass.runtime.attach(compiled, num_slots=64)
        with torch.no_grad(), session.step(range(9)):
            compiled(prompt(9))
        assert (session.read(range(9)) == truth(model, prompt(9))).all()
        print([(s.layer, s.form, s.num_experts, s.top_k) for s in backend.report().sites], backend.report().num_graphs)
        print(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
        """
    )
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True) for _ in range(2)
    ]
    assert [r.returncode for r in runs] == [0, 0], runs[-1].stderr
    (first, cold), (second, warm) = (r.stdout.strip().splitlines()[-2:] for r in runs)
    assert first == second == "[(1, 'softmax_topk', 8, 2)] 1"
    assert int(cold) == 0 < int(warm)
