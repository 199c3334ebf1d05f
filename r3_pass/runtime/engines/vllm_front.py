"""vLLM's front end joins the rows that come with each output of a request: all of them, or none, and then an error.

A request may lose its rows after some were sent (the session is detached; it is preempted, and its cached prefix is of older
weights). What the front end has of it by then would be too short, and what comes later would stand at other positions.

The core knows a request under another id than its caller: ID-RANDOM, or NUMBER_ID-RANDOM of several sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from r3_pass import errors
from r3_pass.errors import R3Error
from r3_pass.runtime.engines.base import WrapPoints

_VOID = "r3_pass_void"
"""Attribute of a RequestState: an output of it came without its rows."""

_NAMES = "r3_pass_names"
"""Attribute of an OutputProcessor: id in the core -> the caller's, of requests that ended without rows; the last 1024."""
_KEPT_NAMES = 1024


def processor_of(engine: Any) -> Any:
    """The OutputProcessor of an LLM, LLMEngine or AsyncLLM; None if the engine has none."""
    return getattr(getattr(engine, "llm_engine", engine), "output_processor", None)


def keep_whole(processor: Any, wraps: WrapPoints) -> None:
    """From now on a request that lost a row has none, and its caller's id is remembered."""

    def process(original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        states = processor.request_states
        for output in outputs:
            state = states.get(output.request_id)
            if state is None:
                continue
            if state.routed_experts_chunks or hasattr(state, _VOID):
                _check(state, output)
            if output.finish_reason is not None and output.routed_experts is None:
                _remember(processor, output.request_id, state.external_req_id)
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
    vars(processor).pop(_NAMES, None)


def _remember(processor: Any, request_id: str, asked: str) -> None:
    names = vars(processor).setdefault(_NAMES, {})
    names[request_id] = asked
    while len(names) > _KEPT_NAMES:
        del names[next(iter(names))]


def by_user_id(processor: Any, found: dict[str, str]) -> dict[str, str]:
    """The core's errors, by the ids under which callers know their requests, which stand in the texts too; of several sequences of
    one request, the first error. An id that the front end never saw stays."""
    named: dict[str, str] = {}
    for request_id, text in found.items():
        state = processor.request_states.get(request_id) if processor is not None else None
        kept = vars(processor).get(_NAMES, {}).pop(request_id, request_id) if processor is not None else request_id
        asked = state.external_req_id if state is not None else kept
        named.setdefault(asked, text.replace(repr(request_id), repr(asked)))
    return named


def raise_errors(found: dict[str, str], outputs: list[Any]) -> None:
    """Raise the first of the errors, by the callers' ids, that kept rows from these outputs, by its own class. Others were logged.

    Raises: R3Error with all outputs, tokens included, as its attribute `outputs`.
    """
    lost = [str(o.request_id) for o in outputs if str(o.request_id) in found]
    if not lost:
        return
    name, _, message = found[lost[0]].partition(": ")
    error = error_of(name, f"request {lost[0]!r} has no routed_experts ({len(lost)} in all): {message}")
    error.__dict__["outputs"] = outputs
    raise error


def error_of(name: str, message: str) -> R3Error:
    """An error of the family by its class's name, as it came from another process."""
    made: R3Error = getattr(errors, name, R3Error)(message)
    return made


def lacks_rows(outputs: Any) -> bool:
    """Whether a sequence that ended by itself has no rows."""
    return any(
        c.routed_experts is None and c.finish_reason not in (None, "abort")
        for o in outputs
        for c in getattr(o, "outputs", ())
        if hasattr(c, "routed_experts")
    )
