"""Replay through the backend: what is forced, when, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from decoder import D, Decoder, Moe, prompt, truth
from forced import gradients, loss_of, random_ids, worst
from torch import Tensor, nn

import r3_pass
from r3_pass.oracle import forced

T, E = 7, 8


def make(**options: Any) -> Decoder:
    """Three blocks, the first one dense, all of it trainable."""
    torch.manual_seed(0)
    return Decoder(**options)


def routes_for(seed: int = 0, tokens: int = T, layers: tuple[int, ...] = (1, 2), k: int = 2) -> Tensor:
    """int64 [T, 3, k]"""
    routes = torch.full((tokens, 3, k), -1)
    for layer in layers:
        routes[:, layer] = random_ids(tokens, E, k, seed=10 * seed + layer)
    return routes


def oracle(model: Decoder, ids: Tensor, routes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the eager model with these experts."""
    given = {model.layers[n].mlp: routes[:, n] for n in range(3) if isinstance(model.layers[n].mlp, Moe)}
    with forced(given, lambda *_: True):
        loss = loss_of(model(ids))
        return loss.detach(), gradients(model, loss)


def replayed(backend: Any, call: Callable[[], Any], of: nn.Module, routes: Any, **options: Any) -> Any:
    with backend.replay(routes, **options):
        loss = loss_of(call())
        return loss.detach(), gradients(of, loss)


def check(got: Any, want: Any) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    apart, whose = worst(got[1], want[1])
    assert apart < 1e-5, f"{whose} differs by {apart}"


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_loss_and_gradients_are_those_of_the_forced_eager_model(inner: str) -> None:
    model, ids, routes = make(), prompt(T), routes_for()
    backend = r3_pass.backend(inner, mode="replay")
    compiled = torch.compile(model, backend=backend)
    check(replayed(backend, lambda: compiled(ids), model, routes), oracle(model, ids, routes))
    assert torch.equal(compiled(ids), torch.compile(model, backend=inner)(ids)), "live outside of the context"
    assert backend.report().replayed == {1: 1, 2: 1}


@pytest.mark.parametrize("parts", ["model", "layers", "mlps"])
@pytest.mark.parametrize(("batch", "positions", "told"), [(2, 3, True), (1, 6, False), (6, 1, False)])
def test_sequences_and_positions_swapped(parts: str, batch: int, positions: int, told: bool) -> None:
    """Rows by position would go to other tokens; where one of the two is 1 the order is the same."""
    model, ids = make(), prompt(batch * positions).view(batch, positions)
    routes = routes_for(tokens=batch * positions)
    backend = r3_pass.backend("eager", mode="replay")
    call: Any = model
    if parts == "model":
        call = torch.compile(model, backend=backend)
    for block in model.layers if parts != "model" else ():
        (block if parts == "layers" else block.mlp).compile(backend=backend)
    want = oracle(model, ids, routes)
    padded = routes.view(batch, positions, 3, 2)
    check(replayed(backend, lambda: call(ids), model, padded, model=model), want)
    swapped = padded.transpose(0, 1)
    if told:
        with pytest.raises(r3_pass.InvalidRoutes, match=r"\[3, 2\] sequences and positions.*lie as \[2, 3\].*swapaxes"):
            replayed(backend, lambda: call(ids), model, swapped, model=model)
    else:
        check(replayed(backend, lambda: call(ids), model, swapped, model=model), want)


@pytest.mark.parametrize("parts", ["model", "layers", "mlps"])
@pytest.mark.parametrize(("batch", "positions", "told"), [(2, 3, True), (1, 6, False)])
def test_flat_rows_without_the_last_one(parts: str, batch: int, positions: int, told: bool) -> None:
    """Of several sequences each has a last token: rows of one after the other would be shifted behind the first of them."""
    model, ids = make(), prompt(batch * positions).view(batch, positions)
    routes = routes_for(tokens=batch * positions)
    backend = r3_pass.backend("eager", mode="replay")
    call: Any = torch.compile(model, backend=backend) if parts == "model" else model
    for block in model.layers if parts != "model" else ():
        (block if parts == "layers" else block.mlp).compile(backend=backend)
    if told:
        with pytest.raises(r3_pass.InvalidRoutes, match=r"5 flat rows, .* lie as \[2, 3\].*routes.pad"):
            replayed(backend, lambda: call(ids), model, routes[:-1], model=model)
    else:
        live = routes.clone()
        live[-1] = -1
        check(replayed(backend, lambda: call(ids), model, routes[:-1], model=model), oracle(model, ids, live))


@pytest.mark.inductor
def test_inductor() -> None:
    model, ids, routes = make(layers=2), prompt(T), routes_for()[:, :2]
    backend = r3_pass.backend("inductor", mode="replay")
    compiled = torch.compile(model, backend=backend)
    given = {model.layers[1].mlp: routes[:, 1]}
    with forced(given, lambda *_: True):
        loss = loss_of(model(ids))
        want = loss.detach(), gradients(model, loss)
    check(replayed(backend, lambda: compiled(ids), model, routes), want)


def test_every_flavour_is_compiled_with_the_first_call() -> None:
    """Live, recorded and replayed, with other token counts: one compilation, and one more for dynamic sizes."""
    model, backend = make(), r3_pass.backend("aot_eager", mode="both")
    compiled = torch.compile(model, backend=backend)
    compiled(prompt(5)), compiled(prompt(6))
    graphs = backend.report().num_graphs
    session = r3_pass.runtime.attach(compiled, num_slots=16)
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (T, 9):
            ids, routes = prompt(tokens), routes_for(tokens=tokens)
            with session.step(range(tokens)):
                compiled(ids)
            own = session.read(range(tokens))
            check(replayed(backend, lambda ids=ids: compiled(ids), model, routes), oracle(model, ids, routes))
            live = loss_of(compiled(ids))
            off = gradients(model, live)
            loss, on = replayed(backend, lambda ids=ids: compiled(ids), model, own)
            assert torch.equal(loss, live) and all(torch.equal(on[name], off[name]) for name in off)
    assert backend.report().num_graphs == graphs
    assert (own == truth(model.requires_grad_(False), prompt(9))).all()


@pytest.mark.parametrize("what", ["layers", "mlps"])
def test_compiled_in_parts(what: str) -> None:
    """One graph serves both MoE blocks, each with its own ids; the model has to be named."""
    model, ids, routes = make(), prompt(T), routes_for()
    backend = r3_pass.backend("aot_eager", mode="replay")
    for block in model.layers:
        (block if what == "layers" else block.mlp).compile(backend=backend)
    check(replayed(backend, lambda: model(ids), model, routes, model=model), oracle(model, ids, routes))
    assert sum(bool(record.found.sites) for record in backend.graphs) == 1
    with pytest.raises(r3_pass.RefusedConfiguration, match="model=model"), backend.replay(routes):
        model(ids)


@pytest.mark.parametrize("where", ["inside", "outside", "reentrant", "per layer", "selective"])
def test_activation_checkpointing(where: str) -> None:
    plain, ids, routes = make(), prompt(T), routes_for()
    want = oracle(plain, ids, routes)
    model = make(checkpoint=where in ("inside", "per layer", "selective"))
    backend = r3_pass.backend("aot_eager", mode="replay")
    if where == "per layer":
        for block in model.layers:
            block.compile(backend=backend)
        call: Callable[[], Any] = lambda: torch.compiler.disable(model, recursive=False)(ids)  # noqa: E731
    elif where == "selective":
        policy = torch.utils.checkpoint.CheckpointPolicy
        keep = {torch.ops.aten.mm.default}
        context = lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(  # noqa: E731
            lambda ctx, op, *a, **k: policy.MUST_SAVE if op in keep else policy.PREFER_RECOMPUTE
        )
        blocks = list(model.layers)

        def forward(x: Tensor) -> Tensor:
            x = model.embed(x)
            for block in blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=context)
            return model.head(x)

        compiled = torch.compile(forward, backend=backend)
        call = lambda: compiled(ids)  # noqa: E731
    else:
        compiled = torch.compile(model, backend=backend)
        anchor = torch.zeros(1, requires_grad=True)  # reentrant checkpointing wants an input with gradients
        call = {
            "inside": lambda: compiled(ids),
            "outside": lambda: torch.utils.checkpoint.checkpoint(compiled, ids, use_reentrant=False),
            "reentrant": lambda: torch.utils.checkpoint.checkpoint(
                lambda a: compiled(ids) + 0 * a, anchor, use_reentrant=True
            ),
        }[where]
    check(replayed(backend, call, model, routes, model=model), want)


def test_gradients_accumulate_over_micro_batches() -> None:
    model, backend = make(), r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend, dynamic=True)
    batches = [(prompt(t, seed=t), routes_for(seed=t, tokens=t)) for t in (5, T, 9)]
    want = [oracle(model, *batch)[1] for batch in batches]
    model.zero_grad()
    for ids, routes in batches:
        with backend.replay(routes):
            loss_of(compiled(ids)).backward()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    total = {name: sum(w[name] for w in want) for name in got}
    assert worst(got, total)[0] < 1e-5


def test_old_log_probabilities_and_loss_in_one_context() -> None:
    """Two forwards inside, one without gradients, which is another graph."""
    model, ids, routes = make(), prompt(T), routes_for()
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    with backend.replay(routes):
        with torch.no_grad():
            old = loss_of(compiled(ids))
        loss = loss_of(compiled(ids))
        got = gradients(model, loss)
    check((loss.detach(), got), oracle(model, ids, routes))
    torch.testing.assert_close(old, loss.detach())
    assert backend.report().replayed == {1: 2, 2: 2}


def test_bfloat16() -> None:
    model, ids, routes = make().bfloat16(), prompt(T), routes_for()
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    got = replayed(backend, lambda: compiled(ids), model, routes)
    want = oracle(model, ids, routes)
    assert worst(got[1], want[1])[0] < 0.02 and torch.allclose(got[0], want[0], rtol=0.02)


# ---- data in ---------------------------------------------------------------------------------------------------------
LAYOUTS: list[Callable[[Tensor], Any]] = [
    lambda r: r.numpy().astype(np.int8),
    lambda r: r.to(torch.int16),
    lambda r: r.to(torch.int32),
    lambda r: r,
    lambda r: r.numpy(),
    lambda r: r[:, 1:],  # MoE layers only
    lambda r: r[None],  # padded, one row a token
    lambda r: torch.cat([r, torch.full_like(r[..., :1], -1)], -1),  # more columns than top-k
    lambda r: r.flip(0).flip(0).transpose(0, 1).contiguous().transpose(0, 1),  # strided
]


def test_accepted_layouts() -> None:
    model, ids, routes = make(), prompt(T), routes_for()
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    want = oracle(model, ids, routes)
    for given in LAYOUTS:
        check(replayed(backend, lambda: compiled(ids), model, given(routes)), want)


def test_unsigned_ids_of_all_tokens() -> None:
    model, ids = make(dense=()), prompt(T)
    routes = torch.stack([random_ids(T, E, 2, seed=n, live=0) for n in range(3)], 1)
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    check(replayed(backend, lambda: compiled(ids), model, routes.to(torch.uint8)), oracle(model, ids, routes))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_last_token_of_a_sequence_has_no_row(batch: int) -> None:
    model, ids = make(), torch.randint(61, (batch, 5))
    rows = routes_for(tokens=batch * 4).view(batch, 4, 3, 2)
    full = torch.cat([rows, torch.full((batch, 1, 3, 2), -1)], 1).flatten(0, 1)
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    for given in [rows, full, *([rows[0]] if batch == 1 else [])]:
        check(replayed(backend, lambda: compiled(ids), model, given), oracle(model, ids, full))


def test_a_layer_with_fewer_choices_than_columns() -> None:
    model, ids = make(top_k=[1, 1, 3]), prompt(T)
    routes = torch.full((T, 3, 3), -1)
    routes[:, 1, :1], routes[:, 2] = random_ids(T, E, 1, 1), random_ids(T, E, 3, 2)
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    given = {model.layers[1].mlp: routes[:, 1, :1], model.layers[2].mlp: routes[:, 2]}
    with forced(given, lambda *_: True):
        loss = loss_of(model(ids))
        want = loss.detach(), gradients(model, loss)
    check(replayed(backend, lambda: compiled(ids), model, routes), want)


# ---- data that lies --------------------------------------------------------------------------------------------------
def changed(**at: Any) -> Callable[[], Tensor]:
    def make_routes() -> Tensor:
        routes = torch.stack([random_ids(T, E, 2, seed=n, live=0) for n in range(3)], 1)
        routes[:, 0] = -1
        for place, ids in at.items():
            row, layer = map(int, place.removeprefix("r").split("_"))
            routes[row, layer] = torch.tensor(ids)
        return routes

    return make_routes


def constant(value: list[int]) -> Callable[[], Tensor]:
    def make_routes() -> Tensor:
        routes = changed()()
        routes[:, 2] = torch.tensor(value)
        return routes

    return make_routes


LIES: list[tuple[Callable[[], Tensor], str]] = [
    (changed(r3_1=[0, 8]), r"layer 1 .* row 3 has an expert that does not exist \(there are 8\)"),
    (changed(r3_1=[5, 5]), "row 3 has an expert twice"),
    (changed(r0_2=[-1, 4]), "-1 before an expert"),
    (changed(r0_2=[4, -2]), "below -1"),
    (changed(r0_2=[4, -1]), "other than 2 experts"),
    (constant([0, 1]), "empty capture"),
    (lambda: torch.zeros(T, 3, 2, dtype=torch.long), "layer 0 has no experts"),
    (changed(r2_0=[1, 2]), "layer 0 has no experts .*the layers are shifted"),
    (lambda: changed()()[:, :1], "1 layers; the model has 3 decoder layers, of which 2 route"),
    (lambda: torch.cat([changed()(), changed()()], 1), "6 layers"),
    (lambda: changed()()[:5], "7 tokens, the routes have 5 rows"),
    (lambda: torch.cat([changed()(), changed()()]), "7 tokens, the routes have 14 rows"),
    (lambda: changed()()[..., :1], "chooses 2 experts for a token, the routes have 1 columns"),
    (lambda: changed()().float(), "integers"),
    (lambda: changed()() > 0, "integers"),
    (lambda: changed()()[0], "shape"),
]


def test_routes_that_cannot_be_right() -> None:
    model, ids = make(), prompt(T)
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    before = loss_of(compiled(ids)).detach()
    for routes, reason in LIES:
        with pytest.raises(r3_pass.InvalidRoutes, match=reason), backend.replay(routes()):
            compiled(ids)
        assert torch.equal(loss_of(compiled(ids)).detach(), before), "nothing of it stays"


def test_bad_rows_may_go_to_the_live_router() -> None:
    model, ids = make(), prompt(T)
    routes = changed(r3_1=[0, 8], r4_1=[5, 5], r0_2=[4, -1])()
    good = changed(r3_1=[-1, -1], r4_1=[-1, -1], r0_2=[-1, -1])()
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    got = replayed(backend, lambda: compiled(ids), model, routes, on_bad_row="live")
    check(got, oracle(model, ids, good))
    assert backend.report().fallback_rows == {1: 2, 2: 1}
    assert "3 bad rows went to the live router" in str(backend.report())
    with pytest.raises(ValueError, match="on_bad_row"):
        backend.replay(routes, on_bad_row="skip")


def test_a_batch_that_routes_alike_by_chance_is_no_empty_capture() -> None:
    model, ids = make(), prompt(2)
    routes = torch.tensor([[[-1, -1], [3, 1], [2, 0]]]).expand(2, 3, 2)
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    check(replayed(backend, lambda: compiled(ids), model, routes), oracle(model, ids, routes))


class MaskedSoftmax(Moe):
    """Softmax over the experts of the kept groups alone: what another expert would score is in no graph."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        logits = self.gate(flat)
        best = logits.view(-1, 4, 2).amax(-1).topk(2, dim=-1)[1]
        kept = torch.zeros(len(flat), 4).scatter(1, best, 1.0).bool().repeat_interleave(2, 1)
        weights, ids = logits.masked_fill(~kept, -torch.inf).softmax(-1).topk(self.top_k)
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
        return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights).view(x.shape)


def test_a_layer_that_cannot_be_forced() -> None:
    model, ids = make(moe=lambda k: MaskedSoftmax(top_k=k)), prompt(T)
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    compiled(ids)
    assert "layers.1.mlp (softmax_grouped_topk) cannot take given routes" in str(backend.report())
    with pytest.raises(r3_pass.PartialCapture, match=r"layer 1 .* pass softmax"), backend.replay(routes_for()):
        compiled(ids)


CAUSES = (
    "No forward ran", "another backend", "block.mlp.compile", "recompile_limit", "output_router_logits",
    "capture_dynamic_output_shape_ops", "is dense",
)  # fmt: skip


# ---- forwards that were not replayed ---------------------------------------------------------------------------------
def test_a_model_that_was_not_compiled() -> None:
    model, backend = make(), r3_pass.backend("aot_eager", mode="replay")
    with (
        pytest.raises(r3_pass.NoRouterFound, match="no compiled graph that routes ran") as error,
        backend.replay(routes_for()),
    ):
        model(prompt(T))
    causes = [line for line in str(error.value).splitlines() if line.startswith("  - ")]
    assert [words in cause for words, cause in zip(CAUSES, causes, strict=True)] == [True] * len(CAUSES)
    assert max(map(len, causes)) < 300


class Convolved(Moe):
    """Its gate does not look like a router's to the structure, and the ids leave the graph before they reach experts."""

    def __init__(self, top_k: int) -> None:
        super().__init__(top_k=top_k)
        self.gate = nn.Conv1d(D, E, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        weights, ids = torch.topk(self.gate(x.transpose(1, 2)).softmax(1), self.top_k, dim=1)
        torch._dynamo.graph_break()
        weights, ids = (t.transpose(1, 2).reshape(-1, self.top_k) for t in (weights, ids))
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
        return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights).view(x.shape)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_training_step_in_which_nothing_was_replayed(reentrant: bool | None) -> None:
    """The backward inside of the context is no excuse for a forward there that routed live."""
    model, ids = make(moe=lambda k: Convolved(k)), prompt(T)
    backend = r3_pass.backend("eager", mode="replay")
    for layer in model.layers:
        layer.mlp.compile(backend=backend)

    def call() -> Any:
        x = model.embed(ids)
        for layer in model.layers:
            x = layer(x) if reentrant is None else torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        return model.head(x)

    with pytest.raises(r3_pass.NoRouterFound), backend.replay(routes_for(), model=model):
        loss_of(call()).backward()


class TwoRouters(nn.Module):
    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.first, self.second = Moe(top_k=top_k), Moe(top_k=top_k)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        torch._dynamo.graph_break()
        return x + self.second(x)


def test_two_routers_in_a_layer_that_are_compiled_apart() -> None:
    """Both would take the layer's routes: every layer as often as any other, and none of it right."""
    model, ids = make(moe=TwoRouters), prompt(T)
    backend = r3_pass.backend("eager", mode="replay")
    for layer in model.layers:
        layer.mlp.compile(backend=backend)
    with (
        pytest.raises(
            r3_pass.RefusedConfiguration, match=r"routes twice[\s\S]*first\.gate\.weight and [\s\S]*second\.gate"
        ),
        backend.replay(routes_for(), model=model),
    ):
        model(ids)


def test_a_size_that_compiling_fixes() -> None:
    """The graph is traced with a symbol for it, which is a number when the inner compiler is through."""

    class Fixes(Moe):
        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, D)
            weights, ids = self.gate(flat).softmax(-1).topk(self.top_k + 1, dim=-1)
            weights, ids = weights[:, : self.top_k], ids[:, : self.top_k]
            hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
            return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights).view(x.shape)

    model = make(moe=lambda k: Fixes(top_k=k))
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    for batch, length in ((2, 8), (1, 1), (2, 1)):
        ids, routes = prompt(batch * length).view(batch, length), routes_for(tokens=batch * length)
        check(replayed(backend, lambda ids=ids: compiled(ids), model, routes), oracle(model, ids, routes))


def test_why_nothing_was_replayed() -> None:
    backend = r3_pass.backend("aot_eager", mode="replay")
    dense = torch.nn.Sequential(torch.nn.Linear(4, 4))
    is_dense = "Sequential, which model= names, is dense"
    with pytest.raises(r3_pass.NoRouterFound, match=is_dense), backend.replay(routes_for(), model=dense):
        pass
    model, other = make(), make()
    compiled = torch.compile(other, backend=backend)
    not_it = r"forwards of another model, or of a copy[\s\S]*No forward ran in it"
    with pytest.raises(r3_pass.NoRouterFound, match=not_it), backend.replay(routes_for(), model=model):
        compiled(prompt(T))


def test_a_layer_that_fell_back_to_eager() -> None:
    model, ids, routes = make(), prompt(T), routes_for()
    backend = r3_pass.backend("aot_eager", mode="replay")
    for block in model.layers:
        block.mlp.compile(backend=backend)
    with backend.replay(routes, model=model):
        model(ids)
    model.layers[2].mlp._compiled_call_impl = None
    with pytest.raises(r3_pass.PartialCapture, match=r"1 of 2 MoE layers .* layers 2 routed live"):
        replayed(backend, lambda: model(ids), model, routes, model=model)


def test_the_recompilation_limit() -> None:
    model, backend = make(), r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        with backend.replay(routes_for()):
            compiled(prompt(T))
        with pytest.raises(r3_pass.NoRouterFound), backend.replay(routes_for(tokens=9)):
            compiled(prompt(9))


def test_an_error_inside_is_not_replaced() -> None:
    backend = r3_pass.backend("aot_eager", mode="replay")
    with pytest.raises(ZeroDivisionError), backend.replay(routes_for()):
        raise ZeroDivisionError


def test_the_other_model_routes_live() -> None:
    """Policy and reference share the compiled graph; only the one that is named is replayed."""
    policy, ids, routes = make(), prompt(T), routes_for()
    torch.manual_seed(1)
    reference = Decoder()
    backend = r3_pass.backend("aot_eager", mode="replay")
    first, second = torch.compile(policy, backend=backend), torch.compile(reference, backend=backend)
    live = second(ids)
    with backend.replay(routes, model=policy):
        assert torch.equal(second(ids), live)
        loss = loss_of(first(ids))
        got = loss.detach(), gradients(policy, loss)
    check(got, oracle(policy, ids, routes))
    with pytest.raises(r3_pass.RefusedConfiguration, match="model=model"), backend.replay(routes):
        first(ids), second(ids)


def test_other_threads_replay_too() -> None:
    model, ids, routes = make(), prompt(T), routes_for()
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    compiled(ids)
    found: list[Tensor] = []
    with backend.replay(routes):
        thread = threading.Thread(target=lambda: found.append(compiled(ids)))
        thread.start()
        thread.join()
    torch.testing.assert_close(loss_of(found[0]).detach(), oracle(model, ids, routes)[0])


def test_threads_do_not_take_each_others_routes() -> None:
    """Which context a forward belongs to is not known by its thread; by its model it is."""
    model, other, ids, routes = make(), make(), prompt(T), routes_for(1)
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    compiled(ids)
    want = oracle(model, ids, routes)[0]
    refused: list[r3_pass.R3Error] = []

    def work(**options: Any) -> None:
        context = backend.replay(routes_for(2), **options)
        try:
            context.__enter__()
        except r3_pass.RefusedConfiguration as error:
            refused.append(error)
            return
        torch.testing.assert_close(loss_of(compiled(ids)).detach(), want)
        context.__exit__(ZeroDivisionError, None, None)  # nothing of `other` ran

    for first, second, count in (({}, {}, 1), ({"model": model}, {}, 2), ({"model": model}, {"model": other}, 2)):
        with backend.replay(routes, **first):
            compiled(ids)
            thread = threading.Thread(target=work, kwargs=second)
            thread.start()
            thread.join()
            torch.testing.assert_close(loss_of(compiled(ids)).detach(), want)
        assert len(refused) == count
    assert "another thread replays other routes" in str(refused[0])


def test_contexts_of_two_models_within_each_other() -> None:
    """Each model takes its own routes, in the inner context too."""
    model, other, ids = make(), make(), prompt(T)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    backend = r3_pass.backend("aot_eager", mode="replay")
    first, second = torch.compile(model, backend=backend), torch.compile(other, backend=backend)
    with backend.replay(routes_for(1), model=model):
        first(ids)
        with backend.replay(routes_for(2), model=other):
            got = loss_of(second(ids)).detach(), loss_of(first(ids)).detach()
    torch.testing.assert_close(got[0], oracle(other, ids, routes_for(2))[0])
    torch.testing.assert_close(got[1], oracle(model, ids, routes_for(1))[0])


@pytest.mark.parametrize("parts", [False, True])
def test_layers_that_change_places(parts: bool) -> None:
    """The same weights, and the same graph, now serve another layer."""
    model, ids, routes = make(), prompt(T), routes_for()
    backend = r3_pass.backend("aot_eager", mode="replay")
    if parts:
        for block in model.layers:
            block.mlp.compile(backend=backend)
    compiled = model if parts else torch.compile(model, backend=backend)
    options = {"model": model} if parts else {}
    check(replayed(backend, lambda: compiled(ids), model, routes, **options), oracle(model, ids, routes))
    first, second = model.layers[1], model.layers[2]
    first.mlp, second.mlp = second.mlp, first.mlp
    check(replayed(backend, lambda: compiled(ids), model, routes, **options), oracle(model, ids, routes))


def test_weights_that_are_assigned_between_steps() -> None:
    model, ids, routes = make(), prompt(T), routes_for()
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    check(replayed(backend, lambda: compiled(ids), model, routes), oracle(model, ids, routes))
    model.load_state_dict({name: weight * 1.1 for name, weight in model.state_dict().items()}, assign=True)
    check(replayed(backend, lambda: compiled(ids), model, routes), oracle(model, ids, routes))


def test_replay_and_a_step_at_once() -> None:
    model, ids = make(), prompt(T)
    backend = r3_pass.backend("aot_eager", mode="both")
    compiled = torch.compile(model, backend=backend)
    session = r3_pass.runtime.attach(compiled, num_slots=16)
    with (
        pytest.raises(r3_pass.RefusedConfiguration, match="step is open"),
        session.step(range(T)),
        backend.replay(routes_for()),
    ):
        compiled(ids)


def test_a_backend_that_only_records() -> None:
    with pytest.raises(r3_pass.RefusedConfiguration, match="mode='replay'"):
        r3_pass.backend("aot_eager").replay(routes_for())
    with pytest.raises(ValueError, match="mode"):
        r3_pass.backend("aot_eager", mode="play")  # type: ignore[arg-type]


# ---- recomputation outside of the graph ------------------------------------------------------------------------------
class Checkpointed:
    """Blocks compiled one by one, checkpointed by eager code: the backward calls their graphs again."""

    def __init__(self, reentrant: bool = False) -> None:
        self.model = make()
        self.backend = r3_pass.backend("aot_eager", mode="replay")
        self.reentrant = reentrant
        for block in self.model.layers:
            block.compile(backend=self.backend)

    def loss(self, ids: Tensor) -> Tensor:
        x = self.model.embed(ids)
        for block in self.model.layers:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return loss_of(self.model.head(x))

    def replay(self, routes: Any) -> Any:
        return self.backend.replay(routes, model=self.model)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_outside_of_the_context(reentrant: bool) -> None:
    it, ids = Checkpointed(reentrant), prompt(T)
    with it.replay(routes_for()):
        loss = it.loss(ids)
    with pytest.raises(r3_pass.RefusedConfiguration, match="live, and its forward was replayed"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_in_the_context_of_another_forward(reentrant: bool) -> None:
    it, ids = Checkpointed(reentrant), prompt(T)
    with it.replay(routes_for(1)):
        loss = it.loss(ids)
    with (
        pytest.raises(r3_pass.RefusedConfiguration, match="by other routes than its forward"),
        it.replay(routes_for(2)),
    ):
        it.loss(ids)
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_live_forward_with_a_backward_in_a_context(reentrant: bool) -> None:
    it, ids = Checkpointed(reentrant), prompt(T)
    loss = it.loss(ids)
    with pytest.raises(r3_pass.RefusedConfiguration, match="routes"), it.replay(routes_for(2)):
        it.loss(ids)
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_live_training_stays_possible(reentrant: bool) -> None:
    """A replayed step, then a live one with checkpointing, and a live one while a replayed forward still waits."""
    it, ids = Checkpointed(reentrant), prompt(T)
    it.loss(ids).backward()
    want = it.gradients()
    with it.replay(routes_for()):
        waiting = it.loss(ids)
    it.model.zero_grad()
    it.loss(ids).backward()
    assert worst(it.gradients(), want)[0] < 1e-6
    with it.replay(routes_for()):
        waiting.backward()
    it.model.zero_grad()
    it.loss(ids).backward()
    assert worst(it.gradients(), want)[0] < 1e-6


def test_a_graph_with_several_outputs_under_checkpointing() -> None:
    """Each output has a node of its own, and each of them asked for the mark that the recomputation left."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make().layers

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            for block in self.layers:
                x = block(x)
            return x, x[..., :4]

    torch.manual_seed(0)
    model, routes = Split(), routes_for()
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(1, T, 16, requires_grad=True)
    found = []
    for call in (compiled, lambda x: torch.utils.checkpoint.checkpoint(compiled, x, use_reentrant=False)):
        with backend.replay(routes):
            whole, part = call(x)
            found.append(gradients(model, loss_of(whole) + loss_of(part * 2)))
    assert worst(*found)[0] == 0


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_interleaved_pipeline_schedule(reentrant: bool, last_first: bool) -> None:
    """Two micro-batches in flight: forward, forward, backward, backward, each inside of its own routes."""
    it = Checkpointed(reentrant)
    ids = [prompt(T, seed=n) for n in range(2)]
    routes = [routes_for(n) for n in range(2)]
    want = [oracle(it.model, *batch)[1] for batch in zip(ids, routes, strict=True)]
    losses = []
    for one, rows in zip(ids, routes, strict=True):
        with it.replay(rows):
            losses.append(it.loss(one))
    it.model.zero_grad()
    for loss, rows in list(zip(losses, routes, strict=True))[:: -1 if last_first else 1]:
        with it.replay(rows.clone()):  # an equal copy will do
            loss.backward()
    assert worst(it.gradients(), {name: want[0][name] + want[1][name] for name in want[0]})[0] < 1e-5


def test_reentrant_checkpoints_know_their_own_forward() -> None:
    """Forwards of one layer in flight: the last of them says nothing about the one that is run again."""
    it, ids = Checkpointed(reentrant=True), prompt(T)
    live = it.loss(ids)
    with it.replay(routes_for(1)):
        first = it.loss(ids)
        again = it.loss(ids)
        with torch.no_grad():
            it.loss(ids)  # old log-probabilities are no checkpoint
    with it.replay(routes_for(2)):
        with torch.no_grad():
            it.loss(ids)
        with pytest.raises(r3_pass.RefusedConfiguration, match="by other routes than its forward"):
            first.backward()
        with pytest.raises(r3_pass.RefusedConfiguration, match="by other routes than its forward"):
            live.backward()
    with pytest.raises(r3_pass.RefusedConfiguration, match="live, and its forward was replayed"):
        again.backward()
    want = oracle(it.model, ids, routes_for(1))[1]
    it.model.zero_grad()
    with it.replay(routes_for(1)):
        first, again = it.loss(ids), it.loss(ids)
        it.loss(ids)
        first.backward(), again.backward()
    assert worst(it.gradients(), {name: 2 * grad for name, grad in want.items()})[0] < 1e-5


def test_reentrant_checkpoints_within_each_other() -> None:
    """The inner region's forward runs again in the backward of the outer one."""
    it, ids, routes = Checkpointed(reentrant=True), prompt(T), routes_for(1)
    want = oracle(it.model, ids, routes)
    it.model.zero_grad()

    def inner(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(it.model.layers[1], it.model.layers[0](x), use_reentrant=True)

    def loss() -> Tensor:
        x = torch.utils.checkpoint.checkpoint(inner, it.model.embed(ids), use_reentrant=True)
        return loss_of(it.model.head(it.model.layers[2](x)))

    with it.replay(routes):
        loss().backward()
    assert worst(it.gradients(), want[1])[0] < 1e-5
    with it.replay(routes):
        waiting = loss()
    with (
        pytest.raises(r3_pass.RefusedConfiguration, match="by other routes than its forward"),
        it.replay(routes_for(2)),
    ):
        it.loss(ids)
        waiting.backward()


def test_one_context_is_entered_again_for_its_backward() -> None:
    model, ids, routes = make(), prompt(T), routes_for()
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(model, backend=backend)
    replay = backend.replay(routes)
    with replay:
        loss = loss_of(compiled(ids))
    with replay:
        got = gradients(model, loss)
    check((loss.detach(), got), oracle(model, ids, routes))


@pytest.mark.cuda
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_on_a_gpu(inner: str, where: str) -> None:
    """Routes that come from the host or lie on the device; checkpointing outside of the graphs recomputes in autograd's thread."""
    model, ids, routes = make().cuda(), prompt(T).cuda(), routes_for().to(where)
    backend = r3_pass.backend(inner, mode="replay")
    want = oracle(model, ids, routes.cuda())
    compiled = torch.compile(model, backend=backend)
    check(replayed(backend, lambda: compiled(ids), model, routes), want)
    for block in model.layers:
        block.compile(backend=backend)

    def forward() -> Tensor:
        x = model.embed(ids)
        for block in model.layers:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return model.head(x)

    check(replayed(backend, forward, model, routes, model=model), want)
    with backend.replay(routes, model=model):
        loss = loss_of(forward())
    with pytest.raises(r3_pass.RefusedConfiguration, match="live, and its forward was replayed"):
        loss.backward()


@pytest.mark.cuda
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_self_tests_on_a_gpu(inner: str) -> None:
    model, backend = make().cuda(), r3_pass.backend(inner, mode="both")
    found = r3_pass.verify.self_test(torch.compile(model, backend=backend), backend, prompt(9).cuda())
    assert found.ok, str(found)
