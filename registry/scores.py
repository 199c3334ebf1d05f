"""From a selection backwards: which linear made the scores that it selects over.

The *span* is the run of dimensions of a value that the selection runs over: one dimension mostly, two where a grouped router
views `[T, E]` as `[T, G, E/G]`. Every operator either passes the span to its inputs, or is the root (a product with a
weight whose free dimension is the span), or ends the search with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.operators import CREATION, argument, is_opaque, spelling
from r3_pass.registry.products import (
    PRODUCTS,
    column_weights,
    through_einsum,
    through_product,
    through_tensordot,
    weight_operands,
)
from r3_pass.registry.shapes import Dim, dims, is_tensor, product
from r3_pass.registry.trace import Root, Span, Trace
from r3_pass.registry.turns import moved_order

_REDUCTIONS = frozenset({
    "sum", "mean", "amax", "amin", "max", "min", "prod", "logsumexp", "norm", "std", "var", "median", "nansum",
    "nanmean", "vector_norm", "any", "all",
})  # fmt: skip
_ORDERING = frozenset({
    "sort", "argsort", "cumsum", "cumprod", "cummax", "cummin", "flip", "roll", "msort", "diff", "unfold",
    "multinomial", "bincount", "histc", "one_hot",
})  # fmt: skip
_MULTIPLIES = frozenset(["mul", "sub"])
_NODE_BUDGET = 600


def trace_scores(flow: DataFlow, scores: fx.Node, dim: int) -> Trace:
    """Follow the selected dimension of `scores` back to the linears that made it.

    Args:
        scores: the value that the selection reads, [..., E, ...].
        dim: the dimension that the selection runs over (may be negative).
    """
    trace = Trace()
    shape = dims(scores)
    if not shape:
        trace.dead_ends.append("the shape of the scores is unknown")
        return trace
    dim %= len(shape)
    token_sizes = tuple(s for i, s in enumerate(shape) if i != dim)
    pending: list[tuple[fx.Node, Span]] = [(scores, (dim, dim))]
    seen: set[tuple[fx.Node, Span]] = set()
    while pending:
        node, span = pending.pop()
        if (node, span) in seen:
            continue
        if len(seen) > _NODE_BUDGET:
            trace.dead_ends.append(f"the search for a linear passed {_NODE_BUDGET} operators")
            break
        seen.add((node, span))
        if flow.kind(node) != "data":
            continue
        trace.passed.append(node)
        pending.extend(_step(flow, node, span, trace, token_sizes))
    return trace


def _step(
    flow: DataFlow, node: fx.Node, span: Span, trace: Trace, token_sizes: Sequence[Dim]
) -> list[tuple[fx.Node, Span]]:
    """The inputs that carry the span on; adds a root or a dead end to the trace instead where there is one."""
    name = spelling(node)
    shape = dims(node)
    size = product(shape[span[0] : span[1] + 1]) if shape else None
    first = flow.operand(node, argument(node, 0, "input", "self"))
    if node.op == "placeholder":
        trace.roots.append(Root(node, (), size))
        return []
    if name in ("getitem", "getattr"):
        return _through_getitem(flow, node, span, trace)
    if name in CREATION or not shape:
        return []
    if name in PRODUCTS:
        return through_product(flow, node, name, span, trace)
    if name == "tensordot":
        return through_tensordot(flow, node, span, trace)
    if name == "einsum":
        return through_einsum(flow, node, span, trace)
    if name in ("conv1d", "conv2d", "cdist") or (is_opaque(node) and span == (len(shape) - 1, len(shape) - 1)):
        weights = weight_operands(flow, node, size)
        if weights:
            trace.roots.append(Root(node, weights, size))
            return []
        if name.startswith("conv"):
            trace.dead_ends.append(f"the scores come from a {name}, along another dimension than its output channels")
            return []
    if name in _ORDERING:
        trace.dead_ends.append(f"the scores come out of {name}, which reorders or counts them")
        return []
    if first is not None and name in (
        "view",
        "transpose",
        "permute",
        "movedim",
        "t",
        "mT",
        "T",
        "adjoint",
        "numpy_T",
        "expand",
    ):
        moved = _through_layout(node, name, span, dims(first), shape)
        if moved is None:
            trace.dead_ends.append(
                f"the selection runs over part or a mixture of the router's outputs ({node.name}: {dims(first)} -> {shape})"
            )
            return []
        return [(first, moved)]
    if name in _REDUCTIONS and first is not None and shape != dims(first):
        return _through_reduction(flow, node, first, span, trace, token_sizes)
    if name in ("cat", "stack"):
        return _through_cat(flow, node, name, span, trace)
    if name == "gather" or name == "take_along_dim" or name == "index_select":
        trace.dead_ends.append(
            f"the scores are picked by {name}, so the selection does not run over a router's outputs"
        )
        return []
    if name in ("softmax", "log_softmax", "normalize", "gumbel_softmax"):
        axis = argument(node, 1, "dim")
        if (
            isinstance(axis, int)
            and axis % len(shape) not in range(span[0], span[1] + 1)
            and shape[axis % len(shape)] in token_sizes
        ):
            trace.couples_tokens = node
    if (
        name in ("masked_fill", "scatter", "index_fill", "masked_scatter", "index_put", "setitem", "index_copy")
        and first is not None
    ):
        return [(first, span)]
    return _through_elementwise(flow, node, name, span, shape, trace)


def _through_elementwise(
    flow: DataFlow, node: fx.Node, name: str, span: Span, shape: Sequence[Dim], trace: Trace
) -> list[tuple[fx.Node, Span]]:
    """Operators that keep the shape, with broadcasting; a product with a weight that spreads the span is a root."""
    size = product(shape[span[0] : span[1] + 1])
    carrying: list[tuple[fx.Node, Span]] = []
    spread: list[fx.Node] = []
    for source in flow.inputs(node):
        have = dims(source)
        shift = len(shape) - len(have)
        low, high = span[0] - shift, span[1] - shift
        if not have or low < 0 or product(have[low : high + 1]) != size:
            continue
        if flow.kind(source) == "data":
            carrying.append((source, (low, high)))
        elif flow.kind(source) == "weight":
            spread.append(source)
    if carrying:
        return carrying
    if spread and name in _MULTIPLIES:
        trace.roots.append(Root(node, tuple(w for s in spread for w in flow.weights(s)), size))
    else:
        trace.dead_ends.append(f"{name} ({node.name}) makes the selected dimension from no router output")
    return []


def _through_getitem(flow: DataFlow, node: fx.Node, span: Span, trace: Trace) -> list[tuple[fx.Node, Span]]:
    source = flow.operand(node, node.args[0])
    if source is None:
        return []
    if not is_tensor(source):
        return _through_result(flow, node, source, span, trace)
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    mapping = index_mapping(index, len(dims(source)))
    if mapping is None:
        trace.dead_ends.append(f"the scores are picked by an index tensor ({node.name})")
        return []
    moved = [mapping[d] for d in range(span[0], span[1] + 1) if d < len(mapping) and mapping[d] is not None]
    if any(_starts_late(index, len(dims(source)), d) for d in moved):
        trace.starts_late = node
    if len(moved) != span[1] - span[0] + 1:
        trace.dead_ends.append(f"indexing ({node.name}) makes the selected dimension")
        return []
    return [(source, (moved[0], moved[-1]))]  # type: ignore[list-item]  # the Nones were filtered


def _starts_late(index: Sequence[Any], rank: int, dim: int | None) -> bool:
    """Whether basic indexing keeps a dimension from another place than its beginning on, or not every place."""
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    at = 0
    for item in index:
        if item is Ellipsis:
            at += rank - used
        elif item is not None:
            if at == dim and isinstance(item, slice) and (item.start not in (None, 0) or item.step not in (None, 1)):
                return True
            at += 1
    return False


def index_mapping(index: Sequence[Any], rank: int) -> list[int | None] | None:
    """Source dimension of each result dimension of basic indexing (None for a new one); None if a tensor index is in it."""
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    result: list[int | None] = []
    at = 0
    for item in index:
        if item is None:
            result.append(None)
        elif item is Ellipsis:
            for _ in range(rank - used):
                result.append(at)
                at += 1
        elif isinstance(item, slice):
            result.append(at)
            at += 1
        elif isinstance(item, int) or (isinstance(item, fx.Node) and not is_tensor(item)):
            at += 1
        else:
            return None
    result.extend(range(at, rank))
    return result


def _through_result(
    flow: DataFlow, node: fx.Node, source: fx.Node, span: Span, trace: Trace
) -> list[tuple[fx.Node, Span]]:
    """One item of an operator that returns several tensors."""
    name = spelling(source)
    first = flow.operand(source, argument(source, 0, "input", "self"))
    if first is None:
        return []
    if name in ("chunk", "split", "tensor_split", "split_with_sizes"):
        axis = argument(source, 2, "dim", default=0)
        if node.args[1] != 0 and isinstance(axis, int) and axis % len(dims(first)) in range(span[0], span[1] + 1):
            trace.starts_late = node
        return [(first, span)]
    if name == "unbind":
        axis = int(argument(source, 1, "dim", default=0)) % len(dims(first))
        return [(first, tuple(d + (d >= axis) for d in span))]  # type: ignore[list-item]  # two dimensions stay two
    axis = argument(source, 2 if name in ("topk", "kthvalue") else 1, "dim", default=-1)
    if name in ("topk", "sort", "max", "min", "kthvalue", "median", "mode") and isinstance(axis, int):
        axis %= len(dims(first))
        if axis in range(span[0], span[1] + 1) and len(dims(first)) == len(dims(node)):
            trace.dead_ends.append(f"the selection runs over the values of another selection ({source.name})")
            return []
        keeps = len(dims(first)) == len(dims(node))
        return [(first, span if keeps else tuple(d + (d >= axis) for d in span))]  # type: ignore[list-item]
    if is_opaque(source):
        weights = weight_operands(flow, source, product(dims(node)[span[0] : span[1] + 1]))
        if weights:
            trace.roots.append(Root(node, weights, dims(node)[span[1]]))
            return []
    trace.dead_ends.append(f"the scores are a result of {name} ({source.name}), which is not understood")
    return []


def _through_layout(node: fx.Node, name: str, span: Span, before: Sequence[Dim], after: Sequence[Dim]) -> Span | None:
    rank = len(after)
    if name == "view":
        return _span_of_block(before, product(after[span[0] : span[1] + 1]), product(after[span[1] + 1 :]))
    if name == "expand":
        shift = rank - len(before)
        low, high = span[0] - shift, span[1] - shift
        return (low, high) if low >= 0 and before[low : high + 1] == after[span[0] : span[1] + 1] else None
    order = moved_order(node, name, rank)
    if order is None:
        return None
    moved = [order[d] for d in range(span[0], span[1] + 1)]
    return (moved[0], moved[-1]) if moved == list(range(moved[0], moved[0] + len(moved))) else None


def _span_of_block(shape: Sequence[Dim], size: Dim, inner: Dim) -> Span | None:
    """The dimensions of `shape` that hold `size` elements with `inner` elements behind each."""
    behind: Dim = 1
    for last in range(len(shape) - 1, -1, -1):
        if behind == inner and shape[last] != 1:
            held: Dim = 1
            for low in range(last, -1, -1):
                held = held * shape[low]
                if held == size:
                    return (low, last)
            return None
        behind = behind * shape[last]
    return None


def _through_reduction(
    flow: DataFlow, node: fx.Node, first: fx.Node, span: Span, trace: Trace, token_sizes: Sequence[Dim]
) -> list[tuple[fx.Node, Span]]:
    before, after = dims(first), dims(node)
    given = argument(node, 2 if spelling(node) in ("norm",) else 1, "dim", "axis")
    reduced = [given] if isinstance(given, int) else list(given or range(len(before)))
    reduced = sorted(int(d) % len(before) for d in reduced)
    if len(before) == len(after):
        moved: list[int] = list(range(span[0], span[1] + 1))
        if any(d in reduced for d in moved):
            trace.dead_ends.append(f"the selected dimension is a constant of {spelling(node)} ({node.name})")
            return []
    else:
        kept = [d for d in range(len(before)) if d not in reduced]
        moved = [kept[d] for d in range(span[0], span[1] + 1)]
        if moved != list(range(moved[0], moved[0] + len(moved))):
            trace.dead_ends.append(f"{spelling(node)} ({node.name}) mixes the selected dimension")
            return []
    if len(before) == len(token_sizes) + 1 and any(before[d] in token_sizes for d in reduced):
        trace.couples_tokens = node
    return [(first, (moved[0], moved[-1]))]


def _through_cat(flow: DataFlow, node: fx.Node, name: str, span: Span, trace: Trace) -> list[tuple[fx.Node, Span]]:
    parts = argument(node, 0, "tensors")
    nodes = [n for p in (parts if isinstance(parts, tuple | list) else ()) if (n := flow.operand(node, p)) is not None]
    axis = int(argument(node, 1, "dim", "axis", default=0)) % len(dims(node))
    if name == "cat":
        return [(n, span) for n in nodes]
    if span == (axis, axis):
        weights: dict[fx.Node, None] = {}
        for part in nodes:
            for passed in column_weights(flow, part):
                weights[passed] = None
        if weights:
            trace.roots.append(Root(node, tuple(weights), len(nodes)))
        else:
            trace.dead_ends.append(f"the scores are stacked ({node.name}) from what no weight scores one by one")
        return []
    lowered = tuple(d - (d > axis) for d in span)
    return [(n, (lowered[0], lowered[-1])) for n in nodes]
