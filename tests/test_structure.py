"""What modules and config say: which list holds the layers, which layers hold experts, how many there are."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder import Decoder, Dense, Moe, decoder
from torch import nn

from r3_pass.structure import Block, inspect


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.mlp.gate.weight", Block("model.layers", 3)),
        ("layers.12.mlp.experts.7.up.weight", Block("layers", 12)),
        ("0.mlp.gate.weight", Block("", 0)),
        ("embed.weight", None),
        ("head.0", None),
        ("h2.weight", None),
    ],
)
def test_block_of_a_weight(name: str, block: Block | None) -> None:
    """The first number is the layer, an expert's number is not; a parameter's own number is no block."""
    assert inspect(nn.Linear(4, 4)).block_of(name) == block
    assert block is None or name.startswith(str(block))


def test_a_decoder() -> None:
    structure = inspect(decoder(layers=4, dense=(0, 2)))
    assert structure.blocks == {"layers": 4} and structure.main_container == "layers"
    assert structure.expected("layers") == (1, 3)
    assert structure.experts[Block("layers", 1)].text == "layers.1.mlp.up holds 8 experts"
    assert structure.num_layers("layers") == 4 and structure.may_route and structure.top_k is None


def test_no_weight_is_touched() -> None:
    """Meta tensors will do: `explain` runs before weights are there (failure class 13)."""
    with torch.device("meta"):
        model = Decoder()
    assert inspect(model).expected("layers") == (1, 2)


class Listed(nn.Module):
    """Experts as modules in a list, behind a gate of as many outputs."""

    def __init__(self, experts: int = 4, outputs: int = 4, other: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(16, outputs, bias=False)
        self.experts = nn.ModuleList(Dense() for _ in range(experts))
        if other:
            self.experts[0] = nn.Linear(16, 16)


class Convolved(nn.Module):
    """A convolution's weight has three dimensions, and a linear of as many outputs stands beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gate = nn.Conv1d(8, 8, 3), nn.Linear(16, 8)


class Banked(nn.Module):
    """A bank of three dimensions that no linear has an output for."""

    def __init__(self) -> None:
        super().__init__()
        self.bank, self.out = nn.Parameter(torch.zeros(5, 3, 7)), nn.Linear(16, 16)


@pytest.mark.parametrize(
    ("mlp", "holds"),
    [
        (Listed, True),
        (lambda: Listed(experts=4, outputs=6), False),
        (lambda: Listed(experts=1, outputs=1), False),
        (lambda: Listed(other=True), False),
        (Moe, True),
        (lambda: Moe(experts=1), False),
        (Convolved, False),
        (Banked, False),
        (Dense, False),
    ],
)
def test_evidence_of_experts(mlp: Callable[[], nn.Module], holds: bool) -> None:
    """Evidence of nothing makes a dense layer an error in every step; evidence that is missed makes a lost layer look dense."""
    structure = inspect(decoder(layers=2, moe=lambda k: mlp()))
    assert structure.expected("layers") == ((1,) if holds else ())


def test_a_dense_model() -> None:
    """The one case that is told at attach."""
    structure = inspect(decoder(layers=3, dense=(0, 1, 2)))
    assert not structure.may_route and structure.experts == {} and structure.main_container is None


@pytest.mark.parametrize("mlp", [lambda: Listed(experts=4, outputs=6), Banked])
def test_what_might_route_is_not_called_dense(mlp: Callable[[], nn.Module]) -> None:
    """A numbered list or a bank is enough to wait for the graphs."""
    assert inspect(decoder(layers=2, moe=lambda k: mlp())).may_route


def test_a_model_without_blocks() -> None:
    """Nothing to expect, and nothing to rule out."""
    structure = inspect(nn.Linear(4, 4))
    assert structure.blocks == {} and structure.may_route and structure.main_container is None


# ---- counts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, 3),
        ({"num_hidden_layers": 3}, 3),
        ({"num_hidden_layers": 2}, 2),
        ({"n_layer": 5}, 5),
        ({"num_hidden_layers": 12, "num_decoder_layers": 3}, 3),
        ({"num_hidden_layers": None}, 3),
        ({"num_hidden_layers": True}, 3),
    ],
)
def test_layers_by_the_config(config: dict[str, Any], layers: int) -> None:
    """Of several counts the one that fits the list; a list that is longer than the config says has a drafter's blocks behind."""
    assert inspect(decoder(config=config)).num_layers("layers") == layers


def test_blocks_past_the_layers_are_a_drafters() -> None:
    """A multi-token-prediction block in the target's list was expected in every step, and never ran."""
    structure = inspect(decoder(layers=4, config={"num_hidden_layers": 3}))
    assert structure.expected("layers") == (1, 2)


@pytest.mark.parametrize(
    ("config", "top_k"),
    [
        ({}, None),
        ({"num_experts_per_tok": 2}, 2),
        ({"num_experts_per_tok": 2, "top_k": 50}, 2),
        ({"moe_top_k": 4}, 4),
        ({"top_k_experts": 3}, 3),
        ({"router_top_k": 2, "moe_k": 3}, None),
        ({"ffn_config": {"moe_top_k": 4}}, 4),
        ({"num_experts_per_tok": 0}, None),
        ({"top_k": True}, None),
    ],
)
def test_top_k_by_the_config(config: dict[str, Any], top_k: int | None) -> None:
    """A hint that saves waiting for the first graph; two that disagree are none."""
    assert inspect(decoder(config=config)).top_k == top_k


def test_the_text_config_of_a_multimodal_model() -> None:
    """The outer config's layers are another tower's."""
    model = decoder()
    text = types.SimpleNamespace(num_hidden_layers=3, num_experts_per_tok=2)
    for config in (types.SimpleNamespace(num_hidden_layers=24, text_config=text),
                   types.SimpleNamespace(num_hidden_layers=24, get_text_config=lambda decoder: text)):  # fmt: skip
        model.config = config
        structure = inspect(model)
        assert (structure.num_layers("layers"), structure.top_k) == (3, 2)


# ---- names ----------------------------------------------------------------------------------------------------------
def test_a_list_under_a_second_name() -> None:
    """`self.first = self.layers[:2]` names the same blocks again, from 0 on: as a second list it would be refused."""
    model = decoder(layers=4)
    model.first = model.layers[:2]
    structure = inspect(model)
    assert structure.main_container == "layers" and structure.blocks == {"layers": 4}


def test_two_lists_with_experts() -> None:
    """An encoder and a decoder: no main list."""
    model = decoder(layers=2)
    model.other = decoder(layers=2).layers
    assert inspect(model).main_container is None


# ---- lists inside lists ---------------------------------------------------------------------------------------------
class Holder(nn.Module):
    """Whatever modules, by name."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def listed(*children: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(children)


def stages(lengths: list[int], **config: int) -> nn.Module:
    model = Holder(stages=listed(*(Holder(blocks=listed(*(Holder(mlp=Moe()) for _ in range(n)))) for n in lengths)))
    model.config = types.SimpleNamespace(**config)  # type: ignore[assignment]
    return model


def sublayers(blocks: int) -> nn.Module:
    """As T5: each block is a list of sublayers of several classes."""
    return Holder(block=listed(*(Holder(layer=listed(nn.Linear(16, 16), Dense(), Moe())) for _ in range(blocks))))


@pytest.mark.parametrize(
    ("model", "container", "layers"),
    [
        (lambda: Holder(mods=listed(decoder(layers=4, dense=(0, 2)))), "mods.0.layers", (1, 3)),
        (lambda: Holder(mods=listed(nn.Embedding(61, 16), decoder())), "mods.1.layers", (1, 2)),
        (lambda: sublayers(3), "block", (0, 1, 2)),
        (lambda: sublayers(1), "block", (0,)),
        (lambda: stages([2, 2, 2], num_hidden_layers=3), "stages", (0, 1, 2)),
        (lambda: Holder(layers=listed(Holder(mlp=Listed()), Holder(moe=Listed()), Dense())), "layers", (0, 1)),
        (lambda: Holder(layers=listed(*(Holder(mlp=Listed()) for _ in range(3)))), "layers", (0, 1, 2)),
    ],
)
def test_the_list_that_counts_the_layers(
    model: Callable[[], nn.Module], container: str, layers: tuple[int, ...]
) -> None:
    """The first number of a path is not always the layer's: a wrapper's, a stage's or an expert's number was taken for it."""
    structure = inspect(model())
    assert structure.lists.nested == () and structure.main_container == container
    assert structure.expected(container) == layers


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": 4}, {"num_hidden_layers": 2}])
def test_stages_of_blocks_are_told_apart_by_the_config_only(config: dict[str, int]) -> None:
    assert inspect(stages([2, 2], **config)).lists.nested == ("stages", "stages.0.blocks")


def test_a_block_without_a_number() -> None:
    """An expert's number was taken for a layer's."""
    structure = inspect(Holder(block=Holder(mlp=Listed())))
    assert (
        structure.block_of("block.mlp.experts.3.up.weight") is None
        and structure.block_of("block.mlp.gate.weight") is None
    )
    assert structure.loose == ("block.mlp.experts",) and structure.may_route and structure.separate_experts


def test_modules_are_experts_before_a_buffer_is() -> None:
    """A buffer [slots, heads, head_dim] outside of anything called attention may be a KV cache; its text says what to do."""
    model = decoder(layers=3, moe=lambda k: Listed())
    for layer in model.layers:
        layer.mixer = nn.Module()
        layer.mixer.register_buffer("k", torch.zeros(16, 4, 4))
    experts = inspect(model).experts
    assert experts[Block("layers", 1)].text == "layers.1.mlp.experts holds 4 experts, each a module"
    assert experts[Block("layers", 0)].text.startswith("layers.0.mixer.k (a buffer; if it is a KV cache, name a module")


def test_a_kv_cache_is_no_bank_of_experts() -> None:
    """A buffer [slots, heads, head_dim] of an attention, beside a weight of as many rows: a dense layer stays dense."""
    model = decoder(layers=3, dense=(0,), config={})
    for layer in model.layers:
        layer.attn = nn.Module()
        layer.attn.register_buffer("k", torch.zeros(16, 4, 4))
    assert inspect(model).expected("layers") == (1, 2)
    for layer in model.layers:
        layer.attn.k = None
        layer.attn.experts = nn.Parameter(torch.zeros(16, 4, 4))
    assert inspect(model).expected("layers") == (0, 1, 2), (
        "parameters may be experts: their rows are told from others at the call"
    )
