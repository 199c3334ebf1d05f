"""Adapter for vLLM 0.32: `attach(llm)`, with the engine core in this process or in others.

    llm = vllm.LLM(model, compilation_config={"mode": 2, "backend": "r3_pass.runtime.engines.vllm.backend"})
    session = r3_pass.runtime.attach(llm)
    llm.generate(prompts)[0].outputs[0].routed_experts             # int16 [seq_len - 1, num_layers, top_k]

Each layer takes one of two ways, found by running a dummy batch: the graph, where what our backend compiled shows its routing; the
engine's own hook on the router, in eager mode and where an operator hides it (CUDA). A layer with neither is refused by name.

vLLM is never imported here: an engine of it brings its own classes. Where the engine core is another process, the plug-in
(`vllm_plugin`, switched on by R3_PASS_VLLM=1) puts the same two halves there, and `attach` returns what speaks with them.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn

from r3_pass.backend import Backend
from r3_pass.errors import RefusedConfiguration
from r3_pass.runtime.engines.base import EngineAdapter, WrapPoints
from r3_pass.runtime.engines.vllm_compile import VllmBackend
from r3_pass.runtime.engines.vllm_config import TESTED, check_config, check_version, deployment_of
from r3_pass.runtime.engines.vllm_front import by_user_id, forget, keep_whole, lacks_rows, processor_of, raise_errors
from r3_pass.runtime.engines.vllm_plugin import SWITCH, asked
from r3_pass.runtime.engines.vllm_routers import Router, find_routers
from r3_pass.runtime.engines.vllm_scheduler import RouteDelivery
from r3_pass.runtime.engines.vllm_slots import BlockSlots, find_slots
from r3_pass.runtime.engines.vllm_ways import find_ways
from r3_pass.runtime.engines.vllm_worker import StepRecorder
from r3_pass.runtime.refusals import Deployment

BACKEND = f"{__name__}.backend"

RECORDER = "r3_pass_recorder"
"""Attribute of a worker: the adapter that records it. DELIVERY, of a scheduler: its RouteDelivery."""
DELIVERY = "r3_pass_delivery"


def __getattr__(name: str) -> Any:
    """`backend`: a new one each time that vLLM looks it up, once for each model that it compiles."""
    if name == "backend":
        return VllmBackend()
    raise AttributeError(name)


def compilation_config() -> dict[str, Any]:
    """For `LLM(..., compilation_config=...)`: our backend, in the one mode that leaves a backend its whole graph."""
    return {"mode": 2, "backend": BACKEND}


class VllmAdapter(EngineAdapter):
    """One worker of vLLM, and the scheduler beside it if that is in the same process.

    Args:
        engine: `LLM`, `LLMEngine` or `EngineCore` with the core in this process, or a worker.
        captured: CUDA graphs, if the engine uses them, were captured before.
    """

    def __init__(self, engine: Any, captured: bool = True) -> None:
        super().__init__()
        core = core_of(engine)
        self.worker = worker_of(core) if core is not None else engine
        self._scheduler = core.scheduler if core is not None else None
        self._front = engine if core is not None else None
        self._config = self.worker.vllm_config
        self._captured = captured
        check_version()
        check_config(self._config)
        self.runner = self.worker.model_runner
        self._slots: BlockSlots | None = find_slots(self.runner.kv_cache_config)
        self._lock = threading.RLock()
        self._recorder: StepRecorder | None = None
        self._hooked: list[Router] = []
        self.delivery: RouteDelivery | None = None
        self._front_wraps = WrapPoints()
        if self._slots is not None:
            self._recorder = StepRecorder(self.runner, self._slots, _forward_context, self._lock)

    @classmethod
    def accepts(cls, engine: object) -> bool:
        return any(
            c.__module__.startswith("vllm.") and c.__name__ in ("LLM", "LLMEngine", "AsyncLLM", "EngineCore")
            for c in type(engine).__mro__
        )

    @classmethod
    def connect(cls, engine: Any) -> Any:
        core = core_of(engine)
        if core is None:
            from r3_pass.runtime.engines import vllm_remote  # it speaks with this module's halves elsewhere

            return vllm_remote.connect(engine)
        adapter = getattr(worker_of(core), RECORDER, None)
        if adapter is None:
            return None
        return adapter.claim(core, engine)

    def claim(self, core: Any, engine: Any) -> Any:
        """The session that the plug-in made when the engine started, for the one `attach`."""
        if self._front is not None or self.delivery is not None:
            raise RefusedConfiguration(
                "a session is attached to this engine already; two would write each other's rows. Call detach() on that one first."
            )
        self.delivery = getattr(core.scheduler, DELIVERY, None) or self._deliver(core.scheduler)
        self._watch(engine)
        return self.session

    # ---- what a session asks ------------------------------------------------------------------------------------
    @property
    def model(self) -> nn.Module:
        found: nn.Module = self.runner.get_model()
        return found

    @property
    def num_slots(self) -> int | None:
        return None if self._slots is None else self._slots.num_slots

    @property
    def max_tokens(self) -> int | None:
        sizes = self._config.compilation_config.cudagraph_capture_sizes or [0]
        return max(int(n) for n in (self.runner.max_num_tokens, *sizes))

    @property
    def experts(self) -> Mapping[str, int]:
        return {r.weight_name: r.num_experts for r in find_routers(self.model)}

    @property
    def backends(self) -> tuple[object, ...]:
        return tuple(self._compiled_with())

    @property
    def deployment(self) -> Deployment:
        return dataclasses.replace(deployment_of(self._config), token_slots=self._slots is not None)

    def _compiled_with(self) -> Iterator[Backend]:
        from r3_pass.runtime.attach import backend_of

        for module in self.model.modules():
            wrapper = vars(module).get("_compiled_callable")
            for cell in (
                getattr(wrapper, "__closure__", None) or ()
            ):  # of a compiled function, Dynamo's context is there
                found = backend_of(SimpleNamespace(dynamo_ctx=cell.cell_contents))
                if found is not None:
                    yield found
                    break

    # ---- life ---------------------------------------------------------------------------------------------------
    def install(self, session: Any) -> None:
        assert self._recorder is not None, "refused by token_slots"
        self.session = session
        self._refuse_captured()
        find_ways(session, self.runner, self.model, self._config.compilation_config.cudagraph_mode, self._hooked)
        self._recorder.install(session, self.wraps)
        self._watch_weights()
        if self._scheduler is not None:
            self.delivery = self._deliver(self._scheduler)
        if self._front is not None:
            self._watch(self._front)
        setattr(self.worker, RECORDER, self)

    def uninstall(self) -> None:
        with self._lock:
            if self._recorder is not None:
                self._recorder.close()
            self.wraps.restore()
            self._front_wraps.restore()
            if (processor := processor_of(self._front)) is not None:
                forget(processor)
            for router in self._hooked:
                router.set(None)
            self._hooked = []
            if self.delivery is not None:
                self.delivery.uninstall()
                vars(self.delivery.scheduler).pop(DELIVERY, None)
                self.delivery = None
            if vars(self.worker).get(RECORDER) is self:
                delattr(self.worker, RECORDER)

    def _deliver(self, scheduler: Any) -> RouteDelivery:
        delivery = RouteDelivery(scheduler)
        setattr(scheduler, DELIVERY, delivery)
        return delivery

    def _watch(self, engine: Any) -> None:
        """Raise what kept rows from their requests, where `LLM.generate` returns."""
        self._front = engine
        if (processor := processor_of(engine)) is not None:
            keep_whole(processor, self._front_wraps)
        if hasattr(engine, "_run_engine"):
            self._front_wraps.wrap(engine, "_run_engine", self._run_engine)

    def _run_engine(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs = run(*args, **kwargs)
        if self.delivery is not None:
            errors = by_user_id(processor_of(self._front), self.delivery.pop_errors())
            if lacks_rows(outputs):
                raise_errors(errors, outputs)
        return outputs

    def _watch_weights(self) -> None:
        def changed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            finally:  # also if it raised: some of the weights are new then
                self._changes += 1
                self.session.weights_changed(self._changes)

        def awake(wake: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = wake(*args, **kwargs)
            assert self.num_slots is not None
            self.session.assign(np.arange(self.num_slots))  # the KV is gone, and with it what its rows meant
            return result

        self._changes = 0
        for owner, names in (
            (self.model, ("load_weights",)),
            (self.runner, ("reload_weights",)),
            (self.worker, _UPDATES),
        ):
            for name in names:
                if hasattr(owner, name):
                    self.wraps.wrap(owner, name, changed)
        if hasattr(self.worker, "wake_up"):
            self.wraps.wrap(self.worker, "wake_up", awake)

    def _refuse_captured(self) -> None:
        """CUDA graphs that were captured before lack the operator that records."""
        mode = self._config.compilation_config.cudagraph_mode
        if self.runner.device.type != "cpu" and self._captured and mode is not None and mode.name != "NONE":
            why = (
                f"{SWITCH} is set: they are those of the session that the plug-in made as the engine started, and detach() "
                "ended it (or the variable was set later than that). Start a new engine, and leave its session attached"
                if asked()
                else f"Start a new engine with {SWITCH}=1 in the environment: the plug-in attaches before they are captured"
            )
            raise RefusedConfiguration(
                f"CUDA graphs were captured before this attach (cudagraph_mode={mode.name}), and record nothing for it. "
                f"{why}, or start it with enforce_eager=True, which captures none."
            )


_UPDATES = ("update_weights", "finish_weight_update")


def core_of(engine: Any) -> Any:
    """The EngineCore of an engine if it is in this process, else None."""
    if hasattr(engine, "model_executor") and hasattr(engine, "scheduler"):
        return engine
    for name in ("llm_engine", "engine_core"):
        inner = getattr(engine, name, None)
        if inner is not None:
            return core_of(inner)
    return None


def worker_of(core: Any) -> Any:
    """The one worker of an engine core, if it is in the same process."""
    wrapper = getattr(core.model_executor, "driver_worker", None)
    worker = getattr(wrapper, "worker", None)
    if worker is None:
        raise RefusedConfiguration(
            f"{type(core.model_executor).__name__} runs its workers in other processes. Set R3_PASS_VLLM=1 in the environment "
            "before the engine starts: the plug-in records there."
        )
    return worker


def _forward_context() -> Any:
    return importlib.import_module("vllm.forward_context").get_forward_context()


__all__ = ["TESTED", "VllmAdapter", "compilation_config"]
