"""Speculation: a small model guesses the next tokens, the target verifies them in one forward."""

from __future__ import annotations

import numpy as np

from engine.model_runner import ModelRunner
from engine.scheduler import Chunk
from engine.sequence import Sequence


class Drafter:
    """A causal model with a KV cache of its own, in the blocks that the target's has too."""

    def __init__(self, runner: ModelRunner, num_drafts: int, max_batch_tokens: int) -> None:
        self.runner = runner
        self.num_drafts = num_drafts
        self.max_batch_tokens = max_batch_tokens

    def propose(self, sequences: list[Sequence]) -> None:
        """Greedy drafts for sequences whose blocks reach as far. Waits for each forward: drafts are tokens on the host."""
        for seq in sequences:
            seq.drafts = []
            seq.num_drafted = min(seq.num_drafted, seq.num_tokens - 1)  # past it lies what the target rejected
        while behind := [seq for seq in sequences if len(seq.drafts) < self.num_drafts]:
            self._advance(behind)

    def _advance(self, sequences: list[Sequence]) -> None:
        """One forward: the next draft of sequences that lack a token, a chunk of those that lack more."""
        budget, chunks, tokens = self.max_batch_tokens, [], []
        for seq in sorted(sequences, key=lambda s: s.num_tokens + len(s.drafts) - s.num_drafted):
            known = seq.token_ids + seq.drafts
            length = min(len(known) - seq.num_drafted, budget)
            if not length:
                break
            end = seq.num_drafted + length
            chunks.append(Chunk(seq, seq.num_drafted, length, num_outputs=int(end == len(known))))
            tokens.append(np.array(known[seq.num_drafted : end]))
            seq.num_drafted = end
            budget -= length
        guesses = iter(self.runner.run(self.runner.batch(chunks, tokens)).argmax(-1).tolist())
        for chunk in chunks:
            if chunk.num_outputs:
                chunk.seq.drafts.append(next(guesses))
