"""Which layer a site's row is of: where weights disagree, where the graph shows no experts, and where a layer is not compiled."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder import HIDDEN, D, Decoder, Dense, Moe, decoder, prompt, truth
from recording import recording
from torch import Tensor, nn

import r3_pass
from r3_pass.binding import Binding

T = 6


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def rows_of(model: nn.Module, **options: Any) -> Any:
    """One step of the whole model, compiled."""
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=16, **options)
    try:
        with torch.no_grad(), session.step(range(T)):
            compiled(prompt(T))
        return session.read(range(T))
    finally:
        session.detach()


class GateOfTheNext(Decoder):
    """Pre-gated: each block's gate chooses the experts of the block behind it."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        scores = self.layers[1].mlp.gate(x.reshape(-1, D))
        for layer in self.layers[2:]:
            moe, flat = layer.mlp, layer.norm(x).reshape(-1, D)
            weights, chosen = scores.softmax(-1).topk(2, -1)
            scores = moe.gate(flat)
            hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, moe.up[chosen]))
            x = x + torch.einsum("tkf,tkdf,tk->td", hidden, moe.down[chosen], weights).view(x.shape)
        return self.head(x)


def test_a_gate_that_chooses_experts_of_another_block() -> None:
    """Its row went to the gate's layer."""
    with pytest.raises(r3_pass.PartialCapture, match=r"the ids of layers\.1\.mlp\.gate choose experts of layers\.2"):
        rows_of(GateOfTheNext(layers=4).requires_grad_(False))


def test_weights_that_come_and_go() -> None:
    """FSDP hangs a gathered weight in the model while its block runs: known again without a search, but only while it hangs."""
    model, other = Decoder(), Decoder()
    binding = Binding(model, torch.device("cpu"), lambda *_: None, mark=False)
    gate, shard = model.layers[1].mlp.gate, nn.Parameter(torch.zeros(1))
    gathered = gate.weight
    gate.weight = shard
    assert not binding.owns(gathered) and not binding.owns(shard)
    binding.claim()
    assert binding.owns(shard) and not binding.owns(gathered)
    gate.weight = gathered
    assert binding.owns(gathered) and not binding.owns(shard)
    gate.weight, other.layers[1].mlp.gate.weight = shard, gathered
    assert binding.owns(shard) and not binding.owns(gathered), "it is the other model's now"
    gate.weight = gathered
    model.layers[1] = other.layers[2]
    assert not binding.owns(gathered), "its block is gone"
    model.layers[1].mlp.gate.weight = gathered
    assert binding.owns(gathered)
    del gathered, gate, shard, other
    model.layers[1] = model.layers[2]
    binding.claim()
    gc.collect()
    held = {id(weight) for weight in model.parameters()}
    binding.claim()
    assert set(binding.marks._unmarked or ()) == held, "weights that are gone are forgotten"


# ---- ids that leave the graph ---------------------------------------------------------------------------------------
class Disabled(Moe):
    @torch._dynamo.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Codes(nn.Module):
    """A codebook beside the experts; the graph ends before the codes are looked up."""

    def __init__(self, codes: int, mlp: nn.Module) -> None:
        super().__init__()
        self.side = nn.ModuleDict({"to_code": nn.Linear(D, codes)})
        self.codes, self.inner = nn.Parameter(torch.randn(codes, D)), mlp

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.side["to_code"](x).softmax(-1).topk(2, -1)
        torch._dynamo.graph_break()
        return self.inner(x) + (self.codes[chosen] * weights[..., None]).sum(-2)


@pytest.mark.parametrize(
    ("codes", "reason"),
    [(8, "is nearer to where"), (16, "is nearer to where"), (17, "chooses among 17"), (5, "chooses among 5")],
)
def test_codes_are_not_taken_for_a_disabled_router(codes: int, reason: str) -> None:
    """They leave the graph as a router's ids do, in a layer that holds experts."""
    with pytest.raises(r3_pass.PartialCapture, match=reason):
        rows_of(decoder(moe=lambda k: Codes(codes, Disabled(top_k=k))))


def test_a_router_whose_ids_leave_the_graph() -> None:
    model = decoder(moe=lambda k: Moe(top_k=k, after_selection=torch._dynamo.graph_break))
    assert (rows_of(model) == truth(model, prompt(T))).all()


# ---- layers of one kind ---------------------------------------------------------------------------------------------
class Packed(nn.Module):
    """All experts in one matrix each, as DBRX: nothing in the modules says that there are any."""

    def __init__(self, top_k: int, after_selection: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.top_k, self.after_selection, self.gate = top_k, after_selection, nn.Linear(D, 8, bias=False)
        self.experts_up = nn.Parameter(torch.randn(8 * HIDDEN, D) * 0.2)
        self.experts_down = nn.Parameter(torch.randn(8 * HIDDEN, D) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        weights, chosen = self.gate(flat).softmax(-1).topk(self.top_k, -1)
        self.after_selection()
        up, down = self.experts_up.view(8, HIDDEN, D)[chosen], self.experts_down.view(8, HIDDEN, D)[chosen]
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, up))
        return torch.einsum("tkf,tkfd,tk->td", hidden, down, weights).view(x.shape)


@pytest.mark.parametrize("broken", [False, True])
def test_experts_in_one_matrix(broken: bool) -> None:
    after = torch._dynamo.graph_break if broken else lambda: None
    model = decoder(moe=lambda k: Packed(k, after))
    assert (rows_of(model) == truth(model, prompt(T))).all()


def test_a_layer_like_the_captured_ones_that_is_not_compiled() -> None:
    """Nothing but its likeness says that it routes: its rows were -1."""
    model, backend = decoder(moe=Packed), r3_pass.backend("eager")
    for layer in model.layers[:2]:
        layer.compile(backend=backend)
    session = r3_pass.runtime.attach(model, backend=backend, num_slots=16)
    with pytest.raises(r3_pass.PartialCapture, match=r"1 of 2 MoE layers[\s\S]*layer 2"), session.step(range(T)):
        model(prompt(T))
    session.detach()


# ---- blocks past the layers -----------------------------------------------------------------------------------------
def test_a_block_past_the_layers_of_the_config() -> None:
    """Left out in silence, its layer would be missing from every row; with num_layers= the user has said which it is."""
    model = decoder(config={"num_hidden_layers": 2})
    with pytest.raises(r3_pass.PartialCapture, match="Pass num_layers=3"):
        rows_of(model)
    assert (rows_of(model, num_layers=3) == truth(model, prompt(T))).all()
    assert (rows_of(model, num_layers=2) == truth(model, prompt(T))[:, :2]).all()


# ---- names ----------------------------------------------------------------------------------------------------------
class Named(nn.Module):
    """A block of two modules whose names are given."""

    def __init__(self, attention: str, moe: str) -> None:
        super().__init__()
        self.names = attention, moe
        self.add_module(attention, Moe())
        self.add_module(moe, Moe())

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = x + self.get_submodule(name)(x)
        return x


@pytest.mark.parametrize("attention", ["self_attn", "attention", "block_attention"])
@pytest.mark.parametrize("moe", ["mlp", "post_attention_moe", "attn_experts"])
def test_experts_of_the_attention(attention: str, moe: str) -> None:
    """A row has no room for them; an MLP that is only called after the attention is none."""
    model = decoder(dense=(0, 1, 2))
    model.layers = nn.ModuleList(Named(attention, moe) for _ in range(2)).requires_grad_(False)
    blocks = [nn.ModuleDict({"mlp": block.get_submodule(moe)}) for block in model.layers]
    rows = rows_of(model)
    kept: list[Tensor] = []
    hooks = [b["mlp"].gate.register_forward_hook(lambda m, i, o: kept.append(o.topk(2, -1)[1])) for b in blocks]
    with torch.no_grad():
        model(prompt(T))
    assert len(hooks) == 2 and (rows == torch.stack(kept, 1).numpy()).all()


@pytest.mark.parametrize("per_layer", [False, True])
def test_why_experts_of_the_attention_are_not_recorded(per_layer: bool) -> None:
    """The report says it of each layer: before anything ran, and of what was compiled."""
    model = decoder(dense=(0, 1, 2))
    model.layers = nn.ModuleList(Named("self_attn", "mlp") for _ in range(2)).requires_grad_(False)
    reports = [r3_pass.explain(model, prompt(T))]
    with torch.no_grad(), recording(model, "eager", list(model.layers) if per_layer else ()) as recorder:
        recorder.rows(T, lambda: recorder.compiled(prompt(T)))
        reports.append(recorder.backend.report())
    for report in reports:
        assert [s.module for s in report.sites] == ["layers.0.mlp.gate", "layers.1.mlp.gate"]
        assert [(r.module.rpartition(".gate")[0] or r.module, r.reason, r.routing) for r in report.rejected] == [
            (f"layers.{n}.self_attn", "attention experts, not the layer's MLP experts", False) for n in range(2)
        ]


class Attributes(nn.Module):
    """Blocks that are attributes, not in a list."""

    def __init__(self, moe: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(61, D), moe()

    def forward(self, ids: Tensor) -> Tensor:
        return self.block(self.embed(ids))


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 4, bias=False), nn.ModuleList(Dense() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        each = [expert(x) * ((chosen == e) * weights).sum(-1, keepdim=True) for e, expert in enumerate(self.experts)]
        return torch.stack(each).sum(0)


@pytest.mark.parametrize("moe", [Moe, Separate])
def test_blocks_without_a_number(moe: Callable[[], nn.Module]) -> None:
    """No row says which layer it is of; an expert's number is not the layer's."""
    with pytest.raises(r3_pass.NoRouterFound, match=r"torch\.nn\.ModuleList"):
        rows_of(Attributes(moe).requires_grad_(False))


def test_lists_inside_one_another_are_refused_at_attach() -> None:
    model = nn.ModuleDict({"stages": nn.ModuleList(decoder() for _ in range(2))})
    with pytest.raises(r3_pass.RefusedConfiguration, match=r"'stages' and 'stages\.0\.layers'[\s\S]*submodule"):
        r3_pass.runtime.attach(model, num_slots=16)


# ---- backend --------------------------------------------------------------------------------------------------------
def test_an_inner_backend_that_does_not_exist() -> None:
    with pytest.raises(r3_pass.RefusedConfiguration, match=r"'inducttor'.*inductor"):
        r3_pass.backend("inducttor")
    with pytest.raises(ValueError, match="inner"):
        r3_pass.backend(5)  # type: ignore[arg-type]
