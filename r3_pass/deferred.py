"""Ids of graphs that hold one layer each, kept until the last layer of the forward has run: then one launch writes them all.

A model whose blocks are compiled by themselves has no graph in which one record op could stand for all layers, and a launch for
each costs more than what it writes. What a graph hands out is memory of its own (`inner.owns_outputs`, `Accepted.shared`), which
nothing that runs later in the forward changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from r3_pass import streams
from r3_pass.errors import RefusedConfiguration


class Deferred:
    """What the running step has handed in so far.

    A CUDA graph that holds the launch must hold the layers too: replayed without one of them, it would write what that layer chose
    in another step. So the ids of a launch come from one capture, or from none.

    Attributes:
        columns: stored layers, in the order in which they ran.
    """

    def __init__(self, device: torch.device) -> None:
        self.columns: list[int] = []
        self._ids: list[Tensor] = []
        self._device = device
        self._capture = 0
        self._stream: streams.Raw = 0
        self._apart = False  # layers are captured in CUDA graphs of their own

    def clear(self) -> None:
        self.columns, self._ids = [], []

    def add(self, column: int, ids: Tensor) -> bool:
        """Keep the ids [T, k] of a stored layer. Returns: False if this layer has to be written by itself, now.

        Raises: RefusedConfiguration if this layer and those before it are not in the same CUDA graph.
        """
        if self._device.type == "cuda":
            if self._apart:
                return False
            capture = self._meet()
            if capture < 0:
                return False
            self._capture = capture
        self.columns.append(column)
        self._ids.append(ids)
        return True

    def take(self) -> list[Tensor]:
        """All of them, in ascending order of columns; nothing is kept. For a launch here and now.

        Raises: as `add`, if that would be in another CUDA graph: the layer that ran last may be one of a graph that records itself.
        """
        if self._device.type == "cuda" and self._ids:
            self._meet()
        order = sorted(range(len(self.columns)), key=self.columns.__getitem__)
        ids = [self._ids[n] for n in order]
        self.clear()
        return ids

    def _meet(self) -> int:
        """Have what runs now come after what was handed in. Returns: the capture that it is in, as `streams.capture`."""
        stream = streams.current(self._device)
        capture = streams.capture(stream) if torch.cuda.is_current_stream_capturing() else 0
        if self._ids and capture != self._capture:
            self._apart = True
            raise RefusedConfiguration(
                "the layers of one forward are captured in several CUDA graphs, or some of them in none. One launch writes the "
                "rows of all layers that are compiled by themselves, so one graph must hold it and all of them. From now on this "
                "session writes each of them by itself: discard the graphs of this forward, and capture them again in a new step."
            )
        if self._ids and stream != self._stream:  # the launch comes after both
            streams.order(stream, self._stream, self._device)
            for kept in self._ids:
                kept.record_stream(streams.stream(stream, self._device))
        self._stream = stream
        return capture
