"""Match a model's graphs without recording anything: what would be captured, what would not, and why."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from r3_pass.binding import Binding
from r3_pass.errors import R3Error
from r3_pass.inner import Compiled
from r3_pass.passes.match import match
from r3_pass.passes.record import occurrences, unequal
from r3_pass.passes.witness import Witnesses
from r3_pass.places import Place
from r3_pass.report import GraphRecord, Report


def explain(model: nn.Module, *args: Any, **kwargs: Any) -> Report:
    """Trace one forward of a model and report every routing candidate in it.

        print(r3_pass.explain(model, input_ids))

    The model runs eagerly behind Dynamo: on real weights, on the meta device, or under a fake mode. Code that the user has
    compiled stays compiled, and a session that is attached sees nothing of it.

    Args:
        model: the model, compiled or not.
        args, kwargs: what it is called with; small inputs will do.

    Returns: a report with `.sites` and `.rejected`; `.dump(folder)` writes the graphs.
    """
    inner = getattr(model, "_orig_mod", model)
    tracer = _Tracer(inner)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
        traced: Any = torch.compile(_call_of(inner), backend=tracer, **_BESIDE)
        traced(*args, **kwargs)
    tracer.binding = None
    return Report(tuple(tracer.graphs))


# Dynamo keeps compiled code by the function that it is of. In a region of its own, what is traced here does not count against the
# limit of recompilations of the user's functions; a torch that lacks the option counts it.
_BESIDE: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
)


def _call_of(model: nn.Module) -> Any:
    """The model's forward as a function, so that its own is traced into and not compiled."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return traced


class _Tracer:
    """A Dynamo backend that matches, and finds out at the call which layer each site is."""

    def __init__(self, model: nn.Module) -> None:
        self.graphs: list[GraphRecord] = []
        # Dropped when all is traced: Dynamo keeps what it compiled, and the model would stay with it.
        self.binding: Binding | None = Binding(model, torch.device("cpu"), self._lay_out, mark=False)

    def _lay_out(self, layers: tuple[int, ...], top_k: int) -> None:
        assert self.binding is not None, "called while tracing"
        self.binding.layers, self.binding.top_k = layers, top_k

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        reason = getattr(module, "compile_subgraph_reason", None)
        found = match(module.graph, broken=bool(getattr(reason, "graph_break", False)))
        record = GraphRecord(len(self.graphs), found, str(getattr(reason, "reason", "")))
        self.graphs.append(record)
        if not found.sites:
            return module.forward
        record.keep(module, None)
        where = occurrences(module, found.sites)
        if reason := unequal(where):
            record.refusals[f"graph {record.number} cannot be recorded: {reason}"] = None
        witnesses = Witnesses(module, where)

        def run(*args: Any) -> Any:
            weights = witnesses.weights(args)
            if weights and self.binding is not None:
                try:
                    self.binding.place(witnesses, weights, record.placed)
                except R3Error as refusal:
                    record.refusals[str(refusal)] = None
                    record.placed.update(
                        {(n, Place(None, s.module, str(refusal))): None for n, s in enumerate(found.sites)}
                    )
            return module(*args)

        return run
