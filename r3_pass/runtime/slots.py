"""The slot buffer: one row of expert ids for each KV slot. The only place that knows its layout.

The buffer is the single truth about slots: a row is void exactly if it is -1. It becomes so when its slot is handed to
a new owner (`void`), and stops being so when a forward or `write` fills it; nothing beside the buffer says more.

Legend: T tokens in the step, L decoder layers, M stored (MoE) layers, K top-k, E experts, S slots.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from r3_pass.errors import BufferLayoutError
from r3_pass.pinned import pinned
from r3_pass.runtime.memory import Placement, allocate, allocate_pinned

# Of an id that nothing was routed to, and of every id of a void row.
VOID = -1

Slots = torch.Tensor | npt.ArrayLike


_INTEGERS = frozenset(
    {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
)


def on_host(slots: Slots) -> npt.NDArray[np.int64]:
    """Slots that lie on the host, int64 [n], a copy.

    Raises: ValueError that says what they are, if they are no vector of integers.
    """
    if isinstance(slots, torch.Tensor):
        if slots.dim() != 1 or (len(slots) and slots.dtype not in _INTEGERS):
            raise ValueError(f"{slots.dtype}{list(slots.shape)}")
        given = slots.numpy()
    else:
        try:
            given = np.asarray(slots)
        except ValueError as error:
            raise ValueError(f"{type(slots).__name__} that numpy makes no array of ({error})") from error
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ValueError(f"{given.dtype}{list(given.shape)}")
    if given.dtype.kind == "u" and given.size and int(given.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"uint64 with a slot {given.max()}, which no int64 holds")
    return given.astype(np.int64)


@dataclass(frozen=True)
class Geometry:
    """What a row is, and what the buffer costs before it exists.

    Args:
        num_slots: S, the KV slots of the cache.
        num_layers: L, dense layers included.
        stored: for each of the M columns the decoder layer that it records, ascending.
        top_k: K, the largest of the stored layers; narrower layers leave -1 in the columns past their own.

    Raises: BufferLayoutError if one of them is impossible.
    """

    num_slots: int
    num_layers: int
    stored: tuple[int, ...]
    top_k: int

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise BufferLayoutError(f"The buffer needs at least 1 slot, got num_slots={self.num_slots}.")
        if self.top_k < 1:
            raise BufferLayoutError(f"A row needs at least 1 id a layer, got top_k={self.top_k}.")
        if not self.stored or list(self.stored) != sorted(set(self.stored)):
            raise BufferLayoutError(f"Stored layers must be ascending and at least one, got {self.stored}.")
        if self.stored[0] < 0 or self.stored[-1] >= self.num_layers:
            raise BufferLayoutError(
                f"Stored layers must be among the model's {self.num_layers} decoder layers (0 to "
                f"{self.num_layers - 1}), got {self.stored}. Pass num_layers if the config does not say it."
            )

    def __str__(self) -> str:
        return (
            f"int16 [{self.num_slots} + 1, {len(self.stored)}, {self.top_k}] for {self.num_layers} decoder layers: "
            f"{self.bytes_per_slot} bytes a slot, {self.nbytes} bytes in all"
        )

    @functools.cached_property
    def row_shape(self) -> tuple[int, int]:
        """(M, K)"""
        return len(self.stored), self.top_k

    @functools.cached_property
    def bytes_per_slot(self) -> int:
        return len(self.stored) * self.top_k * 2

    @property
    def spare_row_bytes(self) -> int:
        """The row beside those of the slots, where padding lands."""
        return self.bytes_per_slot

    @property
    def nbytes(self) -> int:
        """The whole buffer: S + 1 rows."""
        return self.num_slots * self.bytes_per_slot + self.spare_row_bytes

    def bytes_per_block(self, block_size: int) -> int:
        """What a KV block of `block_size` slots costs beside its KV."""
        return block_size * self.bytes_per_slot

    def expand(self, rows: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
        """int16[n, M, K] -> a new int16[n, L, K]: stored columns at their decoder layer, -1 at all others.

        Raises: BufferLayoutError if the rows are not of this geometry.
        """
        if rows.dtype != np.int16 or rows.shape[1:] != self.row_shape:
            raise BufferLayoutError(
                f"Rows are {rows.dtype}{list(rows.shape)}, expected int16[n, {len(self.stored)}, {self.top_k}]."
            )
        expanded = np.full((len(rows), self.num_layers, self.top_k), VOID, dtype=np.int16)
        first, last = self.stored[0], self.stored[-1]
        if last - first + 1 == len(self.stored):  # one run of layers, as in most models: a plain copy
            expanded[:, first : last + 1] = rows
        else:
            expanded[:, list(self.stored)] = rows
        return expanded


class SlotBuffer:
    """int16[S + 1, M, K] on the model's device; the last row is spare: what belongs to no slot lands there.

    Every method is queued on the current stream of the buffer's device and does not wait for it; what `void` asks for, when the
    buffer is used next. Slots are int[n], a tensor on that device or anything on the host. A slot that is -1, or (on another device
    than the CPU, where nobody can raise without waiting) outside the buffer, belongs to no row: reading it gives -1, writing it
    changes the spare row only.

    Args:
        placement: "pinned" for page-locked memory of the host, which the device reads and writes itself.

    Raises: RefusedConfiguration, when made, if there is no room for it.
    Raises, in all methods: ValueError if slots on the host lie outside -1 .. S - 1, or are not a vector of integers.
    """

    def __init__(self, geometry: Geometry, device: torch.device | str, placement: Placement = "device") -> None:
        self.geometry = geometry
        shape = (geometry.num_slots + 1, *geometry.row_shape)
        what = f"the slot buffer ({geometry.num_slots} slots of {geometry.bytes_per_slot} bytes and a spare row)"
        make = allocate if placement == "device" else allocate_pinned
        self.data = make(shape, torch.int16, torch.device(device), what)
        self._voided: list[torch.Tensor] = []  # on the host, int64: rows that `settle` has to void

    @property
    def device(self) -> torch.device:
        return self.data.device

    def gather(self, slots: Slots) -> torch.Tensor:
        """Rows of `slots`, a new int16[n, M, K] on the buffer's device: a snapshot."""
        self.settle()
        wanted = self.checked(slots)
        inside = wanted.clamp(0, self.geometry.num_slots - 1)
        outside = inside != wanted
        rows = self.data.index_select(0, self._sent(inside))
        if outside.device.type == "cpu" and not outside.any():
            return rows
        return rows.masked_fill_(self._sent(outside).view(-1, 1, 1), VOID)

    def snapshot(self, slots: torch.Tensor) -> torch.Tensor:
        """As `gather`, in a step, of slots int64[n] on the buffer's device that are known to be those of rows."""
        return self.data.index_select(0, slots)

    def void(self, slots: Slots) -> None:
        """Rows of `slots` become -1: of slots on the host, when the buffer is used next. Engines hand out blocks one by one, and
        one fill before the next step does for all of them. Where these are all slots, in order, it takes no memory."""
        if isinstance(slots, np.ndarray) and self._are_all(slots):
            self.void_all()
            return
        wanted = self.checked(slots)
        if wanted.device.type == "cpu":
            self._voided.append(wanted)
        else:
            self.settle()
            self.data.index_fill_(0, self._targets(wanted), VOID)

    def settle(self) -> None:
        """Queue what `void` left for later. Before a forward writes to the buffer, and before anybody reads it."""
        if self._voided:
            self.data.index_fill_(0, self._targets(torch.cat(self._voided)), VOID)
            self._voided.clear()  # not before: without memory for it, the fill is still to be done

    def void_all(self) -> None:
        self._voided.clear()
        self.data.fill_(VOID)

    def write(self, slots: Slots, rows: torch.Tensor | npt.NDArray[np.int16]) -> None:
        """Rows int16[n, M, K] become those of `slots`; each slot at most once.

        Raises: BufferLayoutError if the rows are not one of this geometry a slot.
        """
        targets = self._targets(slots)
        expected = (len(targets), *self.geometry.row_shape)
        if rows.dtype not in (torch.int16, np.dtype(np.int16)) or tuple(rows.shape) != expected:
            raise BufferLayoutError(
                f"Rows for {len(targets)} slots are {rows.dtype}{list(rows.shape)}, expected int16{list(expected)}: one a slot "
                "(move: as many slots to copy from as to copy to)."
            )
        if not isinstance(rows, torch.Tensor):
            rows = torch.from_numpy(np.array(rows))  # a copy: torch warns about arrays that are read-only
        self.settle()
        self.data.index_copy_(0, targets, rows.to(self.device, non_blocking=True))

    def move(self, src_slots: Slots, dst_slots: Slots) -> None:
        """Rows of `src_slots` become those of `dst_slots` (each at most once); the two may overlap."""
        self.write(dst_slots, self.gather(src_slots))

    def _are_all(self, slots: npt.NDArray[Any]) -> bool:
        return slots.shape == (self.geometry.num_slots,) and np.array_equal(slots, np.arange(self.geometry.num_slots))

    def _targets(self, slots: Slots) -> torch.Tensor:
        """The row of each slot, the spare one for what belongs to no slot, on the device."""
        wanted = self.checked(slots)
        inside = wanted.clamp(0, self.geometry.num_slots - 1)
        return self._sent(torch.where(inside == wanted, wanted, self.geometry.num_slots))

    def checked(self, slots: Slots) -> torch.Tensor:
        """The slots as int64[n], where they are; a copy if they come from the host."""
        if isinstance(slots, torch.Tensor) and slots.device.type != "cpu":
            if slots.device != self.device or slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"Slots are {slots.dtype}{list(slots.shape)} on {slots.device}, expected int32[n] or int64[n] on "
                    f"{self.device}."
                )
            return slots.long()
        try:
            host = on_host(slots)
        except ValueError as error:
            raise ValueError(f"Slots are {error}, expected a vector of integers.") from error
        if host.size and not (host.min() >= VOID and host.max() < self.geometry.num_slots):
            wrong = host[(host < VOID) | (host >= self.geometry.num_slots)][0]
            raise ValueError(
                f"Slot {wrong} is outside the buffer, expected 0 to {self.geometry.num_slots - 1} (num_slots of attach or wake), "
                "or -1 for no slot."
            )
        return torch.from_numpy(host)

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        """To the buffer's device, if they are not there."""
        if self.device.type == "cuda" and values.device.type == "cpu":
            values = pinned(values)  # from pageable memory a long upload waits for the stream
        return values.to(self.device, non_blocking=True)

    def check_integrity(self) -> None:
        """Assert that the buffer is still what was laid out."""
        assert self.data.shape == (self.geometry.num_slots + 1, *self.geometry.row_shape)
        assert self.data.dtype == torch.int16 and self.data.is_contiguous() and not self.data.is_inference()
        assert self.data.nbytes == self.geometry.nbytes
