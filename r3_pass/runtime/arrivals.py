"""Rows on their way to the host: taken in when they have arrived, and believed only if the device found no fault.

Legend: T tokens in the step, M stored (MoE) layers, K top-k.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from r3_pass.errors import BufferLayoutError, PartialCapture, R3Error, RefusedConfiguration
from r3_pass.passes.ops import ERROR_DUPLICATE, ERROR_SLOT, ERROR_TOKENS, STATE_CALLS, STATE_ERRORS
from r3_pass.runtime.export import Pending
from r3_pass.runtime.rows import RowLog
from r3_pass.runtime.slots import SlotBuffer, Slots

_FAULTS = {
    ERROR_TOKENS: "a forward ran over another number of tokens than the slot mapping has",
    ERROR_SLOT: "a slot was out of range",
    ERROR_DUPLICATE: "a slot stood twice in a mapping",
}


@dataclasses.dataclass
class Arrival:
    """One copy: the rows of a step, of a piece of a prefix, or no rows and what the device says of a step.

    Attributes:
        first_row: where the rows go in the row log; -1 if there are none.
        step: number of the step, for messages.
        writes: how often the step must have written each layer: once, if it had tokens and was not captured into a CUDA graph.
        slots: the step's slots, which are void if it turns out to have failed: their KV is new, their rows are not.
    """

    pending: Pending
    first_row: int
    step: int = 0
    writes: int = 0
    slots: Slots | None = None


class Arrivals:
    """Copies in the order of their steps.

    Attributes:
        failure: the first fault that the device reported and nobody was told of yet.
    """

    def __init__(self) -> None:
        self.failure: R3Error | None = None
        self._copies: deque[Arrival] = deque()

    def add(self, arrival: Arrival) -> None:
        self._copies.append(arrival)

    def drop(self) -> None:
        """Forget what is on its way; the copies themselves must be over."""
        for copy in self._copies:
            copy.pending.release()
        self._copies.clear()

    def collect(
        self,
        log: RowLog | None,
        buffer: SlotBuffer | None,
        layers: tuple[int, ...],
        named: Mapping[int, int],
        wait: bool,
        up_to: int | None = None,
    ) -> None:
        """Take in what has arrived; with `wait`, everything, or what holds rows up to a number of the row log.

        Args:
            named: by layer, how many ids name an expert, where a router chooses among more.

        Rows of a step with a fault are filled in as void, so that whoever asks for them gets an error.
        """
        while self._copies and (self._copies[0].pending.done() or wait):
            if up_to is not None and not self._copies[0].pending.done() and self._copies[0].first_row > up_to:
                return
            copy = self._copies.popleft()
            rows, flags = copy.pending.wait()
            fault = _fault(flags, copy, layers) if flags is not None else None
            fault = fault or past_experts(rows, layers, named)
            self.failure = self.failure or fault
            if fault is not None and copy.slots is not None and buffer is not None:
                buffer.void(copy.slots)
            if copy.first_row >= 0 and log is not None and len(rows):
                log.fill(copy.first_row, np.full_like(rows, -1) if fault is not None else rows)
            copy.pending.release()

    def raise_failure(self) -> None:
        """Raise a fault, once."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure


def past_experts(rows: npt.NDArray[np.int16], layers: tuple[int, ...], named: Mapping[int, int]) -> R3Error | None:
    """An error if an id names no expert, but the padding of a router's weight.

    Args:
        rows: int16 [n, M, K].
    """
    for layer, count in named.items():
        chosen = rows[:, layers.index(layer)] if len(rows) else rows
        if chosen.size and int(chosen.max()) >= count:
            return RefusedConfiguration(
                f"layer {layer} chose expert {int(chosen.max())}, but only {count} experts are there: the router's weight "
                "is padded, and its padding was chosen. Such rows are not handed out. Mask the padding's scores with -inf "
                "before the choice."
            )
    return None


def _fault(flags: npt.NDArray[np.int32], copy: Arrival, layers: tuple[int, ...]) -> R3Error | None:
    """What the device says of a step."""
    found = [text for bit, text in _FAULTS.items() if int(flags[STATE_ERRORS]) & bit]
    if found:
        return BufferLayoutError(
            f"step {copy.step}: {' and '.join(found)}, found on the device. The rows of that step were not recorded. Give one "
            "slot for each token that is forwarded, each at most once, -1 for padding."
        )
    calls = flags[STATE_CALLS:]
    if (calls == copy.writes).all():
        return None
    wrong = np.flatnonzero(calls != copy.writes)
    return PartialCapture(
        f"step {copy.step}: layers {[layers[m] for m in wrong]} were written {calls[wrong].tolist()} times, expected "
        f"{copy.writes}. A replayed CUDA graph lacks the record op, or holds more than one forward. Capture it inside "
        "`session.step(all -1)`."
    )
