"""Which CUDA stream is current, for paths that ask in every step: `torch.cuda.current_stream` takes as long as a kernel launch."""

from __future__ import annotations

import torch

Raw = int


def current(device: torch.device) -> Raw:
    """The current stream's handle."""
    handle: Raw = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


def order(later: Raw, earlier: Raw, device: torch.device) -> None:
    """What is queued on the first stream from now on comes after what is queued on the second one."""
    if later != earlier:
        stream(later, device).wait_stream(stream(earlier, device))


def stream(handle: Raw, device: torch.device) -> torch.cuda.Stream:
    """A stream that has this handle."""
    if handle == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device)
