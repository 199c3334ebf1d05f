"""Rewrite a graph so that its routing sites take given expert ids.

    before:  values: f32[T, K], ids: i64[T, K] = topk(scores, K)
    after:   given: i32[T, K] = r3_routes[site]
             n = where(given < 0, ids, given);  values = gather(scores, -1, n)         # every use of ids is one of n
             the rest as it was

The graph is a copy of the one that Dynamo traced, before autograd, so that gradients are derived from what stands
there: of the live scores at `n`. The given ids are an input of each call, and go into nested graphs (activation
    checkpointing) as inputs of those:
whatever runs a region again runs it with the same ids.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from r3_pass.passes.forcing import Forcing, Swap, plan
from r3_pass.passes.inputs import fake_mode_of
from r3_pass.passes.match import is_weight
from r3_pass.passes.record import Occurrence, Path, attribute, called_as
from r3_pass.passes.site import Accepted, tokens_of
from r3_pass.passes.unmask import Read
from r3_pass.registry.dataflow import DataFlow, subgraph_of
from r3_pass.registry.shapes import dims, product, value


@dataclasses.dataclass(frozen=True)
class Forced:
    """A rewritten graph.

    Attributes:
        module: the copy, with one more input behind the others: int32 [N, T, K], the ids of each occurrence, -1 for
            the live router.
        occurrences: all N sites as they run, in the order of that input.
        unforced: for each, why it stays live when ids are given; "" if it is forced, or has nothing to force
            (`site.fixed`).
        added: the input's placeholder.
        tokens: T, an int or an expression of the graph's symbols.
        top_k: K, the largest of the sites'.
    """

    module: fx.GraphModule
    occurrences: tuple[Occurrence, ...]
    unforced: tuple[str, ...]
    added: fx.Node
    tokens: Any
    top_k: int


def force(
    module: fx.GraphModule, sites: Sequence[Accepted], device: torch.device, broken: bool = False
) -> Forced | str:
    """Copy a Dynamo graph and make its sites take given ids in the copy.

    Args:
        module: as Dynamo hands it to a backend; not changed.
        sites: what the matcher accepted in it, not empty.
        device: where the ids are.
        broken: the graph ends in a graph break.

    Returns: the copy, or a reason (text) why none of it can be forced.
    """
    mode = fake_mode_of(module.graph)
    if mode is None:
        return "the graph carries no traced values"
    flow = DataFlow(module.graph, is_weight)
    found = {site: plan(flow, site, broken) for site in sites if not site.fixed}
    plans = {site: forcing for site, forcing in found.items() if not isinstance(forcing, str)}
    places = _places(module, sites)
    counts = {tokens_of(site) for site in sites}
    if len(counts) > 1:
        return f"its layers route different numbers of tokens ({', '.join(map(str, counts))})"
    top_k = max(site.top_k for site in sites)
    with mode:
        ids = torch.empty((len(places), _size(sites[0]), top_k), dtype=torch.int32, device=device)
    with torch.no_grad():  # else what is traced here is saved for a backward, in the checkpointed region that compiles
        copy, added = _copy(module, plans, places, ids, {})
    _settle(copy)
    unforced = tuple("" if site.fixed or site in plans else str(found[site]) for site, _ in places)
    return Forced(copy, tuple(_occurrences(places)), unforced, added, counts.pop(), top_k)


def _size(site: Accepted) -> Any:
    """The same as a number that fake tensors take."""
    seen = value(site.columns[0])
    at = None if site.id_dim is None else site.id_dim % max(seen.dim(), 1)
    return product([size for dim, size in enumerate(seen.shape) if dim != at])


# ---- copying ----------------------------------------------------------------------------------------------------
Place = tuple[Accepted, Path]


def _places(module: fx.GraphModule, sites: Sequence[Accepted]) -> list[Place]:
    """Every run of every site, in the order in which they run."""
    found: list[Place] = []
    anchors = {site.selections[0]: site for site in sites}
    for node in module.graph.nodes:
        nested = subgraph_of(node)
        if nested is not None:
            found.extend((site, (node, *path)) for site, path in _places(nested, sites))
        if node in anchors:
            found.append((anchors[node], ()))
    return found


def _copy(
    module: fx.GraphModule,
    plans: dict[Accepted, Forcing],
    places: Sequence[Place],
    ids: torch.Tensor,
    outer: dict[Place, fx.Node],
) -> tuple[fx.GraphModule, fx.Node]:
    """Copy a graph and force its sites: by an input [N, T, K] in the outermost graph, by N inputs [T, k] in a nested
    one.

    Args:
        ids: a fake tensor of the input.
        outer: for a nested graph, the values outside that its inputs get; empty for the outermost.

    Returns: the copy, and the last input.
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    bodies: dict[str, fx.GraphModule] = {}
    given: dict[Place, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op != "placeholder" and not given:
            added = _take_each(graph, places, given, outer) if outer else _take_all(graph, places, given, ids)
        nested = subgraph_of(node)
        new = graph.node_copy(node, lambda n: mapping[n])
        mapping[node] = new
        if node.op == "placeholder" and hasattr(node, "_dynamo_source"):
            new._dynamo_source = node._dynamo_source
        inside = {(site, path[1:]): given[(site, path)] for site, path in places if path and path[0] is node}
        if nested is None or not inside:
            continue
        body, _ = _copy(nested, plans, list(inside), ids, inside)
        reference = next(a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr")
        name = f"r3_replay_{str(reference.target).replace('.', '_')}_{len(bodies)}"
        bodies[name] = body
        with graph.inserting_before(new):
            pointer = graph.get_attr(name)
        new.args = (*(pointer if a is mapping[reference] else a for a in new.args), *inside.values())
    for site, path in places:
        if not path and site in plans:
            _Forcer(graph, site, mapping, given[(site, path)]).run(plans[site])
    held = {str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")}
    copy = fx.GraphModule({name: bodies.get(name) or attribute(module, name) for name in held}, graph)
    copy.training = module.training
    copy.meta = dict(module.meta)
    for carried in ("_param_name_to_source", "shape_env", "compile_subgraph_reason"):
        if hasattr(module, carried):
            setattr(copy, carried, getattr(module, carried))
    return copy, added


def _take_all(graph: fx.Graph, places: Sequence[Place], given: dict[Place, fx.Node], ids: torch.Tensor) -> fx.Node:
    routes = _input(graph, "r3_routes", ids)
    for number, place in enumerate(places):
        row = graph.call_method("select", (routes, 0, number))
        row.meta.update(val=ids.select(0, number), example_value=ids.select(0, number))
        given[place] = row
    return routes


def _take_each(
    graph: fx.Graph, places: Sequence[Place], given: dict[Place, fx.Node], outer: dict[Place, fx.Node]
) -> fx.Node:
    for number, place in enumerate(places):
        given[place] = _input(graph, f"r3_given_{number}", value(outer[place]))
    return given[places[-1]]


def _input(graph: fx.Graph, name: str, seen: torch.Tensor) -> fx.Node:
    node = graph.placeholder(name)
    node.meta.update(val=seen, example_value=seen)
    node._dynamo_source = None  # AOTAutograd reads it of every placeholder
    return node


def _settle(module: fx.GraphModule) -> None:
    """Check and recompile a graph and those nested in it."""
    for nested in module.children():
        if isinstance(nested, fx.GraphModule):
            _settle(nested)
    module.graph.lint()
    module.recompile()


def _occurrences(places: Sequence[Place]) -> list[Occurrence]:
    first: dict[Accepted, Path] = {}
    found = []
    for site, path in places:
        start = first.setdefault(site, path)
        gate = tuple(w for weight in site.gate if (w := called_as(weight, start, path)) is not None)
        experts = tuple(w for weight in site.experts if (w := called_as(weight, start, path)) is not None)
        found.append(Occurrence(site, gate, experts, ()))
    return found


# ---- forcing ----------------------------------------------------------------------------------------------------
class _Forcer:
    """Swaps the ids and scores of one site in the copy of the graph that it stands in."""

    def __init__(self, graph: fx.Graph, site: Accepted, mapping: dict[fx.Node, fx.Node], given: fx.Node) -> None:
        self.graph = graph
        self.columns = 1 if len(site.columns) > 1 else site.top_k
        self.mapping = mapping
        self.given = given
        self.made: set[fx.Node] = set()
        self.unmasked: dict[fx.Node, fx.Node] = {}
        self.chosen: dict[fx.Node, fx.Node] = {}

    def run(self, forcing: Forcing) -> None:
        for read in (*forcing.reads, *(swap.scores for swap in forcing.swaps)):
            self._unmask(read)
        for read in forcing.reads:
            reader = self.mapping[read.node]
            reader.replace_input_with(self.mapping[read.argument], self._source(read))
        for swap in forcing.swaps:
            self._swap(swap)
        if forcing.last is not None:
            ids = self.mapping[forcing.last]
            with self.graph.inserting_before(ids.next):
                chosen = self._choose(ids, forcing.id_dim, None, 0)
            self._replace(ids, chosen)

    def _unmask(self, read: Read) -> None:
        """Repeat the steps that lead to a score, without the masks among them."""
        for step in read.steps:
            if step.node in self.unmasked:
                continue
            node, carrier = self.mapping[step.node], self.mapping[step.carrier]
            source = carrier if step.after is None else self.unmasked[step.after]
            with self.graph.inserting_before(node):
                if step.masks:  # a copy: the mask may be put on in place
                    self.unmasked[step.node] = self._call("clone", source)
                    continue
                again = self.graph.node_copy(node)
                again.replace_input_with(carrier, source)
                self.made.add(again)
                self.unmasked[step.node] = again

    def _source(self, read: Read) -> fx.Node:
        return self.unmasked[read.steps[-1].node] if read.steps else self.mapping[read.argument]

    def _swap(self, swap: Swap) -> None:
        node = self.mapping[swap.node]
        behind = node.next
        with self.graph.inserting_before(behind):
            if swap.like is swap.node:
                native = node if swap.ids[0] is swap.node else self._call(operator.getitem, node, 1)
                at = None if swap.width is None else swap.dim
                self.chosen[swap.node] = self._choose(native, at, swap.width, swap.column)
            chosen = self.chosen[swap.like]
            scores = self._scores(swap, chosen) if swap.values else None
        for ids in swap.ids:
            self._replace(self.mapping[ids], chosen)
        for values in swap.values:
            assert scores is not None, "made above"
            self._replace(self.mapping[values], scores)

    def _choose(self, native: fx.Node, at: int | None, width: int | None, column: int) -> fx.Node:
        """`where(given < 0, native, given)`, the given ids laid out as the native ones' first columns."""
        ids = self.given
        if at is None:
            ids = self._call("reshape_as", self._call("select", ids, 1, column), native)
        else:
            ids = self._call("narrow", ids, 1, column, self.columns)
            if width is not None and width > self.columns:
                ids = self._call(torch.nn.functional.pad, ids, (0, width - self.columns), "constant", -1)
            last = len(dims(native)) - 1
            like = native if at == last else self._call("movedim", native, at, -1)
            ids = self._call("reshape_as", ids, like)
            ids = ids if at == last else self._call("movedim", ids, -1, at)
        ids = self._call("to", ids, value(native).dtype)
        return self._call(torch.where, self._call(operator.lt, ids, 0), native, ids)

    def _scores(self, swap: Swap, chosen: fx.Node) -> fx.Node:
        """The scores of the chosen, laid out as the selection returns them."""
        source = self._source(swap.scores)
        rank = len(dims(swap.scores.argument))
        index = chosen if len(dims(chosen)) == rank else self._call("unsqueeze", chosen, swap.dim)
        scores = self._call(torch.gather, source, swap.dim, index)
        return scores if len(dims(swap.values[0])) == rank else self._call("squeeze", scores, swap.dim)

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in self.made)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        """Insert an operator (a method by its name) with what tracing would have seen of it."""
        seen = [value(a) if isinstance(a, fx.Node) else a for a in args]
        if isinstance(target, str):
            node = self.graph.call_method(target, args)
            result = getattr(seen[0], target)(*seen[1:])
        else:
            node = self.graph.call_function(target, args)
            result = target(*seen)
        node.meta.update(val=result, example_value=result)
        self.made.add(node)
        return node
