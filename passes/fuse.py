"""Rewrite a graph so that the router of each site is one operator.

    before:  scores = softmax(logits); values, ids = topk(scores, K); weights = values / values.sum(-1, keepdim=True)
    after:   weights, ids = r3_pass.route(logits, None, K, "softmax", ...)

The graph is a copy; the one that Dynamo traced stays as it is. What else reads the scores keeps the operators that made them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

from torch import fx

from r3_pass.passes.fusing import Fusion, plan_fusion
from r3_pass.passes.match import is_weight
from r3_pass.passes.record import copy_graph
from r3_pass.passes.router import arguments, route
from r3_pass.passes.site import Accepted
from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.shapes import dims, value


@dataclasses.dataclass(frozen=True)
class Fused:
    """A rewritten graph.

    Attributes:
        module: the copy; the original where nothing was fused.
        sites: the same sites, with their values in the copy.
        reasons: for each, why it is not fused; "" if it is.
    """

    module: fx.GraphModule
    sites: tuple[Accepted, ...]
    reasons: tuple[str, ...]


def fuse(module: fx.GraphModule, sites: Sequence[Accepted]) -> Fused:
    """Copy a Dynamo graph and fuse the routers of its sites in the copy, of as many as can be.

    Args:
        module: as Dynamo hands it to a backend; not changed.
        sites: what the matcher accepted in it.
    """
    flow = DataFlow(module.graph, is_weight)
    plans = [plan_fusion(flow, site) for site in sites]
    reasons = tuple(plan if isinstance(plan, str) else "" for plan in plans)
    if all(reasons):
        return Fused(module, tuple(sites), reasons)
    copy, where = copy_graph(module, dict.fromkeys(module.graph.nodes, False))
    mapping = {node: new for (node, _), new in where.items()}
    replaced: dict[fx.Node, fx.Node] = {}
    for plan in plans:
        if isinstance(plan, Fusion):
            replaced.update(_fuse(copy.graph, plan, mapping))
    copy.graph.lint()
    copy.recompile()
    return Fused(copy, tuple(_moved(site, {**mapping, **replaced}) for site in sites), reasons)


def _fuse(graph: fx.Graph, plan: Fusion, mapping: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Fuse one router; returns what took the place of its ids."""
    reading, selection = plan.reading, plan.selection
    first = selection.ids[0]
    logits, bias = mapping[reading.logits], mapping[reading.bias] if reading.bias is not None else None
    anchor = mapping[selection.node]
    with graph.inserting_before(anchor):
        if dims(reading.logits)[:-1] != dims(first)[:-1]:
            flat = graph.call_method("reshape", (logits, -1, dims(reading.logits)[-1]))
            seen = value(logits)
            flat.meta["example_value"] = seen.reshape(-1, seen.shape[-1])
            logits = flat
        both = graph.call_function(route, (logits, bias, *arguments(reading.routing)))
        weights, ids = (graph.call_function(operator.getitem, (both, number)) for number in (0, 1))
    both.meta["example_value"] = (value(reading.weights), value(first))
    weights.meta["example_value"], ids.meta["example_value"] = value(reading.weights), value(first)
    for made in (both, weights, ids):
        made.meta.update({key: anchor.meta[key] for key in ("nn_module_stack", "stack_trace") if key in anchor.meta})
    own = {mapping[node] for node in reading.between}
    for old in selection.ids:
        mapping[old].replace_all_uses_with(ids, delete_user_cb=lambda user: user not in own)
    for name in (reading.weights, *plan.weights_as):
        mapping[name].replace_all_uses_with(weights, delete_user_cb=lambda user: user not in own)
    for node in reversed(list(graph.nodes)):
        if node in own and not node.users:
            graph.erase_node(node)
    return dict.fromkeys(selection.ids, ids)


def _moved(site: Accepted, mapping: dict[fx.Node, fx.Node]) -> Accepted:
    """A site with its values in the copy; those inside nested graphs are where they were."""

    def places(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(mapping.get(node, node) for node in nodes)

    return dataclasses.replace(
        site,
        columns=places(site.columns),
        gate=places(site.gate),
        experts=places(site.experts),
        roots=places(site.roots),
    )
