"""KV slots of vLLM: which group of the KV cache names every token of a sequence, and the slots of its blocks.

A row is indexed by the slot of its token in the group of full attention, whose blocks keep every token; other groups (sliding
windows, state-space layers) drop or fold theirs. Slot = block * block_size + position in the block, -1 for padding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]

# Specs of full attention that do not keep every token in its own slot.
_NOT_EVERY_TOKEN = {"HiddenStateCacheSpec", "RSWASpec"}


class BlockSlots:
    """Slots of one KV cache group.

    Attributes:
        group: its number, as block ids are listed by group.
        layer: name of one of its attention layers.
        num_slots: of the whole cache.
    """

    def __init__(self, group: int, layer: str, block_size: int, num_blocks: int) -> None:
        self.group = group
        self.layer = layer
        self.block_size = block_size
        self.num_slots = block_size * num_blocks
        self._inside = np.arange(block_size, dtype=np.int64)

    def of(self, blocks: list[int]) -> Slots:
        """All slots of these blocks, in order."""
        found: Slots = (np.asarray(blocks, np.int64)[:, None] * self.block_size + self._inside).reshape(-1)
        return found


def find_slots(kv_cache_config: Any) -> BlockSlots | None:
    """The group of full attention; None if the model has none."""
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        specs = list(spec.kv_cache_specs.values()) if hasattr(spec, "kv_cache_specs") else [spec]
        if specs and all(map(_keeps_every_token, specs)):
            return BlockSlots(number, group.layer_names[0], spec.block_size, kv_cache_config.num_blocks)
    return None


def _keeps_every_token(spec: Any) -> bool:
    names = {c.__name__ for c in type(spec).__mro__}
    return "FullAttentionSpec" in names and not names & _NOT_EVERY_TOKEN
