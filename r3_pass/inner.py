"""The compiler behind ours: Inductor, AOTAutograd alone, none, or any Dynamo backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

Compiled = Callable[..., Any]
Inner = str | Callable[..., Compiled]


def compile_with(
    inner: Inner, module: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any]
) -> Compiled:
    """Compile a graph with the backend that the user chose.

    Args:
        inner: "inductor", "aot_eager", "eager", the name of a registered Dynamo backend, or a backend.
        options: what torch.compile was given as `mode` and `options`.
    """
    if inner == "eager":
        return module.forward
    if inner == "aot_eager":
        return _aot_eager(module, example_inputs)
    if inner == "inductor":
        return _inductor(module, example_inputs, options)
    backend = torch._dynamo.lookup_backend(inner)
    compiled: Compiled = backend(module, list(example_inputs), **options)
    return compiled


def owns_outputs(inner: Inner, module: fx.GraphModule, options: dict[str, Any]) -> bool:
    """Whether what each call returns stays as it is when the same compiled graph is called again: not in a CUDA graph's memory."""
    if inner in ("eager", "aot_eager"):
        return True
    patches, config = _patches(options), torch._inductor.config
    return inner == "inductor" and not (
        patches.get("triton.cudagraphs", config.triton.cudagraphs)
        or patches.get("cpp_wrapper", config.cpp_wrapper)
        or getattr(module.meta.get("cudagraph_annotation"), "fwd", False)  # torch._dynamo.override_cudagraphs
    )


def _patches(options: dict[str, Any]) -> dict[str, Any]:
    """What `mode` and `options` change of Inductor's configuration."""
    from torch._inductor import list_mode_options

    return {**(list_mode_options(options["mode"]) if options.get("mode") else {}), **(options.get("options") or {})}


def _inductor(module: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any]) -> Compiled:
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(module, list(example_inputs), config_patches=_patches(options) or None)
    return cast(Compiled, compiled)


def _aot_eager(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
    """AOTAutograd without a code generator; the record op stays in place, as Inductor leaves it."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def forward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        defunctionalize(graph)
        compiled: Compiled = boxed_nop(graph, list(inputs))
        return compiled

    compiled: Compiled = aot_autograd(fw_compiler=forward, bw_compiler=boxed_nop, keep_inference_input_mutations=True)(
        module, list(example_inputs)
    )
    return compiled


def defunctionalize(module: fx.GraphModule) -> int:
    """Turn functionalised mutations of this project's ops back into mutations of the graph's inputs.

        before:  auto = auto_functionalized_v2(op, ..., _all_bases=[buffer]);  new = auto[1];  copy_(buffer, new)
        after:   op(buffer, ...)

    AOTAutograd run without Inductor would clone the whole buffer at every step.

    Returns: how many were turned back.
    """
    graph = module.graph
    done = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or getattr(node.target, "_name", "") not in (
            "auto_functionalized_v2",
            "auto_functionalized",
        ):
            continue
        op = node.args[0]
        if not isinstance(op, torch._ops.OpOverload) or op.namespace != "r3_pass":
            continue
        given = dict(node.kwargs)
        bases = given.get("_all_bases", [])
        arguments = []
        for argument in op._schema.arguments:
            base = given.get(f"_{argument.name}_base_index")
            arguments.append(bases[base] if base is not None else given[argument.name])
        with graph.inserting_before(node):
            graph.call_function(op, tuple(arguments))
        for item in list(node.users):
            for user in list(item.users):
                assert user.target is torch.ops.aten.copy_.default and user.args[1] is item, (
                    "only the write-back may read it"
                )
                user.replace_all_uses_with(user.args[0])
                graph.erase_node(user)
            graph.erase_node(item)
        graph.erase_node(node)
        done += 1
    if done:
        module.recompile()
    return done
