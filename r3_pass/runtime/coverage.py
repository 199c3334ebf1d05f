"""Was every MoE layer written in this step? Asked when each step ends, before any of its rows is returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from r3_pass.binding import Binding
from r3_pass.causes import HOOK, LIMIT, LOOP, listed
from r3_pass.errors import NoRouterFound, PartialCapture, RefusedConfiguration
from r3_pass.places import goes_through
from r3_pass.report import GraphRecord
from r3_pass.structure import Block, numbered

Reasons = Callable[[Block], str]
"""From a decoder layer to why its candidates were rejected, "" if none was."""

_CALL = (
    "It was not called as compiled (the model itself was, or the call bypassed the compiled wrapper): call the compiled model "
    "inside the step, and once."
)
_COMPILE = (
    "It was not compiled with this backend: torch.compile(model, backend=backend), or layer.compile(backend=backend), each of "
    "them."
)
_DISABLED = "It lies in a disabled region (torch.compiler.disable), or behind another graph break: take that away."
_LOOPS = (
    "This model loops over its experts, which Dynamo traces only in what is compiled inside a step: call torch._dynamo.reset() and "
    "run the step again."
)
_NEVER = (
    "No graph that r3_pass compiled and that routes has run for this model yet. If it was not compiled with r3_pass: "
    "torch.compile(model, backend=r3_pass.backend()); where an engine compiles it, give the backend to the engine's compile "
    "config. If it was: its router is written in a form that r3_pass does not know, or cut by a graph break.\n"
)


def _advice(binding: Binding) -> str:
    causes = [_CALL, _COMPILE, LIMIT, HOOK, LOOP, _DISABLED]
    if binding.structure.separate_experts:
        causes.remove(LOOP)
        causes.insert(0, _LOOPS)
    return (
        f"Why no graph of a layer runs, or it falls back to eager, the likeliest first:{listed(causes)}\n"
        "Run r3_pass.explain(model, ...) for every candidate, and the step again."
    )


def reasons_of(graphs: Callable[[], Iterable[GraphRecord]]) -> Reasons:
    """What the graphs that are known by then say of a layer's candidates."""

    def why(block: Block) -> str:
        nodes: dict[str, dict[str, None]] = {}
        for record in graphs():
            sites, rejected = record.sites(), record.rejected()
            # A graph of one layer may serve any; what it rejects says nothing of others where it shows a router.
            any_layer = not sites and not any(numbered(f"{entry.module}.") for entry in rejected)
            for entry in rejected:
                if any_layer or goes_through(entry.module, block):
                    nodes.setdefault(entry.reason, {})[entry.node] = None
        return "; ".join(f"{', '.join(names)} rejected: {reason}" for reason, names in nodes.items())

    return why


def check_coverage(binding: Binding, reasons: Reasons) -> bool:
    """Hold what ran in a step against what the model must have run.

    Returns: True if every expected layer was seen to be written; False if a CUDA graph was replayed, whose own count tells.
    Raises:
        RefusedConfiguration: routing ran that has no fixed ids per token.
        NoRouterFound: nothing was captured.
        PartialCapture: some layers were, and others not.
    """
    if binding.refused:
        raise RefusedConfiguration(
            "the model routes in a way that cannot be recorded:\n  "
            + "\n  ".join(binding.refused)
            + "\nThere is no row of ids per token and layer that a trainer could replay; detach, or record another model."
        )
    if not binding.problems:
        if binding.calls and all(binding.calls):
            return True
        if binding.captured and not any(binding.calls):
            return False
    written = [layer for layer, calls in zip(binding.layers, binding.calls, strict=True) if calls]
    expected = binding.layers or binding.expected()
    missing = [layer for layer in expected if layer not in written]
    seen = [*binding.problems, *(f"layer {layer}: {_why(binding, layer, reasons)}" for layer in missing)]
    lines = "".join(f"\n  {line}" for line in seen)
    advice = _advice(binding)
    name = type(binding.model).__name__
    if not expected:
        raise NoRouterFound(
            f"no MoE layer of {name} could be captured in this step.{lines}\n{_nothing_expected(binding)}\n{advice}"
        )
    if not written and not binding.problems:
        what = f" ({len(missing)} were expected):{lines}"
        advice = advice if binding.modules or any(map(reasons, _blocks(binding, missing))) else _NEVER + advice
        raise NoRouterFound(f"no compiled MoE layer of {name} ran in this step{what}\n{advice}")
    raise PartialCapture(f"{len(written)} of {len(expected)} MoE layers were captured in this step.{lines}\n{advice}")


def _blocks(binding: Binding, layers: Iterable[int]) -> Iterable[Block]:
    return (Block(binding.container or "", layer) for layer in layers)


def _nothing_expected(binding: Binding) -> str:
    """Why no layer was expected to route, and what to do about it."""
    structure = binding.structure
    past = [evidence.text for block, evidence in structure.experts.items() if block.container == binding.container]
    if past:
        count = binding.count_layers(binding.container or "")
        whose = "num_layers= says" if binding.num_layers is not None else "the config says"
        return (
            f"{past[0]}, but that lies past the {count} decoder layers that {whose}. Pass num_layers= the number of decoder "
            "layers to attach."
        )
    if len({block.container for block in structure.experts}) > 1:
        lists = ", ".join(sorted({repr(block.container) for block in structure.experts}))
        return f"Experts are in several lists of blocks: {lists}. Attach the module that holds one of them."
    if structure.loose or not structure.blocks:
        what = f"{structure.loose[0]} holds experts, but" if structure.loose else "The model has"
        return (
            f"{what} no numbered module around its layers, and the number is what tells which decoder layer a row is of. Put the "
            "blocks in a torch.nn.ModuleList (layers.0, layers.1, ...), or attach a module in which they are."
        )
    return "The modules of the model show no experts."


def _why(binding: Binding, layer: int, reasons: Reasons) -> str:
    module = binding.modules.get(layer, "expected")
    block = Block(binding.container or "", layer)
    evidence = binding.structure.experts.get(block)
    seen = evidence.text if evidence is not None else module
    if layer in binding.modules:
        return f"{seen}; captured in an earlier step, but no compiled graph of it ran in this one"
    return f"{seen}; {reasons(block) or 'no graph of it that routes ran'}"
