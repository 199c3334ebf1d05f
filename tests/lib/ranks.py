"""What the tests of two ranks share: their model, prompts, and how often anything was recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import reference
import torch
from torch import nn

from r3_pass.passes import ops

WORLD = 2


def tiny() -> nn.Module:
    """The reference engine's model, whose heads and experts two ranks can share."""
    return reference.tiny(num_attention_heads=4, num_key_value_heads=2)


@contextlib.contextmanager
def record_ops() -> Iterator[list[int]]:
    """How often ids were recorded inside, by an operator in a graph or after the last layer: one number, once it is left."""
    count: list[int] = []
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile, mock.patch.object(ops, "write", wraps=ops.write) as write:
        yield count
    in_graphs = sum(event.count for event in profile.key_averages() if event.key == "r3_pass::record")
    count.append(in_graphs + write.call_count)


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, reference.VOCAB, (count, length)).tolist()
