"""Does replay shrink the mismatch between a rollout and its trainer? Log-probabilities with replay off and on, same weights.

    python examples/mismatch.py --out results        # a table; results/mismatch.json, mismatch.png, policy.json, policy.png

The model is a byte-level Qwen3-MoE of 6.8 M parameters (7 layers, the first dense, 32 experts, top 4), trained on the
Python standard library by `mismatch/train.py`. The rollout is the reference engine in bfloat16, compiled by Inductor; the
trainer's forward is float32, with other attention and expert kernels, compiled by AOTAutograd alone. Model, precisions,
kernels, prompts and seeds stand in `mismatch/setup.json`, which was committed before anything was measured. The floor is the same
architecture with dense layers in the place of its experts: what is left when there is no routing at all.

Then 20 steps of a small policy-gradient loop (groups of completions, advantages within a group, clipped ratios against the
rollout's log-probabilities) from these weights, with and without replay; the reward is the share of vowels.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "mismatch")]

from engine import Engine, ReferenceAdapter, Result  # noqa: E402
from model import PROMPTS, SETUP, load  # noqa: E402

import r3_pass  # noqa: E402
from r3_pass import verify  # noqa: E402

ROLLOUT, TRAINER, POLICY = SETUP["rollout"], SETUP["trainer"], SETUP["policy"]


def engine_of(kind: str, device: str) -> Engine:
    """The rollout engine; its results carry `routed_experts` if the model routes."""
    model = load(kind, getattr(torch, ROLLOUT["dtype"]), device, ROLLOUT["experts"], "sdpa").requires_grad_(False)
    engine = Engine(
        model, r3_pass.backend(ROLLOUT["compiler"]), num_blocks=2048, max_batch_tokens=2048, max_num_seqs=64
    )
    if kind == "moe":
        r3_pass.runtime.attach(ReferenceAdapter(engine))
    engine.warm_up(max_model_len=512)
    return engine


class Trainer:
    """The trainer's model, compiled once for both: live and replayed."""

    def __init__(self, kind: str, device: str) -> None:
        self.model = load(kind, getattr(torch, TRAINER["dtype"]), device, TRAINER["experts"], TRAINER["attention"])
        self.backend = r3_pass.backend(TRAINER["compiler"], mode="replay")
        self.compiled: Any = torch.compile(self.model, backend=self.backend, dynamic=True)
        self.device = device

    def log_probs(self, ids: Tensor) -> Tensor:
        """float [batch, seq - 1]: of each token but the first."""
        logits = self.compiled(ids, use_cache=False).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    def native(self, ids: Tensor) -> Tensor:
        """int [batch, seq, layers, top_k]: what the trainer's own routers choose, by hooks on the uncompiled model."""
        layers, top_k = SETUP["architecture"]["num_hidden_layers"], SETUP["moe"]["num_experts_per_tok"]
        rows = torch.full((*ids.shape, layers, top_k), -1, device=ids.device)
        hooks = []
        for number, layer in enumerate(self.model.model.layers):
            if hasattr(layer.mlp, "experts"):

                def keep(_: Any, __: Any, out: Any, number: int = number) -> None:
                    found = next(t for t in out if not t.is_floating_point())
                    rows[:, :, number] = found.view(*ids.shape, top_k)

                hooks.append(layer.mlp.gate.register_forward_hook(keep))
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            self.model(ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        return rows


def batch_of(results: list[Result], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """ids [batch, seq], the rollout's log-probabilities and the mask of generated tokens [batch, seq - 1]; padded right."""
    seq = max(len(r.prompt_token_ids) + len(r.token_ids) for r in results)
    ids = torch.zeros(len(results), seq, dtype=torch.int64)
    old = torch.zeros(len(results), seq - 1)
    mask = torch.zeros(len(results), seq - 1, dtype=torch.bool)
    for i, r in enumerate(results):
        tokens = r.prompt_token_ids + r.token_ids
        ids[i, : len(tokens)] = torch.tensor(tokens)
        first = len(r.prompt_token_ids) - 1
        old[i, first : first + len(r.token_ids)] = torch.tensor(r.log_probs)
        mask[i, first : first + len(r.token_ids)] = True
    return ids.to(device), old.to(device), mask.to(device)


def compare(device: str, out: Path) -> dict[str, Any]:
    """Before any optimizer step: rollout against trainer, replay off and on, for all seeds; and without routing."""
    found: dict[str, verify.Mismatch] = {}
    drawn: dict[str, tuple[Any, Any]] = {}
    agreements: dict[str, Any] = {}
    for kind in ("dense", "moe"):
        engine, trainer = engine_of(kind, device), Trainer(kind, device)
        rows: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for seed in SETUP["seeds"]:
            engine.generator.manual_seed(seed)
            results = engine.generate(PROMPTS, ROLLOUT["max_tokens"], temperature=ROLLOUT["temperature"])
            assert not [r.error for r in results if r.error]
            for half in (results[: len(results) // 2], results[len(results) // 2 :]):  # memory
                ids, old, mask = batch_of(half, device)
                with torch.no_grad():
                    off = trainer.log_probs(ids)
                    rows.setdefault(f"{kind}, off" if kind == "moe" else "dense (floor)", []).append(
                        (old[mask], off[mask])
                    )
                    if kind == "dense":
                        continue
                    routes = r3_pass.routes.pad([r.routed_experts for r in half], ids.shape[1])
                    with trainer.backend.replay(routes):
                        on = trainer.log_probs(ids)
                rows.setdefault("moe, replay", []).append((old[mask], on[mask]))
                if seed == SETUP["seeds"][0] and half[0] is results[0]:
                    agreements["trainer's own choice"] = verify.agreement(trainer.native(ids), routes)
            for name, parts in rows.items():
                per_seed = 2
                a, b = (torch.cat(side) for side in zip(*parts[-per_seed:], strict=True))
                found[f"{name}, seed {seed}"] = verify.mismatch(a, b)
        for name, parts in rows.items():
            a, b = (torch.cat(side) for side in zip(*parts, strict=True))
            found[name] = verify.mismatch(a, b)
            drawn[name] = (a.cpu(), b.cpu())
    print(verify.table(found))
    print(verify.table(agreements["trainer's own choice"]))
    verify.save(found, out / "mismatch.json")
    verify.draw(drawn, out / "mismatch.png", layers=agreements)
    off, on = found["moe, off"], found["moe, replay"]
    print(
        f"\nk3 KL {off.k3 / on.k3:.1f} times lower, |d| > 0.1 {off.above_tenth / max(on.above_tenth, 1e-12):.1f} times rarer"
    )
    return {"k3": off.k3 / on.k3, "above_tenth": off.above_tenth / max(on.above_tenth, 1e-12)}


def reward(result: Result) -> float:
    return sum(token in b"aeiou" for token in result.token_ids) / len(result.token_ids)


def update(trainer: Trainer, ids: Tensor, old: Tensor, mask: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward of the clipped loss. Returns: the trainer's log-probabilities, and the share of clipped tokens."""
    new = trainer.log_probs(ids)
    ratio = torch.exp(new - old)
    clipped = ratio.clamp(1 - POLICY["clip"], 1 + POLICY["clip"])
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -(gain * mask).sum() / mask.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return new.detach(), ((ratio != clipped) & mask).sum() / mask.sum()


def policy(device: str, replay: bool) -> list[dict[str, float]]:
    """The loop; each step's rollout uses the weights of the step before."""
    engine, trainer = engine_of("moe", device), Trainer("moe", device)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=POLICY["learning_rate"], weight_decay=0.0)
    curve = []
    for step in range(POLICY["steps"]):
        engine.update_weights(trainer.model.state_dict(), step)
        engine.generator.manual_seed(step)
        chosen = [PROMPTS[(step * POLICY["prompts"] + i) % len(PROMPTS)] for i in range(POLICY["prompts"])]
        prompts = [prompt for prompt in chosen for _ in range(POLICY["group"])]
        results = engine.generate(prompts, POLICY["max_tokens"], temperature=1.0)
        rewards = torch.tensor([reward(r) for r in results], device=device).view(-1, POLICY["group"])
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        ids, old, mask = batch_of(results, device)
        routes = r3_pass.routes.pad([r.routed_experts for r in results], ids.shape[1])

        context = trainer.backend.replay(routes) if replay else contextlib.nullcontext()
        with context:
            new, cut = update(trainer, ids, old, mask, advantages)
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found = verify.mismatch(old, new, mask)
        curve.append(
            {"reward": float(rewards.mean()), "k3": found.k3, "above_tenth": found.above_tenth,
             "clipped": float(cut), "gradient norm": float(norm)}
        )  # fmt: skip
        print(
            f"{'replay' if replay else 'off':6} step {step}: " + ", ".join(f"{k} {v:.3g}" for k, v in curve[-1].items())
        )
    return curve


def draw(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    names = ["k3", "above_tenth", "clipped", "reward"]
    figure = Figure(figsize=(12, 3), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names)), names, strict=True):
        for label, curve in curves.items():
            axes.plot([step[name] for step in curve], label=label)
        axes.set(xlabel="step", title=name, yscale="log" if name == "k3" else "linear")
        axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=HERE / "mismatch" / "results")
    parser.add_argument("--no-policy", action="store_true", help="the comparison only")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.config.recompile_limit = 64
    machine = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__, "python": platform.python_version(), "date": datetime.date.today().isoformat(),
    }  # fmt: skip
    print(json.dumps(machine))
    ratios = compare(given.device, given.out)
    (given.out / "machine.json").write_text(json.dumps({**machine, "ratios": ratios}, indent=2) + "\n")
    if not given.no_policy:
        curves = {label: policy(given.device, label == "replay") for label in ("replay off", "replay")}
        (given.out / "policy.json").write_text(json.dumps(curves, indent=2) + "\n")
        draw(curves, given.out / "policy.png")
    if min(ratios.values()) < 2:
        raise SystemExit("replay did not halve the mismatch")


if __name__ == "__main__":
    main()
