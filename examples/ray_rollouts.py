"""A fleet of rollout engines on Ray: answers with `routed_experts` through shared memory, and a death that loses nothing.

    pip install 'r3_pass[ray]'
    python examples/ray_rollouts.py             # two engines of a tiny random MoE, each in a process of its own, on a CPU
    python examples/ray_rollouts.py --kills 10  # and ten of these processes are killed (SIGKILL) while they serve

The driver holds everything that has to survive a worker: the requests, the weights, and the answers. What a worker puts into Ray's
object store by `ray.put` belongs to that worker and dies with it, and so do answers that a stream still holds when its actor dies
(both seen with Ray 2.60). So each answer leaves by itself, through a streaming generator, and a thread of the driver takes it the
moment that it is there, however slowly the driver uses them. A worker that dies is replaced, and only what had not arrived is
asked again.

* Weights of each round go once into the object store; every actor copies them from there, also one that was started later.
* A worker copies an answer's rows into shared memory, and the driver's array is a read-only view of it: nothing is pickled, nor
  copied again. The view keeps that memory until it is dropped, so copy what is kept for long. (Ray sends objects below 100 KiB
  within its messages, unless it is told not to, as here.)
* Each answer says what its rows mean, `session.describe()`, and the driver refuses rows of another layer map, another model or
  other weights than it asked for, and an answer that it did not ask for.
* All rows are held against one prefill of their tokens by the eager model, as in `examples/engine`. It exits with an error unless
  every request is answered once, and every row is equal.

Run on one machine, with CPU actors. `--device cuda` gives each actor a GPU; that was not run, nor were several machines (each needs
r3_pass and this folder on its path, and an answer takes one copy through the network). A worker gets its next requests when it has
answered all that it was asked, so its last steps run with few of them. The driver itself must not die.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import os
import queue
import random
import signal
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
from engine.__main__ import HEADS, TAILS, Eager, tiny
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
        _quiet()
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


class Killer(threading.Thread):
    """Kills workers while they serve: each time after so many answers, and so many seconds more.

    Attributes:
        killed: process ids, in order.
    """

    def __init__(self, fleet: Fleet, moments: list[tuple[int, float]], rng: random.Random) -> None:
        super().__init__(daemon=True)
        self.fleet, self.moments, self.rng = fleet, moments, rng
        self.killed: list[int] = []
        self.ended = threading.Event()

    def run(self) -> None:
        for num_answers, seconds in self.moments:
            while self.fleet.num_answers < num_answers and not self.ended.wait(0.002):
                pass
            self.ended.wait(seconds)
            while not self.ended.is_set() and not self._kill():
                self.ended.wait(0.002)

    def close(self) -> None:
        self.ended.set()
        self.join()

    def _kill(self) -> bool:
        serving = [worker.pid for worker in self.fleet.workers if worker.asked and worker.pid is not None]
        serving = [pid for pid in serving if pid not in self.killed]
        if not serving:
            return False
        pid = self.rng.choice(serving)
        os.kill(pid, signal.SIGKILL)
        self.killed.append(pid)
        return True


def start_ray(num_workers: int) -> None:
    """A Ray of this process's own: no network, no dashboard, little memory; also small objects go through shared memory."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=num_workers,
        object_store_memory=80 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        _system_config={"max_direct_call_object_size": 0},
    )


def describe(model: nn.Module) -> Description:
    """What rows of this model mean, from a session of the driver's own, whose self-test passes."""
    compiled = torch.compile(copy.deepcopy(model), backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=64)
    try:
        session.self_test()
        return session.describe()
    finally:
        session.detach()


def _quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # an actor has one core


def make_requests(
    prompts: list[list[int]], count: int, new_tokens: int, name: str, rng: random.Random
) -> list[Request]:
    """Prompts that share their heads, and answers of different lengths."""
    return [
        Request(f"{name}-{i}", prompts[i % len(prompts)], rng.randint(min(4, new_tokens), new_tokens))
        for i in range(count)
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a causal MoE of transformers, in float32; by default a tiny one, in float64")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: a GPU for each worker")
    parser.add_argument("--inner", default="aot_eager", help="compiler behind the pass, e.g. inductor")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--rounds", type=int, default=3, help="new weights in each; more of them until all kills are done"
    )
    parser.add_argument("--requests", type=int, default=24, help="in each round")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    _quiet()
    rng = random.Random(given.seed)
    torch.manual_seed(given.seed)

    texts = [head + tail for tail in TAILS for head in HEADS]
    if given.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
        prompts = [tokenizer(text)["input_ids"] for text in texts]
    else:
        model, prompts = tiny(), [list(text.encode()) for text in texts]
    model.requires_grad_(False).eval().to(given.device)
    eager, expected = Eager(model), describe(model)
    make = functools.partial(transformers.AutoModelForCausalLM.from_config, model.config, dtype=model.dtype)
    longest = max(map(len, prompts)) + given.new_tokens
    last = given.rounds * given.requests
    moments = sorted((rng.randrange(last), rng.uniform(0, 0.3)) for _ in range(given.kills))

    start_ray(given.workers)
    try:
        fleet = Fleet(
            make, expected, max_model_len=longest, num_workers=given.workers, device=given.device, inner=given.inner, batch=8,
            max_attempts=given.kills + 3, num_blocks=4 * -(-longest // 8), block_size=8, max_batch_tokens=64, max_num_seqs=8,
        )  # fmt: skip
        killer = Killer(fleet, moments, rng)
        with contextlib.closing(fleet), contextlib.closing(killer):
            killer.start()
            print(f"{given.workers} workers on {given.device} serve {type(model).__name__} ({given.inner})", flush=True)
            wrong, lines = 0, ["version  requests  answers  killed  resubmitted  rows equal"]
            while len(lines) <= given.rounds or killer.is_alive():
                version = len(lines)
                requests = make_requests(prompts, given.requests, given.new_tokens, f"step{version}", rng)
                more, line = _round(fleet, killer, model, eager, version, requests)
                wrong += more
                lines.append(line)
    finally:
        ray.shutdown()
    # At the end: Ray itself prints several lines for each death.
    print("", *lines, "", f"killed {killer.killed}, deaths seen {fleet.num_deaths}", sep="\n")
    if wrong or len(killer.killed) != given.kills:
        raise SystemExit(f"{wrong} answers or rows are missing or wrong; {len(killer.killed)} of {given.kills} kills.")


def _round(
    fleet: Fleet, killer: Killer, model: nn.Module, eager: Eager, version: int, requests: list[Request]
) -> tuple[int, str]:
    """New weights, answers under them, and the proof of these.

    Returns: how many answers or rows are missing or wrong; a line of the table."""
    with torch.no_grad():
        for parameter in model.parameters():  # as an optimizer's step would
            if parameter.dim() > 1:
                parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    killed, resubmitted = len(killer.killed), fleet.num_resubmitted
    answers = [answer.result for answer in fleet.generate(requests, put_weights(model), version)]
    once = Counter(result.request_id for result in answers) == Counter(request.request_id for request in requests)
    rows = sum(len(result.routed_experts) for result in answers)
    equal = sum(eager.equal(result, fleet.expected.layers) for result in answers)
    line = (
        f"{version:7}  {len(requests):8}  {len(answers):7}  {len(killer.killed) - killed:6}  "
        f"{fleet.num_resubmitted - resubmitted:11}  {equal} of {rows}"
    )
    return rows - equal + (not once), line


if __name__ == "__main__":
    main()
