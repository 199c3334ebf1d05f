"""Reading an FX graph: who produced a value, and who uses it.

In-place operators return the tensor that they change, and activation checkpointing nests subgraphs. `DataFlow` hides that:
`inputs` and `users` see through in-place updates and into nested graphs.

Legend: T tokens in the step, E experts, K top-k.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from r3_pass.registry.operators import CREATION, spelling
from r3_pass.registry.shapes import dims, is_tensor, value
from r3_pass.registry.writes import fills, is_inplace, reshapes, written

_INLINED = frozenset({
    "wrap", "tag_activation_checkpoint", "wrap_activation_checkpoint", "invoke_subgraph",
    "wrap_with_set_grad_enabled", "wrap_with_autocast", "hints_wrapper", "dynamo_bypassing_wrapper",
})  # fmt: skip
"""Higher-order operators whose graph runs exactly once where they stand: no branch, no loop, no backward beside it."""

_VIEWS = frozenset({"view", "transpose", "permute", "expand", "t", "select", "narrow", "detach"})


def subgraph_of(node: fx.Node) -> fx.GraphModule | None:
    """The nested graph that a higher-order operator (activation checkpoint, regional compilation) runs once, else None."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    if node.target.name() not in _INLINED:
        return None
    for arg in node.args:
        if isinstance(arg, fx.Node) and arg.op == "get_attr":
            found = getattr(node.graph.owning_module, str(arg.target), None)
            if isinstance(found, fx.GraphModule):
                return found
    return None


def bound(call: fx.Node, nested: fx.GraphModule) -> dict[fx.Node, Any]:
    """What a call of a nested graph hands to each of its placeholders."""
    inner = [n for n in nested.graph.nodes if n.op == "placeholder"]
    given = [a for a in call.args if not isinstance(a, str) and not (isinstance(a, fx.Node) and a.op == "get_attr")]
    return dict(zip(inner, given[len(given) - len(inner) :], strict=True)) if len(given) >= len(inner) else {}


def _is_sort(node: fx.Node) -> bool:
    """Whether a node sorts into new memory: what is done to its results is not done to what it read."""
    return spelling(node) in ("sort", "argsort") and node.kwargs.get("out") is None


def _same_memory(one: fx.Node, other: fx.Node) -> bool:
    """Whether tracing saw two tensors to lie in one storage, whatever was read of it between them."""
    first, second = value(one), value(other)
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    if first.layout is not torch.strided or second.layout is not torch.strided:
        return first is second
    return first is second or bool(torch._C._is_alias_of(first, second))  # type: ignore[attr-defined]


def _is_unread(node: fx.Node) -> bool:
    """Whether a node calls Python of somebody else (`torch.compiler.allow_in_graph`), which may keep what it is given."""
    target = node.target
    return isinstance(target, types.FunctionType) and target.__module__.partition(".")[0] != "torch"


class DataFlow:
    """Producers and consumers of every value in a graph and in the graphs nested in it.

    `inputs(node)` are the values that the node reads *as they are when it reads them*: after `mask.scatter_(...)` a reader of
    `mask` has the `scatter_` as its producer. `users(node)` is the inverse. Values cross the border of a nested graph as if the
    graph were inlined; a nested graph that is called several times is read as its first call (`calls` lists them all).

    Args:
        graph: read only; nodes carry `meta["example_value"]` (Dynamo) or `meta["val"]` (AOT).
        is_weight: whether a placeholder holds a weight (parameter or buffer of the model) rather than data.
    """

    def __init__(self, graph: fx.Graph, is_weight: Any) -> None:
        self.order: dict[fx.Node, int] = {}
        self.nodes: list[fx.Node] = []
        self.calls: dict[fx.Graph, list[fx.Node]] = {}
        self.outputs: set[fx.Node] = set()
        self._inputs: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._users: dict[fx.Node, list[fx.Node]] = {}
        self._alias: dict[fx.Node, fx.Node] = {}
        self._latest: dict[fx.Node, fx.Node] = {}
        self._writes: dict[fx.Node, list[fx.Node]] = {}  # by operator, what it writes
        self._reshaped: dict[fx.Node, fx.Node] = {}
        self._kinds: dict[fx.Node, str] = {}
        self._is_weight = is_weight
        self.graph = graph
        self._read(graph, {})

    # ---- construction -------------------------------------------------------------------------------------------
    def _read(self, graph: fx.Graph, outer: dict[fx.Node, fx.Node]) -> None:
        for node in graph.nodes:
            if node in outer:
                self._alias[node] = outer[node]
                continue
            nested = subgraph_of(node)
            if nested is not None:
                self.calls.setdefault(nested.graph, []).append(node)
                if len(self.calls[nested.graph]) == 1:
                    given = bound(node, nested).items()
                    self._read(nested.graph, {p: self.resolve(a) for p, a in given if isinstance(a, fx.Node)})
            self._add(node, top=graph is self.graph)

    def _add(self, node: fx.Node, top: bool) -> None:
        if node.op == "output" and not top:
            return
        if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            nested = subgraph_of(node.args[0])
            if nested is not None and isinstance(node.args[1], int):
                results = next(n for n in nested.graph.nodes if n.op == "output").args[0]
                item = results[node.args[1]] if isinstance(results, tuple | list) else results
                if isinstance(item, fx.Node) and len(self.calls[nested.graph]) == 1:
                    self._alias[node] = self.resolve(item)
                    return
        self.order[node] = len(self.nodes)
        self.nodes.append(node)
        read = tuple(dict.fromkeys(c for n in node.all_input_nodes for c in self._current(self.resolve(n))))
        self._inputs[node] = read
        for source in read:
            self._users.setdefault(source, []).append(node)
        if node.op == "output":
            self.outputs.update(read)
        for target in written(node):
            bases = list(self.bases(self.resolve(target)))
            self._writes.setdefault(node, []).append(bases[0])
            if reshapes(node):
                self._reshaped[bases[0]] = node
            if is_inplace(node) or "out" in node.kwargs or fills(node) is target:
                self._latest.update(dict.fromkeys(bases, node))

    def bases(self, node: fx.Node) -> Iterator[fx.Node]:
        """The node and what it is a view of: an in-place update changes them all."""
        while True:
            yield node
            if (
                node.op not in ("call_function", "call_method")
                or not node.args
                or not isinstance(node.args[0], fx.Node)
            ):
                return
            viewing = spelling(node) in _VIEWS or (
                spelling(node) == "getitem"
                and is_tensor(node.args[0])
                and not any(is_tensor(n) for n in node.all_input_nodes[1:])
            )
            if not viewing and not is_inplace(node):
                return
            node = self.resolve(node.args[0])

    def _current(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """What reads a value now reads: its last update; also the value itself, if that came through a view of another shape."""
        latest = self._latest.get(node)
        if latest is None:
            return (node,)
        return (latest,) if dims(latest) == dims(node) else (node, latest)

    def overwritten(self, node: fx.Node) -> bool:
        """Whether the value may be changed in place after it was made, so that a later reader sees another one."""
        producer = node.args[0] if spelling(node) == "getitem" and isinstance(node.args[0], fx.Node) else node
        return producer.kwargs.get("out") is not None or bool(self._writers(node)[0])

    def shared(self, node: fx.Node) -> bool:
        """Whether others may write to the value's memory after the graph.

        It is an argument's, it is among what the graph returns, or a Python function that was not traced had it.
        """
        _, reached = self._writers(node)
        return any(
            n in self.outputs or n.op in ("placeholder", "get_attr") or any(_is_unread(user) for user in self.users(n))
            for n in reached
        )

    def reshaped(self, node: fx.Node) -> fx.Node | None:
        """What gives the value, or a view of it, another shape in place: the graph then notes that one from the start."""
        for changed, by in self._reshaped.items():
            if node in self.bases(changed) or value(node) is value(changed):  # `contiguous()` that does nothing
                return by
        return None

    def overwritten_unseen(self, node: fx.Node) -> fx.Node | None:
        """What may change the value in place before it is read again, without a result that is read in its place.

        A custom operator or kernel; what returns lists or nothing (`_foreach_add_`, an array's `n[:] = other`); a write to memory
        that is read by another name later (`first, second = ids.unbind(1)`, `ids.long()` that does nothing).
        """
        writers, reached = self._writers(node)
        for writer in writers:
            later = (user for n in reached for user in self.users(n) if self.order.get(user, -1) > self.order[writer])
            if not is_inplace(writer) and writer.kwargs.get("out") is None and any(True for _ in later):
                return writer
        return next((writer for writer in self._writers_of_memory(node) if self._read_aside(node, writer)), None)

    def _writers_of_memory(self, node: fx.Node) -> list[fx.Node]:
        """Operators that write, after a value was made, to what tracing saw to lie in the same memory."""
        return [
            writer
            for writer, targets in self._writes.items()
            if self.order[writer] > self.order[node] and any(_same_memory(node, target) for target in targets)
        ]

    def _read_aside(self, node: fx.Node, writer: fx.Node) -> bool:
        """Whether memory that the value shares is read after it was written, and not as what the writer returns."""
        told = {n for target in self._writes[writer] for n in self.bases(target)}
        if not is_tensor(writer) and writer.target is not operator.setitem:
            told.clear()
        at = self.order[writer]
        held = [n for n in self.nodes[:at] if n not in told and _same_memory(node, n)]
        return any(
            self.order.get(user, -1) > at and spelling(user) not in CREATION and not reshapes(user)
            for n in held
            for user in self.users(n)
        )

    def _writers(self, node: fx.Node) -> tuple[list[fx.Node], set[fx.Node]]:
        """Operators that write, after a value was made, to what may share its memory; and all that may.

        Anything integer that is made of it counts: casts that do nothing and views of all kinds do. So does all that is made of a
        view as another type.
        """
        reached, stack = {node, *self.bases(node)}, [node]
        while stack:
            top = stack.pop()
            floating = is_tensor(top) and (value(top).dtype.is_floating_point or value(top).dtype.is_complex)
            for user in self.users(top):
                seen = value(user)
                if user in reached or _is_sort(user) or spelling(user) in CREATION:
                    continue
                if not floating and is_tensor(user) and seen.dtype.is_floating_point and spelling(user) not in _VIEWS:
                    continue
                reached.add(user)
                stack.append(user)
        after = {n for seen in reached for n in self.users(seen) if self.order.get(n, -1) > self.order[node]}
        writers = [n for n in after if reached & {self.resolve(target) for target in written(n)}]
        return sorted(writers, key=self.order.__getitem__), reached

    # ---- reading ------------------------------------------------------------------------------------------------
    def resolve(self, node: fx.Node) -> fx.Node:
        """The node that really holds this value: sees through nested graphs' borders."""
        while node in self._alias:
            node = self._alias[node]
        return node

    def inputs(self, node: fx.Node) -> tuple[fx.Node, ...]:
        return self._inputs.get(node, ())

    def users(self, node: fx.Node) -> Sequence[fx.Node]:
        return self._users.get(node, ())

    def operand(self, node: fx.Node, arg: Any) -> fx.Node | None:
        """The producer of one argument of `node`, as `node` reads it; None if the argument is no node."""
        if not isinstance(arg, fx.Node):
            return None
        wanted: fx.Node = self.resolve(arg)
        read = self._inputs.get(node, ())
        if wanted in read:
            return wanted
        for candidate in read:
            if any(wanted in self.bases(self.resolve(target)) for target in written(candidate)):
                return candidate
        return wanted

    def kind(self, node: fx.Node) -> str:
        """ "const" (no values but shapes), "weight" (weights and constants only) or "data" (depends on the call's inputs)."""
        known = self._kinds.get(node)
        if known is not None:
            return known
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._kinds:
                stack.pop()
                continue
            if top.op == "placeholder":
                self._kinds[top] = "weight" if self._is_weight(top) else ("data" if is_tensor(top) else "const")
            elif top.op == "get_attr":
                self._kinds[top] = "weight"
            elif spelling(top) in CREATION:
                self._kinds[top] = "const"
            else:
                waiting = [n for n in self.inputs(top) if n not in self._kinds]
                if waiting:
                    stack.extend(waiting)
                    continue
                kinds = {self._kinds[n] for n in self.inputs(top)}
                self._kinds[top] = "data" if "data" in kinds else "weight" if "weight" in kinds else "const"
            stack.pop()
        return self._kinds[node]

    def weights(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The weight placeholders (or attributes) that a weight-only value is made of."""
        found: dict[fx.Node, None] = {}
        stack, seen = [node], {node}
        while stack:
            top = stack.pop()
            if top.op in ("placeholder", "get_attr"):
                if self.kind(top) == "weight":
                    found[top] = None
                continue
            for source in self.inputs(top):
                if source not in seen and self.kind(source) == "weight":
                    seen.add(source)
                    stack.append(source)
        return tuple(found)
