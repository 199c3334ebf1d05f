"""A Dynamo backend that compiles nothing and keeps the graphs it was given: for looking at them, and for counting operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from r3_pass.registry.operators import spelling


class Keeping:
    """`torch.compile(f, backend=Keeping())`, or `r3_pass.backend(inner=Keeping())` for what the pass hands on."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        self.graphs.append(module)
        return module.forward


def traced(function: Callable[..., Any], *args: Any, **options: Any) -> fx.GraphModule:
    """The one Dynamo graph of a function or module."""
    backend = Keeping()
    torch.compile(function, backend=backend, **options)(*args)
    (graph,) = backend.graphs
    return graph


def all_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph, then those of the graphs nested in it."""
    yield from module.graph.nodes
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            yield from all_nodes(child)


def operators(module: fx.GraphModule) -> Counter[str]:
    """How often each operator stands in a graph and in those nested in it."""
    return Counter(spelling(n) for n in all_nodes(module) if n.op in ("call_function", "call_method"))


def named(module: fx.GraphModule, name: str, nth: int = 0) -> fx.Node:
    """The nth operator of one spelling."""
    return [n for n in all_nodes(module) if n.op in ("call_function", "call_method") and spelling(n) == name][nth]
