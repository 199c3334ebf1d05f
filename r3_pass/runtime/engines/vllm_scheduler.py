"""The half that runs beside vLLM's scheduler: rows of each request, and into its outputs.

    update_from_output(scheduled, output)  output.r3_pass holds the step's rows; each EngineCoreOutput gets those that its new
                                           tokens complete, as vLLM's own flag does, and the front end joins them
    _preempt_request(request)              rows that are there stay what they are
    _free_request(request)                 finished or aborted: its rows go, after its last output

The worker may be another process, and rows come with its output: O(new rows) a step whatever a request's length. A request whose
rows cannot be complete is named in `errors`; its tokens go on, its `routed_experts` stay None.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from r3_pass.errors import MissingRoutes, UnsupportedEngine
from r3_pass.runtime.engines.base import WrapPoints
from r3_pass.runtime.engines.vllm_worker import OUTPUT, StepRows
from r3_pass.runtime.rows import RowLog
from r3_pass.runtime.segments import SegmentBatch
from r3_pass.runtime.sequences import SequenceTable

logger = logging.getLogger(__name__)

HOOKS = ("update_from_output", "_preempt_request", "_free_request", "requests")
"""What is wrapped or read on the scheduler."""

_KEPT_ERRORS = 1024


class RouteDelivery:
    """One scheduler. Runs in the thread of vLLM's engine core only.

    Attributes:
        scheduler: vLLM's.
        claimed: an `attach` in another process has returned a session for it.
        errors: of requests that ended without all of their rows: id in the core -> what was wrong; the last 1024.
    """

    def __init__(self, scheduler: Any) -> None:
        for name in HOOKS:
            if not hasattr(scheduler, name):
                raise UnsupportedEngine(
                    f"{type(scheduler).__module__}.{type(scheduler).__name__} has no {name!r}: no scheduler that the adapter knows."
                )
        self.errors: dict[str, str] = {}
        self.claimed = False
        self.scheduler = scheduler
        self._wraps = WrapPoints()
        self._table: SequenceTable | None = None
        self._sent: dict[str, int] = {}
        self._refused: dict[str, str] = {}
        self._ended: list[str] | None = None  # requests freed while an update runs
        wrap = self._wraps.wrap
        wrap(scheduler, "update_from_output", self._update)
        wrap(scheduler, "_preempt_request", self._preempt)
        wrap(scheduler, "_free_request", self._free)

    def uninstall(self) -> None:
        """Restore the scheduler's methods. Called twice: no effect."""
        self._wraps.restore()
        self._table = None
        self._sent.clear()
        self._refused.clear()

    def pop_errors(self) -> dict[str, str]:
        errors, self.errors = self.errors, {}
        return errors

    # ---- hooks: each gets the original first --------------------------------------------------------------------
    def _update(self, update: Callable[..., Any], scheduled: Any, output: Any) -> Any:
        requests = {i: r for i in scheduled.num_scheduled_tokens if (r := self.scheduler.requests.get(i)) is not None}
        step = getattr(output, OUTPUT, None)
        if step is not None:
            self._take(step, requests)
        elif requests:
            self._refuse(requests, "MissingRoutes: the worker sent no rows with this step.")
        self._ended = []
        try:
            outputs = update(scheduled, output)
            self._deliver(outputs, requests)
        finally:
            ended, self._ended = self._ended, None
            for request_id in ended:
                self._forget(request_id)
        return outputs

    def _preempt(self, preempt: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        if self._table is not None:
            self._table.preempt(request.request_id, request.num_tokens)
        return preempt(request, *args, **kwargs)

    def _free(self, free: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        result = free(request, *args, **kwargs)
        if self._ended is not None:
            self._ended.append(request.request_id)
        else:  # aborted between steps
            self._forget(request.request_id)
        return result

    # ---- in -----------------------------------------------------------------------------------------------------
    def _take(self, step: StepRows, requests: dict[str, Any]) -> None:
        if step.rows is None:
            self._refuse(requests, step.error)
            return
        table = self._table
        if table is None:
            table = self._table = SequenceTable(RowLog(step.rows.shape[1:]))
        for hit in step.hits:
            if hit.rows is None:
                self._refuse([hit.request_id], hit.error)
            elif hit.request_id in requests and hit.request_id not in self._refused:
                table.rows.fill(table.extend(SegmentBatch((hit.request_id,), (0,), (len(hit.rows),))), hit.rows)
        batch = self._followed(step, requests)
        try:
            table.check(batch)
        except MissingRoutes:
            for request_id, start in zip(step.request_ids, step.starts.tolist(), strict=True):
                if start > table.end(request_id):
                    why = f"position {table.end(request_id)} comes next, the step begins at {start}"
                    self._refuse([request_id], f"MissingRoutes: {why}: it had run before the session was attached.")
            batch = self._followed(step, requests)
        table.rows.fill(table.extend(batch), step.rows)
        for name in batch.request_ids:
            if isinstance(name, _Nobody):
                table.drop(name)

    def _followed(self, step: StepRows, requests: dict[str, Any]) -> SegmentBatch:
        """The step's segments; rows of requests that ended meanwhile, or are refused, are nobody's."""
        if all(i in requests for i in step.request_ids) and not (
            self._refused and set(step.request_ids) & set(self._refused)
        ):
            return SegmentBatch(step.request_ids, step.starts, step.lengths)
        kept = [i in requests and i not in self._refused for i in step.request_ids]
        names: list[Hashable] = [i if keep else _Nobody() for i, keep in zip(step.request_ids, kept, strict=True)]
        return SegmentBatch(names, np.where(kept, step.starts, 0), step.lengths)

    def _refuse(self, request_ids: Any, why: str) -> None:
        for request_id in request_ids:
            self._refused.setdefault(request_id, why)

    # ---- out ----------------------------------------------------------------------------------------------------
    def _deliver(self, outputs: dict[int, Any], requests: dict[str, Any]) -> None:
        """Give each output the rows of the positions before its request's last token that were not sent yet."""
        due: list[tuple[Any, str, int, int]] = []
        for output in (o for group in outputs.values() for o in group.outputs):
            request = requests.get(output.request_id)
            if request is None:
                continue
            if request.resumable:
                self._refuse(
                    [request.request_id],
                    "RefusedConfiguration: streamed input changes the tokens of a running request.",
                )
            if request.request_id not in self._refused:
                start, stop = self._first(request), request.num_tokens - 1
                if stop > start:
                    due.append((output, request.request_id, start, stop))
            if request.request_id in self._refused and output.finish_reason is not None:
                self._report(request.request_id)
        if not due:
            return
        assert self._table is not None
        short = [d for d in due if self._table.end(d[1]) < d[3]]
        for _, request_id, _, stop in short:
            self._refuse(
                [request_id], f"MissingRoutes: {stop} rows were expected, {self._table.end(request_id)} exist."
            )
            self._report(request_id)
        due = [d for d in due if d not in short]
        rows = self._table.read([(request_id, start, stop) for _, request_id, start, stop in due])
        done = 0
        for output, request_id, start, stop in due:
            output.routed_experts = rows[done : done + stop - start].copy()  # a view would keep the whole step's rows
            done += stop - start
            self._sent[request_id] = stop

    def _first(self, request: Any) -> int:
        """The first position whose row was not sent: callers may ask for those from a position of the prompt on."""
        sent = self._sent.get(request.request_id)
        return (
            sent if sent is not None else int(getattr(request.sampling_params, "routed_experts_prompt_start", 0) or 0)
        )

    def _report(self, request_id: str) -> None:
        self.errors[request_id] = self._refused[request_id]
        logger.error("request %r of the core has no routed_experts: %s", request_id, self._refused[request_id])
        while len(self.errors) > _KEPT_ERRORS:
            del self.errors[next(iter(self.errors))]

    def _forget(self, request_id: str) -> None:
        if self._table is not None:
            self._table.drop(request_id)
        self._sent.pop(request_id, None)
        self._refused.pop(request_id, None)


class _Nobody:
    """Whose rows are dropped at once."""
