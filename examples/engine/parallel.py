"""Several ranks that serve as one: transformers' own tensor- and expert-parallel plans, this engine in lockstep on each.

    torchrun --nproc-per-node 2 examples/engine --tensor-parallel     # or --expert-parallel

Every rank runs the same engine, scheduler and prompts, greedily. Beside the model's own
collectives, one thing passes between them: rows of a prefix hit that the recording rank finds void fail the request on all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
import transformers
from torch import nn
from transformers.distributed import DistributedConfig


@dataclasses.dataclass(frozen=True)
class Ranks:
    """How a model is split.

    Attributes:
        rank, world: which of how many ranks this is. Each holds slices of every layer and routes every token.
        expert_parallel: ranks among which the experts of a layer are split, whole ones; 1 if each is cut.
        group: a process group of these ranks, for what the host has to say.
    """

    rank: int = 0
    world: int = 1
    expert_parallel: int = 1
    group: Any = None

    def gather(self, mine: Any) -> list[Any]:
        """What every rank has, in order."""
        if self.world == 1:
            return [mine]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine, group=self.group)
        return found


def ranks_of(model: Any) -> Ranks:
    """What a transformers model says of how it was loaded.

    Raises: ValueError if it is split in a way that this engine does not drive.
    """
    plan = getattr(getattr(model, "config", None), "distributed_config", None)
    world = getattr(model, "tp_size", None) or 1
    others = {n: getattr(plan, n, None) or 1 for n in ("pp_size", "fsdp_size", "dp_replicate_size")}
    if split := {n: size for n, size in others.items() if size != 1}:
        raise ValueError(f"{type(model).__name__} is split by {split}: this engine drives tensor and expert parallel.")
    if world == 1:
        return Ranks()
    experts = getattr(plan, "ep_size", None) or (world if getattr(plan, "enable_expert_parallel", False) else 1)
    mesh: Any = model._device_mesh
    mesh = mesh["tp"] if mesh.ndim > 1 else mesh
    members = dist.get_process_group_ranks(mesh.get_group())
    group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return Ranks(mesh.get_local_rank(), world, experts, group)


def load(path: str, world: int, *, expert_parallel: bool = False, **options: Any) -> nn.Module:
    """A saved causal model, of which each of `world` processes of an initialized group holds its part.

    Args:
        expert_parallel: whole experts on each rank, instead of a slice of each.
        options: as of `from_pretrained`.
    """
    fields = {field.name for field in dataclasses.fields(DistributedConfig)}
    split: dict[str, Any] = {"tp_size": world}
    if expert_parallel:
        split |= {"ep_size": world} if "ep_size" in fields else {"enable_expert_parallel": True}
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(**split), **options
    )
    return model.eval().requires_grad_(False)
