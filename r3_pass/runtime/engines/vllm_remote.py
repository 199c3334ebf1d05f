"""`attach` where vLLM's engine core is another process: checks that the plug-in is there, and speaks with it.

session = r3_pass.runtime.attach(llm)                 # LLM, LLMEngine
session = await r3_pass.runtime.attach(async_llm)     # AsyncLLM; its first request asks too, if nobody awaited
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

from r3_pass.description import Description
from r3_pass.errors import RefusedConfiguration
from r3_pass.report import RejectedEntry, SiteEntry
from r3_pass.runtime.engines.base import WrapPoints
from r3_pass.runtime.engines.vllm_front import by_user_id, error_of, lacks_rows, processor_of, raise_errors
from r3_pass.runtime.engines.vllm_plugin import CALL, SWITCH, asked
from r3_pass.version import __version__


@dataclasses.dataclass(frozen=True)
class RemoteReport:
    """`Session.report()` of the worker; `print` it."""

    sites: list[SiteEntry]
    rejected: list[RejectedEntry]
    text: str

    def __str__(self) -> str:
        return self.text


def connect(engine: Any) -> RemoteSession | AsyncRemoteSession:
    """Raises: RefusedConfiguration if the plug-in was not switched on, or the engine has a session already."""
    if not asked():
        raise RefusedConfiguration(
            f"the engine core of this {type(engine).__name__} runs in another process, and nothing records there. Set {SWITCH}=1 "
            "in the environment before the engine is made: vLLM then loads r3_pass's plug-in in all of its processes. Or keep the "
            "core in this process: VLLM_ENABLE_V1_MULTIPROCESSING=0."
        )
    inner = getattr(engine, "llm_engine", engine)
    client = inner.engine_core
    if hasattr(client, "call_utility"):
        return RemoteSession(engine, client)
    return AsyncRemoteSession(engine, client)


class RemoteSession:
    """A session in vLLM's worker, as the front end sees it. Rows come with the outputs of `generate`."""

    def __init__(self, engine: Any, client: Any) -> None:
        self._client = client
        self._processor = processor_of(engine)
        self._wraps = WrapPoints()
        self._call("attach", {"r3_pass": __version__})
        if hasattr(engine, "_run_engine"):
            self._wraps.wrap(engine, "_run_engine", self._run_engine)

    def describe(self) -> Description:
        """As `Session.describe`."""
        return Description.from_json(self._call("describe"))

    def report(self) -> RemoteReport:
        """As `Session.report`."""
        return _report(self._call("report"))

    def errors(self) -> dict[str, str]:
        """Requests, by the ids that they were asked with, that ended without all of their rows since the last call, and why;
        `LLM.generate` raises the first by itself."""
        return by_user_id(self._processor, self._call("errors"))

    def weights_changed(self, tag: str | int | None) -> None:
        """As `Session.weights_changed`, for weights that were written past vLLM's own ways of loading them."""
        self._call("weights_changed", tag)

    def detach(self) -> None:
        """The engine serves on, without rows."""
        self._wraps.restore()
        self._call("detach")

    def _call(self, what: str, argument: Any = None) -> Any:
        try:
            answer = self._client.call_utility(CALL, what, json.dumps(argument))
        except Exception as error:
            _explain(error)
            raise
        return _result(answer)

    def _run_engine(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs = run(*args, **kwargs)
        errors = self.errors()  # maybe also of requests that were stepped by hand before
        if lacks_rows(outputs):
            raise_errors(errors, outputs)
        return outputs


class AsyncRemoteSession:
    """The same for `AsyncLLM`: every method is awaited."""

    def __init__(self, engine: Any, client: Any) -> None:
        self._client = client
        self._processor = processor_of(engine)
        self._wraps = WrapPoints()
        self._attaching: asyncio.Future[Any] | None = None
        self._errors: dict[str, str] = {}  # popped, and of requests that have not returned yet
        self._wraps.wrap(engine, "generate", self._generate)

    def __await__(self) -> Generator[Any, None, AsyncRemoteSession]:
        return self._attach().__await__()

    async def _attach(self) -> AsyncRemoteSession:
        if self._attaching is None:  # once, for all requests that come first together
            self._attaching = asyncio.ensure_future(self._call("attach", {"r3_pass": __version__}))
        await asyncio.shield(self._attaching)
        return self

    async def describe(self) -> Description:
        return Description.from_json(await self._call("describe"))

    async def report(self) -> RemoteReport:
        return _report(await self._call("report"))

    async def errors(self) -> dict[str, str]:
        await self._fetch()
        found, self._errors = self._errors, {}
        return found

    async def _fetch(self) -> None:
        self._errors |= by_user_id(self._processor, await self._call("errors"))

    async def weights_changed(self, tag: str | int | None) -> None:
        await self._call("weights_changed", tag)

    async def detach(self) -> None:
        self._wraps.restore()
        await self._call("detach")

    async def _call(self, what: str, argument: Any = None) -> Any:
        try:
            answer = await self._client.call_utility_async(CALL, what, json.dumps(argument))
        except Exception as error:
            _explain(error)
            raise
        return _result(answer)

    async def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        await self._attach()
        lost = False
        async for output in generate(*args, **kwargs):
            lost |= lacks_rows([output])  # streamed, each sequence ends in an output of its own
            if output.finished and lost:
                await self._fetch()
                if (why := self._errors.pop(output.request_id, None)) is not None:
                    raise_errors({output.request_id: why}, [output])
            yield output


def _result(answer: str) -> Any:
    found = json.loads(answer)
    if "error" in found:
        raise error_of(*found["error"])
    return found["result"]


def _explain(error: Exception) -> None:
    """vLLM says of a method that is not there what Python says, in a plain Exception.

    Raises: RefusedConfiguration if that is what it is.
    """
    if f"no attribute '{CALL}'" in str(error):
        raise RefusedConfiguration(
            f"{SWITCH} is set, and the engine core did not load r3_pass's plug-in. Install r3_pass in the engine's environment, "
            f"set {SWITCH}=1 before it starts, and if VLLM_PLUGINS is set, name r3_pass in it."
        ) from error


def _report(found: dict[str, Any]) -> RemoteReport:
    sites = [SiteEntry(**entry) for entry in found["sites"]]
    return RemoteReport(sites, [RejectedEntry(**entry) for entry in found["rejected"]], found["text"])
