"""`python -m r3_pass explain`: from a config alone to what would be recorded, and what it costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from r3_pass.__main__ import main

pytest.importorskip("transformers", reason="needs r3_pass[transformers]")

SMALL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "mlp_only_layers": [0],
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


def test_a_config_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row a layer with form, experts and top-k; the buffer's bytes for one token and for all slots; progress beside it."""
    assert main(["explain", str(config), "--slots", "1000"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert [r[:1] + r[2:] for r in rows[1:3]] == [
        ["1", "softmax_topk", "8", "2", "0"],
        ["2", "softmax_topk", "8", "2", "0"],
    ]
    assert "int16 [1000 + 1, 2, 2], 8 bytes a token" in out
    assert err.count("... ") == 3 and "3 layers" in err


def test_the_folder_of_a_model(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it lies on a disk, beside its weights."""
    assert main(["explain", str(config.parent), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [s["layer"] for s in found["sites"]] == [1, 2] and found["num_layers"] == 3
    assert found["bytes_per_slot"] == 8 and found["buffer_bytes"] == 65_537 * 8 and found["rejected"] == []


def test_a_file_of_another_name(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was read by its folder, in which nothing is named config.json."""
    other = config.rename(config.with_name("mine.json"))
    assert main(["explain", str(other), "--layers", "2"]) == 0
    assert "1 sites in 1 graphs" in capsys.readouterr().out


def test_dump(config: Path, tmp_path: Path) -> None:
    assert main(["explain", str(config), "--dump", str(tmp_path / "graphs")]) == 0
    assert "topk" in (tmp_path / "graphs" / "graph_0_before.txt").read_text()


def test_a_dense_model(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another exit status than a model that can be recorded: a script asks."""
    config.write_text(json.dumps({**SMALL, "mlp_only_layers": [0, 1, 2]}))
    assert main(["explain", str(config)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("0 sites in 1 graphs")
    assert err.splitlines()[-1].startswith("Qwen3MoeForCausalLM is dense: none of its 3 blocks holds experts")


def test_a_model_whose_router_nothing_finds(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may have experts: it is not called dense. (A convolution looks like them, until a graph is seen.)"""
    config.write_text(json.dumps({"model_type": "mamba", "num_hidden_layers": 3, "hidden_size": 32, "vocab_size": 64}))
    assert main(["explain", str(config), "--layers", "2"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("No router of MambaForCausalLM was found. If it has")


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("t5", r"'t5' is an encoder-decoder.*get_decoder\(\)"),
        ("clip", r"no causal language model.*CLIPConfig.*explain\(model"),
    ],
)
def test_a_model_that_is_no_decoder(model: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It was transformers' list of all classes that it has, 6,000 characters."""
    assert main(["explain", model]) == 2
    error = capsys.readouterr().err
    assert re.search(rf"^error: .*{what}", error, re.M) and len(error) < 400


@pytest.mark.parametrize(
    "content",
    ["{", json.dumps({k: v for k, v in SMALL.items() if k != "model_type"}), '{"model_type": "no_such"}', "[]"],
)
def test_a_file_that_is_no_config(config: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A sentence, not a traceback."""
    config.write_text(content)
    assert main(["explain", str(config)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("model", ["no_such_model", "/no/such/config.json"])
def test_a_model_that_nobody_knows(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", model]) == 2
    error = capsys.readouterr().err
    assert f"error: {model!r} is neither a file or folder here nor a model type" in error and len(error) < 200


@pytest.mark.parametrize("option", ["--slots", "--layers"])
def test_a_number_that_cannot_be(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "mixtral", option, "-3"])
    assert "at least 1, got -3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_type_in_a_process_of_its_own() -> None:
    """The command as a user types it; real sizes, two layers of them, and no memory for weights."""
    command = [sys.executable, "-m", "r3_pass", "explain", "mixtral", "--layers", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert [(s["layer"], s["num_experts"], s["top_k"]) for s in found["sites"]] == [(0, 8, 2), (1, 8, 2)]
