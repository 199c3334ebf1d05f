"""The name of a router's form in reports: what happens to its scores, then the selection."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.form import RoutingForm, Selection
from r3_pass.registry.operators import spelling
from r3_pass.registry.trace import Trace


def form_name(flow: DataFlow, form: RoutingForm, selection: Selection, trace: Trace) -> str:
    """ "softmax_topk", "sigmoid_bias_grouped_topk", "topk_softmax": what happens to the scores, then the selection."""
    names = [spelling(n) for n in trace.passed]
    parts: list[str] = [s for s in ("softmax", "log_softmax", "sigmoid", "softplus", "tanh") if s in names]
    if any(spelling(n) == "add" and any(flow.kind(i) == "weight" for i in flow.inputs(n)) for n in trace.passed):
        parts.append("bias")
    masks = [n for n in trace.passed if spelling(n) in ("masked_fill", "where", "mul", "scatter")]
    if any(_masked_by_selection(flow, n) for n in masks) and selection.alone:
        parts.append("grouped")
    after = [form.name]
    if not parts and any(
        spelling(u) == "softmax"
        for v in flow.users(selection.node)
        if spelling(v) == "getitem" and v.args[1] == 0
        for u in _near(flow, v)
    ):
        after.append("softmax")
    return "_".join(parts + after)


def _near(flow: DataFlow, node: fx.Node, steps: int = 3) -> Iterable[fx.Node]:
    level: Sequence[fx.Node] = [node]
    for _ in range(steps):
        level = [u for n in level for u in flow.users(n)]
        yield from level


def _masked_by_selection(flow: DataFlow, node: fx.Node) -> bool:
    stack = [n for n in flow.inputs(node)[1:] if flow.kind(n) == "data"]
    seen = set(stack)
    while stack and len(seen) < 40:
        top = stack.pop()
        if spelling(top) == "topk":
            return True
        for source in flow.inputs(top):
            if source not in seen and spelling(source) not in ("linear", "matmul", "softmax", "sigmoid"):
                seen.add(source)
                stack.append(source)
    return False
