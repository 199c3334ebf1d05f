"""The plug-in of vLLM's processes (entry point `vllm.general_plugins`): the two halves where `attach` cannot reach.

    R3_PASS_VLLM=1 python serve.py            # or os.environ, before the engine is made

vLLM calls `register` in every process that it starts. Without the variable nothing happens at all. With it, an engine records from
its start on, or refuses to start: the worker is attached when its KV cache exists and before CUDA graphs are captured, the
scheduler gets its half when it is made, and the engine core one more method, by which `attach` in the front end speaks with both.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from typing import Any

from r3_pass.errors import R3Error, RefusedConfiguration
from r3_pass.runtime.refusals import check_deployment
from r3_pass.version import __version__

SWITCH = "R3_PASS_VLLM"
CALL = "r3_pass_call"
"""The method that EngineCore and WorkerWrapperBase get: (what, JSON) -> JSON."""


def asked() -> bool:
    return os.environ.get(SWITCH, "") not in ("", "0")


def register() -> None:
    """Called by vLLM in each of its processes; twice is once."""
    if not asked():
        return
    workers = importlib.import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
    core = importlib.import_module("vllm.v1.engine.core").EngineCore
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    processor = importlib.import_module("vllm.v1.engine.output_processor").OutputProcessor
    if hasattr(core, CALL):
        return
    setattr(core, CALL, _core_call)
    setattr(workers, CALL, _worker_call)
    _after(scheduler, "__init__", _deliver)
    _before(workers, "init_device", _check)
    _after(workers, "initialize_from_config", _attach)
    _after(processor, "__init__", _keep_whole)


def _after(owner: Any, name: str, then: Callable[[Any], None]) -> None:
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        then(self)
        return result

    setattr(owner, name, method)


def _before(owner: Any, name: str, first: Callable[[Any], None]) -> None:
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        first(self)
        return original(self, *args, **kwargs)

    setattr(owner, name, method)


# ---- as the engine starts ---------------------------------------------------------------------------------------
def _check(wrapper: Any) -> None:
    """Before the weights are loaded: what the configuration tells already."""
    from r3_pass.runtime.engines.vllm_config import check_config, deployment_of

    check_config(wrapper.vllm_config)
    check_deployment(deployment_of(wrapper.vllm_config))


def _attach(wrapper: Any) -> None:
    """The KV cache is there, CUDA graphs are not."""
    from r3_pass.runtime.engines.vllm import RECORDER

    if getattr(wrapper.worker, RECORDER, None) is None:
        _new_session(wrapper.worker, captured=False)


def _new_session(worker: Any, captured: bool) -> None:
    from r3_pass.runtime.attach import attach
    from r3_pass.runtime.engines.vllm import VllmAdapter

    attach(VllmAdapter(worker, captured=captured))


def _deliver(scheduler: Any) -> None:
    from r3_pass.runtime.engines.vllm import DELIVERY
    from r3_pass.runtime.engines.vllm_scheduler import RouteDelivery

    setattr(scheduler, DELIVERY, RouteDelivery(scheduler))


def _keep_whole(processor: Any) -> None:
    from r3_pass.runtime.engines.base import WrapPoints
    from r3_pass.runtime.engines.vllm_front import keep_whole

    keep_whole(processor, WrapPoints())


# ---- called by the front end ------------------------------------------------------------------------------------
def _core_call(core: Any, what: str, text: str) -> str:
    """What `attach` in another process asks. An R3Error comes back as {"error": [class, text]}."""
    from r3_pass.runtime.engines.vllm import DELIVERY

    delivery = getattr(core.scheduler, DELIVERY, None)
    try:
        if what == "attach":
            _agree(json.loads(text))
            if delivery is not None and delivery.claimed:
                raise RefusedConfiguration(
                    "a session is attached to this engine already. Call detach() on that one first."
                )
            if delivery is None:
                _deliver(core.scheduler)
        if what == "errors":
            return json.dumps({"result": delivery.pop_errors() if delivery is not None else {}})
        answers = [json.loads(a) for a in core.collective_rpc(CALL, args=(what, text))]
        if what == "attach" and "error" not in answers[0]:
            getattr(core.scheduler, DELIVERY).claimed = True
        if what == "detach" and delivery is not None:
            delivery.uninstall()
            delattr(core.scheduler, DELIVERY)
        return json.dumps(answers[0])
    except R3Error as error:
        return json.dumps({"error": [type(error).__name__, str(error)]})


def _agree(theirs: dict[str, str]) -> None:
    if theirs["r3_pass"] != __version__:
        raise RefusedConfiguration(
            f"r3_pass is {theirs['r3_pass']} in the front end and {__version__} in the engine core. Install one version for both."
        )


def _worker_call(wrapper: Any, what: str, text: str) -> str:
    from r3_pass.runtime.engines.vllm import RECORDER

    try:
        adapter = getattr(wrapper.worker, RECORDER, None)
        if adapter is None and what == "attach":
            _new_session(wrapper.worker, captured=True)
            return json.dumps({"result": None})
        if adapter is None:
            raise RefusedConfiguration("no session is attached to this engine. Call r3_pass.runtime.attach again.")
        return json.dumps({"result": _answer(adapter.session, what, text)})
    except R3Error as error:
        return json.dumps({"error": [type(error).__name__, str(error)]})


def _answer(session: Any, what: str, text: str) -> Any:
    if what == "describe":
        return session.describe().to_json()
    if what == "report":
        report = session.report()
        return {
            "text": str(report),
            "sites": [vars(entry) for entry in report.sites],
            "rejected": [vars(entry) for entry in report.rejected],
        }
    if what == "weights_changed":
        session.weights_changed(json.loads(text))
    if what == "detach":
        session.detach()
    return None
