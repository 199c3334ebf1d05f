"""Which way each MoE layer takes: the graph that our backend compiled, or vLLM's own hook on the router.

A dummy batch runs in a step: layers that no graph shows get the hook, then all of them must be there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn

from r3_pass.errors import NoRouterFound, PartialCapture, R3Error, RefusedConfiguration
from r3_pass.runtime.engines.vllm_routers import Router, find_routers

_PROBE_TOKENS = 8
_SWITCH = (
    'start vLLM with compilation_config={"mode": 2, "backend": "r3_pass.runtime.engines.vllm.backend"}, or with '
    "enforce_eager=True, so that the graph or the engine's own hook shows the ids"
)
_INLINED = "its router was compiled into a graph before, and not by r3_pass"


def find_ways(session: Any, runner: Any, model: nn.Module, mode: Any, hooked: list[Router]) -> None:
    """Set the hook on each router that no graph shows.

    Args:
        runner: vLLM's model runner.
        mode: its cudagraph_mode.
        hooked: the routers that got one are added, also if this raises.

    Raises: RefusedConfiguration naming the layers that neither way reaches.
    """
    routers = find_routers(model)
    try:
        _probe(session, runner, mode)
        return
    except (PartialCapture, NoRouterFound):
        shown = session.written  # hooks for the others
    reasons = {}
    for router in (r for r in routers if r.layer not in shown):
        why = router.why_not
        if why:
            reasons[router.layer] = why
            continue
        router.set(_hook(session, router))
        hooked.append(router)
    try:
        _probe(session, runner, mode)
    except (PartialCapture, NoRouterFound) as error:
        missing = [r for r in routers if r.layer not in session.written]
        lines = "".join(f"\n  layer {r.layer} ({r.module}): {reasons.get(r.layer, _INLINED)}" for r in missing)
        raise RefusedConfiguration(
            f"{len(missing)} of {len(routers)} MoE layers of {type(model).__name__} can be recorded neither from a graph "
            f"nor by the engine's hook:{lines}\nWhat to do: {_SWITCH}.\n{error}"
        ) from error


def _hook(session: Any, router: Router) -> Callable[[Tensor], None]:
    record = session.hook(router.layer, router.weight, router.module, router.num_experts, router.top_k)

    def told(ids: Tensor) -> None:
        with contextlib.suppress(R3Error):  # the step knows, and fails when it ends: see `VllmBackend.goes_on`
            record(ids)

    return told


def _probe(session: Any, runner: Any, mode: Any) -> None:
    tokens = min(_PROBE_TOKENS, int(runner.max_num_tokens))
    none = type(mode).NONE if mode is not None else None
    with session.step(np.full(tokens, -1, np.int64)):
        runner._dummy_run(tokens, cudagraph_runtime_mode=none, skip_eplb=True)
