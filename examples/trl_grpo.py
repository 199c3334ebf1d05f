"""TRL's GRPO with transformers' continuous batching as rollout engine: the rollout's experts are replayed in the loss.

    pip install 'r3_pass[trl]'
    python examples/trl_grpo.py        # a tiny Qwen3-MoE with random weights, on a CPU, in half a minute

`ReplayGRPOTrainer` overrides five methods of `GRPOTrainer` and edits nothing. The routes travel as one more tensor of the
generation batch, int16 [batch, prompt + completion, layers, top_k], which TRL shuffles and splits with the others. The policy's
forwards, for the loss and for old log-probabilities, take them; the reference model and the auxiliary loss stay live.

Rollout, old log-probabilities, loss, backward and recomputation share one set of compiled graphs, so what is compiled is each
MoE block, in place: with TRL's activation checkpointing, compiled layers or a compiled model run eagerly in the loss (replay
refuses that). transformers collects router logits for the auxiliary loss by a hook on each gate, which breaks a block's graph in
the middle of its routing (refused as well), so here the blocks' inputs are kept, and their gates called again, live, for
that loss. The methods are private to TRL: this is for trl 1.16, and was run in one process.

The loop without TRL is `policy()` in `examples/mismatch.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import string
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers import logging as transformers_logging
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import GRPOConfig, GRPOTrainer

import r3_pass

PROMPTS = ["why is the sky blue?", "one + one =", "a compiler", "it routes each token to experts.", "yes, no", "x = 3"]


class ReplayGRPOTrainer(GRPOTrainer):
    """GRPO whose policy takes the experts of its own rollout.

    Args:
        inner: the compiler behind the pass.
        measure: also compare the rollout's log-probabilities with the trainer's, replay off and on (one more forward each).

    Attributes:
        backend: its report counts replayed forwards by layer.
        session: records the rollout; detach it to take it off the model.
        measured: with `measure`, log-probabilities of the completions' tokens, a tensor for each rollout, before any optimizer
            step on it: by the engine ("rollout"), and by the trainer ("replay off", "replay on").
    """

    def __init__(self, *args: Any, inner: str = "inductor", measure: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        policy = self.accelerator.unwrap_model(self.model)
        elsewhere = self.use_vllm or self.rollout_func is not None or not self.use_transformers_continuous_batching
        if elsewhere or self.tools or self._is_vlm or hasattr(policy, "peft_config"):
            raise r3_pass.RefusedConfiguration(
                "ReplayGRPOTrainer takes routes from transformers' continuous batching, one turn a sample, of a text model that is "
                "trained in full (with PEFT, reference and policy are one model, and the reference would be replayed). Set "
                "use_transformers_continuous_batching=True; use no vLLM, rollout_func, tools, images or PEFT."
            )
        self.backend = r3_pass.backend(inner, mode="both")
        self.blocks = [layer.mlp for layer in policy.model.layers if hasattr(layer.mlp, "experts")]
        for block in self.blocks:  # as block.compile(...), but that hooks on the block stay out of its graph
            block.forward = torch.compile(block.forward, backend=self.backend, dynamic=True)
        self.session = r3_pass.runtime.attach(policy, backend=self.backend)
        self.policy, self.measure = policy, measure
        self.continuous_batching_config.return_logprobs = measure
        self.measured: dict[str, list[Tensor]] = {"rollout": [], "replay off": [], "replay on": []}
        self._outputs: list[Any] = []
        self._replaying: contextlib.ExitStack | None = None
        self._rollout: list[Any] | None = None

    def _generate(self, prompts: list[Any]) -> Any:
        """Keep what `generate_batch` returns: TRL takes only the tokens from it."""
        generate = self.policy.generate_batch
        self._outputs = []

        def keep(*args: Any, **kwargs: Any) -> Any:
            outputs = generate(*args, **kwargs)
            self._outputs = list(outputs.values())
            return outputs

        self.policy.generate_batch = keep
        try:
            result = super()._generate(prompts)
        finally:
            self.policy.generate_batch = generate
        for prompt, completion, output in zip(result[0], result[1], self._outputs, strict=True):
            rows = getattr(output, "routed_experts", None)
            if [*output.prompt_ids, *output.generated_tokens] != [*prompt, *completion] or rows is None:
                raise r3_pass.MissingRoutes(
                    f"{output.request_id} ({output.status}, {output.error}) has no routes of the tokens that are trained on."
                )
        self._rollout = self._outputs
        return result

    def _routes(self, outputs: list[Any], prompt_width: int, width: int) -> Tensor:
        """int16 [B, S, L, K]: prompts are padded left, completions right; a sample's last token was not forwarded."""
        rows = [output.routed_experts for output in outputs]
        offsets = [prompt_width - len(output.prompt_ids) for output in outputs]
        return torch.from_numpy(r3_pass.routes.pad(rows, width, offsets=offsets)).to(self.accelerator.device)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        try:
            batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
            prompt, completion = batch["prompt_ids"], batch["completion_ids"]
            batch["routes"] = self._routes(self._outputs, prompt.shape[1], prompt.shape[1] + completion.shape[1])
            if self.measure:
                self._compare(batch)
        finally:
            self._rollout = None
        return batch

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_aux_loss: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Old log-probabilities, which come before the loss and in chunks, replay; the reference model's do not."""
        forward = super()._get_per_token_logps_and_entropies
        if self.accelerator.unwrap_model(model) is not self.policy:
            return forward(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        if self._rollout is not None:
            rows = self._routes(self._rollout, input_ids.shape[1] - logits_to_keep, input_ids.shape[1])
            logps = []
            for chunk in zip(
                *(t.split(batch_size or len(rows)) for t in (rows, input_ids, attention_mask)), strict=True
            ):
                with self.backend.replay(chunk[0], model=self.policy):
                    logps.append(forward(model, *chunk[1:], logits_to_keep)[0])
            return torch.cat(logps), None, None
        with self._inputs_of_blocks() as inputs:
            logps, entropies, _ = forward(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        if not compute_aux_loss:
            return logps, entropies, None
        with self.accelerator.autocast():
            logits = tuple(block.gate(x.flatten(0, -2))[0] for block, x in zip(self.blocks, inputs, strict=True))
        top_k = self.policy.config.num_experts_per_tok
        return logps, entropies, load_balancing_loss_func(logits, logits[0].shape[-1], top_k, attention_mask)

    @contextlib.contextmanager
    def _inputs_of_blocks(self) -> Iterator[list[Tensor]]:
        inputs: list[Tensor] = []
        with contextlib.ExitStack() as stack:
            for block in self.blocks:
                hook = block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
                stack.callback(hook.remove)
            yield inputs

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        replay = self.backend.replay(inputs["routes"], model=self.policy)
        if self._replaying is not None:
            self._replaying.enter_context(replay)  # left after the backward, which may run layers again
            return super().compute_loss(model, inputs, *args, **kwargs)
        with replay:
            return super().compute_loss(model, inputs, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "_replaying", None)
            self._replaying = stack
            return super().training_step(*args, **kwargs)

    def _compare(self, batch: dict[str, Any]) -> None:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        lengths = [len(output.generated_tokens) for output in self._outputs]
        rest = ids, mask, batch["completion_ids"].shape[1], self.args.per_device_train_batch_size
        with torch.no_grad():
            found = {
                "replay on": self._get_per_token_logps_and_entropies(self.policy, *rest)[0],
                "replay off": super()._get_per_token_logps_and_entropies(self.policy, *rest)[0],
            }
        for name, logps in found.items():
            self.measured[name].append(
                torch.cat([row[:n].float().cpu() for row, n in zip(logps, lengths, strict=True)])
            )
        self.measured["rollout"].append(torch.tensor([x for output in self._outputs for x in output.logprobs]))


def make_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """A Qwen3-MoE with random weights (layer 0 dense) and a tokenizer of characters, saved: TRL loads the reference from there."""
    torch.manual_seed(0)
    vocabulary = {
        t: i for i, t in enumerate(["<pad>", "<eos>", "<unk>", *string.ascii_lowercase, *string.digits, *" .,+=?"])
    }
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    config = Qwen3MoeConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[0],
        max_position_embeddings=128, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype), tokenizer


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in completions]


def make_trainer(
    folder: Path, dtype: torch.dtype = torch.bfloat16, kind: Any = ReplayGRPOTrainer, **changed: Any
) -> Any:
    model, tokenizer = make_model(folder, dtype)
    own = {name: changed.pop(name) for name in ("inner", "measure") if name in changed}
    options: dict[str, Any] = {
        "per_device_train_batch_size": 8, "num_generations": 8, "gradient_accumulation_steps": 2, "num_iterations": 2,
        "max_completion_length": 32, "temperature": 1.0, "beta": 0.04, "learning_rate": 1e-3, "max_steps": 8,
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 128},
        "use_cpu": True, "bf16": False, "output_dir": str(folder / "out"), "save_strategy": "no", "report_to": [],
        "logging_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    return kind(
        model=model,
        reward_funcs=vowels,
        args=GRPOConfig(**{**options, **changed}),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        **own,
    )


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    warnings.simplefilter("ignore")
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), inner="aot_eager", measure=True)
        trainer.train()
        rollout, *trainers = (torch.cat(parts) for parts in trainer.measured.values())
        found = [r3_pass.verify.mismatch(rollout, logps) for logps in trainers]
        print(r3_pass.verify.table(dict(zip(("replay off", "replay on"), found, strict=True))))
        print(f"replayed forwards by layer: {trainer.backend.report().replayed}")


if __name__ == "__main__":
    main()
