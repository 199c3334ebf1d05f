"""A copy stream that lags, on a CPU: what was submitted arrives when the test says so, or when somebody waits for it.

Until then the host memory holds other rows that look right, as a reused block would.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from r3_pass.runtime import Session
from r3_pass.runtime.export import Exporter, Pending

GARBAGE = 5


class LatePending(Pending):
    def __init__(self, rows: torch.Tensor, flags: torch.Tensor | None) -> None:
        self._source = rows.numpy().copy(), None if flags is None else flags.numpy().copy()
        self.arrived = False
        host_flags = None if flags is None else np.full(flags.shape, GARBAGE, np.int32)
        super().__init__(np.full(rows.shape, GARBAGE, np.int16), host_flags)

    def done(self) -> bool:
        return self.arrived

    def arrive(self) -> None:
        rows, flags = self._source
        if not self.arrived and self._rows is not None:
            self._rows[:] = rows
            if self._flags is not None and flags is not None:
                self._flags[:] = flags
        self.arrived = True


class LaggingExporter(Exporter):
    """Copies of a CPU buffer as late as a test wants.

    Attributes:
        copies: all that were submitted, in order.
        fails: raised by the copies from now on, where it is set.
    """

    def __init__(self, chunk_bytes: int = 2**20) -> None:
        super().__init__("cpu", chunk_bytes)
        self.copies: list[LatePending] = []
        self.fails: Exception | None = None

    @property
    def at_once(self) -> bool:
        return False

    def _copy(self, rows: torch.Tensor, flags: torch.Tensor | None, stream: Any) -> Pending:
        if self.fails is not None:
            raise self.fails
        self.copies.append(LatePending(rows, flags))
        return self.copies[-1]

    def drain(self) -> None:
        for copy in self.copies:
            copy.arrive()


def lag(session: Session, chunk_bytes: int = 2**20) -> LaggingExporter:
    """From now on the session's copies lag."""
    session._delivery.exporter = LaggingExporter(chunk_bytes)
    return session._delivery.exporter
