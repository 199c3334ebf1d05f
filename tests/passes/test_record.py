"""The rewrite: one record op a graph, nothing else changed, and the traced graph as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend import Keeping, operators, traced
from decoder import VOCAB, Decoder, Moe, decoder, prompt, truth
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import r3_pass
from r3_pass.passes.match import match
from r3_pass.passes.record import Recorded, occurrences, rewrite
from r3_pass.passes.site import Accepted
from r3_pass.registry.shapes import value

RECORD = "r3_pass::record"
SLOTS = 64


def rewritten(model: Any, *args: Any, **options: Any) -> tuple[fx.GraphModule, Recorded]:
    module = traced(model, *args, **options)
    result = rewrite(module, match(module.graph).sites, torch.device("cpu"))
    assert isinstance(result, Recorded), result
    return module, result


def recorded_rows(model: nn.Module, ids: Tensor, inner: Any = "eager") -> tuple[Any, torch.Tensor]:
    """One recorded step of a compiled model."""
    compiled = torch.compile(model, backend=r3_pass.backend(inner))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    try:
        with session.step(range(ids.numel())):
            output = compiled(ids)
        return output, session.read(range(ids.numel()))
    finally:
        session.detach()


@pytest.mark.parametrize("layers", [2, 4, 6])
def test_one_record_op_whatever_the_number_of_layers(layers: int) -> None:
    """An op per layer costs 20 times what one op a graph costs (FACTS.md)."""
    module, result = rewritten(decoder(layers=layers), prompt(5))
    before, after = operators(module), operators(result.module)
    assert after - before == {RECORD: 1}
    assert not before - after
    assert len(result.occurrences) == layers - 1


def test_the_traced_graph_stays_as_it_was() -> None:
    """Dynamo reads its own graph's placeholders after the backend returned: one more there and every call fails."""
    module = traced(Decoder(checkpoint=True), prompt(5))
    nested = dict(module.named_children())
    before = [str(module.graph), *(str(m.graph) for m in nested.values() if isinstance(m, fx.GraphModule))]
    result = rewrite(module, match(module.graph).sites, torch.device("cpu"))
    assert isinstance(result, Recorded)
    assert [str(module.graph), *(str(m.graph) for m in nested.values() if isinstance(m, fx.GraphModule))] == before
    assert dict(module.named_children()) == nested and not hasattr(module, "r3_wrap_body_1_0")


def test_the_new_inputs() -> None:
    """They stand last, are marked static for CUDA graphs, need no guard, and a buffer of any number of slots is one graph."""
    module, result = rewritten(decoder(), prompt(5))
    placeholders = [n for n in result.module.graph.nodes if n.op == "placeholder"]
    assert tuple(placeholders[-4:]) == result.added
    assert [n.name for n in result.added] == ["r3_buffer", "r3_state", "r3_slots", "r3_columns"]
    assert len(placeholders) == 4 + sum(n.op == "placeholder" for n in module.graph.nodes)
    for node in result.added:
        assert node.meta["tensor_dict"] == {"_dynamo_static_input_type": "guarded"}
        assert node._dynamo_source is None
    buffer, state, slots, columns = (value(n) for n in result.added)
    assert all(isinstance(s, torch.SymInt) for s in (*buffer.shape, *state.shape, *slots.shape))
    assert [t.dtype for t in (buffer, state, slots, columns)] == [torch.int16, torch.int32, torch.int64, torch.int64]
    assert tuple(columns.shape) == (2,)


def test_what_dynamo_put_on_the_graph_is_carried_over() -> None:
    """AOTAutograd reads each placeholder's source, and which parameter it is; without them it fails or copies."""
    module, result = rewritten(decoder(), prompt(5))
    for ours, theirs in zip(result.module.graph.nodes, module.graph.nodes, strict=False):
        if theirs.op != "placeholder":
            break
        assert ours.name == theirs.name and ours._dynamo_source is theirs._dynamo_source
    assert result.module._param_name_to_source is module._param_name_to_source
    assert result.module.training == module.training


@pytest.mark.parametrize("dynamic", [False, True])
def test_token_counts(dynamic: bool) -> None:
    """Fixed, it is known before the call; symbolic, the graph tells it as one more result, which no caller may see."""
    module, result = rewritten(decoder(), prompt(5), dynamic=dynamic)
    (output,) = [n for n in result.module.graph.nodes if n.op == "output"]
    (plain,) = [n for n in module.graph.nodes if n.op == "output"]
    assert result.tokens == (None if dynamic else 5)
    assert len(output.args[0]) == len(plain.args[0]) + dynamic


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_those_of_the_inner_backend(inner: str, dtype: torch.dtype) -> None:
    """A recorded forward that differs in one bit changes what is sampled: off-policy by the recording itself."""
    model = decoder().to(dtype)
    ids = prompt(9)
    with torch.no_grad():
        want = torch.compile(model, backend=inner)(ids)
        torch._dynamo.reset()
        got, _ = recorded_rows(model, ids, inner)
    assert torch.equal(got, want)


def test_top_k_of_each_layer_its_own() -> None:
    """Columns past a layer's own top-k are -1, not the next layer's ids."""
    model = decoder(layers=4, top_k=(0, 1, 3, 2))
    _, rows = recorded_rows(model, prompt(7))
    assert (rows == truth(model, prompt(7))).all()
    assert (rows[:, 1, 1:] == -1).all() and (rows[:, 2] >= 0).all()


# ---- nested graphs --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_ids_leave_checkpoints_as_results(inner: str) -> None:
    """Written inside, they would be written again when the backward runs the checkpoint once more, into a later step's slots."""
    model = Decoder(checkpoint=True)
    module = traced(model, prompt(5))
    result = rewrite(module, match(module.graph).sites, torch.device("cpu"))
    assert isinstance(result, Recorded)
    assert operators(result.module)[RECORD] == 1
    assert RECORD not in {
        str(n.target) for m in result.module.children() if isinstance(m, fx.GraphModule) for n in m.graph.nodes
    }
    torch._dynamo.reset()
    _, rows = recorded_rows(model, prompt(5), inner)
    assert (rows == truth(model, prompt(5))).all()


class Regions(Decoder):
    """Blocks behind `nested_compile_region`: one nested graph, called once for each layer with its weights."""

    def __init__(self, depth: int) -> None:
        super().__init__(layers=5)
        region = torch.compiler.nested_compile_region

        def one(layer: nn.Module, x: Tensor) -> Tensor:
            return layer(x)

        def two(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
            return inner(second, inner(first, x))

        inner = region(one)
        outer = region(two) if depth == 2 else two
        self.run: Callable[..., Tensor] = outer

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](self.embed(ids))
        for first in (1, 3):
            x = self.run(self.layers[first], self.layers[first + 1], x)
        return self.head(x)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_graph_called_for_several_layers(depth: int) -> None:
    """One body serves layers 1 to 4: each call has its own ids and its own weights, by the path of calls that leads to it."""
    torch.manual_seed(0)
    model = Regions(depth).eval().requires_grad_(False)
    module = traced(model, prompt(5))
    assert sum(n.target is torch.ops.higher_order.invoke_subgraph for n in module.graph.nodes) == (
        4 if depth == 1 else 2
    )
    found = occurrences(module, match(module.graph).sites)
    assert [next(c for c in o.gate[0].name if c.isdigit()) for o in found] == ["1", "2", "3", "4"]
    assert [{c for w in o.experts for c in w.name if c.isdigit()} for o in found] == [{"1"}, {"2"}, {"3"}, {"4"}]
    torch._dynamo.reset()
    _, rows = recorded_rows(model, prompt(5))
    assert (rows == truth(model, prompt(5))).all()


# ---- ids as they were chosen ----------------------------------------------------------------------------------------
class Shifted(Moe):
    """Ids that are made an expert's local number in place, after they were chosen."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, ids = torch.topk(self.gate(flat).softmax(-1), self.top_k, dim=-1)
        ids += 1
        ids[ids == 8] = 0
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
        return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights).view(x.shape)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("nested", [False, True])
def test_ids_changed_in_place_are_recorded_as_chosen(inner: str, nested: bool) -> None:
    """Failure class 4: without the copy the rows held what the dispatcher made of the ids."""
    torch.manual_seed(0)
    model = Decoder(moe=lambda k: Shifted(top_k=k), checkpoint=nested).requires_grad_(False)
    assert ("tag_activation_checkpoint" in operators(traced(model, prompt(9)))) is nested
    torch._dynamo.reset()
    _, rows = recorded_rows(model, prompt(9), inner)
    assert (rows == truth(model, prompt(9))).all()


class Wide(Moe):
    """Ids of shape [2, T/2, K], then the same with k in front."""

    def __init__(self, top_k: int, first: bool) -> None:
        super().__init__(top_k=top_k)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(-1)
        if self.first:
            weights, ids = (t.movedim(0, -1) for t in probs.movedim(-1, 0).topk(self.top_k, dim=0))
        else:
            weights, ids = probs.topk(self.top_k, dim=-1)
        hidden = torch.relu(torch.einsum("bsd,bskfd->bskf", x, self.up[ids]))
        return torch.einsum("bskf,bskdf,bsk->bsd", hidden, self.down[ids], weights)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_layouts_of_ids_are_flattened_in_token_order(first: bool, dynamic: bool) -> None:
    """[B, S, K] and [K, B, S] are rows of B * S tokens; the second, reshaped without moving k, would mix tokens."""
    torch.manual_seed(0)
    model = Decoder(moe=lambda k: Wide(k, first)).requires_grad_(False)
    ids = torch.randint(VOCAB, (2, 4))
    compiled = torch.compile(model, backend=r3_pass.backend("eager"), dynamic=dynamic)
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    with session.step(range(8)):
        compiled(ids)
    want = truth(model, ids)
    assert (session.read(range(8)) == want).all()


# ---- what cannot be recorded together -------------------------------------------------------------------------------
class Halved(Decoder):
    """The last block runs over the last token only."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x[:, -1:] if layer is self.layers[-1] else x)
        return self.head(x)


def test_layers_of_different_token_counts_are_refused() -> None:
    """A step has one slot a token: rows of fewer tokens would go to the first slots, which are other tokens'."""
    model = Halved(config={"num_experts_per_tok": 2}).eval().requires_grad_(False)
    module = traced(model, prompt(5))
    reason = rewrite(module, match(module.graph).sites, torch.device("cpu"))
    assert isinstance(reason, str) and "different numbers of tokens (5, 1; an encoder-decoder, say)" in reason
    torch._dynamo.reset()
    backend = r3_pass.backend("eager")
    compiled = torch.compile(model, backend=backend)
    want = compiled(prompt(5))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    with pytest.raises(r3_pass.RefusedConfiguration, match="different numbers of tokens"), session.step(range(5)):
        compiled(prompt(5))
    assert (session.read(range(5)) == -1).all()
    session.detach()
    assert torch.equal(compiled(prompt(5)), want)
    assert backend.report().sites == [] and all(r.routing for r in backend.report().rejected)


def test_layers_on_different_devices_are_refused() -> None:
    """A pipeline in one graph: a kernel on one device would read the ids of another."""
    from torch._subclasses import FakeTensorMode

    module = traced(decoder(), prompt(5))
    sites = match(module.graph).sites
    ids = sites[1].columns[0]
    with FakeTensorMode():
        ids.meta["example_value"] = torch.empty(5, 2, dtype=torch.int64, device="cuda")
    reason = rewrite(module, sites, torch.device("cpu"))
    assert isinstance(reason, str) and "several devices (cpu, cuda:0)" in reason


def test_a_graph_without_traced_values_is_refused() -> None:
    """A hand-built graph has no fake mode to make inputs in: a reason, not a crash deep in torch."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((x,))
    site = Accepted("topk", 4, 2, (x,), 1, (), (), "", None, True, (x,))
    assert (
        rewrite(fx.GraphModule(nn.Module(), graph), [site], torch.device("cpu")) == "the graph carries no traced values"
    )


def test_other_parts_of_a_graph_are_copied() -> None:
    """Constants and nested graphs without routing stand in the copy as in the traced graph."""

    class Constant(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            x = super().forward(ids)
            x = checkpoint(lambda t: t.sin(), x, use_reentrant=False)
            return x * torch.tensor([math.pi])

    model = Constant().eval()
    with torch.no_grad():
        want = model(prompt(5))
    got, rows = recorded_rows(model, prompt(5))
    assert torch.equal(got, want) and (rows == truth(model, prompt(5))).all()


def test_both_flavours_reach_the_inner_backend() -> None:
    """Guards that are added after the backend returned are lost: the plain graph must be compiled beside the recording one."""
    inner = Keeping()
    model = decoder()
    recorded_rows(model, prompt(5), inner)
    recording, plain = inner.graphs
    assert operators(recording)[RECORD] == 1 and RECORD not in operators(plain)
    assert operators(recording) - operators(plain) == {RECORD: 1}
