"""Rows that leave the slot buffer with their KV (offload, prefill/decode split) and come back."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from r3_pass.errors import RefusedConfiguration
from r3_pass.runtime.slots import SlotBuffer, Slots


@dataclasses.dataclass(frozen=True)
class SavedRows:
    """What `Session.extract` returns and `Session.insert` takes back.

    Attributes:
        rows: int16 [n, M, K] on the host.
        layers: decoder layer of each of the M columns.
        version: weight version that made them.
        checksum: CRC-32 of the rows' bytes.
    """

    rows: npt.NDArray[np.int16]
    layers: tuple[int, ...]
    version: Hashable
    checksum: int


def save(buffer: SlotBuffer, slots: Slots, version: Hashable) -> SavedRows:
    """The rows of these slots; waits for the device."""
    rows = buffer.gather(slots).cpu().numpy()
    return SavedRows(rows, buffer.geometry.stored, version, zlib.crc32(rows.tobytes()))


def restore(buffer: SlotBuffer, slots: Slots, saved: object, version: Hashable) -> None:
    """Write saved rows into these slots.

    Raises: RefusedConfiguration if they are of another layer map, top-k or weight version, or are damaged.
    """
    if not isinstance(saved, SavedRows):
        raise RefusedConfiguration(f"insert takes what extract returned, got {type(saved).__name__}.")
    if not isinstance(saved.rows, np.ndarray):
        raise RefusedConfiguration(
            f"insert takes what extract returned, unchanged: its rows are a numpy array, got {type(saved.rows).__name__}."
        )
    ours = (buffer.geometry.stored, buffer.geometry.row_shape, version)
    theirs = (saved.layers, saved.rows.shape[1:], saved.version)
    if ours != theirs:
        raise RefusedConfiguration(
            f"rows of (layers, shape, weight version) {theirs} cannot go into a buffer of {ours}. Forward these tokens again."
        )
    if zlib.crc32(saved.rows.tobytes()) != saved.checksum:
        raise RefusedConfiguration(
            "saved rows do not match their checksum: they were changed on their way. Forward the tokens again."
        )
    buffer.write(slots, saved.rows)
