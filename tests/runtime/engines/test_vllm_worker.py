"""The worker's half without vLLM: a step that cannot be recorded, and when the engine has to stop."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoder import prompt
from loop import Loop
from torch import Tensor

from r3_pass import BufferLayoutError, PartialCapture, RefusedConfiguration
from r3_pass.runtime.engines.base import WrapPoints
from r3_pass.runtime.engines.vllm_compile import VllmBackend
from r3_pass.runtime.engines.vllm_slots import BlockSlots
from r3_pass.runtime.engines.vllm_worker import StepRecorder, StepRows
from r3_pass.runtime.slots import SlotBuffer

BLOCK = 4


class Runner:
    """What is read of vLLM's model runner, around a compiled model. Each request is given whole, in blocks of its own."""

    kv_cache_config: Any = None
    input_batch: Any = None
    query_start_loc: Any = None

    def __init__(self, call: Callable[[Tensor], Any]) -> None:
        self.call = call
        self.slots = np.zeros(0, np.int64)
        self.outputs: Any = None

    def run(self, *requests: tuple[str, Tensor, int]) -> StepRows:
        """Forward the tokens [1, n] of new requests, each from a block on."""
        size = [tokens.numel() for _, tokens, _ in requests]
        self.slots = np.concatenate(
            [np.arange(b * BLOCK, b * BLOCK + n) for (_, _, b), n in zip(requests, size, strict=True)]
        )
        self.input_batch = SimpleNamespace(
            num_reqs=len(requests),
            req_ids=[r for r, _, _ in requests],
            num_computed_tokens_cpu=np.zeros(len(requests), np.int32),
        )
        self.query_start_loc = SimpleNamespace(np=np.cumsum([0, *size]))
        new = [
            SimpleNamespace(req_id=r, block_ids=[list(range(b, b - (-n // BLOCK)))], num_computed_tokens=0)
            for (r, _, b), n in zip(requests, size, strict=True)
        ]  # fmt: skip
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
        scheduled = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            total_num_scheduled_tokens=sum(size),
            kv_cache_block_copies=None,
        )
        self.tokens = torch.cat([tokens for _, tokens, _ in requests], 1)
        self.execute_model(scheduled)
        found: StepRows = self.sample_tokens().r3_pass
        return found

    def execute_model(self, scheduled: Any) -> None:
        with torch.no_grad():
            self.outputs = self._model_forward(input_ids=self.tokens.flatten())

    def _model_forward(self, input_ids: Tensor) -> Any:
        return self.call(input_ids[None])

    def sample_tokens(self) -> Any:
        return SimpleNamespace()

    def _dummy_run(self, num_tokens: int) -> None:
        raise AssertionError


class Engine:
    def __init__(self, **backend: Any) -> None:
        self.loop = Loop(**backend)
        self.session = self.loop.session
        self.runner = Runner(self.loop.compiled)
        context = SimpleNamespace(slot_mapping={"layer": torch.zeros(0)})
        self.recorder = StepRecorder(self.runner, BlockSlots(0, "layer", BLOCK, 16), lambda: context, threading.RLock())
        self.recorder._mapping = lambda tokens, new: self.runner.slots.copy()  # type: ignore[method-assign]
        self.wraps = WrapPoints()
        self.recorder.install(self.session, self.wraps)

    def check(self, step: StepRows, tokens: Tensor) -> None:
        assert step.error == "" and step.rows is not None
        assert (step.rows == self.loop.truth(tokens)).all()

    def outputs(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.loop.model(tokens)
        return found


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Any:
    made = Engine(**getattr(request, "param", {}))
    yield made
    made.session.check_integrity()
    made.wraps.restore()
    made.session.detach()


def test_a_step(engine: Engine) -> None:
    tokens = prompt(9, 1)
    engine.check(engine.runner.run(("a", tokens[:, :4], 3), ("b", tokens[:, 4:], 5)), tokens)


def _twice(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Refused as the step begins."""

    def mapping(tokens: int, new: int) -> Any:
        slots = engine.runner.slots.copy()
        slots[1] = slots[0]
        return slots

    patch.setattr(engine.recorder, "_mapping", mapping)
    engine.recorder._checked = True


def _eager(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Nothing compiled runs: found when the step ends."""
    patch.setattr(engine.runner, "call", engine.loop.model)


def _foreign(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Found in the forward, before the graph is launched."""

    def call(tokens: Tensor) -> Any:
        engine.loop.compiled(tokens)
        return engine.loop.compiled(tokens)

    patch.setattr(engine.runner, "call", call)


def _longer(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Found in the forward, after the graph has run."""
    patch.setattr(engine.recorder, "_mapping", lambda tokens, new: np.append(engine.runner.slots, -1))
    engine.recorder._checked = True


@pytest.mark.parametrize("engine", [{"backend": VllmBackend("eager")}], indirect=True)
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (_twice, "^BufferLayoutError: .*slot 12"),
        (_eager, "^NoRouterFound|^PartialCapture"),
        (_foreign, "^PartialCapture: .*\n.*routes a second time in one step"),
        (_longer, "^PartialCapture: .*\n.*ran over 5 tokens"),
    ],
)
def test_a_step_that_cannot_be_recorded(
    engine: Engine, fault: Callable[..., None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has outputs, and no rows; neither have the slots of steps before it. The next one is recorded."""
    before, tokens = prompt(6, 1), prompt(5, 2)
    engine.check(engine.runner.run(("a", before, 1)), before)
    with monkeypatch.context() as patch:
        fault(engine, patch)
        step = engine.runner.run(("b", tokens, 3))
    assert step.rows is None and step.request_ids == ("b",)
    assert torch.equal(engine.runner.outputs, engine.outputs(tokens))
    assert re.search(why, step.error), step.error
    assert (engine.session.read(range(64)) == -1).all()
    engine.check(engine.runner.run(("c", tokens, 3)), tokens)
    assert not len(engine.session._delivery.table), "nobody waits for rows of the step"


def test_a_step_that_there_is_no_memory_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: where the copy of its rows found no room, voiding each slot found none either, and the engine ended."""
    before, tokens, targets = prompt(6, 1), prompt(5, 2), SlotBuffer._targets

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    def nearly_full(buffer: SlotBuffer, slots: Any) -> Tensor:
        return targets(buffer, slots) if len(slots) < 10 else full()

    engine.check(engine.runner.run(("a", before, 1)), before)
    with monkeypatch.context() as patch:
        patch.setattr(engine.session._delivery.exporter, "submit", full)
        patch.setattr(SlotBuffer, "_targets", nearly_full)
        step = engine.runner.run(("b", tokens, 3))
    assert step.rows is None and re.match("MissingRoutes: .*no memory for the copy of its 5 rows", step.error)
    assert (engine.session.read(range(64)) == -1).all()
    engine.check(engine.runner.run(("c", tokens, 3)), tokens)


def test_a_copy_that_has_a_fault(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found when the rows are fetched."""
    tokens = prompt(5, 2)
    finish = engine.session.finish

    def fault(*args: Any) -> Any:
        raise BufferLayoutError("a slot was out of range")

    with monkeypatch.context() as patch:
        patch.setattr(engine.session, "finish", fault)
        step = engine.runner.run(("b", tokens, 3))
    assert (step.rows, step.error) == (None, "BufferLayoutError: a slot was out of range")
    assert engine.session.finish == finish and not len(engine.session._delivery.table)
    engine.check(engine.runner.run(("c", tokens, 3)), tokens)


def test_a_session_that_is_detached_while_a_step_is_under_way(engine: Engine) -> None:
    """Asynchronous scheduling: who waits for the tokens gets them. The bug: the engine's thread got the session's refusal."""
    tokens, waiting = prompt(5, 2), SimpleNamespace(get_output=SimpleNamespace)
    engine.check(engine.runner.run(("a", tokens, 1)), tokens)
    engine.wraps.restore()
    engine.runner.sample_tokens = lambda: waiting  # type: ignore[method-assign]
    engine.recorder.install(engine.session, engine.wraps)
    with pytest.raises(AttributeError, match="r3_pass"):  # not there yet
        engine.runner.run(("b", tokens, 3))
    engine.recorder.close()
    engine.session.detach()
    step = waiting.get_output().r3_pass
    assert step.rows is None and step.request_ids == ("b",)
    assert step.error.startswith("RefusedConfiguration: this session is detached")


def test_a_forward_that_was_stopped_in_the_middle(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no outputs; a second forward might find state of the first."""

    def call(tokens: Tensor) -> Any:
        raise PartialCapture("layer 1 is another's")

    monkeypatch.setattr(engine.runner, "call", call)
    with pytest.raises(
        PartialCapture, match=r"layer 1 is another's\nThis stopped .* in the middle.*So the engine stops"
    ):
        engine.runner.run(("a", prompt(5), 1))


def test_slots_that_are_others_than_the_adapter_takes_them_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row of any step could be proved. The bug: only the first step said so, and who stepped on got wrong rows."""
    monkeypatch.setattr(engine.recorder, "_mapping", lambda tokens, new: engine.runner.slots + 1)
    for _ in range(2):
        with pytest.raises(
            BufferLayoutError, match=r"numbers slots in another way\. No row of any step .* so the engine stops"
        ):
            engine.runner.run(("a", prompt(5), 1))


def test_a_prefix_that_cannot_be_read_is_its_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(engine.session, "prefix_hit", _raise)
    batch = engine.recorder._batch
    monkeypatch.setattr(engine.recorder, "_batch", lambda: (launched.append(batch()), launched[-1])[1])
    tokens = prompt(5, 2)
    engine.check(engine.runner.run(("a", tokens, 1)), tokens)
    engine.recorder._hit(engine.session, launched[-1], "b", np.arange(4, 8))
    (hit,) = launched[-1].hits
    assert (hit.request_id, hit.rows, hit.error) == ("b", None, "RefusedConfiguration: not laid out")


def _raise(*args: Any) -> None:
    raise RefusedConfiguration("not laid out")
