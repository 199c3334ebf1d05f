"""One training step of the small decoder with given routes, in one process and on data-parallel ranks.

Each rank takes its part of the batch, and of the routes; the loss is the mean over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from decoder import VOCAB, Decoder
from forced import gradients, loss_of, random_ids
from torch import Tensor, nn

import r3_pass
from r3_pass.oracle import forced
from r3_pass.replays import layers_of

S, E, RANKS = 7, 8, 2
"""Tokens of a sequence; experts; ranks, of two sequences each."""

Step = tuple[Tensor, dict[str, Tensor]]
"""A loss and all gradients."""


def batch() -> tuple[Decoder, Tensor, Tensor]:
    """The model, ids int64 [B, S], routes int64 [B, S, 3, 2], -1 for dense layers and for some tokens."""
    torch.manual_seed(0)
    model, sequences = Decoder(), 2 * RANKS
    ids = torch.randint(VOCAB, (sequences, S))
    routes = torch.full((sequences, S, 3, 2), -1)
    for layer in (1, 2):
        routes[:, :, layer] = random_ids(sequences * S, E, 2, seed=layer).view(sequences, S, 2)
    return model, ids, routes


def alone() -> Step:
    """The eager model with these experts, in one process."""
    model, ids, routes = batch()
    rows = routes.flatten(0, 1)
    with forced({model.layers[n].mlp: rows[:, n] for n in (1, 2)}, lambda *_: True):
        parts = model(ids).chunk(RANKS)
        loss = torch.stack([loss_of(part) for part in parts]).mean()
        return loss.detach(), gradients(model, loss)


def part(whole: Tensor) -> Tensor:
    return whole.chunk(RANKS)[dist.get_rank()]


def step(backend: Any, model: nn.Module, call: Callable[[Tensor], Tensor], ids: Tensor, routes: Tensor) -> Step:
    """On one rank: the mean loss, and gradients put together."""
    model.zero_grad()
    with backend.replay(part(routes), model=model):
        loss = loss_of(call(part(ids)))
        loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    grads = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()}
    return mean / RANKS, {name: grad.clone() for name, grad in grads.items()}


def distributed_data_parallel() -> tuple[Step, Step, str]:
    """With compiled blocks; compiled as a whole; and what is raised where Dynamo splits the whole by gradient buckets."""
    found = []
    model, ids, routes = batch()
    backend = r3_pass.backend("aot_eager", mode="replay")
    for block in model.layers:
        block.compile(backend=backend)
    found.append(step(backend, model, nn.parallel.DistributedDataParallel(model), ids, routes))

    model, ids, routes = batch()
    backend = r3_pass.backend("aot_eager", mode="replay")
    compiled = torch.compile(nn.parallel.DistributedDataParallel(model), backend=backend)
    found.append(step(backend, model, compiled, ids, routes))

    torch._dynamo.reset()
    model, ids, routes = batch()
    backend = r3_pass.backend("aot_eager", mode="replay")
    first, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 5000
    compiled = torch.compile(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=5000 / 2**20), backend=backend)
    live = compiled(part(ids)).detach()
    torch.testing.assert_close(live, model(part(ids)).detach())
    try:
        step(backend, model, compiled, ids, routes)
    except r3_pass.PartialCapture as error:
        return found[0], found[1], str(error)
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = first
    return found[0], found[1], "nothing was raised"


def fully_sharded(checkpoint: bool) -> Step:
    """FSDP2 around each compiled block, with or without its activations checkpointed."""
    from torch.distributed.fsdp import fully_shard

    model, ids, routes = batch()
    model.checkpoint = checkpoint
    backend = r3_pass.backend("aot_eager", mode="replay")
    for block in model.layers:
        block.compile(backend=backend)
        fully_shard(block)
    fully_shard(model)
    step(backend, model, model, ids.flip(1), routes.flip(1))
    layers_of(model).claim = None  # type: ignore[assignment, method-assign]  # a search of all weights, once for each block
    return step(backend, model, model, ids, routes)
