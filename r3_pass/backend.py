"""The Dynamo backend: match a graph, rewrite a copy, compile both, choose at the call.

    compiled = torch.compile(model, backend=r3_pass.backend())          # or backend="r3_pass"

Each graph that routes is compiled as it is, and once for each thing that it may be asked for (with the record op; taking given
routes), all inside the backend's call: guards that come later are lost. Which of them runs is chosen at the call: live without a
session and outside of a replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from r3_pass.behind import BehindABreak, LeftIds
from r3_pass.called import CompiledGraph, RefusedGraph, texts_of
from r3_pass.errors import RefusedConfiguration
from r3_pass.given import OnBadRow
from r3_pass.inner import Compiled, Inner, compile_with, owns_outputs
from r3_pass.passes.behind import Use, leaving, uses
from r3_pass.passes.fuse import Fused, fuse
from r3_pass.passes.match import match
from r3_pass.passes.record import rewrite
from r3_pass.passes.replay import force
from r3_pass.passes.site import Accepted, Match, Rejected
from r3_pass.passes.witness import Witnesses
from r3_pass.registry.shapes import value
from r3_pass.replay import ForcedGraph, Replay
from r3_pass.replays import Replays, frames
from r3_pass.report import GraphRecord, Report

Mode = Literal["record", "replay", "both"]


class Backend:
    """A torch.compile backend that records and replays expert routing; see `r3_pass.backend`."""

    goes_on = False
    """See `called.CompiledGraph`."""

    def __init__(self, inner: Inner, mode: Mode, fuse_router: bool = False) -> None:
        self.inner = inner
        self.mode = mode
        self.fuse_router = fuse_router
        self.graphs: list[GraphRecord] = []
        self.left = LeftIds()
        self.replays: Replays | None = None if mode == "record" else Replays()

    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        return self  # engines copy the configs that hold a backend; a copy would split the report

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
        arriving = uses(module.graph, self.left.choices) if self.left.choices else ()
        compiled = self._compile(module, example_inputs, options, arriving)
        return BehindABreak(compiled, arriving, self.left) if arriving else compiled

    def _compile(
        self, module: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any], arriving: Sequence[Use]
    ) -> Compiled:
        reason = getattr(module, "compile_subgraph_reason", None)
        given = [n for n in module.graph.nodes if n.op == "placeholder"]
        chosen = [(given[use.argument], use.choice.num_experts) for use in arriving if use.chooses]
        found = match(module.graph, broken=bool(getattr(reason, "graph_break", False)), arriving=chosen)
        record = GraphRecord(len(self.graphs), found, str(getattr(reason, "reason", "")))
        self.graphs.append(record)
        if self.replays is not None:
            self.replays.saw(frames())
        refused = [r for r in found.rejected if r.routing]
        if not found.sites:
            plain = compile_with(self.inner, module, example_inputs, options)
            return RefusedGraph(plain, refused, module, self.graphs, self.replays) if refused else plain
        if _split_for_ddp():
            return self._leave(module, example_inputs, refused, record, options, _SPLIT)
        if self.mode == "record":
            fused = fuse(module, found.sites) if self.fuse_router else Fused(module, found.sites, ())
            record.unfused = fused.reasons
            compiled = self._compile_recording(
                fused.module, example_inputs, found, fused.sites, refused, record, options
            )
            if fused.module is not module:
                record.keep_before(module)
            return compiled
        # Every flavour is compiled here and now: guards that a later compilation adds would be lost.
        device = _device_of(found.sites)
        made = force(module, found.sites, device, broken=bool(getattr(reason, "graph_break", False)))
        if isinstance(made, str):
            return self._leave(module, example_inputs, refused, record, options, made)
        for occurrence, why in zip(made.occurrences, made.unforced, strict=True):
            if why:
                site = occurrence.site
                record.refusals[f"{site.module or 'a graph'} ({site.form}) cannot take given routes: {why}"] = None
        forced = compile_with(self.inner, made.module, [*example_inputs, value(made.added)], options)
        if self.mode == "both":
            live = self._compile_recording(module, example_inputs, found, found.sites, refused, record, options)
        else:
            record.keep(module, made.module)
            live = compile_with(self.inner, module, example_inputs, options)
        assert self.replays is not None, "of every mode but 'record'"
        graph = ForcedGraph(self.replays, live, forced, made, module, texts_of(refused), device)
        if self.mode == "replay":
            record.placed = graph.placed
        graph.placed = record.placed
        return graph

    def _compile_recording(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        found: Match,
        sites: Sequence[Accepted],
        refused: Sequence[Rejected],
        record: GraphRecord,
        options: dict[str, Any],
    ) -> Compiled:
        device = _device_of(sites)
        rewritten = rewrite(module, sites, device, owns_outputs(self.inner, module, options))
        if isinstance(rewritten, str):
            return self._leave(module, example_inputs, refused, record, options, rewritten)
        record.keep(module, rewritten.module)
        witnesses = Witnesses(module, rewritten.occurrences)
        left = [(n, number) for number, site in enumerate(witnesses.sites) for n in leaving(module.graph, site)]
        self.left.saw(witnesses.sites[number] for _, number in left)
        fakes = [value(node) for node in rewritten.added]
        recording = compile_with(self.inner, rewritten.module, [*example_inputs, *fakes], options)
        plain = compile_with(self.inner, module, example_inputs, options)
        record.watch_bytecode()
        compiled = CompiledGraph(
            plain,
            recording,
            rewritten.tokens,
            witnesses,
            refused,
            device,
            self.graphs,
            self.goes_on,
            rewritten.hands_out,
            left,
            self.left,
        )
        record.placed = compiled.placed
        return compiled

    def _leave(
        self,
        module: fx.GraphModule,
        example_inputs: Sequence[Any],
        refused: Sequence[Rejected],
        record: GraphRecord,
        options: dict[str, Any],
        why: str,
    ) -> Compiled:
        """Compile a graph as it is, its sites refused for one reason."""
        found = record.found
        more = [Rejected(s.selections[0].name, why, True, s.module, s.gate) for s in found.sites]
        record.found = Match((), (*found.rejected, *more))
        plain = compile_with(self.inner, module, example_inputs, options)
        return RefusedGraph(plain, [*refused, *more], module, self.graphs, self.replays)

    def report(self) -> Report:
        """What was captured in the graphs compiled so far, and what was rejected and why."""
        replays = self.replays
        if replays is None:
            return Report(tuple(self.graphs))
        return Report(tuple(self.graphs), dict(replays.forwards), dict(replays.fallback))

    def replay(self, routes: Any, *, model: nn.Module | None = None, on_bad_row: OnBadRow = "error") -> Replay:
        """A context in which the compiled model takes given expert ids in place of those that its routers choose.

            with backend.replay(routes):
                loss = loss_fn(compiled(input_ids))
                loss.backward()

        The weights of the experts are the live scores of the given ones, so that gradients reach the router. Forward and
        backward belong inside: a recomputation (activation checkpointing) that runs outside is refused. The context may be
        entered again, for the backward of a pipeline schedule, say. What this backend compiled for the model is replayed in
        every thread.

        Args:
            routes: integers of 8 to 64 bits, a numpy array or a torch tensor: [tokens, layers, top_k] in the order of
                the forward's tokens, or padded [batch, seq, layers, top_k]; one row a token, or one less for each
                sequence. `layers` counts all decoder layers or those that route. -1 is the live router: a whole row,
                or columns past a layer's own top-k.
            model: whose weights are meant, where the model was compiled in parts (per layer), or several run inside.
            on_bad_row: "error" raises for an id out of range, an expert twice in a row, a row that is not full; "live"
                leaves such rows to the live router and counts them in `report().fallback_rows`.

        Raises: InvalidRoutes if the routes cannot be right, here or in the forward; at the end NoRouterFound or
            PartialCapture if a layer that routes was not replayed; RefusedConfiguration for a mode without replay.
        """
        if self.replays is None:
            raise RefusedConfiguration(
                "replay needs a model compiled with backend(mode='replay'), or mode='both' to record as well; this "
                "one is mode='record'."
            )
        inner = getattr(model, "_orig_mod", model)
        if inner is not None and not isinstance(inner, nn.Module):
            raise ValueError(f"model is the torch.nn.Module that is replayed, got {type(model).__name__}")
        return Replay(self.replays, routes, inner, on_bad_row)


_SPLIT = (
    "Dynamo split the graph for DistributedDataParallel, which takes one compiled function for each part, with one backward. "
    "Compile the blocks by themselves (block.compile(backend=backend)), or set torch._dynamo.config.optimize_ddp = False"
)


def _split_for_ddp() -> bool:
    """Whether who called the backend runs what it returns once on fake tensors, and counts its backwards (DDPOptimizer)."""
    context = torch._guards.TracingContext.try_get()
    return context is not None and context.fakify_first_call


def _device_of(sites: Sequence[Accepted]) -> torch.device:
    seen = value(sites[0].columns[0])
    return seen.device if isinstance(seen, Tensor) else torch.device("cpu")


def backend(inner: Inner = "inductor", *uncalled: object, mode: Mode = "record", fuse_router: bool = False) -> Backend:
    """A `torch.compile` backend that records which experts every token was routed to.

    >>> import r3_pass, torch
    >>> compiled = torch.compile(torch.nn.Linear(4, 4), backend=r3_pass.backend("eager"))
    >>> compiled(torch.ones(2, 4)).shape
    torch.Size([2, 4])

    Without a session (`r3_pass.runtime.attach`) the compiled model does no route work.

    Args:
        inner: what compiles the rewritten graph: "inductor", "aot_eager", "eager", the name of any Dynamo backend, or
            a backend. Outputs are those of the same inner backend without r3_pass, bit for bit; with Inductor on a GPU, as far as
            it tunes the same kernels alike in two compilations.
        mode: what each graph that routes is compiled for, beside running live: "record", "replay" (`backend.replay(routes)`),
            or "both". Each is one more compilation of the graph when it is first seen, and none later.
        fuse_router: compute each layer's routing from the logits on (scores, top-k, weights) by one kernel, with a session and
            without, where it is exactly a routing that the kernel computes; `report()` says of each site whether it is, or why
            not. Weights are then equal up to rounding, not bit for bit, and so are ids where the margin is more than
            `r3_pass.passes.router.MARGIN`. For inference: with mode="record", and no gradients.
        uncalled: never given; what Dynamo passes where this function itself was taken for a backend.

    Raises: RefusedConfiguration if Dynamo knows no backend of that name, if it is one of r3_pass, for fuse_router with another
        mode, or where Dynamo calls this function itself; ValueError for an unknown mode.
    """
    if isinstance(inner, fx.GraphModule):
        raise RefusedConfiguration(
            "torch.compile was given r3_pass.backend itself, which makes a backend and is none. Call it: "
            "torch.compile(model, backend=r3_pass.backend())."
        )
    if uncalled:
        raise TypeError(
            f"backend takes inner alone by position, got {uncalled!r} as well: mode= and fuse_router= go by name"
        )
    if not isinstance(inner, str) and not callable(inner):
        raise ValueError(f"inner is the name of a Dynamo backend or a backend, got {inner!r}")
    if isinstance(inner, Backend) or inner in (r3_pass, "r3_pass"):
        raise RefusedConfiguration(
            "inner= is what compiles the rewritten graph, and r3_pass's own backend is what rewrites it: a graph would be recorded "
            'twice. Give the backend behind it, "inductor" (the default) or another.'
        )
    if isinstance(inner, str) and inner not in (known := torch._dynamo.list_backends(exclude_tags=())):
        names = ", ".join(name for name in known if name != "r3_pass" and not name.endswith("_TESTING_ONLY"))
        raise RefusedConfiguration(f"inner={inner!r} is no Dynamo backend that is registered here. Known are {names}.")
    if mode not in ("record", "replay", "both"):
        raise ValueError(f"mode is 'record', 'replay' or 'both', got {mode!r}")
    if fuse_router and mode != "record":
        raise RefusedConfiguration(
            f"fuse_router=True with mode={mode!r}: a fused router takes no given routes and has no gradients. Use mode='record' in "
            "the engine, and a backend without fuse_router in the trainer."
        )
    return Backend(inner, mode, fuse_router)


def r3_pass(module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
    """`torch.compile(model, backend="r3_pass")`: a backend without state; sessions are found by the weights of each call."""
    chosen = dict(options.get("options") or {})
    inner, fuse_router = chosen.pop("inner", "inductor"), chosen.pop("fuse_router", False)
    passed = {**options, "options": chosen} if chosen else {k: v for k, v in options.items() if k != "options"}
    return backend(inner, fuse_router=fuse_router)(module, example_inputs, **passed)
