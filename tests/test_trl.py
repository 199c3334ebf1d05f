"""TRL's GRPO with replay: each sample's rows reach its loss, are used there, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import r3_pass
from r3_pass.oracle import forced

pytest.importorskip("trl", reason="needs r3_pass[trl]: make test-extras")

import trl_grpo
from transformers import Qwen3MoeForCausalLM
from trl import GRPOTrainer

LAYERS, EXPERTS, TOP_K, MOE = 3, 8, 2, [1, 2]
PROMPTS = ["why?", "one + one =", "a compiler routes", "x"]


def eager_rows(model: Any, tokens: Tensor) -> Tensor:
    """int16 [tokens - 1, L, K]: what the uncompiled routers choose in one prefill."""
    rows = torch.full((len(tokens) - 1, LAYERS, TOP_K), -1, dtype=torch.int16)
    hooks = []
    for n in MOE:

        def keep(_: Any, __: Any, out: Any, n: int = n) -> None:
            rows[:, n] = out[2].to(torch.int16)

        hooks.append(model.model.layers[n].mlp.gate.register_forward_hook(keep))
    with torch.no_grad():
        model(tokens[None, :-1], use_cache=False)
    for hook in hooks:
        hook.remove()
    return rows


def wrong_rows(model: Any, inputs: dict[str, Any], routes: Tensor) -> int:
    """Columns of a batch [B, S] whose rows are not the eager ones, -1 where there is no token or no row."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1).bool()
    wanted = torch.full((*ids.shape, LAYERS, TOP_K), -1, dtype=torch.int16)
    for sample in range(len(ids)):
        (columns,) = mask[sample].nonzero(as_tuple=True)
        wanted[sample, columns[:-1]] = eager_rows(model, ids[sample, columns])
    return int((wanted != routes).flatten(2).any(-1).sum())


class Checked(trl_grpo.ReplayGRPOTrainer):
    """Holds every batch's rows to the uncompiled model with the weights of the rollout."""

    eager: Any
    orders: list[tuple[list[str], list[str]]]
    wrong: list[tuple[int, int, int]]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.eager.load_state_dict(self.policy.state_dict())
        batch = super()._generate_and_score_completions(inputs)
        self.orders.append((samples(batch), []))
        return batch

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.orders[-1][1].extend(samples(inputs))
        routes = inputs["routes"]
        tried = routes, routes.roll(1, 0), routes.roll(1, 1)  # the others stand in the wrong sample, or one token off
        self.wrong.append(tuple(wrong_rows(self.eager, inputs, rows) for rows in tried))
        return super().compute_loss(model, inputs, *args, **kwargs)


def samples(batch: dict[str, Any]) -> list[str]:
    columns = (batch["prompt_ids"], batch["prompt_mask"].bool(), batch["completion_ids"])
    return [str((p[m].tolist(), c.tolist())) for p, m, c in zip(*columns, strict=True)]


@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_stay_with_their_samples(tmp_path: Path, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two iterations over each rollout, two accumulated batches, shuffled and split, weights changing in between.

    Pages are small, so that a prompt's second sample takes its prefix from the cache.
    """
    trainer = trl_grpo.make_trainer(
        tmp_path, torch.float32, Checked, inner="aot_eager", max_steps=4, per_device_train_batch_size=4, num_generations=2,
        gradient_checkpointing=checkpointing, max_completion_length=8, pad_to_multiple_of=8 if checkpointing else None,
        transformers_continuous_batching_config={"num_blocks": 128, "page_size": 8, "max_batch_tokens": 32},
    )  # fmt: skip
    trainer.eager, trainer.orders, trainer.wrong = Qwen3MoeForCausalLM.from_pretrained(tmp_path), [], []
    shared: list[int] = []
    prefix_hit = trainer.session.prefix_hit
    monkeypatch.setattr(trainer.session, "prefix_hit", lambda *args: (shared.append(len(args[2])), prefix_hit(*args)))
    before = {name: p.clone() for name, p in trainer.policy.named_parameters()}
    trainer.train()
    assert sum(shared) > 0, "no prefix was shared"
    assert len(trainer.wrong) == 8, "4 steps of 2 batches"
    assert all(right == 0 and other > 0 and shifted > 0 for right, other, shifted in trainer.wrong), trainer.wrong
    for generated, trained in trainer.orders:
        assert sorted(trained) == sorted(2 * generated), "num_iterations=2"
    assert any(trained[: len(generated)] != generated for generated, trained in trainer.orders), "nothing was shuffled"
    # 4 steps of 2 batches, and old log-probabilities of 2 rollouts in 2 chunks; a recomputation is not another forward.
    assert trainer.backend.report().replayed == {1: 12, 2: 12}
    gates = [f"model.layers.{n}.mlp.gate.weight" for n in MOE]
    assert all(not torch.equal(before[g], dict(trainer.policy.named_parameters())[g]) for g in gates)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The trainer, and TRL's own of the same model, not compiled."""
    folder = tmp_path_factory.mktemp("trl")
    trainer = trl_grpo.make_trainer(folder, torch.float32, inner="aot_eager", measure=True, max_completion_length=8)
    return trainer, trl_grpo.make_trainer(folder, torch.float32, GRPOTrainer, max_completion_length=8)


def roll_out(trainer: Any) -> dict[str, Any]:
    trainer.policy.train()
    torch.manual_seed(0)
    batch: dict[str, Any] = trainer._generate_and_score_completions([{"prompt": p} for p in PROMPTS for _ in range(4)])
    return batch


def loss_of(trainer: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.model.zero_grad()
    with trainer.backend.replay(batch["routes"], model=trainer.policy) if "routes" in batch else torch.enable_grad():
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def random_rows(like: Tensor) -> Tensor:
    rows = torch.rand(*like.shape[:-1], EXPERTS, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :TOP_K]
    return torch.where(like < 0, -1, rows).to(like.dtype)


def test_own_routes_are_trls_own_loss_and_other_routes_are_not(trained: tuple[Any, Any]) -> None:
    """Loss and all gradients, KL and auxiliary loss included."""
    trainer, plain = trained
    batch = roll_out(trainer)
    for name in ("replay off", "replay on"):
        assert r3_pass.verify.mismatch(trainer.measured["rollout"][-1], trainer.measured[name][-1]).max < 1e-5
    plain.model.load_state_dict(trainer.policy.state_dict())
    want, wanted = loss_of(plain, {k: v for k, v in batch.items() if k != "routes"})
    assert trainer.aux_loss_enabled and plain._metrics["train"]["aux_loss"][-1] > 1
    got, grads = loss_of(trainer, batch)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert trainer._metrics["train"]["aux_loss"][-1] == pytest.approx(plain._metrics["train"]["aux_loss"][-1], rel=1e-5)
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        assert float((grad - wanted[name]).norm()) <= 1e-5 * float(wanted[name].norm()) + 1e-8, name
    for rows in (random_rows(batch["routes"]), batch["routes"].roll(1, 0), batch["routes"].roll(1, 1)):
        assert abs(loss_of(trainer, {**batch, "routes": rows})[0] - want) > 1e-4


def test_old_log_probabilities_replay_and_the_reference_does_not(
    trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With random rows in place of the rollout's, in chunks; the reference runs the policy's compiled code, too."""
    trainer, plain = trained
    real = trainer._routes
    monkeypatch.setattr(trainer, "_routes", lambda *args: random_rows(real(*args)))
    for layer in trainer.ref_model.model.layers:
        if hasattr(layer.mlp, "experts"):
            monkeypatch.setattr(
                layer.mlp, "forward", torch.compile(layer.mlp.forward, backend=trainer.backend, dynamic=True)
            )
    batch = roll_out(trainer)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    kept = batch["completion_mask"].bool()

    def logps() -> Tensor:
        with torch.no_grad():
            found = plain._get_per_token_logps_and_entropies(plain.model, ids, mask, kept.shape[1])[0]
        return found[kept]

    plain.model.load_state_dict(trainer.ref_model.state_dict())
    torch.testing.assert_close(batch["ref_per_token_logps"][kept], logps(), rtol=1e-5, atol=1e-5)
    plain.model.load_state_dict(trainer.policy.state_dict())
    rows = batch["routes"].flatten(0, 1).long()
    with forced({plain.model.model.layers[n].mlp.gate: rows[:, n] for n in MOE}, lambda *_: True) as oracle:
        want = logps()
    assert oracle.forced == len(MOE)
    torch.testing.assert_close(batch["old_per_token_logps"][kept], want, rtol=1e-5, atol=1e-5)
    assert float((want - logps()).abs().max()) > 0.1, "random rows are not the model's own"


def test_a_rollout_without_rows_is_refused(trained: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = trained
    generate = trainer.policy.generate_batch

    def lose(*args: Any, **kwargs: Any) -> Any:
        outputs = generate(*args, **kwargs)
        del next(iter(outputs.values())).routed_experts
        return outputs

    monkeypatch.setattr(trainer.policy, "generate_batch", lose)
    with pytest.raises(r3_pass.MissingRoutes, match="req_0"):
        roll_out(trainer)


def test_other_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(r3_pass.RefusedConfiguration, match="use_transformers_continuous_batching=True"):
        trl_grpo.make_trainer(tmp_path, torch.float32, use_transformers_continuous_batching=False)
