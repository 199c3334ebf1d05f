"""Models on two ranks. Data parallel: each exports its own requests, also where its MoE layers see the tokens of the other.

DTensors: weights and scores of a router may be some; ids may not.
"""

from __future__ import annotations

import datetime
import re
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from decoder import D, Decoder, Moe, decoder, prompt, truth
from processes import on_ranks
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import r3_pass
from r3_pass import BufferLayoutError, NoRouterFound, R3Error, RefusedConfiguration
from r3_pass.runtime import Segment, agreement
from r3_pass.runtime.engines import Deployment, EngineAdapter
from r3_pass.runtime.refusals import check_deployment

SLOTS = 16


class GatheredMoe(Moe):
    """Data-parallel attention: the experts run over the tokens of all ranks, in the order of the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        everyone = all_gather_tensor(x.flatten(0, 1), 0, dist.group.WORLD)
        own = x.shape[1]
        return super().forward(everyone)[dist.get_rank() * own :][:own].view(x.shape)


class Loop(EngineAdapter):
    """An engine whose steps the test drives."""

    num_slots = max_tokens = SLOTS

    def __init__(self, model: nn.Module, deployment: Deployment) -> None:
        super().__init__()
        self._model, self._deployment = model, deployment

    @classmethod
    def accepts(cls, engine: object) -> bool:
        return False

    model = property(lambda self: self._model)  # type: ignore[assignment]
    deployment = property(lambda self: self._deployment)  # type: ignore[assignment]

    def install(self, session: Any) -> None: ...

    def uninstall(self) -> None: ...


def tokens(rank: int, model: Decoder) -> tuple[str, Tensor, Any]:
    """A rank's own request: 5 tokens on the first, 6 on the second."""
    ids = prompt(5 + rank, seed=rank)
    return f"of rank {rank}", ids, truth(model, ids)


def replica() -> tuple[str, Any, Any]:
    """A model of its own on each rank; nothing is shared."""
    model = decoder(config={"num_experts_per_tok": 2})
    name, ids, expected = tokens(dist.get_rank(), model)
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    length = ids.numel()
    with session.step(range(length), [Segment(name, 0, length)]):
        compiled(ids)
    return name, session.finish(name, length + 1), expected


def gathered() -> tuple[str, Any, Any, str]:
    """Tokens of both ranks in each MoE layer: -1 for those of the other, and for the padding to the longest."""
    rank = dist.get_rank()
    name, ids, expected = tokens(rank, decoder(config={"num_experts_per_tok": 2}))
    length = ids.numel()
    padded = torch.nn.functional.pad(ids, (0, 6 - length))
    model = decoder(config={"num_experts_per_tok": 2}, moe=lambda k: GatheredMoe(top_k=k))
    compiled = torch.compile(model, backend=r3_pass.backend("eager"), dynamic=False)
    session = r3_pass.runtime.attach(Loop(model, Deployment(gathered_tokens=True, maps_gathered_tokens=True)))
    own = np.array([3, 1, 4, 15, 9, 2])[:length]
    mapping = np.full(12, -1)
    mapping[rank * 6 :][:length] = own
    with session.step(mapping):
        compiled(padded)
    session.prefix_hit(name, 0, own)
    rows = session.finish(name, length + 1)
    error = ""
    try:
        with session.step(own):
            compiled(padded)
    except BufferLayoutError as raised:
        error = str(raised)
    return name, rows, expected, error


class DistributedMoe(Moe):
    """A router whose scores are a DTensor, made whole before or after the selection."""

    chooses_whole = True

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        everywhere = DTensor.from_local(flat, self.gate.weight.device_mesh, [Replicate()], run_check=False)  # type: ignore[union-attr]
        scores: Any = self.gate(everywhere)
        probs = (scores.full_tensor() if self.chooses_whole else scores).softmax(-1)
        weights, ids = torch.topk(probs, self.top_k, dim=-1)
        if not self.chooses_whole:
            weights, ids = weights.full_tensor(), ids.full_tensor()
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
        return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights).view(x.shape)


def distributed(placement: Any, chooses_whole: bool) -> tuple[Any, Any]:
    """Rows or the refusal, and the rows of a plain decoder."""
    ids = prompt(6)
    expected = truth(decoder(), ids)
    model = decoder(config={"num_experts_per_tok": 2}, moe=lambda k: DistributedMoe(top_k=k))
    mesh = init_device_mesh("cpu", (ranks.WORLD,))
    for module in model.modules():
        if isinstance(module, DistributedMoe):
            module.chooses_whole = chooses_whole
            weight = distribute_tensor(module.gate.weight, mesh, [placement])
            module.gate.weight = nn.Parameter(weight, requires_grad=False)
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    try:
        with session.step(range(6)):
            compiled(ids)
        return session.read(range(6)), expected
    except RefusedConfiguration as error:
        return str(error), expected


def alone() -> list[str]:
    """What the first rank says where the second never comes to the start-up comparison."""
    said = []
    agreement.WAIT = datetime.timedelta(seconds=1)
    rows = np.zeros((4, 2, 2), np.int16)
    for mine in (rows, NoRouterFound("none ran")):
        group = dist.new_group(backend="gloo")
        if dist.get_rank() == 0:
            try:
                agreement.agree(mine, group)
            except R3Error as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def everything() -> Any:
    return replica(), gathered(), distributed(Shard(0), True), distributed(Replicate(), False), alone()


@pytest.fixture(scope="module")
def seen() -> list[Any]:
    return on_ranks(ranks.WORLD, everything)


def test_replicas_export_their_own_requests(seen: list[Any]) -> None:
    for rank, ((name, rows, expected), *_) in enumerate(seen):
        assert name == f"of rank {rank}" and len(rows) == 5 + rank and np.array_equal(rows, expected)


def test_gathered_tokens_that_an_adapter_maps(seen: list[Any]) -> None:
    for rank, (_, (name, rows, expected, _), *_) in enumerate(seen):
        assert name == f"of rank {rank}" and len(rows) == 5 + rank and np.array_equal(rows, expected)


def test_gathered_tokens_that_nobody_maps(seen: list[Any]) -> None:
    """Refused before a forward where the engine says so; where it does not, tokens and slots do not match."""
    with pytest.raises(RefusedConfiguration, match=r"data-parallel attention with gathered tokens.*-1 for the others"):
        check_deployment(Deployment(gathered_tokens=True))
    for rank, (_, (*_, error), *_) in enumerate(seen):
        assert f"the forward ran over 12 tokens, the step's slot mapping has {5 + rank} entries" in error


def test_a_router_weight_that_is_split_among_ranks(seen: list[Any]) -> None:
    for _, _, (rows, expected), *_ in seen:
        assert np.array_equal(rows, expected)


def test_ids_that_are_a_dtensor(seen: list[Any]) -> None:
    for *_, (error, _), _ in seen:
        assert "layers.1.mlp: its ids are a DTensor" in error and "Choose among plain scores" in error


def test_a_rank_that_does_not_come_to_the_comparison(seen: list[Any]) -> None:
    """It is named, after a bounded wait; what the rank itself has to say comes first."""
    (*_, said), (*_, nothing) = seen
    assert re.search(
        r"^RefusedConfiguration: self_test: not every .* within 1 s: .*Ranks 1 failed .*which all ranks call together",
        said[0],
    )
    assert said[1:] == ["NoRouterFound: none ran"] and nothing == []
