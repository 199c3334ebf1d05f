"""Do tensor-parallel ranks choose the same experts? Each records one batch at start-up, and the rows are held side by side."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from r3_pass.errors import R3Error, RefusedConfiguration
from r3_pass.runtime.refusals import Deployment

Rows = npt.NDArray[np.int16]

WAIT = datetime.timedelta(minutes=5)
"""How long the ranks of a gloo group wait for one another; they come from one forward, whose collectives they left together."""


def check_group(deployment: Deployment, group: Any) -> None:
    """Raises: RefusedConfiguration if the other ranks cannot be asked."""
    if not dist.is_available() or not dist.is_initialized():
        found = "torch.distributed has no process group"
    elif (size := dist.get_world_size(group)) != deployment.tensor_parallel:
        found = f"the process group has {size} ranks"
    elif (rank := dist.get_rank(group)) != deployment.tensor_parallel_rank:
        found = f"it is rank {rank} of the process group"
    else:
        return
    raise RefusedConfiguration(
        f"self_test: this is tensor-parallel rank {deployment.tensor_parallel_rank} of {deployment.tensor_parallel}, whose rows "
        f"have to be compared with those of rank 0 and the others, but {found}. The adapter's `group` is the process group of "
        "these ranks, in their order."
    )


def agree(mine: Rows | R3Error, group: Any) -> Rows:
    """All ranks of a group tell each other what they recorded; each raises the same.

    Args: mine: int16 [T, num_layers, top_k] of the same batch, or why there are none.

    Returns: the rows, if all have the same.
    Raises: RefusedConfiguration that names ranks, layer and token of the first difference, or the rank that recorded nothing; in a
        gloo group also a rank that does not come (other backends wait as long as the group's own timeout says).
    """
    try:
        _all_here(group)
    except RefusedConfiguration:
        if isinstance(mine, R3Error):
            raise mine from None
        raise
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(
        told, mine if not isinstance(mine, R3Error) else f"{type(mine).__name__}: {mine}", group=group
    )
    if isinstance(mine, R3Error):
        raise mine
    compare_ranks(told)
    return mine


def _all_here(group: Any) -> None:
    if dist.get_backend(group) != dist.Backend.GLOO:
        return
    try:
        dist.monitored_barrier(group, timeout=WAIT, wait_all_ranks=True)
    except RuntimeError as error:
        raise RefusedConfiguration(
            f"self_test: not every tensor-parallel rank came to the start-up comparison within {WAIT.total_seconds():.0f} s: "
            f"{error}. A rank that is missing died, hangs, or did not call self_test, which all ranks call together: see its log."
        ) from error


def compare_ranks(told: Sequence[Rows | str]) -> None:
    """Args: told: rows of each rank, or its error.

    Raises: as `agree`."""
    for rank, rows in enumerate(told):
        if isinstance(rows, str):
            raise RefusedConfiguration(f"tensor-parallel rank {rank} could not record the start-up batch: {rows}")
    first, *others = [rows for rows in told if not isinstance(rows, str)]
    for rank, rows in enumerate(others, 1):
        if rows.shape != first.shape:
            what = f"rows of shape {rows.shape} and {first.shape}"
        elif np.array_equal(rows, first):
            continue
        else:
            differ = np.argwhere(np.any(rows != first, axis=-1))
            token, layer = (int(i) for i in differ[0])
            what = (
                f"for token {token} in layer {layer} it has {rows[token, layer].tolist()}, rank 0 has "
                f"{first[token, layer].tolist()} ({len(differ)} of {first[..., 0].size} choices differ)"
            )
        raise RefusedConfiguration(
            f"tensor-parallel ranks choose different experts, rank {rank} beside rank 0: {what}. Rows of rank 0 would not be what "
            "the others run. Every rank has to route the whole batch among all experts, with the same router weights and the same "
            "hidden states: load all ranks from one checkpoint, and keep the router whole in the parallel plan."
        )
