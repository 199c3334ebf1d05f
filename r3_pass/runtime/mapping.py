"""The slot mapping of a step: checked at the edge, kept in one tensor that never moves.

    static: int64 [4 + max_tokens] = [tokens, export, rows, 0, slot of token 0, slot of token 1, ..., -1, -1]

The first four entries are the header that `passes.ops.record` reads; so one copy tells a captured CUDA graph all of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from r3_pass.errors import BufferLayoutError
from r3_pass.passes.ops import HEADER, HEADER_EXPORT, HEADER_ROWS, HEADER_TOKENS
from r3_pass.pinned import pinned
from r3_pass.runtime.memory import allocate
from r3_pass.runtime.slots import Slots, on_host

if TYPE_CHECKING:
    from r3_pass.runtime.export import Staged


class SlotMapping:
    """The static tensor, and what the host knows of the running step.

    Args:
        max_tokens: the longest mapping a step may have.
        device: the model's.
    """

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self.device = device
        self.static = allocate((HEADER + max_tokens,), torch.int64, device, f"the slot mapping of {max_tokens} tokens")
        self._used = 0
        self._tokens = self.static[HEADER_TOKENS : HEADER_TOKENS + 1]
        self._reach = 0
        self._part = self.static[:0]

    def check(self, slots: Slots, num_slots: int, segment_tokens: int) -> npt.NDArray[np.int64] | Tensor:
        """The mapping as int64 on the host, checked; or as it is if it lies on the device, where the kernel checks it.

        Raises: BufferLayoutError if it is no vector of integers, longer than max_tokens, names a slot outside 0 .. num_slots - 1 or
            one slot twice, or does not fit the segments.
        """
        if isinstance(slots, Tensor) and slots.device.type != "cpu":
            if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64) or slots.device != self.device:
                raise BufferLayoutError(
                    f"the slot mapping is {slots.dtype}{list(slots.shape)} on {slots.device}; expected int32 or int64 [tokens] on "
                    f"{self.device} or on the host."
                )
            self._check_length(slots.shape[0], segment_tokens)
            return slots
        try:
            host = on_host(slots)
        except ValueError as error:
            raise BufferLayoutError(
                f"the slot mapping is {error}; expected a vector of integers, one a token."
            ) from error
        length = len(host)
        if not segment_tokens <= length <= self.max_tokens:
            self._check_length(length, segment_tokens)
        if not length:
            return host
        ordered = host.copy()
        ordered.sort()
        least, most = ordered.item(0), ordered.item(-1)
        if least < -1 or most >= num_slots:
            wrong = least if least < -1 else most
            raise BufferLayoutError(
                f"slot {wrong} of token {int(np.flatnonzero(host == wrong)[0])} is out of range; expected 0 to "
                f"{num_slots - 1}, or -1 for "
                "padding. A session has the slots that it was attached or woken with (num_slots)."
            )
        padding = int(np.searchsorted(ordered, 0)) if least < 0 else 0
        behind = length - segment_tokens
        if segment_tokens and (padding != behind or (behind and (host[segment_tokens:] >= 0).any())):
            raise BufferLayoutError(
                f"the segments cover the first {segment_tokens} tokens of the mapping, so these need a slot and the "
                f"{behind} behind them must be -1. Lay the segments one after the other from index 0."
            )
        if length - padding < 2:
            return host
        given_out = ordered[padding:]
        twice = given_out[1:] == given_out[:-1]
        first = twice.argmax()  # takes a tenth of what any() does, of so few
        if twice[first]:
            raise BufferLayoutError(
                f"slot {given_out[first]} stands twice in one step's mapping: two tokens cannot share a KV slot. "
                "Use -1 for padding."
            )
        return host

    def _check_length(self, length: int, segment_tokens: int) -> None:
        if length > self.max_tokens:
            raise BufferLayoutError(
                f"the slot mapping has {length} entries, the session was laid out for {self.max_tokens} tokens a step. "
                "Attach with max_tokens= the largest forward, padding included."
            )
        if segment_tokens > length:
            raise BufferLayoutError(
                f"the segments cover {segment_tokens} tokens, the slot mapping has {length} entries. Give each token one slot."
            )

    def entries(self, length: int) -> int:
        """How much of the static tensor a mapping of this length replaces: what the one before it left, too."""
        return HEADER + max(length, self._used)

    def put_staged(self, slots: npt.NDArray[np.int64], staged: Staged) -> None:
        """As `put`, through memory of the step's own, in which the record kernel also leaves the rows."""
        length, mapping = len(slots), staged.mapping
        self._used = length
        mapping[HEADER_TOKENS], mapping[HEADER_EXPORT], mapping[HEADER_ROWS] = length, staged.address, staged.num_rows
        mapping[HEADER : HEADER + length] = slots
        if len(mapping) > HEADER + length:
            mapping[HEADER + length :] = -1
        if self._reach != len(mapping):
            self._reach = len(mapping)
            self._part = self.static[: self._reach]
        staged.upload(self._part)

    def put(self, slots: npt.NDArray[np.int64] | Tensor) -> None:
        """Queue the mapping of a step into the static tensor, -1 behind it."""
        length = len(slots)
        reach = max(length, self._used)
        self._used = length
        if isinstance(slots, Tensor):
            self.static[HEADER + length : HEADER + reach].fill_(-1)
            self.static[HEADER : HEADER + length].copy_(slots)
            self.static[HEADER_EXPORT : HEADER_EXPORT + 1].fill_(-1)
            self._tokens.fill_(length)
            return
        staged = np.full(HEADER + reach, -1, dtype=np.int64)
        staged[0] = length
        staged[HEADER : HEADER + length] = slots
        host = torch.from_numpy(staged)
        if self.device.type == "cuda":
            host = pinned(host)
        self.static[: HEADER + reach].copy_(host, non_blocking=True)

    def close(self) -> None:
        """Queue that no step is running: a graph that is replayed now writes nothing."""
        self._tokens.fill_(-1)

    def open(self, tokens: int) -> None:
        """Queue that the step that was closed goes on."""
        self._tokens.fill_(tokens)

    def slots(self, count: int) -> Tensor:
        """The first `count` slots of the step, on the device."""
        return self.static[HEADER : HEADER + count]
