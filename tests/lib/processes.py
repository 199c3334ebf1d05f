"""Functions that run in several processes at once, the ranks of a gloo group on this machine."""

from __future__ import annotations

import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on each rank, in processes that are started for it; what it returns, by rank.

    Args:
        function: of a module that the ranks can import, such as one of tests/lib; what it returns may hold tensors.
    """
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(_run, (world, port, folder, function, args), nprocs=world)
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(world)]


def _run(rank: int, world: int, port: int, folder: str, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        torch.save(function(*args), Path(folder, str(rank)))
    finally:
        dist.destroy_process_group()
