"""The Dynamo backend: match a graph, rewrite a copy, compile both, choose at the call.

    compiled = torch.compile(model, backend=r3_pass.backend())          # or backend="r3_pass"

Each graph that routes is compiled as it is, and once for each thing that it may be asked for (with the record op; taking given
routes), all inside the backend's call: guards that come later are lost. Which of them runs is chosen at the call: live without a
session and outside of a replay.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from r3_pass.behind import BehindABreak, Carried, LeftIds
from r3_pass.binding import Binding, Placement, find_binding
from r3_pass.errors import R3Error, RefusedConfiguration
from r3_pass.given import OnBadRow
from r3_pass.inner import Compiled, Inner, compile_with, owns_outputs
from r3_pass.passes.behind import Use, choice_of, leaving, uses
from r3_pass.passes.fuse import Fused, fuse
from r3_pass.passes.match import match
from r3_pass.passes.record import rewrite
from r3_pass.passes.replay import force
from r3_pass.passes.site import Accepted, Match, Rejected
from r3_pass.passes.witness import Witnesses
from r3_pass.places import Place
from r3_pass.registry.shapes import value
from r3_pass.replay import ForcedGraph, Replay
from r3_pass.replays import Replays, frames
from r3_pass.report import GraphRecord, Report

Mode = Literal["record", "replay", "both"]


class CompiledGraph:
    """What Dynamo calls for one routing graph.

    Attributes:
        graphs: all that its backend has compiled; grows.
        device: where its ids are.
        witnesses: its sites, and the weights that name their layers.
        placed: how the sites were placed at calls so far, for reports.
        leaving: results that hold the ids of a site which leave by a graph break, and the number of the site.
        hands_out: the recording flavour returns the ids of its one site as one more result, for one launch with those of the other
            layers (`Binding.ran`).
        goes_on: what an R3Error does to a call in a step. False: the call raises it. True: the model's outputs come as they would
            without a session. The step fails either way, at the latest when it ends.
    """

    def __init__(
        self,
        plain: Compiled,
        recording: Compiled,
        tokens: int | None,
        witnesses: Witnesses,
        refused: Sequence[Rejected],
        device: torch.device,
        graphs: Sequence[GraphRecord],
        goes_on: bool = False,
        hands_out: bool = False,
        leaving: Sequence[tuple[int, int]] = (),
        left: LeftIds | None = None,
    ) -> None:
        self.graphs = graphs
        self.device = device
        self.goes_on = goes_on
        self.hands_out = hands_out
        self.leaving = leaving
        self.left = left
        self.plain = plain
        self.recording = recording
        self.tokens = tokens
        self.witnesses = witnesses
        self.refused = tuple(refused)
        self.placed: dict[tuple[int, Place], None] = {}
        self._served: tuple[weakref.ref[Binding], ...] = ()
        self._strangers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def served(self) -> list[Binding]:
        """Bindings that calls of this graph were for."""
        return [binding for reference in self._served if (binding := reference()) is not None]

    def __call__(self, *args: Any) -> Any:
        weights = self.witnesses.weights(args)
        binding = find_binding(weights, self.served, self._strangers)
        if binding is None or not binding.recording or not weights or torch._C._current_graph_task_id() != -1:
            return self.plain(*args)  # no step, or a checkpointed region that a backward inside of one runs again
        try:
            placement = self._begin(binding, weights)
        except R3Error as error:
            self._fail(binding, error)
            return self.plain(*args)
        if not placement.stored:
            return self.plain(*args)
        ids: Tensor | None = None
        tokens = self.tokens
        if self.hands_out:
            *results, ids = self.recording(*args)
            tokens = ids.shape[0]
        else:
            results = self.recording(*args, binding.buffer, binding.state, binding.mapping, placement.columns)
            if tokens is None:
                results, tokens = results[:-1], results[-1]
        if self.leaving:
            self._carry(binding, placement, results)
        try:
            binding.ran(placement, tokens, ids)
        except R3Error as error:
            self._fail(binding, error)
        return results

    def _carry(self, binding: Binding, placement: Placement, results: Sequence[Any]) -> None:
        assert self.left is not None
        reached: dict[int, set[int]] = {}
        for result, number in self.leaving:
            if placement.numbers[number] >= 0:
                site, layer = self.witnesses.sites[number], binding.layers[placement.numbers[number]]
                module = binding.modules.get(layer, site.module)
                came = reached.setdefault(number, set())
                self.left.put(results[result], Carried(weakref.ref(binding), layer, module, choice_of(site), came))

    def _begin(self, binding: Binding, weights: tuple[Any, ...]) -> Placement:
        if not binding.begun:
            binding.begin()
        if self.refused:
            binding.refuse(self.refused)
        placement = binding.placed(self.witnesses, weights)
        if placement is None:
            placement = binding.place(self.witnesses, weights, self.placed)
            if not any(reference() is binding for reference in self._served):
                self._served = (*self._served, weakref.ref(binding))
                binding.learn(self.graphs)
        if placement.stored and self.device != binding.device:
            raise RefusedConfiguration(
                f"the graph's ids are on {self.device}, the session's slot buffer is on {binding.device}: a model that is spread "
                "over devices, or was moved after attach. Attach when its weights are where they will run."
            )
        binding.before(placement)
        return placement

    def _fail(self, binding: Binding, error: R3Error) -> None:
        binding.problems[str(error)] = None  # the step fails, also where an engine swallows this
        if not self.goes_on:
            raise error


class RefusedGraph:
    """What Dynamo calls for a graph whose routing cannot be recorded: it runs, and tells the session of the step."""

    def __init__(
        self,
        plain: Compiled,
        refused: Sequence[Rejected],
        module: fx.GraphModule,
        graphs: Sequence[GraphRecord],
        replays: Replays | None,
    ) -> None:
        self.graphs = graphs
        self.plain = plain
        self.replays = replays
        self.refused = tuple(refused)
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self._weights = [i for i, n in enumerate(placeholders) if isinstance(value(n), torch.nn.Parameter)]

    def __call__(self, *args: Any) -> Any:
        weights = [args[i] for i in self._weights]
        if self.replays is not None:
            self.replays.refuse(weights, _texts(self.refused))
        binding = find_binding(weights, tuple, {})
        if binding is not None and binding.recording:
            binding.learn(self.graphs)
            binding.refuse(self.refused)
        return self.plain(*args)


class Backend:
    """A torch.compile backend that records and replays expert routing; see `r3_pass.backend`."""

    goes_on = False
    """See `CompiledGraph`."""

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
        graph = ForcedGraph(self.replays, live, forced, made, module, _texts(refused), device)
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


def _texts(refused: Sequence[Rejected]) -> list[str]:
    return [f"{r.module or r.node}: {r.reason}" for r in refused]


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
