"""Rows of pipeline stages: merged if every stage handed over all of them, refused by name otherwise."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from decoder import decoder, prompt
from stated import Engine

import r3_pass
from r3_pass import MissingRoutes, NoRouterFound, RefusedConfiguration
from r3_pass.runtime import Segment, StageRows, merge_stages
from r3_pass.runtime.engines import Deployment


def part(stage: int, owned: tuple[int, ...], layers: tuple[int, ...], num_rows: int = 3, top_k: int = 2) -> StageRows:
    rows = np.arange(num_rows * len(layers) * top_k, dtype=np.int16).reshape(num_rows, len(layers), top_k) + 100 * stage
    return StageRows("a", 4, 0, stage, 2, owned, 4, layers, rows, True, "w1")


FIRST, SECOND = part(0, (0, 1), (1,)), part(1, (2, 3), (2, 3), top_k=1)


def test_each_layer_comes_from_the_stage_that_owns_it() -> None:
    merged = merge_stages(pickle.loads(pickle.dumps([SECOND, FIRST])))
    assert merged.dtype == np.int16 and merged.shape == (3, 4, 2) and not merged.flags.writeable
    assert (merged[:, 0] == -1).all()  # a dense layer
    assert np.array_equal(merged[:, 1], FIRST.rows[:, 0])
    assert np.array_equal(merged[:, 2:, 0], SECOND.rows[:, :, 0]) and (merged[:, 2:, 1] == -1).all()


def test_of_an_aborted_request_the_rows_that_every_stage_has() -> None:
    lagging = dataclasses.replace(part(1, (2, 3), (2, 3), num_rows=1), finished=False)
    assert len(merge_stages([dataclasses.replace(FIRST, finished=False), lagging])) == 1


def change(**fields: Any) -> list[StageRows]:
    return [FIRST, dataclasses.replace(SECOND, **fields)]


@pytest.mark.parametrize(
    ("parts", "error", "said"),
    [
        ([], MissingRoutes, "no part"),
        ([FIRST], MissingRoutes, r"stages \[0\] are there"),
        ([FIRST, FIRST], MissingRoutes, r"stages \[0, 0\]"),
        ([FIRST, SECOND, SECOND], MissingRoutes, r"stages \[0, 1, 1\]"),
        ([FIRST, None], RefusedConfiguration, "NoneType"),
        ([FIRST, SECOND.rows], RefusedConfiguration, "ndarray"),
        (change(rows=SECOND.rows[:2]), MissingRoutes, "stage 1 has 2"),
        (change(rows=SECOND.rows[:, :1]), RefusedConfiguration, "expected int16"),
        (change(rows=SECOND.rows.astype(np.int64)), RefusedConfiguration, "int64"),
        (change(request_id="b"), RefusedConfiguration, "different request_id"),
        (change(num_tokens=5), RefusedConfiguration, "different num_tokens"),
        (change(start=1), RefusedConfiguration, "different start"),
        (change(num_layers=5), RefusedConfiguration, "pass num_layers= to attach"),
        (change(weights="w2"), RefusedConfiguration, "weights_changed on every stage"),
        (change(num_stages=3), RefusedConfiguration, "different num_stages"),
        (change(owned=(2,)), RefusedConfiguration, "belongs to one stage"),
        (change(owned=(1, 2, 3)), RefusedConfiguration, "belongs to one stage"),
        (change(layers=(1, 3)), RefusedConfiguration, "owns"),
        (
            [part(0, (0, 1), ()), part(1, (2, 3), ())],
            NoRouterFound,
            "no stage has a layer that routes",
        ),
    ],
)  # fmt: skip
def test_what_is_not_one_request_of_all_stages_is_refused(parts: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        merge_stages(parts)


def stage(model: Any, rank: int, layers: tuple[int, ...]) -> Engine:
    return Engine(model, Deployment(pipeline_parallel=2, pipeline_rank=rank, stage_layers=layers))


def test_a_stage_without_a_router_has_a_part_without_columns() -> None:
    """The dense layers of a model on the first stage, the others on the second."""
    dense, routing = decoder(layers=2, dense=(0, 1)), decoder(layers=2, dense=())
    compiled = torch.compile(routing, backend=r3_pass.backend("eager"))
    first = r3_pass.runtime.attach(stage(dense, 0, (0, 1)), num_layers=2)
    last = r3_pass.runtime.attach(stage(routing, 1, (0, 1)), num_layers=2)
    for session in (first, last):
        with torch.no_grad(), session.step(range(5), [Segment("a", 0, 5)]):
            (compiled if session is last else dense)(prompt(5))
    parts = [session.finish("a", 6) for session in (first, last)]
    assert parts[0].rows.shape == (5, 0, 0) and parts[1].rows.shape == (5, 2, 2)
    # Both decoders number their layers from 0; in a pipeline the second stage's layers are 2 and 3.
    with pytest.raises(RefusedConfiguration, match="belongs to one stage"):
        merge_stages(parts)
    parts = [
        dataclasses.replace(parts[0], num_layers=4),
        dataclasses.replace(parts[1], num_layers=4, owned=(2, 3), layers=(2, 3)),
    ]
    merged = merge_stages(parts)
    assert (merged[:, :2] == -1).all() and np.array_equal(merged[:, 2:], parts[1].rows)
    with pytest.raises(RefusedConfiguration, match="whose layers do not route"):
        first.describe()
    first.detach()
    last.detach()


def test_a_model_with_layers_of_another_stage_is_refused() -> None:
    with pytest.raises(RefusedConfiguration, match=r"owns the decoder layers \[0, 1\], but layers\.2"):
        r3_pass.runtime.attach(stage(decoder(layers=3), 0, (0, 1)))


@pytest.mark.parametrize("wrong", [{"pipeline_rank": 2}, {"stage_layers": (1, 0)}, {"stage_layers": (-1,)}])
def test_a_stage_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(ValueError, match="stage"):
        Deployment(**{"pipeline_parallel": 2, **wrong})
