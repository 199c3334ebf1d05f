"""r3_pass on this engine: what an adapter has to know, and nothing else.

    session = r3_pass.runtime.attach(ReferenceAdapter(engine))
    engine.generate(prompts)[0].routed_experts

Nothing in the engine knows of it. The methods that it wraps are where any engine decides the same things:

| what happens in the engine | method there | what the session is told |
|---|---|---|
| blocks leave the free list | `blocks.take` | `assign`: their rows are void |
| blocks are copied to others | `runner.move_blocks` | `move` |
| a request starts past position 0 | `scheduler.admit` | `prefix_hit`; where it raises, that request fails and the others go on |
| a request starts over | `scheduler.preempt` | `preempt` |
| a forward of the target | `runner.run` | `step`: the slot of each token, -1 for padding, and whose it is |
| warm-up, CUDA graph capture | `runner.run_captured` | `step`, entered first, with all slots -1 |
| forwards of the drafter | `drafter.propose` | `paused`: they write nothing |
| a result leaves | `engine.emit` | `finish`, or `abort` |
| new weights | `engine.update_weights` | `weights_changed` |
| the KV cache goes, and comes back | `engine.sleep`, `engine.wake` | `release`, `wake` |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from engine.engine import Engine
from engine.model_runner import Batch, ModelRunner
from engine.pipeline import Pipeline
from engine.scheduler import Chunk
from engine.sequence import Result, Sequence
from r3_pass import MissingRoutes, RefusedConfiguration, StaleRoutes
from r3_pass.runtime import SegmentBatch, merge_stages
from r3_pass.runtime.engines import Deployment, EngineAdapter

Blocks = list[int]


class ReferenceAdapter(EngineAdapter):
    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.session: Any = None

    @property
    def model(self) -> nn.Module:
        return self.engine.runner.model

    @property
    def num_slots(self) -> int:
        return self.engine.blocks.num_blocks * self.engine.blocks.block_size

    @property
    def max_tokens(self) -> int:
        """Of the largest forward: a chunk and its padding, or the largest decode."""
        decode = 2 * self.engine.max_num_seqs * self.engine.runner.query_len
        return max(self.engine.max_batch_tokens + 8, decode)

    @property
    def pipeline(self) -> Pipeline | None:
        return self.engine.runner.pipeline

    @property
    def deployment(self) -> Deployment:
        """Of tensor-parallel ranks the first records. transformers keeps routers whole on each, so ids number all experts."""
        stage, ranks = self.pipeline, self.engine.ranks
        if stage is not None:
            return Deployment(pipeline_parallel=stage.size, pipeline_rank=stage.rank, stage_layers=stage.layers)
        return Deployment(
            tensor_parallel=ranks.world,
            tensor_parallel_rank=ranks.rank,
            expert_parallel=ranks.expert_parallel,
            global_expert_ids=True,
        )

    @property
    def group(self) -> Any:
        return self.engine.ranks.group

    @contextlib.contextmanager
    def probe(self) -> Iterator[tuple[npt.NDArray[np.int64], Callable[[], Tensor]]]:
        """A prompt of nobody, in blocks that are given back."""
        engine, runner = self.engine, self.engine.runner
        count = min(32, engine.max_batch_tokens, self.num_slots) // 8 * 8  # a multiple, so that nothing is padded
        if self.pipeline is not None:
            raise RefusedConfiguration(
                "self_test: a stage has some of the layers only. Test the whole model on one process."
            )
        if engine.requests or not count:
            raise RefusedConfiguration("self_test takes eight slots and more, before the first request.")
        tokens = np.arange(count) * 7 % runner.vocab_size
        seq = Sequence("self-test", tokens.tolist(), count, 1)
        engine.blocks.grow(seq, engine.blocks.missing(seq, count))
        batch = runner.batch([Chunk(seq, 0, count, 1)], [tokens])
        try:
            yield batch.slot_mapping, lambda: ModelRunner.run(runner, batch)  # not the instance's, which opens a step
        finally:
            engine.blocks.release(seq)

    def install(self, session: Any) -> None:
        self.session = session
        engine, wrap = self.engine, self.wraps.wrap
        wrap(engine.runner, "run", self._run)
        wrap(engine.runner, "run_captured", self._run_captured)
        wrap(engine.runner, "move_blocks", self._move_blocks)
        wrap(engine.scheduler, "admit", self._admit)
        wrap(engine.scheduler, "preempt", self._preempt)
        wrap(engine, "emit", self._emit)
        wrap(engine, "update_weights", self._update_weights)
        wrap(engine, "sleep", self._sleep)
        wrap(engine, "wake", self._wake)
        self._wrap_blocks()
        if engine.drafter is not None:
            wrap(engine.drafter, "propose", self._propose)

    def uninstall(self) -> None:
        self.wraps.restore()

    # ---- blocks -------------------------------------------------------------------------------------------------
    def _wrap_blocks(self) -> None:
        self.wraps.wrap(self.engine.blocks, "take", self._take)

    def _take(self, take: Callable[[int], Blocks], count: int) -> Blocks:
        blocks = take(count)
        self.session.assign(self._slots(blocks))
        return blocks

    def _move_blocks(self, move_blocks: Callable[[dict[int, int]], None], moved: dict[int, int]) -> None:
        move_blocks(moved)
        self.session.move(self._slots(list(moved)), self._slots(list(moved.values())))

    def _slots(self, blocks: Blocks) -> npt.NDArray[np.int64]:
        """The slots of blocks, in the order of positions."""
        size = self.engine.blocks.block_size
        return (np.array(blocks, np.int64)[:, None] * size + np.arange(size)).ravel()

    # ---- requests -----------------------------------------------------------------------------------------------
    def _admit(self, admit: Callable[[Sequence], None], seq: Sequence) -> None:
        """A prefix hit. Rows that cannot be vouched for fail this request, not the others."""
        failure: Exception | None = None
        try:
            self.session.prefix_hit(seq.request_id, 0, self._slots(seq.block_table)[: seq.num_computed])
        except (StaleRoutes, MissingRoutes) as error:
            failure = error
        if seq.num_computed:
            failure = _first(self._gather(failure))
        if failure is not None:
            self.engine.fail(seq, failure)
        else:
            admit(seq)

    def _gather(self, mine: Any) -> list[Any]:
        """What each process has that serves with this one: what one alone finds out would part their ways."""
        return (self.pipeline or self.engine.ranks).gather(mine)

    def _preempt(self, preempt: Callable[[Sequence], None], seq: Sequence) -> None:
        self.session.preempt(seq.request_id, seq.num_tokens)
        preempt(seq)

    def _emit(self, emit: Callable[[Sequence, Result], Result], seq: Sequence, result: Result) -> Result:
        num_tokens = len(seq.token_ids)
        failure: Exception | None = None
        try:
            ended = result.finish_reason in ("abort", "error")
            collect = self.session.abort if ended else self.session.finish
            rows = collect(seq.request_id, num_tokens)
        except (StaleRoutes, MissingRoutes) as error:
            failure = error
            rows = self.session.abort(seq.request_id, num_tokens)
        if self.pipeline is not None:  # the rows of this stage; the output is built on every one
            parts, failures = zip(*self.pipeline.gather((rows, failure)), strict=True)
            rows, failure = merge_stages(parts), _first(failures)
        result.routed_experts = rows
        if failure is not None:
            result.error, result.finish_reason = failure, "error"
        return emit(seq, result)

    # ---- forwards -----------------------------------------------------------------------------------------------
    def _run(self, run: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        chunks = batch.chunks
        segments = SegmentBatch(
            [chunk.seq.request_id for chunk in chunks],
            [chunk.start for chunk in chunks],
            [chunk.length for chunk in chunks],
        )
        with self.session.step(batch.slot_mapping, segments):
            return run(batch)

    def _run_captured(self, run: Callable[..., Tensor], batch: Batch, *args: Any) -> Tensor:
        """The step is entered before the capture: its slot mapping is all padding, and a graph input."""
        with self.session.step(batch.slot_mapping):
            return run(batch, *args)

    def _propose(self, propose: Callable[[list[Sequence]], None], sequences: list[Sequence]) -> None:
        with self.session.paused():
            propose(sequences)

    # ---- life cycle ---------------------------------------------------------------------------------------------
    def _update_weights(self, update: Callable[..., None], state: Mapping[str, Tensor], version: int) -> None:
        try:
            update(state, version)
        finally:  # also if it raised: some of the weights are new then
            self.session.weights_changed(version)

    def _sleep(self, sleep: Callable[[], list[Result]]) -> list[Result]:
        results = sleep()
        self.session.release()
        return results

    def _wake(self, wake: Callable[[int], None], num_blocks: int) -> None:
        wake(num_blocks)
        self._wrap_blocks()  # the engine has a new block manager
        self.session.wake(self.num_slots, self.max_tokens)


def _first(failures: Iterable[Exception | None]) -> Exception | None:
    """What one process found is so for all."""
    return next((failure for failure in failures if failure is not None), None)
