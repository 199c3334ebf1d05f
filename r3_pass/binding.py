"""What the compiled graphs and a session share: where rows go, and which layer a weight names.

A compiled graph may serve every layer of a model, or several models: it learns at the call, from the parameters that arrive, whose
row it writes. So each weight of an attached model carries an `Owner`; nothing is kept in a table of the process, and nothing is
looked up by `id`.

Legend: T tokens in the step, M stored (MoE) layers, K top-k.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from r3_pass import streams
from r3_pass.errors import BufferLayoutError, RefusedConfiguration
from r3_pass.passes.site import Accepted, Rejected
from r3_pass.structure import Block, Structure, inspect, named_weights, numbered

_OWNER = "_r3_owner"
_ATTENTION = re.compile(r"(^|_)(attn|attention)$")
ATTENTION = "attention experts, not the layer's MLP experts"


def in_attention(path: str) -> bool:
    """Whether a module path below a block goes through its attention."""
    return any(_ATTENTION.search(part) for part in path.lower().split("."))


class Owner:
    """On a weight: which binding it belongs to, and as what. Saved and copied as an empty dict, which any loader reads."""

    __slots__ = ("binding", "names")

    def __init__(self, binding: Binding, names: tuple[str, ...]) -> None:
        self.binding = binding
        self.names = names

    def __reduce__(self) -> tuple[type[OrderedDict[str, Any]], tuple[()]]:
        return OrderedDict, ()

    @property
    def blocks(self) -> frozenset[Block]:
        return frozenset(b for name in self.names if (b := self.binding.structure.block_of(name)) is not None)


def owner_of(weight: Any) -> Owner | None:
    found = getattr(weight, _OWNER, None)
    return found if isinstance(found, Owner) else None


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


@dataclasses.dataclass
class Placement:
    """A graph's sites, placed by the weights of one call.

    Attributes:
        columns: int64 [N] on the device, the stored layer of each site, -1 for none; numbers: the same on the host.
        stored: those that are some layer's.
    """

    graph: Sites
    weights: tuple[Any, ...]
    problems: dict[str, None]
    numbers: tuple[int, ...]
    columns: Tensor

    @property
    def stored(self) -> tuple[int, ...]:
        return tuple(n for n in self.numbers if n >= 0)

    def stands(self, graph: Sites, weights: tuple[Any, ...]) -> bool:
        return self.graph is graph and all(a is b for a, b in zip(self.weights, weights, strict=True))


class Binding:
    """One attachment, as compiled graphs see it.

    Attributes:
        buffer: int16 [S + 1, M, K], or None while nothing is allocated.
        state, mapping: persistent tensors of `passes.ops.record`.
        tokens: T of the running step, None outside a step: then graphs run without recording.
        paused: how many pauses are open, in any thread: while there is one, graphs run without recording.
        num_layers: decoder layers as the user gave them; None if the structure tells.
        layers: stored layers in order; grows in the first step only.
        routed: top-k and number of experts of each layer that was placed.
        named: by layer, how many experts there are, where its router chooses among more (a padded weight): checked on the host.
        calls: how often each stored layer was written in the running step.
        captured: a CUDA graph holds the record op, so a step may run without the host seeing it.
        entered_on, ran_on: CUDA streams (handles) of the running step, and of its forward once that has begun.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        lay_out: Callable[[tuple[int, ...], int], None],
        mark: bool = True,
        num_layers: int | None = None,
        experts: Mapping[str, int] | None = None,
    ) -> None:
        self.model = model
        self._unmarked: dict[int, tuple[TensorWeakRef, Owner]] | None = None if mark else {}
        self.device = device
        self.structure: Structure = inspect(model, experts)
        self.container: str | None = self.structure.main_container
        self.buffer: Tensor | None = None
        self.state = torch.zeros(0, dtype=torch.int32)
        self.mapping = torch.zeros(0, dtype=torch.int64)
        self.tokens: int | None = None
        self.paused = 0
        self.num_layers = num_layers
        self.layers: tuple[int, ...] = ()
        self.top_k = 0
        self.calls: list[int] = []
        self.captured = False
        self.capturing = False
        self.begun = True
        self.entered_on: streams.Raw | None = None
        self.ran_on: streams.Raw | None = None
        self.problems: dict[str, None] = {}
        self.refused: dict[str, None] = {}
        self.modules: dict[int, str] = {}
        self.routed: dict[int, tuple[int, int]] = {}
        self.named: dict[int, int] = {}
        self.lock = threading.RLock()
        self._peers: dict[tuple[str, str], tuple[int, ...]] = {}
        self._lay_out = lay_out
        self._placements: dict[tuple[int, int], Placement] = {}
        self._read_by_graphs: list[
            Tensor
        ] = []  # columns of placements that are gone, while a CUDA graph may still read them
        self._tagged: list[Any] = []
        self._released = False
        self._links: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self.claim()

    # ---- weights ------------------------------------------------------------------------------------------------
    def claim(self) -> bool:
        """Mark every weight of the model as this binding's, under its present names; True if that changed any mark.

        Raises: RefusedConfiguration if another session holds them.
        """
        if self._released:
            return False
        names: dict[int, tuple[Any, list[str]]] = {}
        for name, weight in named_weights(self.model):
            block = self.structure.block_of(name)
            if block is None or block.container in self.structure.blocks or not self.structure.blocks:
                names.setdefault(id(weight), (weight, []))[1].append(name)
            else:
                names.setdefault(id(weight), (weight, []))
        if self._unmarked is not None:
            known = {id(w): (TensorWeakRef(w), Owner(self, tuple(found))) for w, found in names.values()}
            for (
                key,
                held,
            ) in self._unmarked.items():  # a weight that FSDP gathers comes back with each forward of its block
                if key not in known and held[1].names and held[0]() is not None:
                    known[key] = held
            before = {key: held[1].names for key, held in self._unmarked.items()}
            if any(before.get(key, held[1].names) != held[1].names for key, held in known.items()):
                self._forget_placements()  # a block that moved brings the same weights to another layer
            self._unmarked = known
            return False
        for weight, _ in names.values():
            owner = owner_of(weight)
            if owner is not None and owner.binding is not self:
                raise RefusedConfiguration(
                    f"a session is attached to this {type(self.model).__name__} already (weight {owner.names[:1]}); "
                    "two would write each other's rows. Call detach() on that session first."
                )
        changed = False
        tagged = []
        for weight, found in names.values():
            owner = owner_of(weight)
            if owner is None or owner.names != tuple(found):
                setattr(weight, _OWNER, Owner(self, tuple(found)))
                changed = True
            tagged.append(weight)
        kept = {id(w) for w in tagged}
        for weight in self._tagged:
            if id(weight) not in kept:
                self._release_weight(weight)
        self._tagged = tagged
        if changed or self.weights_replaced():
            self._forget_placements()
            self._links.clear()
        first = next((weight for name, weight in self.model.named_parameters() if numbered(name)), None)
        if first is not None:
            self._link(first)
        return changed

    def names_layer(self, weight: Any) -> bool:
        """Whether a weight's name tells which block of the model it is in."""
        owner = self._owner(weight)
        return owner is not None and bool(owner.blocks)

    def owns(self, weight: Any) -> bool:
        """Whether a weight is one of the model's, as far as was seen."""
        return self._owner(weight) is not None

    def _owner(self, weight: Any) -> Owner | None:
        if self._unmarked is not None:
            ref, found = self._unmarked.get(id(weight), (None, None))
            if ref is None or found is None or ref() is not weight:
                return None
            return found if not found.names or self._hangs(weight, found.names[0]) else None
        owner = owner_of(weight)
        return owner if owner is not None and owner.binding is self else None

    def _hangs(self, weight: Any, name: str) -> bool:
        """Whether the model has a weight under a name."""
        *path, last = name.split(".")
        module = self.model
        for part in path:
            child = module._modules.get(part)
            if child is None:
                return False
            module = child
        return module._parameters.get(last) is weight or module._buffers.get(last) is weight

    def _link(self, weight: Any) -> None:
        """Remember each module on the way from the model to a weight that names a layer."""
        owner = self._owner(weight)
        if owner is None or not owner.names:
            return
        *path, name = owner.names[0].split(".")
        module = self.model
        for part in path:
            child = module._modules[part]
            assert child is not None, "named_parameters passes through modules"
            self._links[(id(module._modules), part)] = module._modules, part, child
            module = child
        held: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        self._links[(id(held), name)] = held, name, weight

    def blocks(self) -> dict[int, nn.Module]:
        """The module of each stored layer."""
        return {layer: self.model.get_submodule(f"{self.container}.{layer}".strip(".")) for layer in self.layers}

    def experts_shown(self) -> dict[int, int]:
        """How many experts the modules of each stored layer show, where they show any."""
        shown = {layer: self.structure.experts.get(Block(self.container or "", layer)) for layer in self.layers}
        return {layer: evidence.count for layer, evidence in shown.items() if evidence is not None}

    def weights_replaced(self) -> bool:
        """Whether weights hang elsewhere than their marks say: replaced (`load_state_dict(assign=True)`), or moved in the model."""
        return not all(held.get(name) is thing for held, name, thing in self._links.values())

    def release_weights(self) -> None:
        """Take every mark off again, for good."""
        self._released = True
        for weight in self._tagged:
            self._release_weight(weight)
        self._tagged = []
        self._placements.clear()

    def _forget_placements(self) -> None:
        if self.captured:
            self._read_by_graphs.extend(self.columns())
        self._placements.clear()

    def _release_weight(self, weight: Any) -> None:
        owner = owner_of(weight)
        if owner is not None and owner.binding is self:
            delattr(weight, _OWNER)

    @property
    def recording(self) -> bool:
        """Whether what runs now is a step's forward."""
        return self.tokens is not None and not self.paused

    def count_layers(self, container: str) -> int:
        return self.num_layers or self.structure.num_layers(container)

    def expected(self) -> tuple[int, ...]:
        """Layers that must be captured: they hold experts by the model's modules, or a router like that of a captured layer."""
        if self.container is None:
            return ()
        seen = self.structure.expected(self.container, self.num_layers)
        alike = (peers for (container, _), peers in self._peers.items() if container == self.container)
        return tuple(sorted({*seen, *(layer for peers in alike for layer in peers)}))

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

    def columns(self) -> list[Tensor]:
        """What record ops in captured CUDA graphs read beside the buffer."""
        return [placement.columns for placement in self._placements.values()]

    # ---- calls of compiled graphs -------------------------------------------------------------------------------
    def place(self, graph: Sites, weights: tuple[Any, ...], placed: dict[tuple[int, Place], None]) -> Placement:
        """The columns that a graph's sites write, for the weights of this call."""
        key = (id(graph), id(weights[0]))
        placement = self._placements.get(key)
        if placement is None or not placement.stands(graph, weights):
            with self.lock:
                if placement is not None and self.captured:
                    self._read_by_graphs.append(placement.columns)
                placement = self._place(graph, weights, placed)
                self._placements[key] = placement
        self.problems.update(placement.problems)
        return placement

    def _place(self, graph: Sites, weights: tuple[Any, ...], placed: dict[tuple[int, Place], None]) -> Placement:
        if not all(self._hangs_as_named(w) for w in weights):
            self.claim()
        places = tuple(self._place_site(graph, number, weights) for number in range(len(graph.sites)))
        for gates, experts in zip(graph.gates, graph.experts, strict=True):
            for number in (gates or experts)[:1]:
                self._link(weights[number])
        found: dict[int, str] = {}
        wanted = 0
        for place, site in zip(places, graph.sites, strict=True):
            if place.block is None:
                continue
            index = place.block.index
            if index in found:
                raise RefusedConfiguration(
                    f"layer {index} routes twice in one forward ({found[index]} and {place.module}): routed_experts has room for "
                    "one choice per token and layer. Two routed MLPs in a layer and layers that run twice cannot be recorded."
                )
            found[index] = place.module
            self.routed[index] = site.top_k, site.num_experts
            self._name_experts(index, place.block, site)
            wanted = max(wanted, site.top_k)
        self.modules.update(found)
        placed.update(dict.fromkeys(enumerate(places)))
        needed = {*found, *self.expected()}
        if found and (not needed <= set(self.layers) or wanted > self.top_k):
            self._lay_out(tuple(sorted({*self.layers, *needed})), max(wanted, self.top_k))
            self._forget_placements()  # their columns are those of the smaller buffer
        column = {layer: m for m, layer in enumerate(self.layers)}
        numbers = [column[p.block.index] if p.block is not None else -1 for p in places]
        columns = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if self.device.type == "cuda":
            from r3_pass.passes import kernels  # Triton is imported where there is a GPU only

            columns = columns.pin_memory().to(self.device, non_blocking=True)
            kernels.prepare(columns)
        problems = dict.fromkeys(p.problem for p in places if p.problem)
        return Placement(graph, weights, problems, tuple(numbers), columns)

    def _name_experts(self, layer: int, block: Block, site: Accepted) -> None:
        """Note how many ids of a layer name an expert, by the graph, else by the model's modules."""
        evidence = self.structure.experts.get(block)
        named = site.named
        if named is None and evidence is not None and evidence.count < site.num_experts <= 2 * evidence.count:
            named = evidence.count
        if named is not None and named < site.num_experts:
            self.named[layer] = named

    def _hangs_as_named(self, weight: Any) -> bool:
        """Whether a weight is the model's, and its marks say where."""
        owner = self._owner(weight)
        if owner is None or not owner.names:
            return owner is not None
        path, _, name = owner.names[0].rpartition(".")
        try:
            return getattr(self.model.get_submodule(path), name, None) is weight
        except AttributeError:  # the module is gone
            return False

    def _place_site(self, graph: Sites, number: int, weights: tuple[Any, ...]) -> Place:
        """Which block's routing this is: by the gate, then by the experts, then by the module path it was traced in."""
        site = graph.sites[number]
        gate = [o for i in graph.gates[number] if (o := self._owner(weights[i])) is not None]
        experts = [o for i in graph.experts[number] if (o := self._owner(weights[i])) is not None]
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

    def refuse(self, refusals: Sequence[Rejected]) -> None:
        """Remember routing that ran in this step and cannot be recorded."""
        for refusal in refusals:
            self.refused[f"{refusal.module or refusal.node}: {refusal.reason}"] = None

    def ran(self, placement: Placement, tokens: int) -> None:
        """Count a recorded call of a graph; called after it was launched.

        Raises: BufferLayoutError if it ran over another number of tokens than the step's slot mapping has.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.captured = self.capturing = True
        for column in placement.stored:
            self.calls[column] += 1
        if tokens != self.tokens:
            raise BufferLayoutError(
                f"the forward ran over {tokens} tokens, the step's slot mapping has {self.tokens} entries; nothing was recorded. "
                "Give one slot for each token that is forwarded, -1 for padding."
            )

    def begin(self) -> None:
        """At a step's first graph: weights moved in the model are seen, and the forward comes after the step's mapping."""
        if self.begun:
            return
        self.begun = True
        if self.weights_replaced():
            self.claim()
        if self.device.type == "cuda":
            self._join_streams()

    def _join_streams(self) -> None:
        """A forward on another stream than the step was entered on comes after the step's mapping."""
        entered, self.entered_on = self.entered_on, None
        if entered is None or torch.cuda.is_current_stream_capturing():
            return
        self.ran_on = streams.current(self.device)
        streams.order(self.ran_on, entered, self.device)

    def settle(self) -> None:
        """After a CUDA graph was captured: replays on the current stream come after what its record ops were given to read."""
        if self.capturing:
            for placement in self._placements.values():
                tables = getattr(placement.columns, "_r3_tables", None)
                if tables is not None and tables.beside is not None:
                    torch.cuda.current_stream(self.device).wait_stream(tables.beside)
                    tables.make_room()

    def before(self, placement: Placement) -> None:
        """Raises RefusedConfiguration if one of the layers was written in this step already."""
        for column in placement.stored:
            if self.calls[column]:
                layer = self.layers[column]
                raise RefusedConfiguration(
                    f"layer {layer} ({self.modules.get(layer, '?')}) routes a second time in one step: a second "
                    "forward of the model, "
                    "or a layer that runs twice in one. A step is exactly one forward: open a session.step for each."
                )


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


def find_binding(
    weights: Sequence[Any], served: Callable[[], Iterable[Binding]], strangers: MutableMapping[Tensor, None]
) -> Binding | None:
    """Whose call this is, by the weights that arrived; None for a model that no session is attached to.

    Args:
        served: bindings that were found before for the same graph: unknown weights may be new ones of their models.
        strangers: weights that belong to none of these; added to.
    """
    for weight in weights:
        owner = owner_of(weight)
        if owner is not None:
            return owner.binding
    for binding in served():
        if all(w in strangers for w in weights):
            return None
        if binding.claim() and (found := next((o.binding for w in weights if (o := owner_of(w)) is not None), None)):
            return found
        strangers.update((w, None) for w in weights if isinstance(w, Tensor))
    return None
