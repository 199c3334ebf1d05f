"""Adapter for transformers' continuous batching, 5.17 to 5.24: `generate_batch` and `init_continuous_batching`.

    session = r3_pass.runtime.attach(model)                  # a transformers model, before generate_batch
    outputs = model.generate_batch(prompts, continuous_batching_config=config)
    outputs["req_0"].routed_experts                          # int16 [seq_len - 1, num_layers, top_k]

    session = r3_pass.runtime.attach(manager)                # or a ContinuousBatchingManager, before or after start()

Which version it is shows in the objects (see transformers_slots); the version string is never read. Nothing in transformers
or in the model is edited: bound methods are wrapped on the instances, and `uninstall` puts them back.

Errors reach the user the engine's way: a request whose rows are incomplete is delivered as FAILED with the error's text, its
tokens kept; what breaks recording as a whole stops the engine's thread, which fails all requests. `generate_batch` of an
attached model then raises the error itself, with all outputs as its attribute `outputs`.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from r3_pass.errors import R3Error, RefusedConfiguration, UnsupportedEngine
from r3_pass.runtime.engines.base import EngineAdapter, RecordingSession, WrapPoints
from r3_pass.runtime.engines.transformers_batches import BatchRecorder
from r3_pass.runtime.refusals import Deployment

_CACHED_MANAGER = "_cached_continuous_batching_manager"  # where a model keeps its persistent manager


class TransformersAdapter(EngineAdapter):
    """One model and its manager (one at a time)."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._session: RecordingSession | None = None
        self._manager: Any = None
        self._manager_wraps = WrapPoints()
        self._batches: BatchRecorder | None = None
        self._batch_wraps = WrapPoints()
        self._errors: list[R3Error] = []
        self._created_processor = False
        if _is_manager(engine):
            self._engine_model: nn.Module = engine.model
            self._hooks_model = False
            self._take_manager(engine)
        else:
            self._engine_model = getattr(
                engine, "_orig_mod", engine
            )  # a torch.compile wrapper passes these methods through
            self._hooks_model = True
            cached = getattr(self._engine_model, _CACHED_MANAGER, None)
            if cached is not None:
                self._take_manager(cached)

    @classmethod
    def accepts(cls, engine: object) -> bool:
        return _is_manager(engine) or all(
            callable(getattr(engine, name, None)) for name in ("init_continuous_batching", "generate_batch")
        )

    @property
    def model(self) -> nn.Module:
        return self._engine_model

    @property
    def num_slots(self) -> int | None:
        return None if self._batches is None else self._batches.num_slots

    @property
    def max_tokens(self) -> int | None:
        return None if self._batches is None else self._batches.max_tokens

    @property
    def backends(self) -> tuple[object, ...]:
        if self._manager is None:
            return ()
        config = self._manager.continuous_batching_config
        compiled = (config.varlen_compile_config, config.decode_compile_config)
        return tuple([entry.backend for entry in compiled if entry is not None])

    @property
    def deployment(self) -> Deployment:
        """What the model says of how it was loaded: its device map, its parallel sizes.

        Raises: RefusedConfiguration for tensor-parallel ranks of which it does not say which this is.
        """
        model: Any = self._engine_model
        plan = getattr(getattr(model, "config", None), "distributed_config", None)
        tensor_parallel = getattr(model, "tp_size", None) or 1
        experts = getattr(plan, "ep_size", None) or (
            tensor_parallel if getattr(plan, "enable_expert_parallel", 0) else 1
        )
        return Deployment(
            pipeline_parallel=getattr(plan, "pp_size", None) or 1,
            tensor_parallel=tensor_parallel,
            tensor_parallel_rank=_rank_of(model) if tensor_parallel > 1 else 0,
            expert_parallel=experts,
            layer_devices=tuple(sorted({_device_name(d) for d in getattr(model, "hf_device_map", {}).values()})),
        )

    def install(self, session: RecordingSession) -> None:
        with self._lock:
            self._session = session
            if self._hooks_model:
                self.wraps.wrap(self._engine_model, "init_continuous_batching", self._init_manager)
                self.wraps.wrap(self._engine_model, "generate_batch", self._generate_batch)
            if self._manager is not None:
                self._install_manager()
            if self._batches is not None:
                self._batches.install(session, self._batch_wraps)

    def uninstall(self) -> None:
        with self._lock:
            self._session = None
            if self._batches is not None:
                self._batches.close()
            self._batch_wraps.restore()
            self._manager_wraps.restore()
            self.wraps.restore()
            if self._manager is not None and self._created_processor and self._manager._generation_thread is None:
                self._manager.batch_processor = None
            self._manager = self._batches = None

    # -- the manager -------------------------------------------------------------------------------------------------------

    def _take_manager(self, manager: Any) -> None:
        """Take a manager that exists, with its cache: a later `start()` keeps a batch processor that is there."""
        for name in ("output_router", "continuous_batching_config", "stop", "is_running"):
            if not hasattr(manager, name):
                raise UnsupportedEngine(
                    f"{type(manager).__name__} has no {name!r}; the adapter knows transformers 5.17 to 5.24."
                )
        self._manager = manager
        if manager.batch_processor is None and manager.is_running():
            _wait_for_processor(manager)
        if manager.batch_processor is None:
            manager.batch_processor = manager._create_batch_processor()
            self._created_processor = True
        self._batches = self._new_batches(manager.batch_processor)

    def _new_batches(self, processor: Any) -> BatchRecorder:
        batches = BatchRecorder(processor, self._lock)
        batches.errors = self._errors
        if batches.slots.group is None and self._manager.num_return_sequences > 1:
            raise RefusedConfiguration(
                f"num_return_sequences={self._manager.num_return_sequences} forks a request's cache, and this model has no "
                "full-attention layer whose blocks would name the tokens of a fork. Use num_return_sequences=1 and pass "
                "the prompt as often."
            )
        return batches

    def _install_manager(self) -> None:
        wraps, manager = self._manager_wraps, self._manager
        wraps.wrap(manager, "_create_batch_processor", self._create_processor)
        wraps.wrap(manager, "stop", self._stop)
        wraps.wrap(manager.output_router, "deliver", self._deliver)
        wraps.wrap(manager.output_router, "deliver_batch", self._deliver_batch)

    def _init_manager(self, init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`model.init_continuous_batching`: the manager that it makes is recorded from its first batch on."""
        manager = init(*args, **kwargs)
        with self._lock:
            if self._session is None or manager is self._manager:
                return manager
            if self._manager is not None and self._manager.is_running():
                raise RefusedConfiguration(
                    "This model's session records another manager that is still running. Stop that one first, or "
                    "detach the session and attach to the manager that you want recorded."
                )
            self._forget_processor()
            self._manager_wraps.restore()
            self._manager = manager
            self._install_manager()
            if manager.batch_processor is not None:
                self._use_processor(manager.batch_processor)
        return manager

    def _create_processor(self, create: Callable[[], Any]) -> Any:
        """Called by `warmup` and by the engine's thread: a new processor with its cache, or the old one, reset."""
        processor = create()
        with self._lock:
            if self._session is not None:
                if self._batches is not None and self._batches.processor is processor:
                    self._batches.reset()
                else:
                    self._use_processor(processor)
        return processor

    def _use_processor(self, processor: Any) -> None:
        assert self._session is not None
        self._forget_processor()
        try:
            self._batches = self._new_batches(processor)
            # The engine's thread may run in inference mode, whose tensors could not be written outside of it later.
            with torch.inference_mode(False):
                self._session.wake(self._batches.num_slots, self._batches.max_tokens)
        except R3Error as error:
            self._errors.append(error)
            raise
        self._batches.install(self._session, self._batch_wraps)

    def _forget_processor(self) -> None:
        if self._batches is not None:
            self._batches.reset()
            self._batches.close()
            self._batches = None
        self._batch_wraps.restore()

    def _stop(self, stop: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """A manager that stops for good drops its KV cache, and the session its buffer with it."""
        stop(*args, **kwargs)
        with self._lock:
            manager = self._manager
            if self._session is None or self._batches is None or manager.is_running():
                return
            if manager.batch_processor is None:
                self._forget_processor()
                self._session.release()

    # -- results -----------------------------------------------------------------------------------------------------------

    def _deliver(self, deliver: Callable[[Any], None], output: Any) -> None:
        self._add_rows(output)
        deliver(output)

    def _deliver_batch(self, deliver: Callable[[list[Any]], None], outputs: list[Any]) -> None:
        for output in outputs:
            self._add_rows(output)
        deliver(outputs)

    def _add_rows(self, output: Any) -> None:
        """`output.routed_experts`, before the output is seen by anyone. Streamed outputs get it with the last one."""
        with self._lock:
            if self._session is None or self._batches is None:
                return
            num_tokens = len(output.prompt_ids) + len(output.generated_tokens)
            status = output.status
            if status.name == "FINISHED":
                try:
                    output.routed_experts = self._batches.finish(output.request_id, num_tokens)
                    return
                except R3Error as error:
                    self._errors.append(error)
                    output.status = type(status)["FAILED"]
                    output.error = f"{type(error).__name__}: {error}"
            if output.status.name == "FAILED":
                try:
                    rows = self._batches.abort(output.request_id, num_tokens)
                except (
                    R3Error
                ) as error:  # the request fails already: whatever else is wrong must not keep it from its user
                    self._errors.append(error)
                    return
                if rows is not None:
                    output.routed_experts = rows  # as far as they go

    def _generate_batch(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._errors.clear()
        outputs = generate(*args, **kwargs)
        if self._errors:
            error = self._errors[0]
            error.__dict__["outputs"] = outputs
            raise error
        return outputs


def _is_manager(engine: object) -> bool:
    return all(hasattr(engine, name) for name in ("batch_processor", "_create_batch_processor", "add_request", "model"))


def _rank_of(model: Any) -> int:
    """Which tensor-parallel rank this is."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
        return int(mesh.get_local_rank("tp"))
    if mesh is not None and mesh.ndim == 1:
        return int(mesh.get_local_rank())
    raise RefusedConfiguration(
        f"{type(model).__name__} is tensor parallel (tp_size={model.tp_size}), and its device mesh does not say which rank this "
        "is: only rank 0 may record. Load it with one rank, or write an adapter that knows (Deployment.tensor_parallel_rank)."
    )


def _device_name(device: Any) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(device)


def _wait_for_processor(manager: Any, seconds: float = 60.0) -> None:
    """The engine's thread has been started and is making its batch processor."""
    end = time.monotonic() + seconds
    while manager.batch_processor is None and manager.is_running():
        if time.monotonic() > end:
            raise UnsupportedEngine(
                f"The manager's thread runs and has made no batch processor in {seconds:.0f} s. Attach before start()."
            )
        time.sleep(0.005)
