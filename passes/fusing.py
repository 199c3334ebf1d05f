"""Whether a site's router can become one operator, or why not.

Two things make it sound. What lies between the logits and the ids and weights is *exactly* what the operator computes
(`registry.routing`). And nothing else sees what depends on the choice: scores that others read too (an auxiliary loss, a result of
the graph) are computed for them as before, but whatever is made of the chosen ids or groups belongs to the router alone, and
nothing is changed in place behind its back. Decides, never mutates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import fx

from r3_pass.passes.router import MOST_CHOICES, MOST_EXPERTS
from r3_pass.passes.site import Accepted
from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.form import Selection
from r3_pass.registry.operators import argument, spelling
from r3_pass.registry.read_routing import Reading, read_routing
from r3_pass.registry.routing import Unread
from r3_pass.registry.shapes import dims, is_tensor, value
from r3_pass.registry.writes import is_inplace, written

_ALIASES = frozenset({
    "view", "transpose", "permute", "movedim", "t", "mT", "T", "adjoint", "expand", "expand_as", "broadcast_to", "select",
    "narrow", "slice", "split", "split_with_sizes", "tensor_split", "chunk", "unbind", "unfold", "diagonal", "as_strided",
    "alias", "detach", "to", "float", "type", "type_as", "half", "bfloat16", "contiguous", "getitem", "getattr",
})  # fmt: skip
"""Operators whose result may share its memory with their first argument."""


@dataclasses.dataclass(frozen=True)
class Fusion:
    """What to fuse.

    Attributes:
        selection: the operator that chooses; the fused one takes its place in the order.
        weights_as: values that hold the weights under another name: what was changed in place to become them.
    """

    reading: Reading
    selection: Selection
    weights_as: tuple[fx.Node, ...]


def plan_fusion(flow: DataFlow, site: Accepted) -> Fusion | str:
    """How to fuse the router of a site; a reason (text) if it cannot be."""
    try:
        return _plan(flow, site)
    except Unread as reason:
        return str(reason)


def _plan(flow: DataFlow, site: Accepted) -> Fusion:
    selection = _selection(site)
    root = _root(flow, site, selection)
    reading = read_routing(flow, selection, root)
    if dims(root)[:-1] != dims(selection.ids[0])[:-1] and len(dims(selection.ids[0])) != 2:
        raise Unread(f"its logits are laid out as {list(dims(root))}, its ids as {list(dims(selection.ids[0]))}")
    nodes = reading.between
    outside = [n for n in (*nodes, root) if n.graph is not flow.graph]
    if outside:
        raise Unread(f"{outside[0].name} is in another graph (activation checkpointing)")
    if any(value(n).requires_grad for n in nodes if is_tensor(n)):
        raise Unread("its weights may need gradients: compile under torch.no_grad(), or with parameters that need none")
    _check_users(reading, selection)
    names = _check_writes(flow, reading)
    return Fusion(reading, selection, names)


def _selection(site: Accepted) -> Selection:
    """The one `topk` of a site, whose ids are recorded as they are."""
    selection = site.choices[0][0]
    node = selection.node
    if len(site.choices) != 1 or not selection.alone or spelling(node) != "topk" or selection.scores is None:
        raise Unread(f"its form ({site.form}) is none of those that are fused: one topk of logits, softmax or sigmoid")
    if argument(node, 3, "largest", default=True) is not True or node.kwargs.get("out") is not None:
        raise Unread(f"{node.name} selects the least, or into buffers that were made before")
    rank = len(dims(selection.scores))
    if selection.dim % rank != rank - 1:
        raise Unread(f"{node.name} does not select over the last dimension of its scores")
    if site.columns[0] not in selection.ids:
        raise Unread(
            f"the ids that experts see are made by {spelling(site.columns[0])} ({site.columns[0].name}) from those selected"
        )
    if site.overwritten:
        raise Unread("its ids are changed in place")
    return selection


def _root(flow: DataFlow, site: Accepted, selection: Selection) -> fx.Node:
    if len(site.roots) != 1:
        raise Unread("its scores come from several products")
    root = site.roots[0]
    shape = dims(root)
    if not shape or shape[-1] != site.num_experts:
        raise Unread(f"its logits {list(shape)} do not end in the {site.num_experts} experts that it selects over")
    if value(root).dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise Unread(f"its logits are {value(root).dtype}")
    top_k = dims(selection.ids[0])[-1]
    if site.num_experts > MOST_EXPERTS or top_k > MOST_CHOICES:
        raise Unread(
            f"{top_k} of {site.num_experts} experts are more than the {MOST_CHOICES} of {MOST_EXPERTS} that a kernel holds"
        )
    return root


def _check_users(reading: Reading, selection: Selection) -> None:
    """Nothing but ids and weights may leave of what depends on the choice."""
    nodes = reading.between
    chosen = {n for n in nodes if spelling(n) == "topk" or n is selection.node}
    stack = list(chosen)
    while stack:
        for user in stack.pop().users:
            if user in nodes and user not in chosen:
                chosen.add(user)
                stack.append(user)
    handed = {reading.weights, *selection.ids}
    for node in chosen - handed:
        for user in node.users:
            if user not in nodes and not _is_renamed(reading, node):
                raise Unread(
                    f"{spelling(user)} ({user.name}) reads {node.name}, which depends on the choice, beside the experts"
                )


def _is_renamed(reading: Reading, node: fx.Node) -> bool:
    """Whether a value became the weights in place, so that later readers of it read those."""
    return is_inplace(reading.weights) and node in written(reading.weights) and dims(node) == dims(reading.weights)


def _check_writes(flow: DataFlow, reading: Reading) -> tuple[fx.Node, ...]:
    """No operator beside the router changes what it reads or makes, and it changes nothing that others read.

    Returns: other names of the weights.
    """
    nodes, weights = reading.between, reading.weights
    inputs = {reading.logits, *([reading.bias] if reading.bias is not None else [])}
    for node in flow.nodes:
        for target in written(node):
            touched = set(_bases(flow, flow.resolve(target)))
            if node not in nodes:
                if touched & (nodes | inputs):
                    raise Unread(f"{spelling(node)} ({node.name}) changes in place what its router reads or returns")
                continue
            if not touched <= nodes:
                raise Unread(f"{spelling(node)} ({node.name}) changes its logits in place")
            for held in touched:
                late = node is weights and held in written(weights)
                for user in held.users:
                    if user not in nodes and not (late and flow.order.get(user, -1) > flow.order[weights]):
                        raise Unread(
                            f"{user.name} reads {held.name}, which {spelling(node)} ({node.name}) changes in place"
                        )
    return tuple(n for n in written(weights) if _is_renamed(reading, n))


def _bases(flow: DataFlow, node: fx.Node) -> Iterator[fx.Node]:
    """A value and all that it may share its memory with, towards where it was made."""
    while True:
        yield node
        if (
            not node.args
            or not isinstance(node.args[0], fx.Node)
            or not (spelling(node) in _ALIASES or is_inplace(node))
        ):
            return
        node = flow.resolve(node.args[0])
