"""A saved form of `routed_experts` of many sequences: one safetensors file, with what is needed to read it.

    save_routes("routes.safetensors", {"req_0": rows, "req_1": more}, session.describe())
    routes, description = load_routes("routes.safetensors")          # routes["req_0"]: int16 [tokens, num_layers, top_k]

    tensors   rows     int16 [all tokens, M, K]     the layers that route only, sequences one after the other
              lengths  int64 [sequences]
    metadata  format, request_ids (JSON), description (JSON), sha256

Nothing in it is executed or unpickled. The checksum finds damage; it is no signature. Needs `pip install 'r3_pass[safetensors]'`.

Legend: L decoder layers, M stored (MoE) layers, K top-k.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from r3_pass.description import Description
from r3_pass.errors import BufferLayoutError, RefusedConfiguration

Rows = npt.NDArray[np.int16]
Lengths = npt.NDArray[np.int64]

FORMAT = "r3_pass.routes/1"
_SAVE_AGAIN = "Save the routes again, from the session that recorded them."


def save_routes(
    path: str | os.PathLike[str], routes: Mapping[str | int, npt.ArrayLike], description: Description
) -> None:
    """Write the rows of many sequences. The file appears whole or not at all, and replaces one of that name.

    Args:
        routes: int16 [tokens, num_layers, top_k] by request id (text or whole number), as `finish` returned them. Rows that are -1
            throughout (boundaries of turns) may be among them.
        description: `session.describe()` of the session that recorded them.

    Raises:
        RefusedConfiguration: safetensors is not installed, or a request id is neither text nor a whole number.
        BufferLayoutError: rows that are not what the description says.
    """
    numpy_file = _safetensors()[1]
    if not isinstance(routes, Mapping):
        raise ValueError(f"routes are rows by request id ({{id: rows}}), got {type(routes).__name__}")
    ids = list(routes)
    wrong = [i for i in ids if not _is_id(i)]
    if wrong:
        raise RefusedConfiguration(
            f"request id {wrong[0]!r} is a {type(wrong[0]).__name__}; a file holds ids that are text or whole numbers. "
            "Save under names of your own."
        )
    parts = [_stored_columns(request_id, np.asarray(rows), description) for request_id, rows in routes.items()]
    shape = (len(description.layers), description.top_k)
    rows = np.concatenate([np.zeros((0, *shape), np.int16), *parts])
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    texts = {"format": FORMAT, "request_ids": json.dumps(ids), "description": description.to_json()}
    tensors = {"rows": rows, "lengths": lengths}
    partial = f"{os.fspath(path)}.partial-{os.getpid()}"
    try:
        numpy_file.save_file(tensors, partial, texts | {"sha256": _checksum(tensors, texts)})
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)


def load_routes(
    path: str | os.PathLike[str], expect: Description | None = None
) -> tuple[dict[str | int, Rows], Description]:
    """Read what `save_routes` wrote.

    Args:
        expect: what the rows must be: layer map, top-k, shape, dtype, numbers of experts. Their model and weights are not compared:
            the description that is returned says them.

    Returns: rows by request id, int16 [tokens, num_layers, top_k], read-only; and their description.
    Raises: RefusedConfiguration for a file that is none, is truncated or changed, or holds other rows than expected; OSError if
        it cannot be read.
    """
    if not isinstance(expect, Description | None):
        raise ValueError(
            f"expect is a Description (session.describe(), Description.from_json), got {type(expect).__name__}"
        )
    tensors, texts = _read(path)
    where = f"{os.fspath(path)}: "
    if texts.get("format") != FORMAT or set(texts) != {"format", "request_ids", "description", "sha256"}:
        raise RefusedConfiguration(
            f"{where}a safetensors file of format {texts.get('format')!r}, expected {FORMAT!r}: not written by this "
            "version's save_routes."
        )
    if set(tensors) != {"rows", "lengths"}:
        raise RefusedConfiguration(
            f"{where}holds the tensors {sorted(tensors)}, expected rows and lengths. {_SAVE_AGAIN}"
        )
    if _checksum(tensors, texts) != texts["sha256"]:
        raise RefusedConfiguration(f"{where}the checksum does not fit: the file was changed. {_SAVE_AGAIN}")
    description = Description.from_json(texts["description"])
    rows, lengths, ids = tensors["rows"], tensors["lengths"], _ids(where, texts["request_ids"])
    shape = (len(description.layers), description.top_k)
    if rows.dtype != np.int16 or rows.shape[1:] != shape:
        raise RefusedConfiguration(
            f"{where}rows are {rows.dtype}{list(rows.shape)}, expected int16[n, {shape[0]}, {shape[1]}]. {_SAVE_AGAIN}"
        )
    whole = lengths.dtype == np.int64 and lengths.shape == (len(ids),)
    if not whole or (lengths < 0).any() or (lengths > len(rows)).any() or lengths.sum() != len(rows):
        raise RefusedConfiguration(
            f"{where}{len(ids)} request ids with lengths {lengths.dtype}{list(lengths.shape)} of {int(lengths.sum())} rows in all, "
            f"{len(rows)} rows are there. {_SAVE_AGAIN}"
        )
    if expect is not None and (differences := description.differences(expect)):
        raise RefusedConfiguration(
            f"{where}these routes are of another model or layout: {'; '.join(differences)}. Load the routes of the model that is "
            "trained."
        )
    parts = np.split(rows, np.cumsum(lengths)[:-1]) if ids else []
    found: dict[str | int, Rows] = {}
    for request_id, part in zip(ids, parts, strict=True):
        expanded = np.full((len(part), description.num_layers, description.top_k), -1, dtype=np.int16)
        expanded[:, list(description.layers)] = part
        _stored_columns(request_id, expanded, description)
        expanded.flags.writeable = False
        found[request_id] = expanded
    return found, description


def _stored_columns(request_id: str | int, rows: npt.NDArray[Any], description: Description) -> Rows:
    """The columns of the layers that route, checked against the description.

    Raises: BufferLayoutError
    """
    expected = (description.num_layers, description.top_k)
    if rows.dtype != np.int16 or rows.ndim != 3 or rows.shape[1:] != expected:
        raise BufferLayoutError(
            f"request {request_id!r}: rows are {rows.dtype}{list(rows.shape)}, expected int16[tokens, {expected[0]}, "
            f"{expected[1]}] by the description."
        )
    layers = list(description.layers)
    others = np.setdiff1d(np.arange(description.num_layers), layers)
    routed = np.flatnonzero((rows[:, others] != -1).any(axis=(0, 2)))
    if routed.size:
        raise BufferLayoutError(
            f"request {request_id!r}: layer {int(others[routed[0]])} has expert ids, but the description says that it does not "
            f"route (layers {layers} do). Take the description of the session that recorded the rows."
        )
    stored: Rows = rows[:, layers]
    for column, layer in enumerate(layers):
        top_k, experts = description.layer_top_k[column], description.num_experts[column]
        ids = stored[:, column]
        chosen = ids >= 0
        used = chosen.sum(axis=1)
        width = description.top_k if top_k is None else top_k
        uneven = (used > 0) & (used != width if top_k is not None else used > width)
        bad = (ids < -1).any(axis=1) | (ids >= (experts or 2**15)).any(axis=1) | uneven | chosen[:, width:].any(axis=1)
        if bad.any():
            token = int(np.flatnonzero(bad)[0])
            raise BufferLayoutError(
                f"request {request_id!r}, row {token}, layer {layer}: ids {ids[token].tolist()}; expected {width} ids of "
                f"{experts or 'some'} experts and -1 behind them, or -1 throughout."
            )
    return stored


def _ids(where: str, text: str) -> list[str | int]:
    try:
        ids = json.loads(text)
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not all(map(_is_id, ids)) or len(set(ids)) < len(ids):
        raise RefusedConfiguration(
            f"{where}its request ids are no list of different texts and whole numbers. {_SAVE_AGAIN}"
        )
    return ids


def _is_id(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    safetensors, _ = _safetensors()
    with open(path, "rb"):
        pass  # what is not there is an OSError, not a damaged file
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise RefusedConfiguration(
            f"{os.fspath(path)} is no whole safetensors file ({error}): truncated, or something else. {_SAVE_AGAIN}"
        ) from error


def _checksum(tensors: Mapping[str, npt.NDArray[Any]], texts: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name in ("format", "request_ids", "description"):
        digest.update(f"{name} {len(texts[name])}\n{texts[name]}\n".encode())
    for name in ("lengths", "rows"):
        held = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {held.dtype.str} {held.shape}\n".encode())
        digest.update(held.data)
    return digest.hexdigest()


def _safetensors() -> tuple[Any, Any]:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise RefusedConfiguration(
            "the saved form of routes is a safetensors file: pip install 'r3_pass[safetensors]'."
        ) from error
    return safetensors, safetensors.numpy
