"""Functions that run in several processes at once, the ranks of one group on this machine."""

from __future__ import annotations

import datetime
import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

PATIENCE = datetime.timedelta(seconds=300)
"""How long a rank waits for the others."""


def on_ranks(world: int, function: Callable[..., Any], *args: Any, device: str = "cpu") -> list[Any]:
    """`function(*args)` on each rank, in processes that are started for it; what it returns, by rank.

    Args:
        function: of a module that the ranks can import, such as one of tests/lib; what it returns may hold tensors.
        device: "cuda" for a GPU each, and NCCL.

    Raises: what a rank raised, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(_run, (world, port, folder, device, function, args), nprocs=world)
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(world)]


def _run(rank: int, world: int, port: int, folder: str, device: str, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_NVLS_ENABLE": "0",
    }
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # what the host has to say goes by gloo; the machine may have no name
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=PATIENCE)
    torch.save(function(*args), Path(folder, str(rank)))
    dist.barrier()
    if device == "cpu":  # CUDA graphs may still hold on to what would be destroyed
        dist.destroy_process_group()
