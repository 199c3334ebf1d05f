"""Weights that are 0 where a choice is another rank's: are they still beside it, and is all that it makes multiplied by them?

Zeros alone prove nothing. Moved to other tokens or columns, or left out of one of the ways that experts' work takes to the result,
they let experts work for choices that are not this rank's.

Legend: T tokens, K top-k; "work" is what is made with the local ids and not multiplied by their weights yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from r3_pass.registry.dataflow import (
    CONTRACTIONS,
    CREATION,
    DataFlow,
    argument,
    dims,
    is_inplace,
    is_opaque,
    is_tensor,
    spelling,
    value,
)
from r3_pass.registry.dispatch import Dispatch
from r3_pass.registry.unchanged import Changed, Layout, Unchanged, number_of

_LAYOUTS = frozenset({
    "view", "contiguous", "clone", "detach", "alias", "transpose", "permute", "t", "expand", "select", "narrow", "unbind",
    "to", "float", "type_as", "half", "bfloat16", "double", "convert_element_type",
})  # fmt: skip
_PICKS = frozenset({"getitem", "index_select", "take"})


class Zeroed(Unchanged):
    """Layouts of all values that are 0 where the choice that they stand beside is another rank's.

    Args:
        ids: the selection's.
        functions: values that are a function of one id each, `ids` among them.
        local: the ids that experts see; an order in which weights are laid is a sort of these.
    """

    def __init__(
        self, flow: DataFlow, ids: fx.Node, k_dim: int | None, functions: Collection[fx.Node], local: fx.Node
    ) -> None:
        super().__init__(flow, [ids], k_dim, None, self.holds, self._is_order, lambda _: False)
        self._functions, self._local = functions, local
        self.orders: set[fx.Node] = set()
        self.read([n for n in functions if n is not ids])

    def holds(self, node: fx.Node) -> bool:
        return node in self.layouts

    def starts(self, node: fx.Node, condition: fx.Node) -> bool:
        """Whether a value that a condition has zeroed lies beside the ids as the condition does."""
        layout = self.layouts.get(condition)
        if layout is not None and (beside := _beside(layout, dims(condition), dims(node))) is not None:
            self.layouts[node] = beside
            return True
        return False

    def _through(self, node: fx.Node) -> Layout:
        name = spelling(node)
        if is_inplace(node):
            raise Changed("changes them in place")
        if node in self._functions and name not in _LAYOUTS:
            return next(self.layouts[n] for n in self._flow.inputs(node) if n in self.layouts)
        if name in ("mul", "div", "masked_fill"):
            given = [self._flow.operand(node, a) for a in node.args[: 2 if name == "mul" else 1]]
            for source in given:
                held = None if source is None else self.layouts.get(source)
                if held is not None and source is not None:
                    moved = _beside(held, dims(source), dims(node))
                    if moved is not None and (name != "masked_fill" or number_of(argument(node, 2, "value")) == 0):
                        return moved
            raise Changed("does not keep their zeros")
        if name in _PICKS or name in _LAYOUTS:
            found = super()._through(node)
            if name == "view" and len([t for t in found.tags if t == "F"]) > 1:
                raise Changed("brings them into another order")
            return found
        raise Changed("does not keep their zeros")

    def _is_order(self, node: fx.Node) -> bool:
        if order_of(self._flow, node, self._local) is None:
            return False
        self.orders.add(node)
        return True


def order_of(flow: DataFlow, node: fx.Node, local: fx.Node) -> fx.Node | None:
    """The sort of all local ids whose order a value is."""
    operator = node
    if spelling(node) == "getitem" and node.args[1] == 1:
        operator = node.args[0]  # type: ignore[assignment]  # of a sort
    if spelling(operator) != ("argsort" if operator is node else "sort"):
        return None
    source = flow.operand(operator, argument(operator, 0, "input", "self"))
    while source is not None and source is not local and spelling(source) in ("view", "clone", "contiguous", "to"):
        source = flow.operand(source, source.args[0])
        if source is not None and len(dims(source)) > 1 and source is not local:
            return None
    flat = len([size for size in dims(operator if is_tensor(operator) else node) if size != 1]) <= 1
    return operator if flat and source is local else None


def _beside(layout: Layout, before: Sequence[Any], after: Sequence[Any]) -> Layout | None:
    """The layout of what a value is broadcast to; None if a token or a choice would be repeated."""
    added = len(after) - len(before)
    if added < 0:
        return None
    fits = all(tag == "N" or old == new for tag, old, new in zip(layout.tags, before, after[added:], strict=True))
    return dataclasses.replace(layout, tags=("N",) * added + layout.tags) if fits else None


@dataclasses.dataclass(frozen=True)
class _Work:
    """What is made with local ids: of which columns, and whether it lies in the order of experts."""

    columns: tuple[int, ...]
    in_order: bool


def all_weighed(flow: DataFlow, local: fx.Node, after: Collection[fx.Node], dispatch: Dispatch, zeroed: Zeroed) -> bool:
    """Whether all that is made with the local ids is multiplied by the weight of its own choice before it leaves the graph.

    Args: after: values downstream of the local ids.
    """
    work: dict[fx.Node, _Work | None] = {}  # None: it cannot be said
    counted, done = {local}, set[fx.Node]()
    for node in sorted(after, key=flow.order.__getitem__):
        inputs = flow.inputs(node)
        if spelling(node) in CREATION:
            continue
        if node in zeroed.layouts or node is local:
            counted.add(node)
            continue
        if not _floats(node):
            (counted if any(n in counted or n in work for n in inputs) else done).add(node)
            continue
        theirs = [work[n] for n in inputs if n in work]
        weighing = [n for n in inputs if n in zeroed.layouts and value(n).dtype.is_floating_point]
        if weighing and (spelling(node) in ("mul", *CONTRACTIONS) or is_opaque(node)):
            if not all(_weighs(flow, node, w, [o for o in inputs if o in work], theirs, zeroed) for w in weighing):
                return False
            done.add(node)
        elif theirs:
            work[node] = _passed(node, theirs, inputs, counted, flow)
        elif done & set(inputs):
            done.add(node)
        elif any(n in counted for n in inputs):
            made = [n for n in inputs if n not in counted and (is_tensor(n) or flow.kind(n) != "const")]
            if made:
                work[node] = _made(node, inputs, dispatch, local)
            else:
                counted.add(node)  # a count, or a one-hot as numbers
    if any(n in flow.outputs for n in work):
        return False
    orders = {order_of(flow, n, local) for n in zeroed.orders}
    return len(orders) <= 1 and all(
        _sorted_by(flow, n, local) in orders for n in dispatch.chain if orders and _picked(n)
    )


def _floats(node: fx.Node) -> bool:
    """Whether a value is of floating-point numbers, or an operator's several results may be."""
    changed = node.args[0] if spelling(node) == "setitem" else None
    seen = value(changed if isinstance(changed, fx.Node) else node)
    return not hasattr(seen, "dtype") or bool(seen.dtype.is_floating_point)


def _made(node: fx.Node, inputs: Sequence[fx.Node], dispatch: Dispatch, local: fx.Node) -> _Work | None:
    everything = dispatch.columns.get(local)
    if everything is None:
        return None
    ids = [n for n in inputs if n in dispatch.columns or n is local]
    columns = {dispatch.columns.get(n, everything) for n in ids} or {everything}
    laid = [n for n in inputs if n in dispatch.chain and n not in dispatch.columns]
    if len(columns) > 1 or laid:
        return None
    sorted_ = not ids or any(_picked(n) for n in ids)
    return _Work(columns.pop(), sorted_ and spelling(node) in _PICKS | {"embedding", "gather"})


def _picked(node: fx.Node) -> bool:
    """Whether ids are those of a sort, or picked by one."""
    if node.op not in ("call_function", "call_method") or not node.args:
        return False
    source = node.args[0]
    if spelling(node) == "getitem" and isinstance(source, fx.Node) and not is_tensor(source):
        return spelling(source) == "sort"
    return spelling(node) in _PICKS and any(is_tensor(n) for n in node.all_input_nodes[1:])


def _sorted_by(flow: DataFlow, node: fx.Node, local: fx.Node) -> fx.Node | None:
    source = node.args[0]
    if isinstance(source, fx.Node) and not is_tensor(source):
        return source
    index = next(n for n in flow.inputs(node) if n is not flow.operand(node, source))
    return order_of(flow, index, local)


def _passed(
    node: fx.Node,
    theirs: Sequence[_Work | None],
    inputs: Sequence[fx.Node],
    counted: Collection[fx.Node],
    flow: DataFlow,
) -> _Work | None:
    first = theirs[0]
    if first is None or any(other != first for other in theirs):
        return None
    if spelling(node) in _PICKS and any(n in counted for n in inputs):
        return dataclasses.replace(first, in_order=False) if first.in_order else None
    return first


def _weighs(
    flow: DataFlow,
    node: fx.Node,
    weight: fx.Node,
    others: Sequence[fx.Node],
    theirs: Sequence[_Work | None],
    zeroed: Zeroed,
) -> bool:
    layout = zeroed.layouts[weight]
    if is_opaque(node):
        return "P" not in layout.tags
    tags = "".join(tag for tag in layout.tags if tag != "N")
    if tags.lstrip("T") not in ("", "K", "F", "P") or (tags.startswith("T") and tags[-1] in "FP"):
        return False
    for work in theirs:
        if work is None or work.columns != layout.columns or work.in_order is not ("P" in tags):
            return False
    if spelling(node) != "einsum":
        return True
    equation = node.args[0]
    if not isinstance(equation, str) or "." in equation:
        return False
    letters = dict(zip(_operands(node), equation.replace(" ", "").split("->")[0].split(","), strict=True))
    mine = {c for c, tag in zip(letters[weight], layout.tags, strict=True) if tag != "N"} if weight in letters else None
    return mine is not None and all(mine <= set(letters[o]) for o in others if o in letters)


def _operands(node: fx.Node) -> list[Any]:
    given = node.args[1:]
    return list(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else list(given)
