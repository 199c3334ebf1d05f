"""How an operator is spelled, and where its arguments are.

A Dynamo graph is not normalised: `torch.topk(x, 2)`, `x.topk(k=2)` and `aten.topk.default` are one operator, arguments come
by position or keyword.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_SYNONYMS = {
    "multiply": "mul", "imul": "mul", "rmul": "mul", "iadd": "add", "radd": "add", "isub": "sub", "subtract": "sub", "rsub": "sub",
    "truediv": "div", "itruediv": "div", "true_divide": "div", "divide": "div", "ifloordiv": "floordiv", "floor_divide": "floordiv",
    "imod": "mod", "remainder": "mod", "fmod": "mod", "iand": "and", "and": "and", "or": "or", "ior": "or", "bitwise_and": "and",
    "bitwise_or": "or", "logical_and": "and", "logical_or": "or", "invert": "not", "logical_not": "not", "bitwise_not": "not",
    "neg": "neg", "negative": "neg", "is_scatter": "scatter", "concat": "cat", "concatenate": "cat", "view_as": "view",
    "reshape_as": "view", "reshape": "view", "unsafe_view": "view", "flatten": "view", "unflatten": "view", "squeeze": "view",
    "unsqueeze": "view", "ravel": "view", "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim",
    "absolute": "abs",
    "imatmul": "matmul", "index": "getitem", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "not_equal": "ne", "softmax_": "softmax", "special_softmax": "softmax", "grouped_mm_fallback": "grouped_mm",
}  # fmt: skip

CREATION = frozenset({
    "zeros", "ones", "full", "empty", "arange", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros",
    "new_ones", "new_full", "new_empty", "rand", "randn", "randint", "rand_like", "randn_like", "randint_like",
    "eye", "tensor", "scalar_tensor", "linspace", "size", "shape", "numel", "dim", "sym_size", "stride",
})  # fmt: skip
"""Operators whose result depends on the shape of their inputs at most, never on their values."""

RANDOM = frozenset(
    {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli", "multinomial"}
)

CONTRACTIONS = frozenset({
    "linear", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "einsum", "tensordot", "bilinear", "grouped_mm", "scaled_mm",
    "int_mm", "weight_int8pack_mm", "weight_int4pack_mm", "dot",
})  # fmt: skip
"""Operators that multiply and sum over a shared dimension."""

COMPARISONS = frozenset(["eq", "ne", "gt", "ge", "lt", "le", "isin"])
SELECTIONS = frozenset(["topk", "argmax", "argmin", "max", "min", "kthvalue", "multinomial", "argsort", "sort"])
PICKS = frozenset({"getitem", "index_select", "gather", "take_along_dim", "embedding", "take"})
"""Operators that read a value at an index."""

PIECES = frozenset({"chunk", "split", "tensor_split", "split_with_sizes", "unbind"})
"""Operators that cut a value into several."""

REARRANGE = frozenset({
    "view", "transpose", "permute", "expand", "contiguous", "clone", "detach", "to", "type_as", "float", "half",
    "bfloat16", "long", "int", "repeat",
})  # fmt: skip
"""Operators that keep all values, in another layout or another type."""

CASTS = frozenset({"to", "long", "int", "float", "type_as", "half", "bfloat16", "double", "convert_element_type"})
GROUPED = frozenset(["grouped_mm"])


def spelling(node: fx.Node) -> str:
    """The operator's one name: `torch.topk`, `.topk` and `aten.topk.default` are all "topk"; custom ops keep "ns::name"."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        target = node.target
        if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            namespace, _, name = str(getattr(target, "_qualified_op_name", None) or target._schema.name).partition("::")
            if namespace not in ("aten", "prims"):
                return f"{namespace}::{name.split('.')[0]}"
            name = name.split(".")[0]
        else:
            name = getattr(target, "__name__", str(target))
    else:
        return node.op
    name = name.strip("_") if name.startswith("__") else name.lstrip("_").rstrip("_")
    return _SYNONYMS.get(name, name)


def is_opaque(node: fx.Node) -> bool:
    """True for a custom operator: its inputs are known, what it does with them is not."""
    return node.op == "call_function" and "::" in spelling(node)


def argument(node: fx.Node, position: int, *names: str, default: Any = None) -> Any:
    """An argument given by position or by any of its keyword names."""
    if len(node.args) > position:
        return node.args[position]
    for name in names:
        if name in node.kwargs:
            return node.kwargs[name]
    return default
