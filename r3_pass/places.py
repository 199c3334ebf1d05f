"""Which decoder layer the row of a site is of: by its gate, then by its experts, then by the module path it was traced in.

What the weights of a call do not tell for certain is a reason, and where the layer should have been recorded, a problem.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from r3_pass.errors import BufferLayoutError, RefusedConfiguration
from r3_pass.marks import Marks, Owner
from r3_pass.passes.site import Accepted
from r3_pass.structure import Block, Structure, in_attention, named_weights

ATTENTION = "attention experts, not the layer's MLP experts"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one site of a graph writes for one set of weights.

    Attributes:
        reason: why it writes nothing, where `block` is None.
        problem: what a step in which it runs raises; "" if it is right that nothing is written.
    """

    block: Block | None
    module: str
    reason: str
    problem: str = ""


class Sites(Protocol):
    """What is placed by the weights of a call: a graph's sites (`Witnesses`), or the layer of an engine's hook.

    Attributes:
        gates, experts: for each site, which of the weights are its router's and its experts'.
    """

    sites: tuple[Accepted, ...]
    gates: list[list[int]]
    experts: list[list[int]]


class Places:
    """The decoder layers of one model.

    Attributes:
        container: path of the list of blocks that holds the routers; None until one is found.
        num_layers: decoder layers as the user gave them; None if the structure tells.
    """

    def __init__(self, model: nn.Module, structure: Structure, marks: Marks, num_layers: int | None) -> None:
        self.model = model
        self.structure = structure
        self.container: str | None = structure.main_container
        self.num_layers = num_layers
        self._marks = marks
        self._peers: dict[tuple[str, str], tuple[int, ...]] = {}

    def count_layers(self, container: str) -> int:
        return self.num_layers or self.structure.num_layers(container)

    def expected(self) -> tuple[int, ...]:
        """Layers that must be captured: they hold experts by the model's modules, or a router like that of a captured layer."""
        if self.container is None:
            return ()
        seen = self.structure.expected(self.container, self.num_layers)
        alike = (peers for (container, _), peers in self._peers.items() if container == self.container)
        return tuple(sorted({*seen, *(layer for peers in alike for layer in peers)}))

    def find(self, graph: Sites, number: int, weights: tuple[Any, ...]) -> Place:
        """Which block's routing this is: by the gate, then by the experts, then by the module path it was traced in."""
        site = graph.sites[number]
        gate = [o for i in graph.gates[number] if (o := self._marks.owner(weights[i])) is not None]
        experts = [o for i in graph.experts[number] if (o := self._marks.owner(weights[i])) is not None]
        name = (gate or experts)[0].names[0] if (gate or experts) and (gate or experts)[0].names else site.module
        module = name.rpartition(".")[0]
        candidates = _candidates([o.blocks for o in gate], [o.blocks for o in experts])
        if len(candidates) > 1:
            candidates = frozenset(b for b in candidates if goes_through(site.module, b)) or candidates
        if not candidates and any(o.blocks for o in experts):
            chosen = ", ".join(sorted({str(b) for o in experts for b in o.blocks}))
            why = f"the ids of {module} choose experts of {chosen}: a row has room for a layer's own choice only"
            return Place(None, module, why, f"{module or site.module}: {why}")
        if not candidates:
            why = "no weight of a decoder layer is in the same graph as the selection"
            return Place(None, module, why, f"{site.module or 'a graph'}: {why}" if site.proved else "")
        if len(candidates) > 1:
            sharing = ", ".join(sorted(map(str, candidates)))
            why = f"its weights are shared by {sharing}, and nothing else in the graph tells which of them runs"
            return Place(None, module, why, f"{module}: {why}")
        (block,) = candidates
        inside = module.removeprefix(f"{block}.")
        if in_attention(inside):
            return Place(None, module, ATTENTION)
        if not site.proved and (doubt := self._doubt(block, site.num_experts, gate)):
            expected = block.container == self.container and block.index in self.expected()
            packed = self._packed(block, site.num_experts, gate)
            return Place(
                None, module, doubt, f"{module}: {doubt}" if expected or (packed and self.structure.may_route) else ""
            )
        self._check(block, module, site.num_experts)
        count = self.count_layers(block.container)
        if block.index >= count:
            why = f"block {block.index} lies past the model's {count} layers (a drafter's)"
            if self.num_layers is not None:
                return Place(None, module, why)
            advice = (
                f"block {block.index} routes, but the model has {count} layers by its config. Pass "
                f"num_layers={block.index + 1} to attach "
                f"if it is a layer of the model, num_layers={count} if it is a drafter's"
            )
            return Place(None, module, why, f"{module}: {advice}")
        self._find_peers(block, gate)
        return Place(block, module, "")

    def _doubt(self, block: Block, num_experts: int, gate: Sequence[Owner]) -> str:
        """Why ids that leave the graph may not be those of the experts that the block's modules show; "" if they are."""
        left = "the ids leave the graph before they reach experts, and"
        evidence = self.structure.experts.get(block)
        if evidence is None:
            if not self.structure.may_route:
                return f"{left} the layer holds no experts"
            packed = not self.structure.experts and self._packed(block, num_experts, gate)
            return "" if packed else f"{left} none are seen in the layer's modules"
        names = self._gates(block, gate)
        nearest = max((_shared(n, evidence.path) for n in names), default=0)
        padded = evidence.count < num_experts <= 2 * evidence.count and nearest > _depth(block)
        if num_experts != evidence.count and not padded:
            return f"{left} it chooses among {num_experts}, while {evidence.text}"
        for name, weight in named_weights(self.model):
            beside = name.rpartition(".")[0] != evidence.path.rpartition(".")[0] and not name.startswith(
                f"{evidence.path}."
            )
            scores = weight.dim() == 2 and weight.shape[0] == evidence.count
            if scores and beside and name.startswith(f"{block}.") and _shared(name, evidence.path) > nearest:
                return f"{left} {name} is nearer to where {evidence.text}"
        return ""

    def _packed(self, block: Block, num_experts: int, gate: Sequence[Owner]) -> bool:
        """Whether a matrix [E * f, .] near the gate could hold all experts in one."""
        for gate_name in self._gates(block, gate):
            around = gate_name.split(".")[:-1][:-2]
            inside = ".".join(around) if len(around) > _depth(block) else str(block)
            for name, weight in named_weights(self.model):
                if name.startswith(f"{inside}.") and name != gate_name and weight.dim() == 2:
                    rows = weight.shape[0]
                    if rows > num_experts > 0 and rows % num_experts == 0:
                        return True
        return False

    def _gates(self, block: Block, gate: Sequence[Owner]) -> list[str]:
        """Names of a gate's weights in a block."""
        return [n for owner in gate for n in owner.names if self.structure.block_of(n) == block]

    def _check(self, block: Block, module: str, experts: int) -> None:
        if self.container is None:
            self.container = block.container
            others = {b.container for b in self.structure.experts} - {block.container}
            if others:
                self._two_lists(block.container, others.pop(), module)
        elif self.container != block.container:
            self._two_lists(self.container, block.container, module)
        if experts > torch.iinfo(torch.int16).max:
            raise BufferLayoutError(
                f"{module} routes over {experts} experts; the slot buffer is int16 and holds ids up to "
                f"{torch.iinfo(torch.int16).max}. "
                "Such a model cannot be recorded."
            )

    def _two_lists(self, first: str, second: str, module: str) -> None:
        raise RefusedConfiguration(
            f"two lists of blocks hold routed experts, {first!r} and {second!r} (met at {module}): an encoder-decoder, or a "
            "drafter inside the target, has no place in routed_experts [tokens, num_layers, top_k]. Compile and attach the one "
            "that is to be recorded by itself: attach(model.decoder, backend=backend, num_slots=...)."
        )

    def _find_peers(self, block: Block, gate: Sequence[Owner]) -> None:
        """Expect every block of the list that has a router of the same name and shape, even where no experts are seen in it."""
        for name in (n for owner in gate for n in owner.names if n.startswith(f"{block}.")):
            inside = name.removeprefix(f"{block}.")
            key = block.container, inside
            if key in self._peers:
                continue
            held = dict(named_weights(self.model))
            count = min(self.count_layers(block.container), self.structure.blocks.get(block.container, 0))
            same = (i for i in range(count) if (w := held.get(f"{Block(block.container, i)}.{inside}")) is not None
                    and w.shape == held[name].shape)  # fmt: skip
            self._peers[key] = tuple(same)


def _candidates(gates: Sequence[frozenset[Block]], experts: Sequence[frozenset[Block]]) -> frozenset[Block]:
    """The blocks that a site's weights name: those that all gates agree on, and all experts; none if these are of other blocks."""
    scoring = [blocks for blocks in gates if blocks]
    chosen = [blocks for blocks in experts if blocks]
    found = (frozenset.intersection(*scoring) or frozenset.union(*scoring)) if scoring else frozenset()
    if not chosen:
        return found
    held = frozenset.intersection(*chosen)
    return found & held if found else held


def goes_through(path: str, block: Block) -> bool:
    """Whether a module path, relative to the compiled frame, goes through the block: `layers.2.mlp` through `model.layers.2`."""
    parts = path.split(".")
    starts = (".".join(parts[: n + 1]) for n, part in enumerate(parts) if part.isdigit())
    return any(f".{block}".endswith(f".{start}") for start in starts)


def _shared(first: str, second: str) -> int:
    """How many modules two paths have in common."""
    pairs = zip(first.split("."), second.split("."), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(first.count("."), second.count(".")) + 1)


def _depth(block: Block) -> int:
    return str(block).count(".") + 1
