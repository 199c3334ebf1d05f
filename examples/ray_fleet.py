"""A fleet of rollout engines on Ray that answers every request exactly once, whichever of its workers die.

See `ray_rollouts.py`, which runs one. What the driver has to keep, and how answers reach it, is said there.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import queue
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
import transformers
from engine import Engine, ReferenceAdapter, Result
from torch import nn

import r3_pass
from r3_pass.description import Description

Bytes = dict[str, npt.NDArray[np.uint8]]

# What Ray raises where the process behind an actor is gone, or what it held. An exception of the actor's own code is none of these.
DEATHS = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.ObjectLostError)


@dataclasses.dataclass(frozen=True)
class Request:
    request_id: str
    prompt: list[int]
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """A finished request on its way to the driver.

    Attributes:
        result: the engine's, with `routed_experts`: int16 [len(prompt) + len(token_ids) - 1, num_layers, top_k].
        description: `session.describe()` as JSON, while these rows were made.
        pid: the process that made them.
    """

    result: Result
    description: str
    pid: int


class EngineActor:
    """One engine, with a session attached, in a process of its own.

    Args:
        make: the model; its weights come with the requests.
        max_model_len: of the longest request: what CUDA graphs are captured for.
        options: sizes of the engine.
    """

    def __init__(
        self, make: Callable[[], nn.Module], device: str, inner: str, max_model_len: int, options: dict[str, int]
    ) -> None:
        quiet()
        model = make().requires_grad_(False).eval().to(device)
        self.engine = Engine(model, r3_pass.backend(inner), **options)
        self.session = r3_pass.runtime.attach(ReferenceAdapter(self.engine))
        if device != "cpu":
            self.engine.warm_up(max_model_len)

    def pid(self) -> int:
        return os.getpid()

    def serve(self, requests: list[Request], weights: Bytes, version: int) -> Iterator[Answer]:
        """Each answer as soon as it is there, all of them under weights of this version."""
        if self.session.version is None or self.session.version != version:
            mine = self.engine.runner.model.state_dict()
            new = {name: torch.from_numpy(flat).view(mine[name].dtype) for name, flat in weights.items()}
            self.engine.update_weights({name: flat.view(mine[name].shape) for name, flat in new.items()}, version)
        for request in requests:
            self.engine.add_request(request.prompt, request.max_tokens, request_id=request.request_id)
        while self.engine.requests:
            for result in self.engine.step():
                yield Answer(result, self.session.describe().to_json(), os.getpid())


def put_weights(model: nn.Module) -> Any:
    """A model's weights in the object store, as bytes (numpy knows no bfloat16). Returns: what `Fleet.generate` takes."""
    tensors = {name: t.detach().cpu().contiguous().flatten() for name, t in model.state_dict().items()}
    return ray.put({name: flat.view(torch.uint8).numpy() for name, flat in tensors.items()})


@dataclasses.dataclass(eq=False)
class Worker:
    """An actor, as the driver sees it.

    Attributes:
        pid: of its process, once it has started.
        busy: it starts, or answers; what comes of that arrives in the fleet's queue.
        asked: requests whose answers the driver has not seen, by id.
    """

    actor: Any
    pid: int | None = None
    busy: bool = True
    asked: dict[str, Request] = dataclasses.field(default_factory=dict)


class Fleet:
    """Engines on Ray that answer every request exactly once, whichever of them die.

    Args:
        make, device, inner, max_model_len, options: of each `EngineActor`.
        expected: what all answers' rows have to be; its weights are those of each call.
        num_workers: actors; on "cuda" each has a GPU.
        batch: requests that a worker is asked at a time.
        max_attempts: of a request, or of starts in a row that fail, before the death that ended the last of them is raised.

    Attributes:
        workers: as they are now.
        num_answers, num_deaths, num_resubmitted: answers that were handed out; workers that died; requests that were asked again.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        expected: Description,
        *,
        max_model_len: int,
        num_workers: int = 2,
        device: str = "cpu",
        inner: str = "inductor",
        batch: int = 8,
        max_attempts: int = 3,
        **options: int,
    ) -> None:
        self.expected = expected
        self.batch = batch
        self.max_attempts = max_attempts
        self.num_answers = self.num_deaths = self.num_resubmitted = 0
        self._failed_starts = 0
        self._arrived: queue.SimpleQueue[tuple[Worker, Any]] = queue.SimpleQueue()
        # No restarts by Ray: a stream that broke may have left a process that still runs. It is killed for good instead.
        actor = ray.remote(EngineActor).options(num_cpus=1, num_gpus=int(device != "cpu"), max_restarts=0)
        self._new = functools.partial(actor.remote, make, device, inner, max_model_len, options)
        self.workers = [self._start() for _ in range(num_workers)]

    def _start(self) -> Worker:
        worker = Worker(self._new())
        self._follow(worker, [worker.actor.pid.remote()])
        return worker

    def _follow(self, worker: Worker, refs: Iterable[Any]) -> None:
        """Put the values of references into the queue as they come; then None, or what Ray raised."""

        def run() -> None:
            try:
                for ref in refs:
                    self._arrived.put((worker, ray.get(ref)))
            except ray.exceptions.RayError as error:
                self._arrived.put((worker, error))
            else:
                self._arrived.put((worker, None))

        worker.busy = True
        threading.Thread(target=run, daemon=True).start()

    def close(self) -> None:
        for worker in self.workers:
            ray.kill(worker.actor)
        self.workers = []

    def generate(self, requests: Sequence[Request], weights: Any, version: int) -> Iterator[Answer]:
        """Answers in the order in which they come, one for each request.

        Args:
            weights: `put_weights(model)`; version: their tag.

        Raises: RefusedConfiguration or MissingRoutes for an answer whose rows are not what was asked for; what an engine raised;
            what Ray raised, if workers die again and again.
        """
        unanswered = {request.request_id: request for request in requests}
        if len(unanswered) < len(requests):
            raise ValueError("two requests have one id.")
        expected = dataclasses.replace(self.expected, weights=version)
        waiting, attempts = deque(requests), Counter[str]()
        try:
            while unanswered:
                for worker in self.workers:
                    if not worker.busy and waiting:
                        mine = [waiting.popleft() for _ in range(min(self.batch, len(waiting)))]
                        attempts.update(request.request_id for request in mine)
                        worker.asked = {request.request_id: request for request in mine}
                        serve = worker.actor.serve.options(num_returns="streaming")
                        self._follow(worker, serve.remote(mine, weights, version))
                worker, arrived = self._arrived.get()
                if worker not in self.workers:
                    continue  # the last words of one that was replaced
                if isinstance(arrived, DEATHS):
                    self._failed_starts += worker.pid is None
                    lost = list(worker.asked.values())
                    self.num_deaths += 1
                    self._replace(worker)
                    tried = max([attempts[request.request_id] for request in lost], default=0)
                    if max(tried, self._failed_starts) >= self.max_attempts:
                        raise arrived
                    self.num_resubmitted += len(lost)
                    waiting.extendleft(reversed(lost))
                elif isinstance(arrived, Exception):
                    self._replace(worker)
                    raise arrived
                elif isinstance(arrived, int):
                    worker.pid, self._failed_starts = arrived, 0
                elif arrived is None:
                    worker.busy = False
                    if worker.asked:
                        raise r3_pass.MissingRoutes(
                            f"process {worker.pid} is done, and did not answer {sorted(worker.asked)}. Look at its engine's log."
                        )
                else:
                    name = arrived.result.request_id
                    check(arrived, worker.asked.get(name), expected)
                    del worker.asked[name], unanswered[name]
                    self.num_answers += 1
                    yield arrived
        finally:
            for worker in self.workers[:]:
                if worker.asked:  # left early: what it still makes is nobody's
                    self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        ray.kill(worker.actor)  # for certain: a connection may be lost while its process goes on
        self.workers[self.workers.index(worker)] = self._start()


def check(answer: Answer, request: Request | None, expected: Description) -> None:
    """Whether an answer is one to that request, with rows that mean what is expected.

    Args:
        request: what its worker was asked under the answer's id, and did not answer before; None if there is no such request.

    Raises: RefusedConfiguration, MissingRoutes; the error of a request that failed in its engine.
    """
    result = answer.result
    where = f"request {result.request_id!r}, from process {answer.pid}"
    if request is None or result.prompt_token_ids != request.prompt:
        raise r3_pass.RefusedConfiguration(
            f"{where}: an answer that was not asked of it, or was given before. Ids must be unique in the fleet."
        )
    if result.error is not None:
        raise result.error
    given = Description.from_json(answer.description)
    differences = given.differences(expected)
    for name in ("weights", "fingerprint"):
        mine, theirs = getattr(given, name), getattr(expected, name)
        if mine != theirs:
            differences.append(f"{name} is {mine!r}, expected {theirs!r}")
    if differences:
        raise r3_pass.RefusedConfiguration(
            f"{where}: rows of another model, layer map or weights: {'; '.join(differences)}. Give the actors the model and the "
            "version that is trained."
        )
    shape = (len(result.prompt_token_ids) + len(result.token_ids) - 1, given.num_layers, given.top_k)
    rows = result.routed_experts
    if rows is None or rows.dtype != np.int16 or rows.shape != shape:
        got = None if rows is None else f"{rows.dtype}{list(rows.shape)}"
        raise r3_pass.MissingRoutes(f"{where}: rows are {got}, expected int16{list(shape)}. Ask again.")


def quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # an actor has one core
