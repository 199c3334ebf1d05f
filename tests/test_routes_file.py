"""The saved form of routes: what was saved comes back, and nothing else does."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoder import prompt
from loop import Loop

from r3_pass import BufferLayoutError, RefusedConfiguration
from r3_pass.description import Description
from r3_pass.routes_file import _checksum, load_routes, save_routes

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="needs r3_pass[safetensors]")

DESCRIPTION = Description("M", "ff", None, 5, 3, (1, 2, 4), (3, 2, 3), (8, 8, None), "int16", "0.1.0")


def some_rows(tokens: int, seed: int = 0) -> np.ndarray:
    """int16 [tokens, 5, 3] as the description says."""
    rows = np.full((tokens, 5, 3), -1, np.int16)
    rows[:, [1, 2, 4]] = np.random.default_rng(seed).integers(0, 8, (tokens, 3, 3))
    rows[:, 2, 2] = -1
    return rows


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    """Ids of both kinds, an empty sequence, a boundary row; only layers that route are stored."""
    path = tmp_path / "routes.safetensors"
    routes: dict[str | int, np.ndarray] = {
        "a": some_rows(4),
        7: some_rows(0),
        "ü/b": some_rows(9, 1),
        "7": some_rows(2, 2),
    }
    routes["a"][2] = -1
    for _ in range(2):  # the second time over the first
        save_routes(path, routes, DESCRIPTION)
    loaded, description = load_routes(path, expect=DESCRIPTION)
    assert description == DESCRIPTION and list(loaded) == list(routes)
    for request_id, rows in loaded.items():
        assert rows.dtype == np.int16 and not rows.flags.writeable
        assert np.array_equal(rows, routes[request_id])
    assert safetensors_numpy.load_file(path)["rows"].shape == (15, 3, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["routes.safetensors"]


def test_no_sequences(tmp_path: Path) -> None:
    save_routes(tmp_path / "none", {}, DESCRIPTION)
    assert load_routes(tmp_path / "none") == ({}, DESCRIPTION)


def test_from_a_session_to_a_file(tmp_path: Path) -> None:
    loop = Loop()
    loop.step(("a", 0, prompt(4), range(4)))
    rows, description = loop.session.finish("a", 5), loop.session.describe()
    save_routes(tmp_path / "routes", {"a": rows}, description)
    loaded, again = load_routes(tmp_path / "routes", expect=description)
    assert again == description and np.array_equal(loaded["a"], rows)
    loop.session.detach()


def put(rows: np.ndarray, where: Any, value: int) -> np.ndarray:
    rows = rows.copy()
    rows[where] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (some_rows(3).astype(np.int32), "int32"),
        (some_rows(3)[:, :4], r"int16\[3, 4, 3\], expected int16\[tokens, 5, 3\]"),
        (some_rows(3)[0], "int16"),
        (put(some_rows(3), (0, 3, 0), 1), "layer 3 has expert ids"),
        (put(some_rows(3), (1, 1, 2), 8), "row 1, layer 1: ids .* expected 3 ids of 8 experts"),
        (put(some_rows(3), (2, 1, 0), -2), "row 2, layer 1"),
        (put(some_rows(3), (2, 1, 0), -1), "row 2, layer 1"),
        (put(some_rows(3), (2, 2, 2), 0), "row 2, layer 2: ids .* expected 2 ids"),
    ],
)
def test_rows_that_are_not_what_the_description_says(tmp_path: Path, rows: np.ndarray, words: str) -> None:
    """Found when saved: the trainer's machine is too late. Nothing is written."""
    with pytest.raises(BufferLayoutError, match=words):
        save_routes(tmp_path / "routes", {"good": some_rows(2), "bad": rows}, DESCRIPTION)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("request_id", [("a", 1), None, True, 1.5])
def test_ids_that_a_file_cannot_hold(tmp_path: Path, request_id: Any) -> None:
    with pytest.raises(RefusedConfiguration, match="text or whole numbers"):
        save_routes(tmp_path / "routes", {request_id: some_rows(2)}, DESCRIPTION)


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 6}, {"top_k": 4}, {"layers": (1, 3, 4)}, {"layer_top_k": (3, 3, 3)}, {"num_experts": (8, 8, 9)}],
)
def test_routes_of_another_model(tmp_path: Path, change: dict[str, Any]) -> None:
    save_routes(tmp_path / "routes", {"a": some_rows(2)}, dataclasses.replace(DESCRIPTION, num_experts=(8, 8, 8)))
    load_routes(tmp_path / "routes", expect=DESCRIPTION)
    with pytest.raises(RefusedConfiguration, match=f"another model or layout: {next(iter(change))} "):
        load_routes(tmp_path / "routes", expect=dataclasses.replace(DESCRIPTION, **change))


def test_arguments_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows by request id.*got ndarray"):
        save_routes(tmp_path / "x", np.zeros((1, 2, 2), np.int16), DESCRIPTION)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expect is a Description"):
        load_routes(tmp_path / "x", expect={})  # type: ignore[arg-type]


def test_a_file_cut_or_changed_anywhere(tmp_path: Path) -> None:
    """Every length, and every byte: each is a refusal."""
    path, other = tmp_path / "routes", tmp_path / "other"
    save_routes(path, {"a": some_rows(2)}, DESCRIPTION)
    whole = path.read_bytes()
    for stop in [*range(0, len(whole), 7), len(whole) - 1]:
        other.write_bytes(whole[:stop])
        with pytest.raises(RefusedConfiguration):
            load_routes(other)
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1
        other.write_bytes(changed)
        if changed[at : at + 1].isspace() or whole[at : at + 1].isspace():
            continue  # padding of the header
        with pytest.raises(RefusedConfiguration):
            load_routes(other)


@pytest.mark.parametrize(
    ("tensors", "texts", "words"),
    [
        ({"lengths": np.array([3, 0])}, {}, "request ids with lengths"),
        ({"lengths": np.array([3, -1])}, {}, "request ids with lengths"),
        ({"lengths": np.array([2**62, 2**62, 2**62, 2**62, 2])}, {"request_ids": "[1, 2, 3, 4, 5]"}, "with lengths"),
        ({"lengths": np.array([2], np.int32)}, {}, "request ids with lengths"),
        ({"rows": some_rows(2)[:, [1, 2, 4]].astype(np.int32)}, {}, "rows are int32"),
        ({"rows": some_rows(2)[:, [1, 2]]}, {}, r"int16\[2, 2, 3\], expected"),
        ({"rows": np.zeros((2, 3, 3), np.int16)}, {}, "layer 2: ids"),
        ({"more": np.zeros(1)}, {}, "holds the tensors"),
        ({}, {"request_ids": '["a", "b"]'}, "request ids with lengths"),
        ({}, {"request_ids": '[["a"]]'}, "request ids"),
        ({}, {"request_ids": '{"a": 1}'}, "request ids"),
        ({}, {"request_ids": "nonsense"}, "request ids"),
        ({}, {"description": "{}"}, "has the fields"),
        ({}, {"format": "r3_pass.routes/2"}, "'r3_pass.routes/2', expected"),
    ],
)
def test_a_file_with_a_right_checksum_is_not_believed_either(
    tmp_path: Path, tensors: dict[str, Any], texts: dict[str, str], words: str
) -> None:
    """Somebody who writes such files otherwise: what contradicts itself is refused, whatever the checksum."""
    good = {"rows": some_rows(2)[:, [1, 2, 4]], "lengths": np.array([2])}
    said = {
        "format": "r3_pass.routes/1",
        "request_ids": json.dumps(["a"]),
        "description": DESCRIPTION.to_json(),
    } | texts
    held = {name: np.ascontiguousarray(array) for name, array in (good | tensors).items()}
    safetensors_numpy.save_file(held, tmp_path / "routes", said | {"sha256": _checksum(held, said)})
    with pytest.raises((RefusedConfiguration, BufferLayoutError), match=words):
        load_routes(tmp_path / "routes")


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_routes(tmp_path / "nothing")
    torch.save({"rows": torch.zeros(1)}, tmp_path / "pickle")
    with pytest.raises(RefusedConfiguration, match="no whole safetensors file"):
        load_routes(tmp_path / "pickle")
    safetensors_numpy.save_file({"rows": np.zeros(1)}, tmp_path / "foreign")
    with pytest.raises(RefusedConfiguration, match="not written by this version's save_routes"):
        load_routes(tmp_path / "foreign")


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (lambda: save_routes(tmp_path / "a", {}, DESCRIPTION), lambda: load_routes(tmp_path / "a")):
        with pytest.raises(RefusedConfiguration, match=r"pip install 'r3_pass\[safetensors\]'"):
            call()
