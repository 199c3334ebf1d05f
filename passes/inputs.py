"""Adding inputs to a copy of a Dynamo graph.

Dynamo reads its own graph's placeholders again after a backend returns, so they may only be added to a copy. An added
placeholder stands for a tensor that stays where it is from call to call: marked static, so that CUDA graphs write to the tensor
itself and not to a copy; all its sizes symbolic, so that another number of slots needs no compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from r3_pass.registry.shapes import value


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The fake mode that traced the graph; None if the graph holds no traced values."""
    for node in graph.nodes:
        seen = value(node)
        if isinstance(seen, FakeTensor):
            return seen.fake_mode
    context = torch._guards.TracingContext.try_get()
    return context.fake_mode if context is not None else None


def add_input(
    graph: fx.Graph, mode: FakeTensorMode, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> fx.Node:
    """Append a placeholder for a persistent tensor.

    Args:
        graph: a copy; mutated.
        shape: hints of its sizes, each larger than 1; -n stands for a size that is n for good.
    """
    sizes = [abs(s) for s in shape]
    with torch._guards.tracing(None):
        real = torch.empty(sizes, dtype=dtype, device="meta" if device.type == "meta" else device)
    context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.STATIC if s < 0 else DimDynamic.DYNAMIC for s in shape],
        constraint_sizes=[None] * len(shape),
    )
    fake = mode.from_tensor(real, static_shapes=False, symbolic_context=context, source=ConstantSource(f"r3_{name}"))
    last = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_after(last[-1]) if last else graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder(f"r3_{name}")
    node.meta.update(val=fake, example_value=fake, tensor_dict={"_dynamo_static_input_type": "guarded"})
    node._dynamo_source = None  # AOTAutograd reads it of every placeholder
    return node
