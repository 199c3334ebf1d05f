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
import functools
import os
import random
import signal
import threading
from collections import Counter

import ray
import torch
import transformers
from engine.proof import Eager, load_whole
from ray_fleet import Fleet, Request, put_weights, quiet
from torch import nn

import r3_pass
from r3_pass.description import Description


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
    quiet()
    rng = random.Random(given.seed)
    torch.manual_seed(given.seed)

    model, prompts = load_whole(given.model, given.device)
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
