"""vLLM's front end joins the rows that come with each output of a request: all of them, or none.

A request may lose its rows after some were sent (the session is detached; it is preempted, and its cached prefix is of older
weights). What the front end has of it by then would be too short, and what comes later would stand at other positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r3_pass.runtime.engines.base import WrapPoints

_VOID = "r3_pass_void"
"""Attribute of a RequestState: an output of it came without its rows."""


def processor_of(engine: Any) -> Any:
    """The OutputProcessor of an LLM, LLMEngine or AsyncLLM; None if the engine has none."""
    return getattr(getattr(engine, "llm_engine", engine), "output_processor", None)


def keep_whole(processor: Any, wraps: WrapPoints) -> None:
    """From now on a request that lost a row has none."""

    def process(original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        states = processor.request_states
        for output in outputs:
            state = states.get(output.request_id)
            if state is not None and (state.routed_experts_chunks or hasattr(state, _VOID)):
                _check(state, output)
        return original(outputs, *args, **kwargs)

    wraps.wrap(processor, "process_outputs", process)


def _check(state: Any, output: Any) -> None:
    """After the first output, each brings one row for each of its tokens."""
    count = 0 if output.routed_experts is None else len(output.routed_experts)
    if count != len(output.new_token_ids) or hasattr(state, _VOID):
        setattr(state, _VOID, True)
        state.routed_experts_chunks.clear()
        output.routed_experts = None


def forget(processor: Any) -> None:
    """The session is detached: requests that run on have no rows."""
    for state in processor.request_states.values():
        state.routed_experts_chunks.clear()


def own_errors(errors: dict[str, str], request_id: str) -> dict[str, str]:
    """Take those of a request and of its sequences out of the errors; vLLM adds to the id that its caller knows.

    >>> errors = {"a-0123abcd": "x", "1_a-0123abcd": "y", "b-0123abcd": "z"}
    >>> sorted(own_errors(errors, "a").values()), list(errors)
    (['x', 'y'], ['b-0123abcd'])
    """
    return {i: errors.pop(i) for i in list(errors) if request_id in _names(i)}


def _names(internal: str) -> set[str]:
    child = internal.partition("_")[2] if internal.partition("_")[0].isdigit() else internal
    return {internal, child, internal.rpartition("-")[0], child.rpartition("-")[0]}


def lacks_rows(outputs: Any) -> bool:
    """Whether a sequence that ended by itself has no rows."""
    return any(
        c.routed_experts is None and c.finish_reason not in (None, "abort")
        for o in outputs
        for c in getattr(o, "outputs", ())
        if hasattr(c, "routed_experts")
    )
