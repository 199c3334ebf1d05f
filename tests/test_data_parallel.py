"""Replay on data-parallel ranks: each takes the routes of its part of the batch."""

from __future__ import annotations

import pytest
import torch
from data_parallel import RANKS, Step, alone, distributed_data_parallel, fully_sharded
from forced import worst
from processes import on_ranks


def same(got: Step, want: Step) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    apart, whose = worst(got[1], want[1])
    assert apart < 1e-5, f"{whose} differs by {apart}"


def test_distributed_data_parallel() -> None:
    """A model that is compiled whole, and whose graph Dynamo splits by gradient buckets, is refused and runs live."""
    want = alone()
    for blocks, whole, split in on_ranks(RANKS, distributed_data_parallel):
        same(blocks, want)
        same(whole, want)
        assert "optimize_ddp = False" in split


@pytest.mark.parametrize("checkpoint", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fully_sharded(checkpoint: bool) -> None:
    """FSDP2: a block's weights are other objects while it runs."""
    want = alone()
    for got in on_ranks(RANKS, fully_sharded, checkpoint):
        same(got, want)
