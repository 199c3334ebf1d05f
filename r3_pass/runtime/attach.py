"""`attach`: which model is meant, which adapter serves the engine, and a session for both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import torch
from torch import nn

from r3_pass.backend import Backend
from r3_pass.errors import NoRouterFound, RefusedConfiguration, UnsupportedEngine
from r3_pass.report import GraphRecord
from r3_pass.runtime.engines import ADAPTERS
from r3_pass.runtime.engines.base import EngineAdapter
from r3_pass.runtime.idle import IdleSession
from r3_pass.runtime.inputs import count
from r3_pass.runtime.memory import Placement
from r3_pass.runtime.refusals import check_deployment
from r3_pass.runtime.session import Session
from r3_pass.runtime.stage_session import DenseStageSession, StageSession, routes
from r3_pass.structure import inspect, numbered, text_config

logger = logging.getLogger(__name__)


def attach(
    engine: Any,
    *,
    backend: Backend | str | None = None,
    num_slots: int | None = None,
    max_tokens: int | None = None,
    num_layers: int | None = None,
    placement: Placement = "device",
) -> Session:
    """Connect an engine, or a compiled model whose steps you drive, to the slot buffer.

        session = attach(engine)                                  # transformers continuous batching, or your EngineAdapter
        session = attach(compiled, num_slots=4096)                # torch.compile(model, backend=r3_pass.backend())
        session = attach(model, backend=backend, num_slots=4096)  # per-layer compilation, a compiled step function

    Comes before or after the first compiled call. On a rank whose adapter says that another one records (`Deployment`), an
    `IdleSession`; on a pipeline stage, one whose `finish` and `abort` return parts for `merge_stages`.

    Args:
        engine: an engine that an adapter knows, an `EngineAdapter`, a compiled model, or (with `num_slots`) the model itself.
        backend: what the model was compiled with, where that is not `engine` itself; makes errors name each rejected candidate.
        num_slots: KV slots, for a model whose steps you drive.
        max_tokens: longest slot mapping of a step; `num_slots` by default.
        num_layers: decoder layers, where neither config nor the list of blocks says it.
        placement: "pinned" lays a GPU's slot buffer into page-locked memory of the host, which the record kernel then writes over
            the bus: no GPU memory, nothing to charge to the KV budget; large prefills and prefix hits take longer.

    Raises:
        UnsupportedEngine: nothing knows such an object.
        NoRouterFound: the model is dense.
        RefusedConfiguration: a model of a kind that cannot be recorded, or one that has a session already.
        ValueError: an argument of a wrong type, or a count below 1; the model is not changed by any attach that raises.
    """
    if not (backend is None or isinstance(backend, Backend | str)):
        raise ValueError(f"backend is what r3_pass.backend() returned, got {backend!r}")
    if isinstance(backend, str) and backend != "r3_pass":
        raise RefusedConfiguration(
            f"backend={backend!r} does not record. Compile with backend=r3_pass.backend(inner={backend!r})."
        )
    for name, given in (("num_slots", num_slots), ("max_tokens", max_tokens), ("num_layers", num_layers)):
        if given is not None:
            count(name, given)
    if placement not in get_args(Placement):
        raise ValueError(f"placement is 'device' or 'pinned', got {placement!r}")
    if num_slots is None:
        return _attach_engine(engine, backend, num_layers, placement)
    model, found = unwrap(engine)
    chosen = backend if isinstance(backend, Backend) else found
    _refuse_replay(chosen)
    _refuse_model(model)
    device = _device_of(model)
    _check_placement(placement, device)
    if chosen is None and any(a.accepts(engine) for a in ADAPTERS):
        logger.warning(
            "attach(%s, num_slots=%d): the steps are yours to drive (session.step). What an engine of its own runs "
            "(generate_batch, say) is not recorded; for that, attach without num_slots. If this is meant, compile the model "
            "with backend=r3_pass.backend() and attach what torch.compile returned, or pass that backend.",
            type(engine).__name__, num_slots,
        )  # fmt: skip
    return Session(
        model,
        device,
        num_slots,
        max_tokens,
        num_layers,
        call=engine,
        placement=placement,
        graphs=_graphs(chosen),
    )


def _check_placement(placement: Placement, device: torch.device) -> None:
    if placement == "pinned" and device.type != "cuda":
        raise RefusedConfiguration(
            f"placement='pinned' is for a model on a GPU, whose memory it saves; this one is on {device}. Leave it out."
        )


def _attach_engine(engine: Any, backend: Backend | str | None, num_layers: int | None, placement: Placement) -> Session:
    adapter = engine if isinstance(engine, EngineAdapter) else None
    if adapter is None:
        known = next((a for a in ADAPTERS if a.accepts(engine)), None)
        if known is None:
            if isinstance(engine, type) and issubclass(engine, EngineAdapter):
                raise UnsupportedEngine(
                    f"attach got the class {engine.__name__}. Pass an instance: {engine.__name__}(engine)."
                )
            if isinstance(engine, nn.Module) or callable(engine):
                raise RefusedConfiguration(
                    f"attach({type(engine).__name__}) needs num_slots=, the number of KV slots: no engine is "
                    "behind it that would say so."
                )
            names = ", ".join(a.__name__ for a in ADAPTERS)
            raise UnsupportedEngine(
                f"no adapter knows a {type(engine).__module__}.{type(engine).__name__} (known: {names}, and "
                "compiled models with num_slots=). "
                "Drive the steps yourself with attach(compiled_model, num_slots=...), or write an adapter on "
                "r3_pass.runtime.engines.EngineAdapter and attach an instance of it."
            )
        there: Session | None = known.connect(engine)
        if there is not None:
            return there
        adapter = known(engine)  # type: ignore[call-arg]  # adapters are built from the engine
    session: Session | None = None
    try:
        check_deployment(adapter.deployment)
        session = _session_of(adapter, backend, num_layers, placement)
        adapter.install(session)
    except BaseException:
        adapter.uninstall()
        if session is not None:
            session.detach()
        raise
    return session


def _session_of(
    adapter: EngineAdapter, backend: Backend | str | None, num_layers: int | None, placement: Placement
) -> Session:
    deployment = adapter.deployment
    dense_stage = deployment.is_stage and not routes(adapter.model)
    if not dense_stage:
        _refuse_model(adapter.model, adapter.experts)
    theirs = next((b for b in adapter.backends if isinstance(b, Backend)), None)
    chosen = backend if isinstance(backend, Backend) else theirs
    _refuse_replay(chosen)
    device = _device_of(adapter.model)
    _check_placement(placement, device)
    if not deployment.exports:
        return IdleSession(adapter.model, device, adapter.num_slots, num_layers, adapter)
    if dense_stage:
        return DenseStageSession(adapter.model, device, num_layers, adapter)
    if deployment.is_stage:
        return StageSession(adapter.model, device, num_layers, adapter, placement, _graphs(chosen))
    return Session(
        adapter.model,
        device,
        adapter.num_slots,
        adapter.max_tokens,
        num_layers,
        adapter,
        placement=placement,
        graphs=_graphs(chosen),
    )


def unwrap(compiled: Any) -> tuple[nn.Module, Backend | None]:
    """The model behind what torch.compile returned, and our backend if it can be seen there."""
    seen: Any = compiled
    backend: Backend | None = None
    for _ in range(8):
        backend = backend or backend_of(seen)
        inner = getattr(seen, "_orig_mod", None)
        if inner is None and not isinstance(seen, nn.Module):
            inner = (
                getattr(seen, "_torchdynamo_orig_callable", None)
                or getattr(seen, "__self__", None)
                or getattr(seen, "__wrapped__", None)
            )
        if inner is None:
            break
        seen = inner
    if not isinstance(seen, nn.Module):
        raise RefusedConfiguration(
            f"attach got a {type(compiled).__name__} with no model behind it that could be seen (a compiled "
            "function, say). Pass the model "
            "whose weights it uses: attach(model, backend=backend, num_slots=...)."
        )
    return seen, backend


def backend_of(wrapper: Any) -> Backend | None:
    """Our backend inside a torch.compile wrapper; None if it is somewhere else or another one."""
    seen = getattr(wrapper, "dynamo_ctx", None)
    for name in (
        "callback",
        "_torchdynamo_orig_backend",
        "_torchdynamo_orig_callable",
        "compiler_fn",
        "_compiler_fn",
        "_orig_backend",
    ):
        for holder in (seen, getattr(seen, "callback", None)):
            found = getattr(holder, name, None)
            while found is not None and not isinstance(found, Backend):
                found = getattr(found, "_torchdynamo_orig_backend", None) or getattr(found, "compiler_fn", None)
            if isinstance(found, Backend):
                return found
    return None


def _refuse_replay(backend: Backend | None) -> None:
    if backend is not None and backend.mode == "replay":
        raise RefusedConfiguration(
            "the backend is mode='replay': what it compiled takes routes and records none. Compile with r3_pass.backend(), or with "
            "backend(mode='both') to replay in the same compiled function."
        )


def _graphs(backend: Backend | None) -> Callable[[], Iterable[GraphRecord]]:
    return tuple if backend is None else lambda: tuple(backend.graphs)


def _refuse_model(model: nn.Module, experts: Mapping[str, int] | None = None) -> None:
    structure = inspect(model, experts)
    flagged = getattr(getattr(model, "config", None), "is_encoder_decoder", False) or getattr(
        text_config(model), "is_encoder_decoder", False
    )
    if flagged and len(structure.blocks) > 1:  # the parts of such a model share its config
        raise RefusedConfiguration(
            f"{type(model).__name__} is an encoder-decoder: layers of both number from 0, and routed_experts has "
            "one axis of layers. "
            "Compile and attach the decoder by itself: attach(model.get_decoder(), backend=backend, num_slots=...)."
        )
    if structure.lists.nested:
        nested = " and ".join(map(repr, structure.lists.nested))
        raise RefusedConfiguration(
            f"{type(model).__name__} has lists of blocks inside one another, {nested}, and neither is as long as its config says: "
            "which of them counts the decoder layers cannot be told. Attach the submodule that holds one list of layers: "
            "attach(model.get_submodule(...), backend=backend, num_slots=...)."
        )
    if not structure.may_route:
        raise NoRouterFound(
            f"{type(model).__name__} is dense: none of its {sum(structure.blocks.values())} blocks holds experts. "
            "There is no routing to record."
        )


def _device_of(model: nn.Module) -> torch.device:
    """The device of the decoder layers.

    Raises: RefusedConfiguration if they lie on several.
    """
    named = list(model.named_parameters())
    layers = {p.device: name for name, p in reversed(named) if numbered(name)}
    if len(layers) > 1:
        where = " and ".join(
            f"{name} on {device}" for device, name in sorted(layers.items(), key=lambda item: str(item[0]))
        )
        raise RefusedConfiguration(
            f"{type(model).__name__} lies on several devices ({where}); the slot buffer lies on one, and graphs of the other "
            "layers could not write to it. Load the model onto one device."
        )
    return next(iter(layers), named[0][1].device if named else torch.device("cpu"))
