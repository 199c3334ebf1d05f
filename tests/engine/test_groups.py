"""Groups of sequences that the reference engine attends to as one: logits are those of each sequence by itself."""

from __future__ import annotations

import copy
import random
from typing import Any

import engine.attention
import engine.model_runner
import numpy as np
import pytest
import torch
from engine import Engine
from engine.model_runner import ModelRunner
from engine.scheduler import Chunk
from engine.sequence import Sequence
from reference import LAYERS, VOCAB, tiny
from torch import Tensor

BLOCK, BLOCKS = 4, 64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

# Name: chunks (start, length) of a forward, decodes of one token first; groups (sequences, tokens, blocks) that they make.
FORWARDS: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int, int]]]] = {
    "equal lengths": ([(0, 7)] * 5, [(5, 7, 2)]),
    "mixed lengths": ([(0, 7), (0, 5), (0, 5), (0, 9), (0, 7)], [(1, 7, 2), (2, 5, 2), (1, 9, 3), (1, 7, 2)]),
    "equal lengths at different starts": ([(0, 6), (11, 6), (4, 6), (8, 3)], [(3, 6, 5), (1, 3, 3)]),
    "decodes and prompts": ([(9, 1), (3, 1), (0, 6), (5, 6), (0, 11)], [(2, 1, 3), (2, 6, 3), (1, 11, 3)]),
    "decodes, one of them padding": ([(9, 1), (3, 1), (17, 1)], [(4, 1, 5)]),
    "one decode": ([(6, 1)], [(2, 1, 2)]),
    "one prompt": ([(0, 13)], [(1, 13, 4)]),
    "one decode and one prompt": ([(6, 1), (0, 13)], [(1, 1, 2), (1, 13, 4)]),
}


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()


class Served:
    """A runner, and the same model by itself."""

    def __init__(self, device: str) -> None:
        model = tiny(0).to(device)
        self.alone: Any = copy.deepcopy(model)
        self.runner = ModelRunner(model, "eager", BLOCKS, BLOCK, query_len=1)
        self.random = random.Random(0)

    def forward(self, cuts: list[tuple[int, int]], shared: int = 0) -> tuple[Any, list[Tensor]]:
        """One forward of chunks whose sequences were prefilled up to there, in scattered blocks, the first `shared` in common.

        Returns: the batch; logits [length, vocabulary] of each chunk, checked beside the model's own."""
        free = self.random.sample(range(BLOCKS), BLOCKS)
        common = [free.pop() for _ in range(shared)]
        tokens = self.random.choices(range(VOCAB), k=shared * BLOCK)
        chunks = []
        for start, length in cuts:
            ids = tokens + self.random.choices(range(VOCAB), k=start + length - len(tokens))
            own = [free.pop() for _ in range(-(-len(ids) // BLOCK) - shared)]
            seq = Sequence("", ids, len(ids), 1, block_table=common + own)
            done = 0 if not chunks else shared * BLOCK  # the others find what the first one prefilled
            if start > done:
                self.run([Chunk(seq, done, start - done, 1)])
            chunks.append(Chunk(seq, start, length, length))
        batch, logits = self.run(chunks)
        found = list(logits.split([chunk.length for chunk in chunks]))
        for chunk, mine in zip(chunks, found, strict=True):
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                ids = torch.tensor([chunk.seq.token_ids], device=mine.device)
                expected = self.alone(ids, use_cache=False).logits[0, chunk.start :]
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)
        return batch, found

    def run(self, chunks: list[Chunk]) -> tuple[Any, Tensor]:
        tokens = [np.array(c.seq.token_ids[c.start : c.start + c.length]) for c in chunks]
        batch = self.runner.batch(chunks, tokens)
        return batch, self.runner.run(batch)[: len(batch.outputs)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORWARDS)
def test_a_group_is_attended_to_as_each_of_its_sequences_by_itself(name: str, device: str) -> None:
    chunks, groups = FORWARDS[name]
    batch, _ = Served(device).forward(chunks)
    assert batch.layout.tolist() == [*map(list, groups), [0, 0, 0]]


@pytest.mark.parametrize("device", DEVICES)
def test_a_group_of_prefix_hits(device: str) -> None:
    batch, _ = Served(device).forward([(8, 1), (8, 5), (8, 5), (14, 5)], shared=2)
    assert batch.layout.tolist() == [[1, 1, 3], [3, 5, 5], [0, 0, 0]]


def test_a_group_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its queries and keys, padded to the longest; a sequence by itself may have more, and decodes are never cut."""
    monkeypatch.setattr(engine.model_runner, "_FEW_QUERIES", 6)
    monkeypatch.setattr(engine.model_runner, "_MAX_SCORES", 2 * 6 * 2 * BLOCK)
    decodes, long, short = (
        [(9, 1), (40, 1), (30, 1)],
        [*[(0, 6)] * 5, (6, 6), (0, 6), (20, 6)],
        [*[(9, 3)] * 2, *[(2, 3)] * 2],
    )
    batch, _ = Served("cpu").forward(decodes + long + short)
    assert batch.layout.tolist() == [
        [3, 1, 11], [2, 6, 2], [2, 6, 2], [1, 6, 2], [1, 6, 3], [1, 6, 2], [1, 6, 7], [1, 3, 3], [1, 3, 3], [2, 3, 2], [0, 0, 0]
    ]  # fmt: skip


def test_the_number_of_groups_needs_no_graph_of_its_own() -> None:
    served = Served("cpu")
    served.forward(FORWARDS["one prompt"][0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for chunks, _ in FORWARDS.values():
            served.forward(chunks)


@pytest.mark.parametrize(
    "lengths, groups", [([10] * 16, [(16, 10)]), ([7, 9] * 8, [(8, 7), (8, 9)])], ids=["one length", "two lengths"]
)
def test_equal_prompts_are_attended_to_at_once(
    lengths: list[int], groups: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each layer once, whatever the order in which they came."""
    calls: list[tuple[int, ...]] = []
    attend = engine.attention._attend

    def counted(query: Tensor, *rest: Any) -> Tensor:
        calls.append(tuple(query.shape[:2]))
        return attend(query, *rest)

    served = Engine(tiny(0), "eager", num_blocks=BLOCKS, block_size=BLOCK, max_batch_tokens=160, max_num_seqs=16)
    for i, length in enumerate(lengths):
        served.add_request([i % VOCAB] * length, max_tokens=1)
    monkeypatch.setattr(engine.attention, "_attend", counted)
    served.step()
    assert calls == groups * LAYERS
