"""What the compiled graphs and a session share: where rows go, and which layer a weight names.

A compiled graph may serve every layer of a model, or several models: it learns at the call, from the parameters that arrive, whose
row it writes. So each weight of an attached model carries a mark (`marks`), and a site's weights tell its layer (`places`).

Legend: T tokens in the step, M stored (MoE) layers, K top-k.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from r3_pass import streams
from r3_pass.deferred import Deferred
from r3_pass.errors import BufferLayoutError, RefusedConfiguration
from r3_pass.marks import Marks, owner_of
from r3_pass.passes import ops
from r3_pass.passes.site import Accepted, Rejected
from r3_pass.places import Place, Places, Sites
from r3_pass.report import GraphRecord
from r3_pass.structure import Block, Structure, inspect


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
    stored: tuple[int, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.stored = tuple(n for n in self.numbers if n >= 0)

    def stands(self, graph: Sites, weights: tuple[Any, ...]) -> bool:
        same = self.graph is graph and len(self.weights) == len(weights)
        return same and all(map(operator.is_, self.weights, weights))


class Binding:
    """One attachment, as compiled graphs see it.

    Attributes:
        buffer: int16 [S + 1, M, K], or None while nothing is allocated.
        state, mapping: persistent tensors of `passes.ops.record`.
        tokens: T of the running step, None outside a step: then graphs run without recording.
        paused: how many pauses are open, in any thread: while there is one, graphs run without recording.
        layers: stored layers in order; grows in the first step only.
        routed: top-k and number of experts of each layer that was placed.
        named: by layer, how many experts there are, where its router chooses among more (a padded weight): checked on the host.
        calls: how often each stored layer ran in the running step; left: how many have not; records: how many record ops ran.
        captured: a CUDA graph holds the record op, so a step may run without the host seeing it.
        graphs: what the backends have compiled that graphs of the model came from, as far as one ran in a step.
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
        self.device = device
        self.structure: Structure = inspect(model, experts)
        self.marks = Marks(model, self.structure, self, self._forget_placements, mark)
        self.places = Places(model, self.structure, self.marks, num_layers)
        self.buffer: Tensor | None = None
        self.state = torch.zeros(0, dtype=torch.int32)
        self.mapping = torch.zeros(0, dtype=torch.int64)
        self.tokens: int | None = None
        self.paused = 0
        self.layers: tuple[int, ...] = ()
        self.top_k = 0
        self.calls: list[int] = []
        self.left = 0
        self.records = 0
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
        self._lay_out = lay_out
        self._compiled: dict[int, Sequence[GraphRecord]] = {}
        self._placements: dict[tuple[int, int], Placement] = {}
        # Columns of placements that are gone, and what columns were copied from, while a CUDA graph may still read them.
        self._read_by_graphs: list[Tensor] = []
        self._all = torch.zeros(0, dtype=torch.int64)  # the columns of all stored layers
        # Columns of launches that leave layers to record ops in graphs. CUDA graphs read them, so they live as long as the buffer.
        self._some: dict[tuple[int, ...], Tensor] = {}
        self._deferred = Deferred(device)
        self.claim()

    # ---- the model ----------------------------------------------------------------------------------------------
    @property
    def container(self) -> str | None:
        """Path of the list of blocks that holds the routers; None until one is found."""
        return self.places.container

    @property
    def num_layers(self) -> int | None:
        """Decoder layers as the user gave them; None if the structure tells."""
        return self.places.num_layers

    def count_layers(self, container: str) -> int:
        return self.places.count_layers(container)

    def expected(self) -> tuple[int, ...]:
        """As `Places.expected`."""
        return self.places.expected()

    def blocks(self) -> dict[int, nn.Module]:
        """The module of each stored layer."""
        return {layer: self.model.get_submodule(f"{self.container}.{layer}".strip(".")) for layer in self.layers}

    def experts_shown(self) -> dict[int, int]:
        """How many experts the modules of each stored layer show, where they show any."""
        shown = {layer: self.structure.experts.get(Block(self.container or "", layer)) for layer in self.layers}
        return {layer: evidence.count for layer, evidence in shown.items() if evidence is not None}

    # ---- weights ------------------------------------------------------------------------------------------------
    def claim(self) -> bool:
        """As `Marks.claim`."""
        return self.marks.claim()

    def names_layer(self, weight: Any) -> bool:
        """Whether a weight's name tells which block of the model it is in."""
        owner = self.marks.owner(weight)
        return owner is not None and bool(owner.blocks)

    def owns(self, weight: Any) -> bool:
        """Whether a weight is one of the model's, as far as was seen."""
        return self.marks.owner(weight) is not None

    def release_weights(self) -> None:
        """Take every mark off again, for good."""
        self.marks.release()
        self._placements.clear()

    def _forget_placements(self) -> None:
        if self.captured:
            self._read_by_graphs.extend(self.columns())
        self._placements.clear()

    # ---- calls of compiled graphs -------------------------------------------------------------------------------
    @property
    def recording(self) -> bool:
        """Whether what runs now is a step's forward."""
        return self.tokens is not None and not self.paused

    def columns(self) -> list[Tensor]:
        """What record ops in captured CUDA graphs read beside the buffer."""
        return [*(placement.columns for placement in self._placements.values()), self._all, *self._some.values()]

    def bind(self, buffer: Tensor, state: Tensor, calls: list[int]) -> None:
        """Rows go to this buffer from now on; `calls`, of its layers, were written in the running step already."""
        if self.captured:
            self._read_by_graphs.extend((self._all, *self._some.values()))
        self._some.clear()
        self.buffer, self.state, self.calls, self.left = buffer, state, calls, calls.count(0)
        self._all = self._sent(range(len(calls)))

    def start(self, tokens: int) -> None:
        """A step of so many tokens begins."""
        self.calls = [0] * len(self.layers)
        self.left = len(self.layers)
        self.records = 0
        self.capturing = self.begun = False
        self.problems.clear()
        self.refused.clear()
        self._deferred.clear()
        self.tokens = tokens
        if self.device.type == "cuda":
            self.entered_on = streams.current(self.device)

    def stop(self) -> int | None:
        """The step is over. Returns: its tokens."""
        tokens, self.tokens = self.tokens, None
        self._deferred.clear()  # a layer that did not run is an error, and so these are nobody's
        return tokens

    def placed(self, graph: Sites, weights: tuple[Any, ...]) -> Placement | None:
        """Where a graph's sites were placed for the weights of this call, if they were."""
        placement = self._placements.get((id(graph), id(weights[0])))
        if placement is None or not placement.stands(graph, weights):
            return None
        if placement.problems:
            self.problems.update(placement.problems)
        return placement

    def place(self, graph: Sites, weights: tuple[Any, ...], placed: dict[tuple[int, Place], None]) -> Placement:
        """The columns that a graph's sites write, for the weights of this call; added to `placed`."""
        known = self.placed(graph, weights)
        if known is not None:
            return known
        with self.lock:
            key = (id(graph), id(weights[0]))
            if self.captured and (older := self._placements.get(key)) is not None:
                self._read_by_graphs.append(older.columns)
            placement = self._placements[key] = self._place(graph, weights, placed)
        self.problems.update(placement.problems)
        return placement

    def _place(self, graph: Sites, weights: tuple[Any, ...], placed: dict[tuple[int, Place], None]) -> Placement:
        if not all(self.marks.hangs_as_named(w) for w in weights):
            self.claim()
        places = tuple(self.places.find(graph, number, weights) for number in range(len(graph.sites)))
        for gates, experts in zip(graph.gates, graph.experts, strict=True):
            for number in (gates or experts)[:1]:
                self.marks.link(weights[number])
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
            self._write_deferred()  # columns of the smaller buffer
            self._lay_out(tuple(sorted({*self.layers, *needed})), max(wanted, self.top_k))
            self._forget_placements()  # their columns are those of the smaller buffer
        column = {layer: m for m, layer in enumerate(self.layers)}
        numbers = [column[p.block.index] if p.block is not None else -1 for p in places]
        problems = dict.fromkeys(p.problem for p in places if p.problem)
        return Placement(graph, weights, problems, tuple(numbers), self._sent(numbers))

    def _sent(self, numbers: Iterable[int]) -> Tensor:
        """Columns for the record op, on the device."""
        columns = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        if self.device.type == "cuda":
            from r3_pass.passes import kernels  # Triton is imported where there is a GPU only

            pinned = columns.pin_memory()
            if torch.cuda.is_current_stream_capturing():
                self._read_by_graphs.append(pinned)  # each replay copies it again
            columns = pinned.to(self.device, non_blocking=True)
            kernels.prepare(columns)
        return columns

    def _name_experts(self, layer: int, block: Block, site: Accepted) -> None:
        """Note how many ids of a layer name an expert, by the graph, else by the model's modules."""
        evidence = self.structure.experts.get(block)
        named = site.named
        if named is None and evidence is not None and evidence.count < site.num_experts <= 2 * evidence.count:
            named = evidence.count
        if named is not None and named < site.num_experts:
            self.named[layer] = named

    def learn(self, graphs: Sequence[GraphRecord]) -> None:
        """A graph of the model came from the backend that compiled these; it goes on to add to them."""
        self._compiled[id(graphs)] = graphs

    @property
    def graphs(self) -> tuple[GraphRecord, ...]:
        return tuple(record for graphs in self._compiled.values() for record in graphs)

    def refuse(self, refusals: Sequence[Rejected]) -> None:
        """Remember routing that ran in this step and cannot be recorded."""
        for refusal in refusals:
            self.refused[_named(refusal)] = None

    def withdraw(self, refusals: Sequence[Rejected]) -> None:
        """What was refused in this step turned out to be right, by what ran after it."""
        for refusal in refusals:
            self.refused.pop(_named(refusal), None)

    def ran(self, placement: Placement, tokens: int, ids: Tensor | None = None) -> None:
        """Count a call of a graph, after it was launched.

        Args:
            ids: [T, k] of the one layer of a graph that did not record them; they are written with those of the other layers.

        Raises: BufferLayoutError if it ran over another number of tokens than the step's slot mapping has; RefusedConfiguration as
            `Deferred.add`.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.captured = self.capturing = True
        if len(placement.stored) == len(self.calls):  # a graph of all layers, each of which had not run (`before`)
            self.calls = [1] * len(self.calls)
        else:
            for column in placement.stored:
                self.calls[column] += 1
        self.left -= len(placement.stored)
        if tokens != self.tokens:
            raise BufferLayoutError(
                f"the forward ran over {tokens} tokens, the step's slot mapping has {self.tokens} entries; nothing was recorded. "
                "Give one slot for each token that is forwarded, -1 for padding."
            )
        if ids is None:
            self.records += 1
        elif not self._deferred.add(placement.stored[0], ids):
            self._write(placement.columns, [ids])
        if not self.left:
            self._write_deferred()

    def _write_deferred(self) -> None:
        """All layers have run, or the buffer is about to be another one."""
        if numbers := self._deferred.columns:
            columns = self._all if len(numbers) == len(self._all) else self._columns_of(tuple(sorted(numbers)))
            self._write(columns, self._deferred.take())

    def _columns_of(self, numbers: tuple[int, ...]) -> Tensor:
        known = self._some.get(numbers)
        if known is None:
            known = self._some[numbers] = self._sent(numbers)
        return known

    def _write(self, columns: Tensor, ids: Sequence[Tensor]) -> None:
        assert self.buffer is not None, "placing laid it out"
        self.records += 1
        ops.write(self.buffer, self.state, self.mapping, columns, ids)

    def begin(self) -> None:
        """At a step's first graph: weights moved in the model are seen, and the forward comes after the step's mapping."""
        if self.begun:
            return
        self.begun = True
        if self.marks.replaced():
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
            for columns in self.columns():
                tables = getattr(columns, "_r3_tables", None)
                if tables is not None and tables.beside is not None:
                    torch.cuda.current_stream(self.device).wait_stream(tables.beside)
                    tables.make_room()

    def before(self, placement: Placement) -> None:
        """Raises RefusedConfiguration if one of the layers was written in this step already."""
        if self.left == len(self.calls):
            return
        for column in placement.stored:
            if self.calls[column]:
                layer = self.layers[column]
                raise RefusedConfiguration(
                    f"layer {layer} ({self.modules.get(layer, '?')}) routes a second time in one step: a second "
                    "forward of the model, "
                    "or a layer that runs twice in one. A step is exactly one forward: open a session.step for each."
                )


def _named(refusal: Rejected) -> str:
    return f"{refusal.module or refusal.node}: {refusal.reason}"


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
