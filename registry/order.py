"""Does the router see the tokens in the order in which the graph got them?

A slot mapping names tokens in the order of the model's input. A model that sorts, flips or transposes its tokens on the way to a
router would hand over rows in another order, with nothing wrong in any shape. So the way from the router's input back to
the graph's inputs is walked, along the residual stream: what moves tokens on it is found; what is not understood ends the walk.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from r3_pass.registry.dataflow import (
    CONTRACTIONS,
    DataFlow,
    argument,
    dims,
    is_opaque,
    is_tensor,
    spelling,
)

_MOVES = frozenset({"flip", "roll", "flipud", "fliplr", "index_select", "gather", "take_along_dim", "sort", "rot90"})
_TURNS = frozenset({"transpose", "permute", "movedim", "t", "mT", "T"})
_STEPS = 4000


def reordering(flow: DataFlow, product: fx.Node) -> fx.Node | None:
    """The operator that moves tokens between the graph's inputs and a router's product; None if none was seen.

    Args:
        product: the linear (or other product with the router's weight) that makes the scores.
    """
    node = next((n for n in flow.inputs(product) if flow.kind(n) == "data" and is_tensor(n)), None)
    turned: list[fx.Node] = []
    if spelling(product).startswith("conv") and node is not None and spelling(node) in _TURNS:
        node = _upstream(flow, node, spelling(node))  # channels go second into a convolution, and last again behind it
    for _ in range(_STEPS):
        if node is None:
            return None
        if node.op == "placeholder":
            return turned[0] if turned else None
        name = spelling(node)
        if name in _MOVES or (name == "getitem" and _picks_tokens(flow, node)):
            return node
        if name in _TURNS and _turns_tokens(node):
            if turned and _same_turn(turned[-1], node):
                turned.pop()
            else:
                turned.append(node)
        node = _upstream(flow, node, name)
    return None


def _upstream(flow: DataFlow, node: fx.Node, name: str) -> fx.Node | None:
    """The input whose tokens these are; None where that is not understood."""
    if name == "embedding":
        return flow.operand(node, argument(node, 0, "input"))
    data = [n for n in flow.inputs(node) if flow.kind(n) == "data" and is_tensor(n)]
    if not data or is_opaque(node) or name in ("cat", "stack", "scaled_dot_product_attention"):
        return None
    if name in CONTRACTIONS:
        return data[0] if len(data) == 1 else None
    same = [n for n in data if dims(n) == dims(node)]
    return min(same, key=flow.order.__getitem__) if same else (data[0] if len(data) == 1 else None)


def _picks_tokens(flow: DataFlow, node: fx.Node) -> bool:
    """Indexing of activations by a tensor that depends on the call's inputs."""
    return any(is_tensor(n) and flow.kind(n) == "data" for n in flow.inputs(node)[1:]) and is_tensor(node.args[0])


def _turns_tokens(node: fx.Node) -> bool:
    """Whether a transposition changes the order of elements: moving dimensions of size 1 does not."""
    source = node.args[0]
    return isinstance(source, fx.Node) and _without_ones(dims(source)) != _without_ones(dims(node))


def _without_ones(shape: tuple[Any, ...]) -> list[Any]:
    return [size for size in shape if size != 1]


def _same_turn(one: fx.Node, other: fx.Node) -> bool:
    """Two turns that cancel: the later one restores the shape that the earlier one had before it."""
    later, earlier = (one, other)
    source = earlier.args[0]
    return isinstance(source, fx.Node) and dims(later) == dims(source)
