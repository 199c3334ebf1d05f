"""Memory of a session's buffers: allocated whole or refused by name, with the bytes that are wanted and those that are free."""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from r3_pass.errors import RefusedConfiguration

Placement = Literal["device", "pinned"]
"""Where a GPU's slot buffer lies: in its own memory, or in the host's, page-locked, which it reads and writes over the bus."""


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str) -> Tensor:
    """A tensor full of -1, writable also where it was made under `inference_mode`.

    Args:
        what: its name, and what to do if it does not fit: "the slot buffer (...)", for messages.

    Raises: RefusedConfiguration if the device has no room for it.
    """
    wanted = _bytes(shape, dtype)
    free = free_bytes(device)
    if free is not None and wanted > free:
        raise RefusedConfiguration(_does_not_fit(what, wanted, device, f"{free} bytes are free"))
    with torch.inference_mode(False):
        try:
            made = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError, and what the host's allocator raises
            raise RefusedConfiguration(_does_not_fit(what, wanted, device, "its allocation failed")) from error
        return made.fill_(-1)


def allocate_pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str) -> Tensor:
    """As `allocate`: a tensor of the GPU whose bytes lie in page-locked memory of the host. It takes none of the GPU's memory.

    Raises: RefusedConfiguration if the host has no room for it, or it cannot be locked.
    """
    wanted = _bytes(shape, dtype)
    free = free_bytes(torch.device("cpu"))
    if free is not None and wanted > free:
        raise RefusedConfiguration(_does_not_fit(what, wanted, torch.device("cpu"), f"{free} bytes are free"))
    with torch.inference_mode(False), torch.cuda.device(device):
        made = torch.as_tensor(_Pinned(wanted, device, what), device=device)
        return made.view(dtype).view(shape).fill_(-1)


class _Pinned:
    """Page-locked memory of the host as torch takes it for memory of the GPU (one address space for both)."""

    def __init__(self, wanted: int, device: torch.device, what: str) -> None:
        try:
            memory = mmap.mmap(-1, max(wanted, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise RefusedConfiguration(_does_not_fit(what, wanted, torch.device("cpu"), str(error))) from error
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        error_code = int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0))
        if error_code:
            raise RefusedConfiguration(
                f"{what}: {wanted} bytes of host memory cannot be page-locked (CUDA error {error_code}). Raise the limit on locked "
                "memory (ulimit -l), or attach without placement='pinned'."
            )
        self.__cuda_array_interface__ = {"shape": (wanted,), "typestr": "|u1", "data": (address, False), "version": 3}
        weakref.finalize(self, _unlock, memory, address, device)


def _unlock(memory: Any, address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # kernels that write there may be queued
    torch.cuda.cudart().cudaHostUnregister(address)
    del memory


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    wanted = dtype.itemsize
    for size in shape:
        wanted *= size
    return wanted


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
