"""Metrics against numbers worked out by hand, and self-tests that fail where they must."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoder import Decoder, prompt

import r3_pass
from r3_pass import verify


def test_mismatch_by_hand() -> None:
    d = torch.tensor([0.0, 0.05, -0.2, math.log(3)])
    rollout = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    found = verify.mismatch(rollout, rollout + d)
    k3 = [math.exp(x) - 1 - x for x in d.tolist()]
    assert found.tokens == 4
    assert found.mean_abs == pytest.approx((0.05 + 0.2 + math.log(3)) / 4, rel=1e-6)
    assert found.k3 == pytest.approx(sum(k3) / 4, rel=1e-6)
    assert (found.above_tenth, found.above_factor_2) == (0.5, 0.25)
    assert found.max == pytest.approx(math.log(3), rel=1e-6)
    assert found.p99 == pytest.approx(np.quantile(np.abs(d.numpy()), 0.99), rel=1e-6)


def test_small_differences_are_not_lost_to_rounding() -> None:
    """exp(d) - 1 - d of d = 1e-6 is 5e-13: gone in float32."""
    rollout = torch.full((10,), -1.0, dtype=torch.float64)
    assert verify.mismatch(rollout, rollout + 1e-6).k3 == pytest.approx(5e-13, rel=1e-3)


def test_mask() -> None:
    rollout = torch.zeros(2, 3)
    trainer = torch.tensor([[5.0, 0.2, 0.2], [math.nan, 0.2, 0.2]])
    mask = np.array([[0, 1, 1], [0, 1, 1]])
    assert verify.mismatch(rollout, trainer, mask).mean_abs == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((torch.zeros(3), torch.zeros(2)), "shape"),
        ((torch.zeros(3), torch.zeros(3), torch.ones(2)), "mask has the shape"),
        ((torch.zeros(3), torch.zeros(3), torch.zeros(3)), "no token"),
        ((torch.zeros(3), torch.tensor([0.0, math.inf, 0.0])), "1 of 3 .* not finite"),
    ],
)
def test_what_cannot_be_compared(arguments: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        verify.mismatch(*arguments)


def test_agreement() -> None:
    native = torch.tensor([[[-1, -1], [0, 1]], [[-1, -1], [2, 3]], [[-1, -1], [4, 5]], [[-1, -1], [6, 7]]])
    other = torch.tensor([[[-1, -1], [1, 0]], [[-1, -1], [2, 9]], [[-1, -1], [8, 9]], [[-1, -1], [-1, -1]]])
    (layer,) = verify.agreement(native, other.numpy())
    assert (layer.layer, layer.rows, layer.coverage) == (1, 3, 0.75)
    assert layer.equal_sets == pytest.approx(1 / 3) and layer.overlap == pytest.approx(0.5)
    with pytest.raises(r3_pass.InvalidRoutes, match="shapes"):
        verify.agreement(native, other[:2])


def test_printed_saved_and_drawn(tmp_path: Path) -> None:
    rollout = -torch.rand(200)
    runs = {"off": (rollout, rollout + 0.3 * torch.randn(200)), "on": (rollout, rollout + 0.01 * torch.randn(200))}
    found = {name: verify.mismatch(*run) for name, run in runs.items()}
    lines = verify.table(found).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["off", "on"] and "k3 KL" in lines[0]
    assert str(found["on"]).splitlines()[-1].split()[0] == "200"
    saved = json.loads(verify.save(found, tmp_path / "runs.json").read_text())
    assert saved["off"]["k3"] == found["off"].k3
    agreed = verify.agreement(torch.tensor([[[0, 1]]]), torch.tensor([[[1, 0]]]))
    assert json.loads(verify.save(agreed, tmp_path / "layers.json").read_text())[0]["equal_sets"] == 1.0
    assert verify.table(agreed).splitlines()[1].split() == ["0", "1", "1.0000", "1.0000", "1.0000"]
    pytest.importorskip("matplotlib", reason="needs r3_pass[plots]")
    assert verify.draw(runs, tmp_path / "plot.png", layers={"on": agreed}).stat().st_size > 5000


def trainable(**options: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**options)


def test_self_test() -> None:
    model, backend = trainable(), r3_pass.backend("aot_eager", mode="both")
    compiled = torch.compile(model, backend=backend)
    found = verify.self_test(compiled, backend, prompt(9))
    assert found.ok, str(found)
    assert len(found.results) == 6 and str(found).count("ok  ") == 6
    assert all(p.grad is None for p in model.parameters()), "the model is as it was"


def test_self_test_of_a_replay_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that a graph takes from the next row: the model's own routes give other bits, random ones another loss."""
    from r3_pass.replay import Replay

    block = Replay.block
    monkeypatch.setattr(Replay, "block", lambda *args: block(*args).roll(1, 1))
    model, backend = trainable(), r3_pass.backend("aot_eager", mode="both")
    found = verify.self_test(torch.compile(model, backend=backend), backend, prompt(9))
    failed = {r.name for r in found.results if not r.ok}
    assert failed == {"own routes, recorded and replayed", "random experts and the eager model"}, str(found)


def test_self_test_of_a_replay_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls are for this: every comparison with the model's own routes holds if nothing is forced."""
    from r3_pass.replay import Replay

    block = Replay.block
    monkeypatch.setattr(Replay, "block", lambda *args: torch.full_like(block(*args), -1))
    model, backend = trainable(), r3_pass.backend("aot_eager", mode="both")
    found = verify.self_test(torch.compile(model, backend=backend), backend, prompt(9))
    assert [r.ok for r in found.results] == [True, False, False, False, True, True], str(found)


def test_self_test_needs_both_modes() -> None:
    backend = r3_pass.backend("aot_eager", mode="replay")
    with pytest.raises(r3_pass.RefusedConfiguration, match="mode='both'"):
        verify.self_test(torch.compile(trainable(), backend=backend), backend, prompt(9))
