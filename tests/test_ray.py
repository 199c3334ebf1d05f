"""Rollouts on Ray: a worker that dies loses no answer, rows are views of shared memory, and rows of something else are refused."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import r3_pass
from r3_pass.description import Description

pytest.importorskip("ray", reason="needs r3_pass[ray]: make test-extras")

import ray
import ray_rollouts
from engine.proof import Eager, tiny
from ray_fleet import Answer, Fleet, Request, check, put_weights
from transformers import AutoModelForCausalLM

SHORT, LONG = 2, 400
PROMPTS = ["why?", "one + one =", "a compiler", "x", "why is it blue?", "one + two =", "a token", "routes"]
# Of each worker's four, three are done at once.
REQUESTS = [Request(f"r{i}", list(text.encode()), LONG if i % 4 == 3 else SHORT) for i, text in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def model() -> Any:
    model: Any = tiny()
    return model.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def fleet(model: Any) -> Iterator[Fleet]:
    torch.set_num_threads(1)
    path = os.pathsep.join([str(Path(ray_rollouts.__file__).parent), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)  # the processes of actors import the example
        ray_rollouts.start_ray(2)
    try:
        make = functools.partial(AutoModelForCausalLM.from_config, model.config, dtype=model.dtype)
        expected = ray_rollouts.describe(model)
        sizes = {"num_blocks": 64, "block_size": 8, "max_batch_tokens": 64, "max_num_seqs": 4}
        yield Fleet(make, expected, max_model_len=512, inner="eager", batch=4, **sizes)
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def served(fleet: Fleet, model: Any) -> tuple[list[Answer], int, Any]:
    """Answers of a fleet whose first worker to answer was killed then; its process; a copy of its first rows from before.

    At that time it had made three answers, of which the driver had used one; it uses the others long after the death."""
    answers = fleet.generate(REQUESTS, put_weights(model), version=1)
    first = next(answers)
    rows = first.result.routed_experts.copy()
    time.sleep(0.5)
    os.kill(first.pid, signal.SIGKILL)
    time.sleep(3)
    return [first, *answers], first.pid, rows


def wrong_rows(model: Any, answers: list[Answer], layers: tuple[int, ...]) -> int:
    eager = Eager(model)
    results = [answer.result for answer in answers]
    return sum(len(result.routed_experts) - eager.equal(result, layers) for result in results)


def shared(array: Any) -> bool:
    """Whether an array's memory is a mapping that processes share."""
    start = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions, *_ = line.split()
        low, high = (int(x, 16) for x in bounds.split("-"))
        if low <= start and start + array.nbytes <= high:
            return permissions[3] == "s"
    return False


def test_a_worker_that_dies_loses_nothing(served: tuple[list[Answer], int, Any], fleet: Fleet, model: Any) -> None:
    answers, killed, rows_before = served
    assert Counter(answer.result.request_id for answer in answers) == Counter(r.request_id for r in REQUESTS)
    assert fleet.num_deaths == 1 and fleet.num_answers == len(REQUESTS)
    assert sum(answer.pid == killed for answer in answers) == 3 and fleet.num_resubmitted == 1
    lengths = {answer.result.request_id: len(answer.result.token_ids) for answer in answers}
    assert lengths == {request.request_id: request.max_tokens for request in REQUESTS}
    assert (answers[0].result.routed_experts == rows_before).all()
    assert wrong_rows(model, answers, fleet.expected.layers) == 0


def test_the_rows_are_held_to_the_weights_that_were_sent(
    served: tuple[list[Answer], int, Any], fleet: Fleet, model: Any
) -> None:
    """An actor's own model starts from other random weights."""
    torch.manual_seed(1)
    other = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype).eval()
    assert wrong_rows(other, served[0], fleet.expected.layers) > 100


def test_rows_are_views_of_shared_memory(served: tuple[list[Answer], int, Any]) -> None:
    """Those of the dead worker, too."""
    for answer in served[0]:
        rows = answer.result.routed_experts
        assert rows.dtype == np.int16 and shared(rows)
        assert not rows.flags.owndata and not rows.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            rows[0, 0, 0] = 0
        assert not shared(rows.copy())


def described(answer: Answer, **changed: Any) -> Answer:
    given = Description.from_json(answer.description)
    return dataclasses.replace(answer, description=dataclasses.replace(given, **changed).to_json())


def one_row_less(answer: Answer) -> Answer:
    result = dataclasses.replace(answer.result, routed_experts=answer.result.routed_experts[1:])
    return dataclasses.replace(answer, result=result)


def other_prompt(answer: Answer) -> Answer:
    return dataclasses.replace(answer, result=dataclasses.replace(answer.result, prompt_token_ids=[1]))


@pytest.mark.parametrize(
    ("alter", "version", "error", "says"),
    [
        (
            functools.partial(described, layers=(0, 1)),
            1,
            r3_pass.RefusedConfiguration,
            r"layers is \(0, 1\), expected \(1, 2\)",
        ),
        (functools.partial(described, fingerprint="0"), 1, r3_pass.RefusedConfiguration, "fingerprint is '0'"),
        (lambda answer: answer, 2, r3_pass.RefusedConfiguration, "weights is 1, expected 2"),
        (other_prompt, 1, r3_pass.RefusedConfiguration, "not asked of it"),
        (one_row_less, 1, r3_pass.MissingRoutes, r"rows are int16\[\d+, 3, 4\], expected int16"),
    ],
)
def test_other_rows_are_refused(
    served: tuple[list[Answer], int, Any],
    fleet: Fleet,
    alter: Callable[[Answer], Answer],
    version: int,
    error: type[Exception],
    says: str,
) -> None:
    answer = served[0][0]
    request = next(r for r in REQUESTS if r.request_id == answer.result.request_id)
    check(answer, request, dataclasses.replace(fleet.expected, weights=1))
    with pytest.raises(error, match=says):
        check(alter(answer), request, dataclasses.replace(fleet.expected, weights=version))
    with pytest.raises(r3_pass.RefusedConfiguration, match="given before"):
        check(answer, None, dataclasses.replace(fleet.expected, weights=1))


def test_a_fleet_goes_on_after_a_refusal(
    served: tuple[list[Answer], int, Any], fleet: Fleet, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same ids, and other weights: what the workers were at is nobody's answer."""
    model = type(model)(model.config).to(model.dtype).requires_grad_(False).eval()
    weights = put_weights(model)
    layers = fleet.expected.layers
    with monkeypatch.context() as patch:
        patch.setattr(fleet, "expected", dataclasses.replace(fleet.expected, layers=(0, 1)))
        with pytest.raises(r3_pass.RefusedConfiguration, match=r"layers is \(1, 2\), expected \(0, 1\)"):
            list(fleet.generate(REQUESTS, weights, version=2))
    answers = list(fleet.generate(REQUESTS, weights, version=2))
    assert Counter(answer.result.request_id for answer in answers) == Counter(r.request_id for r in REQUESTS)
    assert wrong_rows(model, answers, layers) == 0
    assert fleet.num_deaths == 1
