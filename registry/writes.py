"""Which operators write into what they are given."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from r3_pass.registry.operators import argument, is_opaque, spelling

_INPLACE_OPERATORS = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.iand, operator.ior,
    operator.ixor, operator.ilshift, operator.irshift, operator.ipow,
}  # fmt: skip
_INPLACE_METHODS = frozenset({"__setitem__", *(f"__{function.__name__}__" for function in _INPLACE_OPERATORS)})

_RESHAPES = frozenset({"t", "transpose", "view", "resize", "resize_as", "as_strided"})
"""What gives a tensor another shape, where it is done in place."""

_WRITES_ARRAY = {
    "numpy_method_wrapper": frozenset({"fill", "put", "sort", "partition", "itemset"}),
    "numpy_to_tensor_wrapper": frozenset({"put", "copyto", "fill_diagonal", "put_along_axis"}),
}
"""What changes a numpy array in place, by what Dynamo wraps it in."""


def is_inplace(node: fx.Node) -> bool:
    """True if the node changes its first argument and returns it (or, for `setitem`, returns nothing)."""
    if node.op == "call_method":
        name = str(node.target)
        return name in _INPLACE_METHODS or (name.endswith("_") and not name.endswith("__"))
    if node.op != "call_function":
        return False
    if node.target is operator.setitem or node.target in _INPLACE_OPERATORS:
        return True
    target = node.target
    if _asks_for_it(node) or _writes_array(target):
        return True
    if isinstance(target, torch._ops.OpOverload):
        alias = target._schema.arguments[0].alias_info if target._schema.arguments else None
        return bool(alias is not None and alias.is_write) and target.namespace == "aten"
    if getattr(target, "__module__", "") == "_operator":
        return False  # and_, or_, not_: Python's keywords have the underscore, not the operators
    name = getattr(target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _asks_for_it(node: fx.Node) -> bool:
    """Whether a function of torch.nn.functional is told to work in place: `hardtanh(x, 0, 3, inplace=True)`."""
    target = node.target
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    code = getattr(target, "__code__", None)
    if code is None or getattr(target, "__module__", "") != "torch.nn.functional":
        return False
    names = code.co_varnames[: code.co_argcount]
    at = names.index("inplace") if "inplace" in names else len(node.args)
    return at < len(node.args) and bool(node.args[at])


def _writes_array(target: Any) -> bool:
    """Whether it is numpy's, as Dynamo traces it, and changes the array that it is given."""
    wrapper = type(target)
    if wrapper.__module__ != "torch._dynamo.utils" or not wrapper.__name__.startswith("numpy_"):
        return False
    name = str(getattr(target, "__name__", "")).removeprefix("wrapped_")
    known = _WRITES_ARRAY.get(wrapper.__name__, ())
    return name in known or name in _INPLACE_METHODS or getattr(target, "op", None) in _INPLACE_OPERATORS


def reshapes(node: fx.Node) -> bool:
    """Whether it gives its first argument another shape in place."""
    return is_inplace(node) and spelling(node) in _RESHAPES


def written(node: fx.Node) -> list[fx.Node]:
    """The values that an operator changes: in place, by `out=`, or as its schema says. A Triton kernel may change any."""
    first = argument(node, 0, "input", "self") if is_inplace(node) else None
    found: list[Any] = [*first] if isinstance(first, tuple | list) else [first]
    out = node.kwargs.get("out")
    found.extend(out if isinstance(out, tuple | list) else [out])
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if isinstance(target, torch._ops.OpOverload):
        for position, argument_ in enumerate(target._schema.arguments):
            if argument_.alias_info is not None and argument_.alias_info.is_write:
                found.append(argument(node, position, argument_.name))
    if isinstance(target, torch._ops.HigherOrderOperator) and target.name().startswith("triton_kernel_wrapper"):
        found.extend(node.all_input_nodes)
    return [n for n in dict.fromkeys(found) if isinstance(n, fx.Node)]


def fills(node: fx.Node) -> fx.Node | None:
    """The one value that a custom operator without a result writes: `gemm(out!, x, weight) -> ()`. None for any other operator."""
    if not is_opaque(node):
        return None
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if target._schema.returns:
        return None
    changed = written(node)
    return changed[0] if len(changed) == 1 else None
