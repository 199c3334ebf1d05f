"""The engine: requests in, results out, one forward a step; the tokens of a step are handled while the next one runs.

engine = Engine(model, backend=r3_pass.backend(), num_blocks=256)
results = engine.generate([[7, 1, 4], [1, 5]], max_tokens=32)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.block_manager import BlockManager
from engine.drafter import Drafter
from engine.model_runner import Batch, ModelRunner
from engine.parallel import ranks_of
from engine.pipeline import Pipeline
from engine.scheduler import Scheduler
from engine.sequence import Result
from engine.sequence import Sequence as Request


@dataclasses.dataclass(eq=False)
class _Launched:
    """A forward on its way: what it samples is still on the device, or being copied."""

    batch: Batch
    tokens: Tensor
    log_probs: Tensor
    event: torch.cuda.Event | None


class Engine:
    """Serves one causal MoE of transformers.

    Args:
        model: its attention is replaced by the engine's.
        backend: what torch.compile compiles its forward with, and the drafter's.
        drafter: a smaller causal model with the same tokens; num_drafts: tokens that it guesses, which one forward verifies.
        num_blocks, block_size: of the KV cache.
        max_batch_tokens: of one forward; longer prompts are cut into chunks.
        max_num_seqs: sequences that run at a time.
        pipeline: the stage of this process; every process makes the same calls.

    Attributes:
        ranks: how the model is split. Each rank has an engine, all of them with the same requests, greedy.
        requests: those that wait or run, by id.
        num_accepted, num_rejected: of the drafts that were verified.

    Raises: ValueError for a model that it cannot serve right, or sizes that serve nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Any,
        *,
        drafter: nn.Module | None = None,
        num_drafts: int = 3,
        num_blocks: int = 256,
        block_size: int = 16,
        max_batch_tokens: int = 512,
        max_num_seqs: int = 64,
        pipeline: Pipeline | None = None,
    ) -> None:
        drafts = num_drafts if drafter is not None else 0
        if min(num_blocks, block_size, max_batch_tokens, max_num_seqs) < 1 or (drafter is not None and drafts < 1):
            raise ValueError("num_blocks, block_size, max_batch_tokens, max_num_seqs and num_drafts are 1 at least.")
        if max_batch_tokens <= drafts:
            raise ValueError(f"max_batch_tokens={max_batch_tokens} has no room for a token and {drafts} drafts.")
        self.ranks = ranks_of(model)
        if pipeline is not None and self.ranks.world > 1:
            raise ValueError("a tensor-parallel model is split already: no pipeline.")
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self.blocks = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(self.blocks, max_batch_tokens, max_num_seqs, drafts)
        self.runner = ModelRunner(model, backend, num_blocks, block_size, 1 + drafts, pipeline)
        self.drafter = (
            Drafter(ModelRunner(drafter, backend, num_blocks, block_size, 1), drafts, max_batch_tokens)
            if drafter is not None
            else None
        )
        if self.drafter is not None and self.drafter.runner.vocab_size > self.runner.vocab_size:
            raise ValueError("the drafter has tokens that the model does not know.")
        self.requests: dict[str, Request] = {}
        self._launched: _Launched | None = None
        self._ended: list[Request] = []
        self._ready: list[Result] = []
        self._asleep = self._torn = False
        self.num_accepted = self.num_rejected = 0
        self._names = itertools.count()
        self.generator = torch.Generator(self.runner.device).manual_seed(0)

    # ---- requests -----------------------------------------------------------------------------------------------
    def add_request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        temperature: float = 0.0,
        stop_token_ids: Iterable[int] = (),
        on_token: Callable[[str, int], None] | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt. `on_token(request_id, token)` is called for each token. Returns: the request's id.

        Raises: ValueError if the cache could never hold it, a token is none of the model's, or the id is taken.
        """
        self._check_request(prompt, max_tokens)
        request_id = f"req_{next(self._names)}" if request_id is None else request_id
        if request_id in self.requests:
            raise ValueError(f"request {request_id!r} is running.")
        seq = Request(
            request_id, list(prompt), len(prompt), max_tokens, temperature, frozenset(stop_token_ids), on_token
        )
        self.requests[request_id] = seq
        self.scheduler.waiting.append(seq)
        return request_id

    def _check_request(self, prompt: Sequence[int], max_tokens: int) -> None:
        drafts, vocab_size = self.scheduler.num_drafts, self.runner.vocab_size
        if self._asleep:
            raise ValueError("the engine sleeps: wake it first.")
        if not prompt or max_tokens < 1:
            raise ValueError("a request needs a token at least, in its prompt and to generate.")
        if len(prompt) + max_tokens + drafts > self.blocks.num_blocks * self.blocks.block_size:
            raise ValueError(f"{len(prompt)} + {max_tokens} tokens (and {drafts} drafts) do not fit into the KV cache.")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise ValueError(f"tokens {min(prompt)} to {max(prompt)}: the model knows 0 to {vocab_size - 1}.")

    def abort(self, request_id: str) -> Result:
        """End a request now, whether it waits or runs. Returns: what it has, tokens that are still on the device left out.

        Raises: KeyError if there is no such request, or it has ended.
        """
        seq = self.requests[request_id]
        self._end(seq, "abort")
        self._ended.remove(seq)
        return self.emit(seq, seq.result())

    def preempt(self, request_id: str) -> None:
        """Take a request's blocks, if it runs: it starts over later, and keeps its tokens, those of the forward under way included.

        Raises: KeyError if there is no such request, or it has ended.
        """
        seq = self.requests[request_id]
        self._verify()
        if seq in self.scheduler.running:
            self.scheduler.preempt(seq)

    def _verify(self) -> None:
        """Drafts of the forward under way become tokens or nothing: that says which rows go with tokens that are handed out."""
        if self.drafter is not None and self._launched is not None:
            self._handle(self._launched)
            self._launched = None

    def fail(self, seq: Request, error: Exception) -> None:
        """End one request with an error; the others go on."""
        self._end(seq, "error")
        self._ended.remove(seq)
        result = seq.result()
        result.error = error
        self._ready.append(self.emit(seq, result))

    def generate(self, prompts: Iterable[Sequence[int]], max_tokens: int = 16, **options: Any) -> list[Result]:
        """Serve prompts to their ends, beside requests that were added before: what ends of those, the next `step` returns.

        Returns: results in the order of the prompts; without those that a callback aborted, which `abort` returned."""
        prompts = list(prompts)
        for prompt in prompts:
            self._check_request(prompt, max_tokens)
        names = [self.add_request(prompt, max_tokens, **options) for prompt in prompts]
        results: dict[str, Result] = {}
        while any(name in self.requests for name in names):
            results.update((result.request_id, result) for result in self.step())
        mine = [results.pop(name) for name in names if name in results]
        self._ready += results.values()
        return mine

    # ---- steps --------------------------------------------------------------------------------------------------
    def step(self) -> list[Result]:
        """Launch the next forward, then hand out what the one before it made. Returns: requests that ended with it.

        Raises: RuntimeError while it sleeps, or after a step that raised: what was scheduled was not computed.
        """
        if self._asleep or self._torn:
            raise RuntimeError(
                "the engine sleeps: wake it first."
                if self._asleep
                else "an earlier step raised. Take what there is with sleep(), which aborts all requests, then wake()."
            )
        self._torn = True
        before = self._launched
        if self.drafter is not None and before is not None:
            self._handle(before)  # what is verified next depends on how many drafts were accepted
        self._launched = self._launch()
        if before is not None and self.drafter is None:
            self._handle(before)
        self._torn = False
        return self._deliver()

    def _launch(self) -> _Launched | None:
        chunks = self.scheduler.schedule()
        if not chunks:
            return None
        if self.drafter is not None:
            drafted = [chunk.seq for chunk in chunks if chunk.num_outputs > 1]
            self.drafter.propose(drafted)
            if self.runner.pipeline is not None:
                for seq, drafts in zip(drafted, self.runner.pipeline.agree([s.drafts for s in drafted]), strict=True):
                    seq.drafts = drafts
        pending = self._rows_of_pending()
        tokens = []
        for chunk in chunks:
            known = chunk.seq.token_ids + [-1 - pending.get(chunk.seq, 0)] * chunk.seq.num_pending
            known += chunk.seq.drafts if chunk.num_outputs > 1 else []
            tokens.append(np.array(known[chunk.start : chunk.start + chunk.length]))
        order = sorted(range(len(chunks)), key=lambda i: (chunks[i].length != self.runner.query_len, chunks[i].length))
        batch = self.runner.batch([chunks[i] for i in order], [tokens[i] for i in order])
        logits = self.runner.run(batch)[: len(batch.outputs)]
        sampled, log_probs = self._sample(logits, batch)
        for chunk in batch.chunks:
            self.blocks.seal(chunk.seq)
            if chunk.num_outputs == 1 and self.drafter is None:
                chunk.seq.num_pending += 1
        self.runner.sampled = sampled
        if sampled.device.type != "cuda":
            return _Launched(batch, sampled, log_probs, None)
        ids, scores = (torch.empty_like(t, device="cpu", pin_memory=True) for t in (sampled, log_probs))
        ids.copy_(sampled, non_blocking=True)
        scores.copy_(log_probs, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Launched(batch, ids, scores, event)

    def _rows_of_pending(self) -> dict[Request, int]:
        """Which of the tokens sampled last is whose."""
        if self._launched is None:
            return {}
        sampling = [chunk.seq for chunk in self._launched.batch.chunks if chunk.num_outputs]
        return {seq: row for row, seq in enumerate(sampling)}

    def _sample(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """int64 and float [outputs]: a token after each output, and its log-probability."""
        log_probs = logits.float().log_softmax(-1)
        heat = torch.tensor([c.seq.temperature for c in batch.chunks for _ in range(c.num_outputs)])
        scores = log_probs
        if heat.any():
            uniform = torch.rand(logits.shape, generator=self.generator, device=logits.device)
            noise = -torch.log(-torch.log(uniform.clamp(1e-10, 1 - 1e-7)))
            scores = log_probs + noise * heat[:, None].to(logits.device, non_blocking=True)
        tokens = scores.argmax(-1)
        return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]

    def _handle(self, launched: _Launched) -> None:
        """The tokens of a forward, on the host: append them, and see who is done."""
        if launched.event is not None:
            launched.event.synchronize()
        tokens, log_probs = launched.tokens.tolist(), launched.log_probs.tolist()
        for chunk in launched.batch.chunks:
            seq = chunk.seq
            mine, tokens = tokens[: chunk.num_outputs], tokens[chunk.num_outputs :]
            theirs, log_probs = log_probs[: chunk.num_outputs], log_probs[chunk.num_outputs :]
            if seq.finish_reason or not mine:
                continue
            accepted = 0
            while accepted < len(mine) - 1 and seq.drafts[accepted] == mine[accepted]:
                accepted += 1
            self.num_accepted += accepted
            self.num_rejected += len(mine) - 1 - accepted
            seq.num_pending -= self.drafter is None
            if len(mine) > 1 and seq in self.scheduler.running:  # if not, it was preempted and has no KV
                seq.num_computed = chunk.start + accepted + 1
            for token, log_prob in zip(mine[: accepted + 1], theirs, strict=False):
                seq.token_ids.append(token)
                seq.log_probs.append(log_prob)
                if token in seq.stop_token_ids or len(seq.log_probs) == seq.max_tokens:
                    self._end(seq, "stop" if token in seq.stop_token_ids else "length")
                    break

    def _deliver(self) -> list[Result]:
        for seq in (*self.requests.values(), *self._ended):
            new = seq.token_ids[seq.num_prompt + seq.num_streamed :] if seq.on_token is not None else ()
            for token in new:
                if seq.finish_reason == "abort":  # by a callback, just now
                    break
                seq.num_streamed += 1
                seq.on_token(seq.request_id, token)  # type: ignore[misc]
        while self._ended:
            seq = self._ended.pop(0)
            self._ready.append(self.emit(seq, seq.result()))
        ready, self._ready = self._ready, []
        return ready

    def emit(self, seq: Request, result: Result) -> Result:
        """The last look at a result before it leaves."""
        return result

    def _end(self, seq: Request, reason: str) -> None:
        seq.finish_reason = reason
        self.scheduler.remove(seq)
        del self.requests[seq.request_id]
        self._ended.append(seq)

    # ---- life cycle ---------------------------------------------------------------------------------------------
    @property
    def runners(self) -> list[ModelRunner]:
        return [self.runner] + ([self.drafter.runner] if self.drafter is not None else [])

    def warm_up(self, max_model_len: int) -> None:
        """Compile the decodes of all padded sizes; on a GPU, capture them as CUDA graphs for sequences up to that length.

        Longer ones are served without. After `wake`, graphs have to be captured again.
        """
        num_seqs = 2
        while True:
            self.runner.run(self.runner.dummy(num_seqs))
            if self.runner.device.type == "cuda":
                self.runner.capture(num_seqs, -(-max_model_len // self.blocks.block_size))
            if num_seqs >= self.max_num_seqs:
                return
            num_seqs *= 2

    def update_weights(self, state_dict: Mapping[str, Tensor], version: int) -> None:
        """New weights, copied into the old ones. Requests that run start over with them and keep their tokens."""
        self._verify()
        for seq in reversed(self.scheduler.running[:]):
            self.scheduler.preempt(seq)
        self.blocks.forget_prefixes()
        here = self.runner.model.state_dict().keys()  # a stage has some of the layers only
        self.runner.model.load_state_dict({name: value for name, value in state_dict.items() if name in here})

    def compact(self) -> None:
        """Move the blocks in use to the front of the cache."""
        if moved := self.blocks.compact(self.scheduler.running):
            for runner in self.runners:
                runner.move_blocks(moved)

    def sleep(self) -> list[Result]:
        """Free the KV cache. Returns: requests that were not finished, aborted."""
        results = self._deliver() + [self.abort(name) for name in list(self.requests)]
        if self._launched is not None and self._launched.event is not None:
            self._launched.event.synchronize()
        self._launched = None
        self._asleep, self._torn = True, False
        for runner in self.runners:
            runner.release()
        return results

    def wake(self, num_blocks: int) -> None:
        """A KV cache again, empty."""
        self._asleep = False
        self.blocks = self.scheduler.blocks = BlockManager(num_blocks, self.blocks.block_size)
        for runner in self.runners:
            runner.allocate(num_blocks)
