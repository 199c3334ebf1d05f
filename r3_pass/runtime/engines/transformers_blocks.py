"""KV blocks of transformers' continuous batching that change hands: their rows follow.

get_free_blocks              a block gets an owner          -> noted, `assign` before anything else touches it
perform_cache_copy           a fork's partial blocks        -> `move` (copy_cache in 5.17)
offload to the CPU           a starved request's blocks     -> `extract`
restore                      into other blocks              -> `insert`
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from r3_pass.errors import RefusedConfiguration
from r3_pass.runtime.engines.base import RecordingSession, Slots
from r3_pass.runtime.engines.transformers_slots import SlotSpace

_log = logging.getLogger(__name__)


class BlockMoves:
    """What happened to blocks and what the session was not told yet; calls come with the engine's stream current."""

    def __init__(self, slots: SlotSpace) -> None:
        self._slots = slots
        self._new_blocks: list[int] = []
        self._offloaded: dict[str, tuple[int, object]] = {}  # request id -> positions, their rows

    def allocate(self, allocate: Callable[..., list[int] | None], *args: Any, **kwargs: Any) -> list[int] | None:
        """Hook of get_free_blocks. Shared and cached blocks never pass here, so their rows stay valid."""
        blocks = allocate(*args, **kwargs)
        if blocks and _group_of(*args, **kwargs) == self._slots.group:
            self._new_blocks.extend(blocks)
        return blocks

    def assign_new(self, session: RecordingSession) -> None:
        if self._new_blocks:
            session.assign(self._slots.of_blocks(self._new_blocks))
            self._new_blocks = []

    def copied(self, session: RecordingSession, *args: Any) -> None:
        """After a copy of blocks: `({group: (sources, targets)})`, or `(sources, targets)` of all groups."""
        if self._slots.group is None:
            return
        sources, targets = args[0]["full_attention"] if isinstance(args[0], dict) else args
        if sources:
            self.assign_new(session)
            session.move(self._slots.of_blocks(sources), self._slots.of_blocks(targets))

    def offloaded(self, session: RecordingSession, request_id: str, slots: Slots) -> None:
        """The request's KV went to the CPU; nothing has written to its slots since."""
        self._offloaded[request_id] = len(slots), session.extract(slots)

    def restored(self, session: RecordingSession, request_ids: Iterable[str]) -> None:
        """The KV of these requests came back, into the blocks that their tables name now."""
        self.assign_new(session)
        for request_id in request_ids:
            if request_id not in self._offloaded:
                continue
            length, rows = self._offloaded.pop(request_id)
            slots = self._slots.of_request(request_id, 0, length)
            if slots is None:
                continue
            try:
                session.insert(slots, rows)
            except RefusedConfiguration as error:
                # Saved before the weights changed, say. The request has its own rows on the host already; who shares these
                # blocks later finds them void and is told.
                _log.warning("the rows of request %r were not restored with its KV: %s", request_id, error)

    def forget(self, request_id: str) -> None:
        self._offloaded.pop(request_id, None)

    def reset(self) -> None:
        self._offloaded.clear()


def _group_of(*args: Any, **kwargs: Any) -> Any:
    """5.24: get_free_blocks(index, num_blocks). 5.17: get_free_blocks(n_blocks, last_block_id, shareable, group_id)."""
    if "group_id" in kwargs:
        return kwargs["group_id"]
    return args[3] if len(args) == 4 else args[0]
