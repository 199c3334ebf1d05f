"""Replay on tensor- and expert-parallel ranks: loss and gradients are those of one process that is forced to the same experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensor_parallel
from processes import on_ranks


@pytest.mark.parametrize(
    "expert_parallel", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["tensor", "expert"]
)
def test_loss_and_gradients(expert_parallel: bool, tmp_path: Path) -> None:
    path = str(tmp_path)
    tensor_parallel.save(path)
    loss, grads = tensor_parallel.alone(path)
    for (ours, our_grads), replayed in on_ranks(2, tensor_parallel.replayed, path, 2, expert_parallel):
        assert replayed == {1: 1, 2: 1}
        assert abs(ours - loss) < 1e-6
        assert set(our_grads) == set(grads)
        worst = max(float((our_grads[n] - g).norm() / g.norm()) for n, g in grads.items())
        assert worst < 1e-5
    assert all(float(grads[f"model.layers.{n}.mlp.gate.weight"].norm()) > 0 for n in (1, 2))
