"""Our Dynamo backend as vLLM's compilation config names it: `{"mode": 2, "backend": "r3_pass.runtime.engines.vllm.backend"}`.

vLLM compiles ahead of time and saves what a backend returns, to load it at the next start without asking the backend. Recording
needs what the backend knows of the graph, so what it returns for a graph with routing says that it cannot be saved: the pass runs
at every start (Inductor's own caches of generated code stay in use).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import fx
from torch._dynamo.aot_compile_types import SerializableCallable

from r3_pass.backend import Backend
from r3_pass.errors import RefusedConfiguration
from r3_pass.inner import Compiled, Inner


class RoutingGraph(SerializableCallable):
    """A compiled graph that routes, as ahead-of-time compilation takes it."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> NoReturn:
        """Raises: RefusedConfiguration. vLLM reports it as a warning, and compiles again at the next start."""
        raise RefusedConfiguration("a graph that r3_pass records is compiled at every start; nothing is wrong")

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> NoReturn:
        raise RefusedConfiguration("a graph that r3_pass records is never saved.")


class VllmBackend(Backend):
    """One for each model that vLLM compiles, so that a report is of one model.

    What an R3Error stops is recording, not the forward: vLLM's engine core ends with an exception in it, and all requests with it.
    """

    goes_on = True

    def __init__(self, inner: Inner = "inductor") -> None:
        super().__init__(inner, "record")

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
        compiled = super().__call__(module, example_inputs, **options)
        return compiled if hasattr(compiled, "serialize") else RoutingGraph(compiled)
