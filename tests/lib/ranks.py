"""The reference engine on two ranks: what each process runs, and what it saw.

A function here runs in processes of its own (`spawn`), each with the same arguments; what rank r returns is the r-th result.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import nn

WORLD = 2
_TIMEOUT = 300  # seconds that a rank waits for the other
VOCAB, LAYERS, TOP_K, EXPERTS = 12, 2, 2, 4


def tiny(seed: int = 0) -> nn.Module:
    """A Qwen3-MoE of two layers, the first of them dense, in float64, whose heads and experts two ranks can share."""
    torch.manual_seed(seed)
    config: Any = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        moe_intermediate_size=4,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        mlp_only_layers=[0],
    )
    config._experts_implementation = "batched_mm"
    model: nn.Module = transformers.Qwen3MoeForCausalLM(config).double().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.normal_(0, 0.6)
    return model


def run(function: Callable[..., Any], *args: Any, device: str = "cpu") -> list[Any]:
    """Results of `function(*args)` on each of two ranks of one group.

    Raises: what a rank raised, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(_rank, (function, args, device, port, folder), nprocs=WORLD)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(WORLD)]


def _rank(rank: int, function: Callable[..., Any], args: Any, device: str, port: int, folder: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_NVLS_ENABLE": "0",
    }
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.backends.cuda.matmul.allow_tf32 = False
    if device == "cuda":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # what the host has to say goes by gloo; the machine may have no name
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=datetime.timedelta(seconds=_TIMEOUT))
    result = function(*args)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    dist.barrier()
    if device == "cpu":  # CUDA graphs may still hold on to what would be destroyed
        dist.destroy_process_group()


@contextlib.contextmanager
def record_ops() -> Iterator[list[int]]:
    """How often the record operator ran inside: one number, once the context is left."""
    count: list[int] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield count
    count.append(sum(event.count for event in profile.key_averages() if event.key == "r3_pass::record"))


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, VOCAB, (count, length)).tolist()
