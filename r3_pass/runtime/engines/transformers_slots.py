"""Where the tokens of transformers' continuous batching live: block tables to KV slots, on the host.

Position p of a request is slot `table[p // page] * page + p % page` of the full-attention group, in transformers 5.17 (a list
of groups, whose write index is this slot) and 5.24 (a dict of allocators, whose write index counts rows of all layers of a
block). The sliding-window groups are rings that forget, so they name no slot. Nothing here touches a device tensor: the
decode fast path fills no write index at all, and the synchronous path on a GPU holds it on the device.

Legend: R requests in the batch, T tokens in the step.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np

from r3_pass.errors import UnsupportedEngine
from r3_pass.runtime.engines.base import Slots


class SlotSpace(Protocol):
    """How one KV cache numbers its tokens."""

    @property
    def num_slots(self) -> int: ...

    @property
    def group(self) -> int | None:
        """Index of the group whose blocks are the slots, None if no block is."""

    def of_batch(self, request_ids: Sequence[str], starts: Slots, stops: Slots) -> Slots:
        """Slots [T] of positions starts[r]..stops[r] of each request, one request after the other."""

    def of_request(self, request_id: str, start: int, stop: int) -> Slots | None:
        """Slots of positions start..stop as the block table has them now; None where this cache cannot tell."""

    def of_blocks(self, blocks: Sequence[int]) -> Slots:
        """All slots of these blocks of the group."""

    def one_writer_each(self, slots: Slots) -> Slots:
        """The same slots [T]; of several writers of one slot all but one get a spare slot, which nobody reads."""

    def check(self, io: Any, slots: Slots) -> None:
        """Compare with what the engine prepared to write. Raises UnsupportedEngine."""


def find_slots(cache: Any, max_requests: int) -> SlotSpace:
    """The slot space of a `PagedAttentionCache` of either layout, chosen by what it holds."""
    if hasattr(cache, "cache_allocators"):
        for allocator in cache.cache_allocators.values():
            if allocator.layer_type == "full_attention":
                num_blocks = (cache.num_sectors + 2) * allocator.blocks_per_sector
                page = allocator.tokens_per_page
                return PagedSlots(
                    allocator.block_table, page, num_blocks, allocator.index, allocator.block_physical_stride, spare=0
                )
        return StepSlots(cache.max_batch_tokens)
    if hasattr(cache, "group_cache_managers"):
        for index, group in enumerate(cache.group_cache_managers):
            if not hasattr(group, "sliding_window"):
                page = cache.block_size
                return PagedSlots(group.block_table, page, cache.num_blocks + 2, index, page, spare=max_requests)
        return StepSlots(cache.max_batch_tokens)
    raise UnsupportedEngine(
        f"{type(cache).__module__}.{type(cache).__name__} has neither cache_allocators (transformers 5.24) nor "
        "group_cache_managers (5.17). Use one of these versions, or drive the steps yourself with "
        "attach(compiled_model, num_slots=...)."
    )


class PagedSlots:
    """Slots are the tokens of the full-attention group's blocks.

    Args:
        tables: request id to its block ids, in order; the engine's own, read at each call, never changed.
        page: tokens in a block.
        num_blocks: block ids are below it, the engine's two bins included.
        group: the group's index in `write_index_storage`.
        stride: distance of two blocks in the write index; equal to `page` where the write index is the slot.
        spare: slots past the cache, one per request of a batch. transformers 5.17 lets a prompt that is a whole number of
            shared blocks re-run its last token *in the shared block*, so two such requests of one batch write one slot
            (and with asynchronous batching it then takes the next block, hardly begun, for a complete one and shares that
            too). Each request's row is the one of its own forward: all but one of the writers get a spare slot.
    """

    def __init__(
        self, tables: dict[str, list[int]], page: int, num_blocks: int, group: int, stride: int, spare: int
    ) -> None:
        self._tables = tables
        self._page = page
        self._stride = stride
        self._spare = np.arange(num_blocks * page, num_blocks * page + spare, dtype=np.int64)
        self._writer = np.zeros(num_blocks * page if spare else 0, dtype=np.int64)
        self.group = group
        self.num_slots = num_blocks * page + spare

    def of_batch(self, request_ids: Sequence[str], starts: Slots, stops: Slots) -> Slots:
        page, lengths = self._page, stops - starts
        first, last = starts // page, -(-stops // page)
        counts = np.where(lengths > 0, last - first, 0)
        spans = zip(request_ids, first.tolist(), (first + counts).tolist(), strict=True)
        blocks = np.fromiter(chain.from_iterable(self._tables[r][a:b] for r, a, b in spans), dtype=np.int64)
        if len(blocks) != counts.sum():
            raise UnsupportedEngine(
                f"The block tables of {len(request_ids)} requests hold {len(blocks)} blocks where this batch needs "
                f"{counts.sum()} (page size {page}). This transformers keeps its tables in a way that is not known here."
            )
        # Token t of request r: its position, and where r's blocks begin in `blocks`.
        positions = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        base = np.repeat(np.cumsum(counts) - counts - first, lengths)
        slots: Slots = blocks[base + positions // page] * page + positions % page
        return slots

    def of_request(self, request_id: str, start: int, stop: int) -> Slots | None:
        return self.of_batch([request_id], np.array([start]), np.array([stop]))

    def of_blocks(self, blocks: Sequence[int]) -> Slots:
        starts = np.asarray(blocks, dtype=np.int64) * self._page
        slots: Slots = (starts[:, None] + np.arange(self._page)).reshape(-1)
        return slots

    def one_writer_each(self, slots: Slots) -> Slots:
        if not len(self._spare):
            return slots
        tokens = np.arange(len(slots))
        self._writer[slots] = tokens
        repeats = np.flatnonzero(self._writer[slots] != tokens)
        if len(repeats):
            slots = slots.copy()
            slots[repeats] = self._spare[: len(repeats)]
        return slots

    def check(self, io: Any, slots: Slots) -> None:
        written = io.write_index_storage[self.group, : len(slots)].numpy()
        written = written // self._stride * self._page + written % self._stride
        if not np.array_equal(written, slots):
            where = int(np.flatnonzero(written != slots)[0])
            raise UnsupportedEngine(
                f"Token {where} of the first batch is written to KV slot {written[where]} and its block table says "
                f"{slots[where]}. This transformers lays out its cache in a way that is not known here."
            )


class StepSlots:
    """A model without full attention: no slot outlives its step, since no block is ever shared. Token t writes slot t."""

    group = None

    def __init__(self, max_tokens: int) -> None:
        self.num_slots = max_tokens

    def of_batch(self, request_ids: Sequence[str], starts: Slots, stops: Slots) -> Slots:
        return np.arange(int((stops - starts).sum()), dtype=np.int64)

    def of_request(self, request_id: str, start: int, stop: int) -> Slots | None:
        return None

    def of_blocks(self, blocks: Sequence[int]) -> Slots:
        return np.empty(0, dtype=np.int64)

    def one_writer_each(self, slots: Slots) -> Slots:
        return slots

    def check(self, io: Any, slots: Slots) -> None:
        return None
