"""Which CUDA stream is current, for paths that ask in every step: `torch.cuda.current_stream` takes as long as a kernel launch."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

Raw = int


def current(device: torch.device) -> Raw:
    """The current stream's handle."""
    handle: Raw = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


def capture(stream: Raw) -> int:
    """The number of the CUDA graph capture that a stream is in, 0 for none; -1 if the driver does not tell."""
    ask = _capture_info()
    if ask is None:
        return -1
    status, number = ctypes.c_int(), ctypes.c_uint64()
    failed = ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    if failed:
        return -1
    return number.value if status.value == 1 else 0


@functools.cache
def _capture_info() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None


def order(later: Raw, earlier: Raw, device: torch.device) -> None:
    """What is queued on the first stream from now on comes after what is queued on the second one."""
    if later != earlier:
        stream(later, device).wait_stream(stream(earlier, device))


def stream(handle: Raw, device: torch.device) -> torch.cuda.Stream:
    """A stream that has this handle."""
    if handle == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device)
