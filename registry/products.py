"""Products that a selection's scores may come from: is the selected dimension the free one of a weight?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.operators import argument, spelling
from r3_pass.registry.shapes import Dim, dims, is_tensor, product, value
from r3_pass.registry.trace import Root, Span, Trace
from r3_pass.registry.writes import fills

PRODUCTS = frozenset({
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "int_mm", "scaled_mm", "weight_int8pack_mm", "weight_int4pack_mm",
})  # fmt: skip


def through_product(flow: DataFlow, node: fx.Node, name: str, span: Span, trace: Trace) -> list[tuple[fx.Node, Span]]:
    shape = dims(node)
    rank = len(shape)
    offset = 1 if name in ("addmm", "baddbmm") else 0
    left = flow.operand(node, argument(node, offset, "input", "mat1", "batch1", "self"))
    right = flow.operand(node, argument(node, offset + 1, "weight", "mat2", "batch2", "other"))
    if left is None or right is None:
        return []
    size = product(shape[span[0] : span[1] + 1])
    carrier, other = (right, left) if span == (rank - 1, rank - 1) else (left, right)
    if span[0] != span[1] or span[0] < rank - 2:
        trace.dead_ends.append(f"the selection runs over a batch dimension of {name} ({node.name})")
    elif flow.kind(carrier) == "weight" and flow.kind(other) == "data":
        trace.roots.append(Root(node, flow.weights(carrier), size))
    elif flow.kind(carrier) == "data" and flow.kind(other) == "weight":
        trace.over_tokens = True
        trace.dead_ends.append(f"the selection runs over tokens, not over the outputs of {name} ({node.name})")
    else:
        trace.dead_ends.append(
            f"the scores are a product of two activations ({node.name}: query and key, say), not of a router weight"
        )
    return []


def through_tensordot(flow: DataFlow, node: fx.Node, span: Span, trace: Trace) -> list[tuple[fx.Node, Span]]:
    """The result's dimensions are those of the left operand that are not summed over, then those of the right one."""
    left, right = flow.operand(node, argument(node, 0, "a")), flow.operand(node, argument(node, 1, "b"))
    if left is None or right is None:
        return []
    summed = argument(node, 2, "dims", default=2)
    count = summed if isinstance(summed, int) else len(summed[0]) if isinstance(summed[0], tuple | list) else 1
    carrier, other = (left, right) if span[1] < len(dims(left)) - count else (right, left)
    if span[0] == span[1] and flow.kind(carrier) == "weight" and flow.kind(other) == "data":
        trace.roots.append(Root(node, flow.weights(carrier), dims(node)[span[0]]))
    else:
        trace.dead_ends.append(
            f"the selection does not run over the outputs of a router's weight in tensordot ({node.name})"
        )
    return []


def through_einsum(flow: DataFlow, node: fx.Node, span: Span, trace: Trace) -> list[tuple[fx.Node, Span]]:
    equation = argument(node, 0, "equation")
    operands = list(node.args[1:])
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    parsed = einsum_letters(equation, [len(dims(o)) if isinstance(o, fx.Node) else 0 for o in operands])
    if parsed is None or span[0] != span[1]:
        trace.dead_ends.append(f"einsum {equation!r} ({node.name}) is not understood")
        return []
    letters, result = parsed
    letter = result[span[0]]
    with_letter = [o for o, used in zip(operands, letters, strict=True) if letter in used]
    nodes = [flow.operand(node, o) for o in with_letter]
    weights = [n for n in nodes if n is not None and flow.kind(n) == "weight"]
    if weights and len(weights) == len(nodes):
        trace.roots.append(Root(node, tuple(w for n in weights for w in flow.weights(n)), dims(node)[span[0]]))
    elif any(flow.kind(n) == "weight" for o in operands if (n := flow.operand(node, o)) is not None):
        trace.over_tokens = True
        trace.dead_ends.append(
            f"the selection runs over tokens, not over the outputs of einsum {equation!r} ({node.name})"
        )
    else:
        trace.dead_ends.append(
            f"the scores are a product of activations (einsum {equation!r}, {node.name}), not of a router weight"
        )
    return []


def einsum_letters(equation: Any, ranks: Sequence[int]) -> tuple[list[str], str] | None:
    """Each operand's and the result's subscripts with "..." written out (upper-case letters); None if not understood."""
    if not isinstance(equation, str):
        return None
    equation = equation.replace(" ", "")
    left, arrow, result = equation.partition("->")
    parts = left.split(",")
    if len(parts) != len(ranks):
        return None
    hidden = max(
        (rank - len(part.replace("...", "")) for part, rank in zip(parts, ranks, strict=True) if "..." in part),
        default=0,
    )
    spare = [chr(0x391 + i) for i in range(hidden)]
    written = []
    for part, rank in zip(parts, ranks, strict=True):
        count = rank - len(part.replace("...", "")) if "..." in part else 0
        written.append(part.replace("...", "".join(spare[len(spare) - count :])))
    if not arrow:
        joined = "".join(written)
        result = "".join(spare) + "".join(sorted(c for c in set(joined) if joined.count(c) == 1 and c not in spare))
    else:
        result = result.replace("...", "".join(spare))
    return written, result


def weight_operands(flow: DataFlow, node: fx.Node, size: Dim) -> tuple[fx.Node, ...]:
    """Weights that a custom product takes beside data, one of whose dimensions is the number of outputs.

    An engine that packed a weight for its kernel leaves a handle in its place: an integer that hangs on the module.
    """
    if not any(flow.kind(n) == "data" for n in flow.inputs(node)):
        return ()
    held = [n for n in flow.inputs(node) if flow.kind(n) == "weight" and is_tensor(n)]
    found = [n for n in held if len(dims(n)) >= 2 and size in dims(n)]
    if not found and fills(node) is not None:
        found = [n for n in held if not dims(n) and value(n).dtype == torch.int64]
    return tuple(w for n in found for w in flow.weights(n))


def column_weights(flow: DataFlow, part: fx.Node) -> tuple[fx.Node, ...]:
    """Weights of the one-output linear that made one column of stacked scores."""
    node: fx.Node | None = part
    for _ in range(8):
        if node is None or flow.kind(node) != "data":
            return ()
        if spelling(node) in ("linear", "matmul", "mm", "addmm"):
            return tuple(w for n in flow.inputs(node) if flow.kind(n) == "weight" for w in flow.weights(n))
        data = [n for n in flow.inputs(node) if flow.kind(n) == "data"]
        node = data[0] if len(data) == 1 else None
    return ()
