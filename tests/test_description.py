"""What a session says of its rows."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from decoder import decoder, prompt

import r3_pass
from r3_pass import RefusedConfiguration
from r3_pass.description import Description, describe_tag, fingerprint

GOOD = Description("Mixtral", "ab" * 32, "v2", 6, 4, (1, 2, 4), (4, 4, 2), (8, 8, 16), "int16", "0.1.0")


def test_a_session_describes_its_rows() -> None:
    """Layers of different top-k after dense ones; what only a step shows is None before it."""
    model = decoder(layers=5, dense=(0, 3), top_k=(2, 2, 3, 2, 3))
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=8)
    with pytest.raises(RefusedConfiguration, match="Run one step"):
        session.describe()
    with torch.no_grad(), session.step(range(3)):
        compiled(prompt(3))
    session.weights_changed("step-7")
    described = session.describe()
    assert described == Description(
        model="Decoder",
        fingerprint=fingerprint(model),
        weights="step-7",
        num_layers=5,
        top_k=3,
        layers=(1, 2, 4),
        layer_top_k=(2, 3, 3),
        num_experts=(8, 8, 8),
        dtype="int16",
        r3_pass=r3_pass.__version__,
    )
    assert session.read(range(3)).shape[1:] == (described.num_layers, described.top_k)
    session.release()
    assert session.describe() == described, "asleep it is the same model"
    session.detach()


def test_before_the_first_step_the_config_says_it() -> None:
    model = decoder(config={"num_experts_per_tok": 2, "num_hidden_layers": 3})
    session = r3_pass.runtime.attach(model, num_slots=8)
    described = session.describe()
    assert (described.layers, described.top_k, described.layer_top_k) == ((1, 2), 2, (None, None))
    assert not described.differences(dataclasses.replace(described, layer_top_k=(2, 2), num_experts=(8, 8)))
    session.detach()


def test_print() -> None:
    assert str(GOOD).splitlines() == [
        "Mixtral abababababab, weights 'v2', recorded by r3_pass 0.1.0",
        "routed_experts: int16 [tokens, 6, 4]",
        "layers 1-2: top-4 of 8 experts",
        "layer 4: top-2 of 16 experts",
        "3 of 6 layers are -1: they do not route",
    ]
    assert "Description(model='Mixtral'" in repr(GOOD)


def test_json_and_back() -> None:
    assert Description.from_json(GOOD.to_json()) == GOOD
    assert json.loads(GOOD.to_json())["layers"] == [1, 2, 4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "uint8"}, "dtype is 'uint8'"),
        ({"num_layers": 0}, "at least 1"),
        ({"top_k": 2.0}, "whole number"),
        ({"top_k": True}, "whole number"),
        ({"layers": [1, 1, 2]}, "ascending"),
        ({"layers": [1, 2, 6]}, "lie in 0 .. 5"),
        ({"layers": []}, "at least one"),
        ({"layers": [1, 2]}, "one top-k"),
        ({"layers": [1, 2, None]}, "whole numbers"),
        ({"layer_top_k": [5, 4, 4]}, "top-k of a layer lies in 1 .. 4"),
        ({"num_experts": [8, 8, 1]}, "has 2 to 32767 experts, got 1"),
        ({"num_experts": [8, 8, 40_000]}, "got 40000"),
        ({"model": 3}, "is text"),
        ({"weights": [1]}, "is a tag"),
        ({"more": 1}, "has the fields"),
    ],
)
def test_descriptions_that_cannot_be(change: dict[str, Any], words: str) -> None:
    """It comes from a file, so nothing in it is believed."""
    text = json.dumps(json.loads(GOOD.to_json()) | change)
    with pytest.raises(RefusedConfiguration, match=words):
        Description.from_json(text)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"a"', "{}"])
def test_text_that_is_no_description(text: str) -> None:
    with pytest.raises(RefusedConfiguration, match="a description of routes"):
        Description.from_json(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 7}, ["num_layers is 6, expected 7"]),
        ({"top_k": 8}, ["top_k is 4, expected 8"]),
        ({"layers": (1, 2, 3)}, ["layers is (1, 2, 4), expected (1, 2, 3)"]),
        ({"layer_top_k": (4, 4, 3)}, ["layer_top_k of layer 4 is 2, expected 3"]),
        ({"num_experts": (8, 9, 16)}, ["num_experts of layer 2 is 8, expected 9"]),
        ({"model": "other", "fingerprint": "", "weights": None, "r3_pass": "9", "num_experts": (None,) * 3}, []),
    ],
)
def test_differences(change: dict[str, Any], words: list[str]) -> None:
    assert GOOD.differences(dataclasses.replace(GOOD, **change)) == words


def test_tags_of_any_kind() -> None:
    assert [describe_tag(tag) for tag in (None, 7, "v", ("step", 3))] == [None, 7, "v", "('step', 3)"]


def test_the_fingerprint_is_of_the_architecture() -> None:
    """Other values are the same model; another size, or another name, is not."""
    assert fingerprint(decoder(seed=1)) == fingerprint(decoder(seed=2))
    assert fingerprint(decoder(layers=4)) != fingerprint(decoder())


def test_stages_are_described_as_one_model() -> None:
    first = dataclasses.replace(GOOD, layers=(1, 2), layer_top_k=(4, 4), num_experts=(8, 8))
    last = dataclasses.replace(GOOD, fingerprint="cd" * 32, layers=(4,), layer_top_k=(2,), num_experts=(16,), top_k=2)
    merged = Description.of_stages([first, last])
    assert dataclasses.replace(merged, fingerprint=GOOD.fingerprint) == GOOD
    assert merged.fingerprint not in (first.fingerprint, last.fingerprint)
    with pytest.raises(RefusedConfiguration, match="weights"):
        Description.of_stages([first, dataclasses.replace(last, weights="v1")])
    with pytest.raises(RefusedConfiguration, match="ascending"):
        Description.of_stages([first, first])
