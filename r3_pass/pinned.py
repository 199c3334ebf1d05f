"""Page-locked host memory for short uploads."""

from torch import Tensor


def pinned(host: Tensor) -> Tensor:
    """A page-locked copy; the tensor itself where no more memory can be locked: its upload is then slower, and as right."""
    try:
        return host.pin_memory()
    except RuntimeError:
        return host
