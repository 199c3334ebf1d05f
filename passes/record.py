"""Rewrite a graph so that the ids of its routing sites land in the slot buffer.

    before:  ids_0: i64[T, K] = getitem(topk, 1);  ids_1 = ...;  return (hidden,)
    after:   the same, and, once, at the end:
             r3_pass.record(r3_buffer, r3_state, r3_slots, r3_columns, [ids_0, ids_1, ...])
             return (hidden, T)

A graph of one site may belong to one of many layers. It can hand out its ids instead, for one launch after the last layer:

    after:   return (hidden, ids_0)

The graph is a copy; the one that Dynamo traced stays as it is. Ids inside nested graphs (activation checkpointing) leave them as
further results, so that nothing is written inside a region that is run again in the backward.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from r3_pass.passes import ops
from r3_pass.passes.inputs import add_input, fake_mode_of
from r3_pass.passes.site import Accepted
from r3_pass.registry.dataflow import bound, subgraph_of
from r3_pass.registry.operators import spelling
from r3_pass.registry.shapes import dims, plain, product, value

BUFFER, STATE, SLOTS, COLUMNS = "buffer", "state", "slots", "columns"


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """A site as it runs: once, or once for each call of the nested graph that it stands in.

    Attributes:
        site: what the matcher decided.
        gate, experts: placeholders or attributes of the *outer* graph that name the layer.
        columns: values in the rewritten outer graph that hold the ids.
    """

    site: Accepted
    gate: tuple[fx.Node, ...]
    experts: tuple[fx.Node, ...]
    columns: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A rewritten graph.

    Attributes:
        module: the copy, with four more inputs behind the others: buffer, state, slots, columns; or with one more result.
        occurrences: in the order of `columns` entries.
        added: the new placeholders, in order.
        tokens: token count of the sites: an int if it is fixed, None if the graph returns it as one more result.
        hands_out: nothing is recorded, and one more result is the ids [T, k], in memory that nobody else has.
    """

    module: fx.GraphModule
    occurrences: tuple[Occurrence, ...]
    added: tuple[fx.Node, ...]
    tokens: int | None
    hands_out: bool = False


def rewrite(
    module: fx.GraphModule, sites: Sequence[Accepted], device: torch.device, hand_out: bool = False
) -> Recorded | str:
    """Copy a Dynamo graph and record its sites in the copy.

    Args:
        module: as Dynamo hands it to a backend; not changed.
        sites: what the matcher accepted in it, not empty.
        device: where the ids are, and so the buffer.
        hand_out: return the ids, if there is one site. Not where a tensor takes over another one's memory (`set_`, `.data =`): what
            writes to it later is not seen, and a copy looks to Inductor like one that nobody needs.

    Returns: the copy, or a reason (text) why the sites cannot be recorded together.
    """
    mode = fake_mode_of(module.graph)
    if mode is None:
        return "the graph carries no traced values"
    copy, where = copy_graph(module, _wanted(sites))
    graph = copy.graph
    output = next(n for n in graph.nodes if n.op == "output")
    found = tuple(_occurrences(sites, where))
    if reason := unequal(found):
        return reason
    if hand_out and len(found) == 1 and not any(spelling(node) == "set" for node in _all_nodes(module)):
        with graph.inserting_before(output):
            ids = _flatten(graph, found[0])
            if (found[0].site.shared and not found[0].site.overwritten) or _holds_more(ids):
                ids = _call(graph, "clone", ids, ())
        output.args = ((*output.args[0], ids),)
        graph.lint()
        copy.recompile()
        return Recorded(copy, found, (), None, hands_out=True)
    added = (
        add_input(graph, mode, BUFFER, (7, 5, 3), torch.int16, device),
        add_input(graph, mode, STATE, (11,), torch.int32, device),
        add_input(graph, mode, SLOTS, (13,), torch.int64, device),
        add_input(graph, mode, COLUMNS, (-len(found),), torch.int64, device),
    )
    with graph.inserting_before(output):
        _, tokens = insert_record(graph, found, added)
        if not isinstance(tokens, int):
            results = tuple(output.args[0])
            output.args = ((*results, tokens),)
    graph.lint()
    copy.recompile()
    return Recorded(copy, found, added, tokens if isinstance(tokens, int) else None)


def occurrences(module: fx.GraphModule, sites: Sequence[Accepted]) -> tuple[Occurrence, ...]:
    """Where each site runs, without a rewrite to use; for explanations."""
    _, where = copy_graph(module, _wanted(sites))
    return tuple(_occurrences(sites, where))


def insert_record(
    graph: fx.Graph, found: Sequence[Occurrence], added: Sequence[fx.Node], count: bool = True
) -> tuple[list[fx.Node], Any]:
    """Insert the record op at the graph's insertion point.

    Args:
        count: also make a node for the token count where that is symbolic.

    Returns: the [T, k] ids of each site, and the token count: an int, a node, or None if it was not asked for.
    """
    flat = [_flatten(graph, occurrence) for occurrence in found]
    graph.call_function(ops.record, (*added, flat))
    seen = value(flat[0])
    tokens = plain(seen.shape[0]) if isinstance(seen, torch.Tensor) else None
    if isinstance(tokens, int) or not count:
        return flat, tokens if isinstance(tokens, int) else None
    size = graph.call_method("size", (flat[0], 0))
    size.meta["example_value"] = seen.shape[0] if isinstance(seen, torch.Tensor) else None
    return flat, size


def unequal(found: Sequence[Occurrence]) -> str:
    """Why these sites have no place in one step; "" if they have."""
    counts: dict[Any, None] = {}
    devices: dict[torch.device, None] = {}
    for occurrence in found:
        seen = value(occurrence.columns[0])
        if isinstance(seen, torch.Tensor):
            devices[seen.device] = None
        shape = dims(occurrence.columns[0])
        at = None if occurrence.site.id_dim is None else occurrence.site.id_dim % max(len(shape), 1)
        counts[product([size for dim, size in enumerate(shape) if dim != at])] = None
    if len(devices) > 1:
        return f"its layers are on several devices ({', '.join(map(str, devices))}), and the slot buffer is on one"
    if len(counts) < 2:
        return ""
    return (
        f"its layers route different numbers of tokens ({', '.join(map(str, counts))}; an encoder-decoder, say), and a step has "
        "one slot a token"
    )


def kept(graph: fx.Graph, ids: fx.Node) -> fx.Node:
    """A copy of ids as they are where they are made."""
    with graph.inserting_after(ids):
        return _call(graph, "clone", ids, ())


def _holds_more(ids: fx.Node) -> bool:
    """Whether ids are a part of something larger (all experts in order, say), which would stay in memory with them."""
    seen = value(ids)
    if not isinstance(seen, torch.Tensor):
        return False
    return bool(plain(seen.untyped_storage().nbytes()) != product([*dims(ids), seen.dtype.itemsize]))


def _flatten(graph: fx.Graph, occurrence: Occurrence) -> fx.Node:
    """The ids of one occurrence as [T, k], rows in token order."""
    site = occurrence.site
    parts = []
    for column in occurrence.columns:
        seen = value(column)
        rank = seen.dim() if isinstance(seen, torch.Tensor) else 2
        node = column
        if site.id_dim is None:
            node = _call(graph, "reshape", node, (-1, 1))
        else:
            if site.id_dim != rank - 1:
                node = _call(graph, "movedim", node, (site.id_dim, -1))
            if rank != 2:
                width = 1 if len(occurrence.columns) > 1 else site.top_k
                node = _call(graph, "reshape", node, (-1, width))
        parts.append(node)
    if len(parts) == 1:
        return parts[0]
    joined = graph.call_function(torch.cat, (parts, 1))
    _fake(joined, torch.cat, ([value(p) for p in parts], 1))
    return joined


def _call(graph: fx.Graph, method: str, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    made = graph.call_method(method, (node, *args))
    seen = value(node)
    if isinstance(seen, torch.Tensor):
        _fake(made, getattr(seen, method), args)
    return made


def _fake(node: fx.Node, function: Any, args: tuple[Any, ...]) -> None:
    result = function(*args)
    node.meta["example_value"] = result
    node.meta["val"] = result


Path = tuple[fx.Node, ...]  # calls of nested graphs, the outermost first; () for a value of the outer graph itself
Where = dict[tuple[fx.Node, Path], fx.Node]


def _wanted(sites: Sequence[Accepted]) -> dict[fx.Node, bool]:
    """The values that hold ids; True for those that the graph changes in place later, so that a copy must be kept."""
    return {node: site.overwritten for site in sites for node in site.columns}


def copy_graph(module: fx.GraphModule, wanted: dict[fx.Node, bool]) -> tuple[fx.GraphModule, Where]:
    """Copy a graph, handing the wanted values of nested graphs out to it.

    Returns: the copy, and where each wanted value now is, by the original value and the original calls that lead to it.
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    where: Where = {}
    bodies: dict[str, fx.GraphModule] = {}
    for node in module.graph.nodes:
        nested = subgraph_of(node)
        new = graph.node_copy(node, lambda n: mapping[n])
        mapping[node] = new
        if node.op == "placeholder" and hasattr(node, "_dynamo_source"):
            new._dynamo_source = node._dynamo_source
        if node in wanted:
            where[(node, ())] = kept(graph, new) if wanted[node] else new
        if nested is None or not any(n in wanted for n in _all_nodes(nested)):
            continue
        body, inside = copy_graph(nested, wanted)
        results = next(n for n in body.graph.nodes if n.op == "output")
        handed = list(results.args[0])
        results.args = ((*handed, *inside.values()),)
        body.recompile()
        reference = next(a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr")
        name = f"r3_{str(reference.target).replace('.', '_')}_{len(bodies)}"
        bodies[name] = body
        with graph.inserting_before(new):
            pointer = graph.get_attr(name)
        new.args = tuple(pointer if a is mapping[reference] else a for a in new.args)
        seen = value(node)
        if isinstance(seen, tuple | list):
            new.meta["example_value"] = (*seen, *(value(v) for v in inside.values()))
        for position, ((original, path), copied) in enumerate(inside.items()):
            item = graph.call_function(operator.getitem, (new, len(handed) + position))
            item.meta["example_value"] = value(copied)
            where[(original, (node, *path))] = item
    held = {str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")}
    copy = fx.GraphModule({name: bodies.get(name) or attribute(module, name) for name in held}, graph)
    copy.training = module.training
    copy.meta = dict(module.meta)
    for carried in ("_param_name_to_source", "shape_env", "compile_subgraph_reason"):
        if hasattr(module, carried):
            setattr(copy, carried, getattr(module, carried))
    return copy, where


def attribute(module: fx.GraphModule, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _all_nodes(module: fx.GraphModule) -> Iterable[fx.Node]:
    for node in module.graph.nodes:
        yield node
        nested = subgraph_of(node)
        if nested is not None:
            yield from _all_nodes(nested)


def _occurrences(sites: Sequence[Accepted], where: Where) -> Iterable[Occurrence]:
    for site in sites:
        paths = [path for node, path in where if node is site.columns[0]]
        for path in paths:
            gate = tuple(w for weight in site.gate if (w := called_as(weight, paths[0], path)) is not None)
            experts = tuple(w for weight in site.experts if (w := called_as(weight, paths[0], path)) is not None)
            yield Occurrence(site, gate, experts, tuple(where[(column, path)] for column in site.columns))


def called_as(weight: fx.Node, first: Path, path: Path) -> fx.Node | None:
    """What comes in along `path` at the place where `weight` comes in along `first`; None if that is no plain argument."""
    if first == path:
        return weight
    inside = weight
    for call in first:
        nested = subgraph_of(call)
        assert nested is not None, "a path is made of calls"
        held = [p for p, given in bound(call, nested).items() if given is inside]
        if not held:
            return None
        inside = held[0]
    for call in reversed(path):
        nested = subgraph_of(call)
        assert nested is not None, "a path is made of calls"
        given = bound(call, nested).get(inside)
        if not isinstance(given, fx.Node) or given.op not in ("placeholder", "get_attr"):
            return None
        inside = given
    return inside
