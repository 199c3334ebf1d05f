"""Ranks whose rows differ: which, where, and what to do. (tests/engine/test_parallel.py has two that are processes.)"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from r3_pass import RefusedConfiguration
from r3_pass.runtime.agreement import check_group, compare_ranks
from r3_pass.runtime.engines import Deployment

ROWS = np.arange(24, dtype=np.int16).reshape(4, 3, 2)


def changed(token: int, layer: int) -> Any:
    rows = ROWS.copy()
    rows[token, layer] = rows[token, layer, ::-1]
    return rows


def test_equal_rows_pass() -> None:
    compare_ranks([ROWS, ROWS.copy(), ROWS.copy()])


@pytest.mark.parametrize(
    "told, why",
    [
        (
            [ROWS, ROWS, changed(2, 1)],
            "rank 2 beside rank 0: for token 2 in layer 1 it has [15, 14], rank 0 has [14, 15] (1 of 12",
        ),
        ([ROWS, ROWS[:, :2]], "rank 1 beside rank 0: rows of shape (4, 2, 2) and (4, 3, 2)"),
        ([ROWS, "NoRouterFound: none ran"], "rank 1 could not record the start-up batch: NoRouterFound: none ran"),
        (["PartialCapture: layer 3", ROWS], "rank 0 could not record the start-up batch: PartialCapture: layer 3"),
    ],
)
def test_a_difference_is_refused_by_name(told: list[Any], why: str) -> None:
    with pytest.raises(RefusedConfiguration, match=re.escape(why)):
        compare_ranks(told)


def test_ranks_that_cannot_be_asked() -> None:
    deployment = Deployment(tensor_parallel=2, tensor_parallel_rank=1)
    with pytest.raises(RefusedConfiguration, match=r"rank 1 of 2.*no process group\. The adapter's `group`"):
        check_group(deployment, None)
