"""What the tests of two ranks share: their model, prompts, and how often the record operator ran."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import reference
import torch
from torch import nn

WORLD = 2


def tiny() -> nn.Module:
    """The reference engine's model, whose heads and experts two ranks can share."""
    return reference.tiny(num_attention_heads=4, num_key_value_heads=2)


@contextlib.contextmanager
def record_ops() -> Iterator[list[int]]:
    """How often the record operator ran inside: one number, once the context is left."""
    count: list[int] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield count
    count.append(sum(event.count for event in profile.key_averages() if event.key == "r3_pass::record"))


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, reference.VOCAB, (count, length)).tolist()
