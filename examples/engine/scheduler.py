"""Which tokens of which sequences the next forward takes."""

from __future__ import annotations

import dataclasses
from collections import deque

from engine.block_manager import BlockManager
from engine.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence in a forward, at positions start .. start + length - 1.

    Attributes:
        num_outputs: how many of its last tokens a next one is sampled after: one at the end of what is known, one more for
            each draft, none in the middle of a prompt.
    """

    seq: Sequence
    start: int
    length: int
    num_outputs: int


class Scheduler:
    """Running sequences first, each with its next token (and drafts for it) or its next chunk; then waiting ones.

    Attributes:
        num_hits: admissions that found a prefix in the cache; num_preempted: how often a sequence gave up its blocks.
    """

    def __init__(self, blocks: BlockManager, max_batch_tokens: int, max_num_seqs: int, num_drafts: int) -> None:
        self.blocks = blocks
        self.num_drafts = num_drafts
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_hits = self.num_preempted = 0

    def schedule(self) -> list[Chunk]:
        """The next forward's chunks, decodes first. Empty if nothing can run."""
        chunks: list[Chunk] = []
        budget = self.max_batch_tokens
        preempted = False
        for seq in sorted(self.running, key=lambda s: s.num_uncomputed > 1):
            if (
                seq not in self.running or seq.exhausted
            ):  # preempted just now, or only its last token's value is awaited
                continue
            drafts = self.num_drafts if seq.num_uncomputed == 1 else 0
            length = min(seq.num_uncomputed + drafts, budget)
            if length < 1 + drafts:  # a decode is never cut
                continue
            if not self._make_room(seq, seq.num_computed + length, {chunk.seq for chunk in chunks}):
                preempted = True
                continue
            chunks.append(self._take(seq, length, drafts))
            budget -= length
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs and not preempted:
            seq = self.waiting[0]
            length = min(seq.num_tokens - self.blocks.match_prefix(seq), budget)
            missing = self.blocks.missing(seq, seq.num_computed + length)
            if missing > len(self.blocks.free):
                self.blocks.release(seq)
                break
            self.waiting.popleft()
            self.running.append(seq)
            self.blocks.grow(seq, missing)
            self.num_hits += bool(seq.num_computed)
            self.admit(seq)
            if seq in self.running:
                chunks.append(self._take(seq, length, 0))
                budget -= length
        return chunks

    def admit(self, seq: Sequence) -> None:
        """A sequence leaves the waiting line; its first `num_computed` positions were found in the cache. It may be failed here."""

    def preempt(self, seq: Sequence) -> None:
        """Give up its blocks; its tokens, those that were generated included, are forwarded again later."""
        self.running.remove(seq)
        self.blocks.release(seq)
        seq.num_drafted = 0
        self.num_preempted += 1
        self.waiting.appendleft(seq)

    def remove(self, seq: Sequence) -> None:
        """It ended: its blocks are free, also while a forward that was launched still writes to them."""
        (self.running if seq in self.running else self.waiting).remove(seq)
        self.blocks.release(seq)

    def _take(self, seq: Sequence, length: int, drafts: int) -> Chunk:
        start = seq.num_computed
        seq.num_computed += length
        reaches = start + length - drafts == seq.num_tokens
        return Chunk(seq, start, length, 1 + drafts if reaches else 0)

    def _make_room(self, seq: Sequence, num_tokens: int, taken: set[Sequence]) -> bool:
        """Blocks for so many positions, if need be those of sequences that came later. False: it was preempted itself."""
        missing = self.blocks.missing(seq, num_tokens)
        while missing > len(self.blocks.free):
            victim = next(s for s in reversed(self.running) if s not in taken)
            self.preempt(victim)
            if victim is seq:
                return False
        self.blocks.grow(seq, missing)
        return True
