"""Who owns which KV block, and which block holds which prefix."""

from __future__ import annotations

from collections import Counter, OrderedDict

from engine.sequence import Sequence


class BlockManager:
    """Blocks of `block_size` slots. A full block can be found again by the hash of the tokens up to its end, until it is
    handed out anew: the least recently freed block goes first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.owners: Counter[int] = Counter()
        self.block_of: dict[tuple[int, ...], int] = {}  # the tokens up to a block's end name it: no hash can collide
        self.prefix_of: dict[int, tuple[int, ...]] = {}

    def match_prefix(self, seq: Sequence) -> int:
        """Share the cached blocks that hold the sequence's first tokens; the last token is always left to forward.

        Returns: positions that need no forward."""
        size = self.block_size
        for end in range(size, len(seq.token_ids), size):
            block = self.block_of.get(tuple(seq.token_ids[:end]))
            if block is None:
                break
            self.free.pop(block, None)
            self.owners[block] += 1
            seq.block_table.append(block)
        seq.num_computed = len(seq.block_table) * size
        return seq.num_computed

    def missing(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that the sequence lacks for so many positions."""
        return -(-num_tokens // self.block_size) - len(seq.block_table)

    def grow(self, seq: Sequence, count: int) -> None:
        """Give it `count` more blocks; there must be as many free."""
        if count > 0:
            seq.block_table += self.take(count)

    def take(self, count: int) -> list[int]:
        """Blocks off the free list, for a new owner: what they held is gone."""
        taken = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            self.block_of.pop(self.prefix_of.pop(block, ()), None)
            self.owners[block] = 1
            taken.append(block)
        return taken

    def seal(self, seq: Sequence) -> None:
        """The full blocks of a sequence, whose KV is computed or queued, can be found from now on."""
        size = self.block_size
        full = min(seq.num_computed, len(seq.token_ids)) // size
        for index in range(seq.num_sealed, full):
            block, prefix = seq.block_table[index], tuple(seq.token_ids[: (index + 1) * size])
            if block not in self.prefix_of and prefix not in self.block_of:
                self.block_of[prefix] = block
                self.prefix_of[block] = prefix
        seq.num_sealed = max(seq.num_sealed, full)

    def release(self, seq: Sequence) -> None:
        """Take its blocks back, the last first: heads of prompts are found again longest."""
        for block in reversed(seq.block_table):
            self.owners[block] -= 1
            if not self.owners[block]:
                del self.owners[block]
                self.free[block] = None
        seq.block_table = []
        seq.num_computed = seq.num_sealed = 0

    def forget_prefixes(self) -> None:
        """New weights, or another cache: no block can be found again."""
        self.block_of.clear()
        self.prefix_of.clear()

    def compact(self, sequences: list[Sequence]) -> dict[int, int]:
        """Plan to move the blocks in use to the lowest numbers; cached blocks of nobody are given up.

        Returns: new block by old block. The caller copies the KV."""
        for block in [block for block in self.prefix_of if block not in self.owners]:
            del self.block_of[self.prefix_of.pop(block)]
        holes = sorted(set(range(len(self.owners))) - set(self.owners))
        moved = dict(zip(sorted(b for b in self.owners if b >= len(self.owners)), holes, strict=True))
        self.owners = Counter({moved.get(block, block): count for block, count in self.owners.items()})
        self.prefix_of = {moved.get(block, block): prefix for block, prefix in self.prefix_of.items()}
        self.block_of = {prefix: block for block, prefix in self.prefix_of.items()}
        self.free = OrderedDict.fromkeys(range(len(self.owners), self.num_blocks))
        for seq in sequences:
            seq.block_table = [moved.get(block, block) for block in seq.block_table]
        return moved
