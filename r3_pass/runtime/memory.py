"""Device memory of a session: allocated whole or refused by name, with the bytes that are wanted and those that are free."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from r3_pass.errors import RefusedConfiguration


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str) -> Tensor:
    """A tensor full of -1, writable also where it was made under `inference_mode`.

    Args:
        what: its name, and what to do if it does not fit: "the slot buffer (...)", for messages.

    Raises: RefusedConfiguration if the device has no room for it.
    """
    wanted = dtype.itemsize
    for size in shape:
        wanted *= size
    free = free_bytes(device)
    if free is not None and wanted > free:
        raise RefusedConfiguration(_does_not_fit(what, wanted, device, f"{free} bytes are free"))
    with torch.inference_mode(False):
        try:
            made = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError, and what the host's allocator raises
            raise RefusedConfiguration(_does_not_fit(what, wanted, device, "its allocation failed")) from error
        return made.fill_(-1)


def _does_not_fit(what: str, wanted: int, device: torch.device, left: str) -> str:
    return (
        f"{what} does not fit on {device}: {wanted} bytes, {left}. Charge r3_pass.runtime.plan(model, num_slots=...).nbytes to "
        "the engine's KV cache budget before it allocates, or give the cache fewer slots."
    )


def free_bytes(device: torch.device) -> int | None:
    """What may still be allocated there; None if nobody says."""
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return None
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else int(kib) * 1024
