"""Does the router see the tokens in the order in which the graph got them?

A slot mapping names tokens in the order of the model's input. A model that sorts, flips or transposes its tokens on the way to a
router would hand over rows in another order, with nothing wrong in any shape. So the way from the router's input back to
the graph's inputs is walked, along the residual stream: what moves tokens on it is found; what is not understood ends the walk.
"""

from __future__ import annotations

import sys
from collections import deque
from itertools import pairwise
from typing import Any

import sympy
from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.operators import CONTRACTIONS, PIECES, argument, is_opaque, spelling
from r3_pass.registry.shapes import dims, is_tensor, plain, value
from r3_pass.registry.turns import moved_order

_MOVES = frozenset({"flip", "roll", "flipud", "fliplr", "index_select", "gather", "take_along_dim", "sort", "rot90"})
_WRITES = frozenset({"setitem", "index_put", "index_copy", "scatter", "index_add", "scatter_add"})
_ORDERS = frozenset({"argsort", "sort", "topk", "nonzero", "where", "argmax", "max"})
_JOINS = {"hstack": 1, "column_stack": 1, "vstack": 0, "row_stack": 0}
"""Joins along an axis of their own; of `cat` and `stack`, it is an argument."""
_TURNS = frozenset({"transpose", "permute", "movedim", "t", "mT", "T"})
_PADS = frozenset({"pad", "constant_pad_nd"})
_OF_NARROW = (("dim",), ("start", "index"), ("length",))
_STEPS = 4000
_PART_STEPS = 60
_NEAR = 200


def reordering(flow: DataFlow, product: fx.Node) -> fx.Node | None:
    """The operator that moves tokens between the graph's inputs and a router's product; None if none was seen.

    Args:
        product: the linear (or other product with the router's weight) that makes the scores.
    """
    start = next((n for n in flow.inputs(product) if _is_data(flow, n)), None)
    channels_second = spelling(product).startswith("conv")  # and last again behind it
    tokens_last = len(product.args) > 1 and flow.operand(product, product.args[1]) is start  # weight @ x.T
    if (channels_second or tokens_last) and start is not None and _is_turn(start):
        start = _upstream(flow, start, spelling(start))
    moved = _mover(flow, start)
    return None if moved is None or _another_way(flow, start, moved) else moved


def _mover(flow: DataFlow, node: fx.Node | None) -> fx.Node | None:
    """The first operator on the way back that moves tokens."""
    turned: list[fx.Node] = []
    for _ in range(_STEPS):
        if node is None:
            return None
        if node.op == "placeholder":
            return turned[0] if turned else None
        name = spelling(node)
        if _moves(flow, node, name):
            return node
        if _is_turn(node) and _turns_tokens(node):
            if turned and _same_turn(turned[-1], node):
                turned.pop()
            else:
                turned.append(node)
        node = _upstream(flow, node, name)
    return None


def _another_way(flow: DataFlow, start: fx.Node | None, moved: fx.Node) -> bool:
    """Whether what is moved comes unmoved, too, from the same graph input: past experts that sort and sort back, say."""
    origins = {n for n in _behind(flow, moved) if n.op == "placeholder"}
    stack = [start]
    seen = {start}
    while stack and len(seen) < _STEPS:
        node = stack.pop()
        if node in origins:
            return True
        if node is None or node.op == "placeholder":
            continue
        name = spelling(node)
        if _moves(flow, node, name) or (_is_turn(node) and _turns_tokens(node)):
            continue
        same = [n for n in flow.inputs(node) if _is_data(flow, n) and dims(n) == dims(node)]
        for source in same if len(same) > 1 else [_upstream(flow, node, name)]:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return False


def _behind(flow: DataFlow, node: fx.Node, near: int = sys.maxsize) -> set[fx.Node]:
    """What a value is made of: all of it, or about as many of the nearest values as are asked for."""
    waiting, seen = deque([node]), {node}
    while waiting and len(seen) < near:
        for source in flow.inputs(waiting.popleft()):
            if source not in seen and flow.kind(source) == "data":
                seen.add(source)
                waiting.append(source)
    return seen


def _upstream(flow: DataFlow, node: fx.Node, name: str) -> fx.Node | None:
    """The input whose tokens these are; None where that is not understood."""
    if name == "embedding":
        return flow.operand(node, argument(node, 0, "input"))
    source = flow.operand(node, node.args[0]) if node.args else None
    if _looks_up(flow, node, name):
        return next((n for n in flow.inputs(node) if _is_data(flow, n)), None)
    if name in _WRITES and source is not None and flow.kind(source) == "data":
        return source  # other tokens (an image's) are written over some of these
    if name in _WRITES:
        return None  # laid into a tensor that was made before
    if _joins(name) and (whole := _parts(flow, node)) is not None:
        return whole[0]
    data = [n for n in flow.inputs(node) if _is_data(flow, n)]
    if not data or is_opaque(node) or _joins(name) or name == "scaled_dot_product_attention":
        return None
    if name in CONTRACTIONS:
        return data[0] if len(data) == 1 else None
    same = [n for n in data if dims(n) == dims(node)]
    return min(same, key=flow.order.__getitem__) if same else (data[0] if len(data) == 1 else None)


def _is_data(flow: DataFlow, node: fx.Node) -> bool:
    """A tensor that depends on the call's inputs; `out[i] = x` returns none, but stands for what `out` is from then on."""
    return flow.kind(node) == "data" and (is_tensor(node) or spelling(node) == "setitem")


def _moves(flow: DataFlow, node: fx.Node, name: str) -> bool:
    """Whether an operator may put tokens into other places."""
    if name in _MOVES or out_of_order(flow, node):
        return not _looks_up(flow, node, name)
    if name == "einsum":
        return _turns_letters(node)
    if name in _PADS:
        return any(front and front + back == 0 for front, back in _paddings(node)[1:])
    if _shifts_by_padding(flow, node, name) or _written_elsewhere(flow, node, name):
        return True
    source = flow.operand(node, node.args[0]) if node.args else None
    if source is None or not (is_tensor(source) or spelling(source) == "setitem"):
        return False
    if name == "getitem":
        return flow.kind(source) == "data" and any(is_tensor(n) or isinstance(n, list) for n in _index(node, 1))
    if name in _WRITES and flow.kind(source) == "const":
        index = _index(node, 1 if name in ("setitem", "index_put") else 2)
        late = any(isinstance(n, slice) and n.start not in (None, 0) for n in index)
        return late or any(is_tensor(n) and not _sorts_back(flow, node, flow.operand(node, n)) for n in index)
    return False


def _sorts_back(flow: DataFlow, write: fx.Node, index: fx.Node | None) -> bool:
    """Whether tokens are written to where the same order took them from: experts that sort their tokens, and sort them back."""
    if index is None:
        return False
    orders = {index} | {n for n in _behind(flow, index, _NEAR) if spelling(n) in _ORDERS}
    picked = [
        n for n in _behind(flow, write, _NEAR) if spelling(n) in ("getitem", "index_select", "gather") and is_tensor(n)
    ]
    by = [n for pick in picked for n in flow.inputs(pick)[1:] if is_tensor(n)]
    return any(orders & _behind(flow, n, _NEAR) for n in by)


def _looks_up(flow: DataFlow, node: fx.Node, name: str) -> bool:
    """Whether rows of a weight are picked, as an embedding does."""
    source = flow.operand(node, node.args[0]) if node.args else None
    return name in ("getitem", "index_select") and source is not None and flow.kind(source) == "weight"


def _turns_letters(node: fx.Node) -> bool:
    """Whether an einsum of one operand brings its dimensions into another order."""
    equation = str(argument(node, 0, "equation")).replace(" ", "")
    before, _, after = equation.partition("->")
    kept = [letter for letter in before if letter in after]
    return bool(after) and "," not in before and kept != [letter for letter in after if letter in kept]


def _paddings(node: fx.Node) -> list[tuple[int, int]]:
    """What is added before and behind each dimension, the last one first; nothing if that is no number."""
    given = argument(node, 1, "pad")
    if not isinstance(given, tuple | list) or not all(isinstance(n, int) for n in given):
        return []
    return list(zip(given[::2], given[1::2], strict=False))


def _shifts_by_padding(flow: DataFlow, node: fx.Node, name: str) -> bool:
    """Whether the first tokens of a value that was padded in front are kept: each token is then where the next one was."""
    source = flow.operand(node, node.args[0]) if name == "getitem" else None
    if source is None or spelling(source) not in _PADS:
        return False
    added = _paddings(source)[:0:-1]
    before = len(dims(source)) - 1 - len(added)
    cuts = _index(node, 1)[before:]
    return before >= 0 and any(
        front > 0 and isinstance(cut, slice) and cut.start in (None, 0) and cut.stop is not None
        for (front, _), cut in zip(added, cuts, strict=False)
    )


def _written_elsewhere(flow: DataFlow, node: fx.Node, name: str) -> bool:
    """Whether a slice of tokens is written to where other tokens of the same value were."""
    target = flow.operand(node, node.args[0]) if node.args else None
    if name == "setitem":
        index, written = _index(node, 1), node.args[2]
    elif name == "copy" and target is not None and spelling(target) == "getitem":
        index, written, target = _index(target, 1), node.args[1], flow.operand(target, target.args[0])
    else:
        return False
    if target is None or not isinstance(written, fx.Node) or Ellipsis in index:
        return False
    for axis, cut in enumerate(index[: len(dims(target)) - 1]):
        taken = _cut(flow, flow.operand(node, written), axis)
        if taken is None or axis >= len(dims(taken[0])):
            continue
        here = _from_the_front(_number(cut.start if isinstance(cut, slice) else cut), dims(target)[axis])
        there = _from_the_front(taken[1], dims(taken[0])[axis])
        if _is_number(here) and _is_number(there) and here != there and taken[0] in _behind(flow, target, _NEAR):
            return True
    return False


def _number(given: Any) -> Any:
    """A number of a graph, a symbolic one as its expression; what is none stays what it is."""
    seen = plain(value(given)) if isinstance(given, fx.Node) else given
    return seen if _is_number(seen) else given


def _is_number(given: Any) -> bool:
    return isinstance(given, int | sympy.Expr)


def _from_the_front(start: Any, size: Any) -> Any:
    """Where a slice begins, of so many."""
    if start is None:
        return 0
    negative = (
        start < 0 if isinstance(start, int) else isinstance(start, sympy.Expr) and start.could_extract_minus_sign()
    )
    return size + start if negative else start


def _index(node: fx.Node, position: int) -> tuple[Any, ...]:
    found = node.args[position] if len(node.args) > position else None
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def out_of_order(flow: DataFlow, node: fx.Node) -> bool:
    """Whether slices of one value are joined along its tokens in another order than they had, or not for certain in the same."""
    found = _parts(flow, node) if _joins(spelling(node)) else None
    return found is not None and not found[1]


def _joins(name: str) -> bool:
    return name in ("cat", "stack") or name in _JOINS


def _parts(flow: DataFlow, joined: fx.Node) -> tuple[fx.Node, bool] | None:
    """The value that several joined parts are slices of, and whether they follow one another; None if they are no such slices."""
    rank = len(dims(joined))
    axis = _JOINS.get(spelling(joined))
    axis = argument(joined, 1, "dim", "axis", default=0) if axis is None else axis
    given = argument(joined, 0, "tensors")
    if not rank or not isinstance(axis, int) or not isinstance(given, tuple | list):
        return None
    axis %= rank
    if rank > 1 and axis == rank - 1:
        return None  # features, or columns
    cuts = [_cut(flow, flow.operand(joined, part), axis) for part in given]
    sources = {cut[0] for cut in cuts if cut is not None}
    of_one = [cut[1:] for cut in cuts if cut is not None]
    if len(sources) != 1 or len(of_one) < 2:
        return None
    follow = all(before[1] == after[0] for before, after in pairwise(of_one))
    whole = len(of_one) == len(cuts) and of_one[0][0] in (None, 0)
    return sources.pop(), follow and whole


def _cut(flow: DataFlow, part: fx.Node | None, axis: int) -> tuple[fx.Node, Any, Any] | None:
    """The value that a part was cut from along its tokens, where it begins and where it ends; None if it was not cut."""
    for _ in range(_PART_STEPS):
        if part is None or part.op == "placeholder":
            return None
        name = spelling(part)
        if _joins(name):
            return None
        if name == "getitem":
            source = flow.operand(part, part.args[0])
            if source is None:
                return None
            if not is_tensor(source):  # an item of chunk, split or unbind
                whole = flow.operand(source, argument(source, 0, "input", "tensor", "self"))
                pieces = spelling(source) in PIECES | {"hsplit", "vsplit"}
                number = part.args[1]
                return (whole, number, number + 1) if whole is not None and pieces and isinstance(number, int) else None
            if flow.kind(source) == "data":
                index = _index(part, 1)
                cut = index[axis] if axis < len(index) else None
                if isinstance(cut, slice) and cut.step not in (None, 1):
                    return source, object(), object()  # every second token: it follows upon nothing
                if isinstance(cut, slice) and (cut.start is not None or cut.stop is not None):
                    return source, _number(cut.start), _number(cut.stop)
                if isinstance(cut, int):
                    return source, cut, cut + 1
        if name in ("narrow", "select") and (source := flow.operand(part, part.args[0])) is not None:
            dim, start, count = (_number(argument(part, n + 1, *names)) for n, names in enumerate(_OF_NARROW))
            count = 1 if name == "select" else count
            known = isinstance(dim, int) and _is_number(start) and _is_number(count)
            if known and dim % len(dims(source)) == axis and flow.kind(source) == "data":
                return source, start, start + count
        part = _upstream(flow, part, name)
    return None


def _turn(node: fx.Node) -> list[int] | None:
    """For each dimension of a transposition's result, which one it was; None if the operator is none, or is not understood."""
    source = node.args[0] if node.args else None
    name = spelling(node)
    if name == "getattr" and isinstance(node.args[1], str):
        name = node.args[1]
    if name not in _TURNS or not isinstance(source, fx.Node):
        return None
    return moved_order(node, name, len(dims(source)))


def _is_turn(node: fx.Node) -> bool:
    return spelling(node) in _TURNS or (spelling(node) == "getattr" and node.args[1] in _TURNS)


def _turns_tokens(node: fx.Node) -> bool:
    """Whether a transposition changes the order of elements: moving dimensions of size 1 does not."""
    source, order = node.args[0], _turn(node)
    if not isinstance(source, fx.Node):
        return False
    if order is None:
        return _without_ones(dims(source)) != _without_ones(dims(node))
    kept = [d for d in order if dims(source)[d] != 1]
    return kept != sorted(kept)


def _without_ones(shape: tuple[Any, ...]) -> list[Any]:
    return [size for size in shape if size != 1]


def _same_turn(later: fx.Node, earlier: fx.Node) -> bool:
    """Whether two turns cancel: the later one moves each dimension back to where the earlier one took it from."""
    source, one, other = earlier.args[0], _turn(earlier), _turn(later)
    if not isinstance(source, fx.Node) or dims(later) != dims(source) or one is None or other is None:
        return False
    return len(one) == len(other) and [one[d] for d in other] == list(range(len(one)))
