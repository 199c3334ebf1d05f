"""Regions that an autograd function runs in its forward, and again in its backward: reentrant activation checkpointing.

The forward runs without gradients there, so nothing that it saves leads from the second run to the first. The context object
does: a function's forward and its backward get the same `ctx`, and both stand on the stack while the region runs.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch.autograd.function import BackwardCFunction

Context = BackwardCFunction


def running() -> tuple[list[Context], Context | None]:
    """Of the caller: the functions whose forward it runs in, and the innermost one in whose backward."""
    forwards: list[Context] = []
    backward: Context | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, BackwardCFunction):
                if code.co_name == "forward":
                    forwards.append(first)
                elif backward is None:
                    backward = first
        frame = frame.f_back
    return forwards, backward
