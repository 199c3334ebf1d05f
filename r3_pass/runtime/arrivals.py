"""Rows on their way to the host: taken in when they have arrived, and believed only if the device found no fault.

Legend: T tokens in the step, M stored (MoE) layers, K top-k.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from r3_pass.errors import BufferLayoutError, PartialCapture, R3Error, RefusedConfiguration
from r3_pass.passes.ops import ERROR_DUPLICATE, ERROR_SLOT, ERROR_TOKENS, STATE_CALLS, STATE_ERRORS, TURNS
from r3_pass.runtime.export import Pending
from r3_pass.runtime.rows import Numbers, RowLog
from r3_pass.runtime.slots import SlotBuffer

_FAULTS = {
    ERROR_TOKENS: "a forward ran over another number of tokens than the slot mapping has",
    ERROR_SLOT: "a slot was out of range",
    ERROR_DUPLICATE: "a slot stood twice in a mapping",
}

_ONCE = tuple(1 << 8 * turn for turn in range(TURNS))
"""The words of a layer that was written once."""


@dataclasses.dataclass(slots=True)
class Arrival:
    """One copy: the rows of a step, of a piece of a prefix, or no rows and what the device says of a step.

    Attributes:
        first_row: where the rows go in the row log.
        step: number of the step, for messages; 0 for a piece of a prefix.
        writes: how often the step must have written each layer: once, if it had tokens and was not captured into a CUDA graph.
        after: of a piece, how many steps had been added before it was gathered.
        void: of a piece, that a step before it turned out to have failed: its rows may be anybody's.
        staged: whether the kernel wrote it: each layer was then counted in turns (`ops.HEADER_EXPORT`).
    """

    pending: Pending
    first_row: int
    step: int = 0
    writes: int = 0
    after: int = 0
    void: bool = False
    staged: bool = False

    def holds(self, numbers: Numbers) -> bool:
        """Whether a row of these numbers, ascending, is among its rows."""
        at = int(np.searchsorted(numbers, self.first_row))
        return at < len(numbers) and int(numbers[at]) < self.first_row + self.pending.num_rows


class Arrivals:
    """Copies in the order of their steps, and those of prefixes beside them: who asks for a step's rows waits for no prefix.

    Attributes:
        failure: the first fault that the device reported and nobody was told of yet.
    """

    def __init__(self) -> None:
        self.failure: R3Error | None = None
        self._steps: deque[Arrival] = deque()
        self._pieces: deque[Arrival] = deque()
        self._added = 0  # steps
        self._taken = 0  # steps

    def add_step(self, arrival: Arrival) -> None:
        self._added += 1
        self._steps.append(arrival)

    def add_piece(self, arrival: Arrival) -> None:
        arrival.after = self._added
        self._pieces.append(arrival)

    def drop(self) -> None:
        """Forget what is on its way; the copies themselves must be over."""
        for copy in (*self._steps, *self._pieces):
            copy.pending.release()
        self._taken += len(self._steps)
        self._steps.clear()
        self._pieces.clear()

    def collect(
        self,
        log: RowLog | None,
        buffer: SlotBuffer | None,
        layers: tuple[int, ...],
        named: Mapping[int, int],
        wait: bool,
        numbers: Numbers | None = None,
    ) -> None:
        """Take in what has arrived; with `wait`, everything, or what holds the rows with these numbers, ascending.

        Args:
            named: by layer, how many ids name an expert, where a router chooses among more.

        Rows of a step with a fault are filled in as void, so that whoever asks for them gets an error. All of the
        buffer is void then too: where the step wrote is not known, nor what was moved since.
        """
        for copy in self._ready(self._steps, wait, numbers):
            self._take_step(copy, log, buffer, layers, named)
        for copy in self._ready(self._pieces, wait, numbers) if self._pieces else ():
            while self._taken < copy.after:  # a fault of a step before it must be known first
                self._take_step(self._steps[0], log, buffer, layers, named)
                self._steps.popleft()
            rows, _ = copy.pending.wait()
            if not copy.void and (fault := past_experts(rows, layers, named)) is not None:
                self.failure = self.failure or fault
                copy.void = True
            if log is not None:
                log.fill(copy.first_row, np.full_like(rows, -1) if copy.void else rows)
            copy.pending.release()

    @staticmethod
    def _ready(copies: deque[Arrival], wait: bool, numbers: Numbers | None) -> Iterator[Arrival]:
        """From the front: all up to the last one that is waited for, and those behind it that are there. Each is in the queue until
        it was taken in."""
        wanted = 0
        if wait:
            held = (n for n, copy in enumerate(copies, start=1) if numbers is None or copy.holds(numbers))
            wanted = max(held, default=0)
        while copies and (wanted > 0 or copies[0].pending.done()):
            wanted -= 1
            yield copies[0]
            copies.popleft()

    def _take_step(
        self,
        copy: Arrival,
        log: RowLog | None,
        buffer: SlotBuffer | None,
        layers: tuple[int, ...],
        named: Mapping[int, int],
    ) -> None:
        rows, flags = copy.pending.wait()
        self._taken += 1
        fault = _fault(flags, copy, layers) if flags is not None else None
        if fault is None and named:
            fault = past_experts(rows, layers, named)
        if fault is not None:
            self.failure = self.failure or fault
            for piece in self._pieces:
                piece.void = piece.void or piece.after >= self._taken
            if buffer is not None:
                buffer.void_all()
        if log is not None and len(rows):
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
    said: list[int] = flags.tolist()
    calls = said[STATE_CALLS:]
    right = _ONCE if copy.staged and copy.writes else (copy.writes,)
    if not said[STATE_ERRORS] and sum(map(calls.count, right)) == len(calls):
        return None
    if copy.staged:
        calls = [sum(word.to_bytes(TURNS, "little")) for word in calls]
    found = [text for bit, text in _FAULTS.items() if said[STATE_ERRORS] & bit]
    if found:
        return BufferLayoutError(
            f"step {copy.step}: {' and '.join(found)}, found on the device. The rows of that step were not recorded. Give one "
            "slot for each token that is forwarded, each at most once, -1 for padding."
        )
    wrong = [m for m, count in enumerate(calls) if count != copy.writes]
    return PartialCapture(
        f"step {copy.step}: layers {[layers[m] for m in wrong]} were written {[calls[m] for m in wrong]} times, expected "
        f"{copy.writes}. A replayed CUDA graph lacks the record op, or holds more than one forward. Capture it inside "
        "`session.step(all -1)`."
    )
