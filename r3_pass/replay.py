"""Replay: which routes a forward takes, and that every layer took them.

    with backend.replay(routes):
        loss = loss_fn(compiled(input_ids))
        loss.backward()

What is replayed now stands on the backend, under a lock, not in a thread: autograd recomputes in another one. A
compiled graph asks at each call. Recomputation of a checkpointed region outside of the graph must take the routes that
its forward took: each such forward leaves a mark among the tensors that the region saves, and the mark that comes back
from the recomputation is compared.

Legend: T tokens, L decoder layers, M MoE layers, K columns of the routes, N sites of a graph.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.weak import WeakTensorKeyDictionary

from r3_pass.binding import Binding, Place, Placement, owner_of
from r3_pass.errors import InvalidRoutes, NoRouterFound, PartialCapture, R3Error, RefusedConfiguration
from r3_pass.given import Given, OnBadRow
from r3_pass.inner import Compiled
from r3_pass.passes.replay import Forced
from r3_pass.passes.witness import Witnesses
from r3_pass.regions import Context, running
from r3_pass.registry.dataflow import plain, value

_ADVICE = (
    "Compile the blocks that route so that their graphs run in training, too (each MoE block by itself: "
    "block.mlp.compile(backend=backend)), and pass model= to replay(); r3_pass.explain(model, ...) and "
    "backend.report() say what was seen. A hook on a gate breaks the graph of a block between its top-k and its experts: "
    "transformers sets one for output_router_logits=True, which works in a model that is compiled whole only"
)


class _Layers:
    """On a model: which layer each of its weights is of. Copied and saved as an empty dict."""

    def __init__(self, model: nn.Module) -> None:
        self.binding = Binding(model, torch.device("cpu"), self._lay_out, mark=False)

    def _lay_out(self, layers: tuple[int, ...], top_k: int) -> None:
        self.binding.layers, self.binding.top_k = layers, top_k

    def __reduce__(self) -> tuple[type[OrderedDict[str, Any]], tuple[()]]:
        return OrderedDict, ()


def layers_of(model: nn.Module) -> Binding:
    held = model.__dict__.get("_r3_layers")
    if not isinstance(held, _Layers) or held.binding.model is not model:
        held = _Layers(model)
        model.__dict__["_r3_layers"] = held
    return held.binding


class Replays:
    """Replay's state of one backend.

    Attributes:
        lock: held while the state changes; calls of graphs only read.
        forwards: replayed forwards of each layer.
        fallback: rows of each layer that were bad and went to the live router.
        marks: by weight, forwards that may yet be recomputed. Grad mode tells graphs apart, so these stand here.
        last: by weight, whether its last forward was replayed.
        regions: by reentrant region that may yet be recomputed, and by weight, the replayed forwards in it.
        device: where the last graph that was compiled routes; routes are checked there.
    """

    def __init__(self) -> None:
        self.marks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.last: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.regions: weakref.WeakKeyDictionary[Context, dict[int, _Mark]] = weakref.WeakKeyDictionary()
        self.lock = threading.RLock()
        self.forwards: Counter[int] = Counter()
        self.fallback: Counter[int] = Counter()
        self.device: torch.device | None = None
        self._beside: torch.cuda.Stream | None = None
        self._open: tuple[tuple[Replay, int], ...] = ()  # and by which thread
        self._frames: list[weakref.ref[nn.Module]] = []
        self._models: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[Given, int] = weakref.WeakKeyDictionary()

    @property
    def active(self) -> Replay | None:
        running = self._open
        return running[-1][0] if running else None

    def find(self, weights: Sequence[Any]) -> tuple[Replay, Binding] | None:
        """The innermost context that replays the model of these weights, and where they are in it.

        Raises: as `Replay.binding_for`.
        """
        for replay, _ in reversed(self._open):
            binding = replay.binding_for(weights)
            if binding is not None:
                return replay, binding
        return None

    def refuse(self, weights: Sequence[Any], reasons: Sequence[str]) -> None:
        """Raises for routing of a replayed model that cannot take given routes."""
        if reasons and self._open and (not weights or self.find(weights) is not None):
            raise PartialCapture("replay: routing that cannot take given routes ran: " + "; ".join(reasons) + ".")

    def beside(self) -> torch.cuda.Stream | None:
        """A stream for routes that come from the host; None where no graph runs on a GPU."""
        device = self.device
        if device is None or device.type != "cuda":
            return None
        if self._beside is None or self._beside.device != device:
            self._beside = torch.cuda.Stream(device)
        return self._beside

    def enter(self, replay: Replay) -> None:
        """Raises: RefusedConfiguration if a graph could not tell this context from one that another thread has open."""
        thread = threading.get_ident()
        with self.lock:
            for other, whose in self._open:
                if whose != thread and other.may_be(replay) and self.number(other.given) != self.number(replay.given):
                    raise RefusedConfiguration(
                        "replay: another thread replays other routes with this backend now, and a forward takes them in "
                        "whatever thread it runs. Let one thread open a context at a time, compile with a backend for "
                        "each thread, or, for several models, name each: backend.replay(routes, model=model)."
                    )
            self._open = (*self._open, (replay, thread))

    def leave(self, replay: Replay) -> None:
        with self.lock:
            at = max(n for n, (r, _) in enumerate(self._open) if r is replay)
            self._open = self._open[:at] + self._open[at + 1 :]

    def number(self, given: Given | None) -> int:
        """Names routes by what is in them; 0 is none."""
        if given is None:
            return 0
        with self.lock:
            if given not in self._numbers:
                known = next((n for g, n in self._numbers.items() if g.same(given)), None)
                self._numbers[given] = next(_NUMBERS) if known is None else known
            return self._numbers[given]

    # ---- models -------------------------------------------------------------------------------------------------
    def saw(self, frames: Iterable[nn.Module]) -> None:
        """Remember modules whose forward Dynamo compiles."""
        for frame in frames:
            if not any(known() is frame for known in self._frames):
                with self.lock:
                    self._frames = [*(known for known in self._frames if known() is not None), weakref.ref(frame)]

    def model_of(self, weights: Sequence[Any]) -> nn.Module | None:
        """The model that weights belong to: one that has a session, or else the largest whose forward was compiled."""
        owner = next((o for w in weights if (o := owner_of(w)) is not None), None)
        if owner is not None:
            return owner.binding.model
        known = self._models.get(weights[0])
        found: nn.Module | None = known() if known is not None else None
        if found is None:
            wanted = set(map(id, weights))
            frames = [frame for reference in self._frames if (frame := reference()) is not None]
            holding = [f for f in frames if any(id(p) in wanted for p in (*f.parameters(), *f.buffers()))]
            holding = [f for f in holding if self._names(f, weights)]
            found = max(holding, key=lambda f: sum(1 for _ in f.parameters()), default=None)
            if found is None:
                return None
            self._models[weights[0]] = weakref.ref(found)
        return found

    @staticmethod
    def _names(model: nn.Module, weights: Sequence[Any]) -> bool:
        """Whether one of these weights of a model is in one of its layers."""
        binding = layers_of(model)
        if not any(map(binding.owns, weights)):
            binding.claim()  # weights may have been replaced
        return any(map(binding.names_layer, weights))


class Replay:
    """One context: `with backend.replay(routes)`. May be entered again, also for a backward that comes later."""

    def __init__(self, replays: Replays, routes: Any, model: nn.Module | None, on_bad_row: OnBadRow) -> None:
        self.given = Given(routes, on_bad_row, replays.device, replays.beside())
        self.model = model
        self.forwards: Counter[int] = Counter()
        self.backward = False
        self._replays = replays
        self._tracing = contextlib.ExitStack()
        self._named = model is not None
        self._routed: list[int] = []
        self._layer_of: dict[int, int] = {}
        self._told: Counter[int] = Counter()
        self._blocks: dict[int, tuple[Placement, Tensor]] = {}

    def __enter__(self) -> Replay:
        self.forwards.clear()
        self.backward = False
        self._replays.enter(self)
        if self.model is not None and layers_of(self.model).structure.separate_experts:
            # Loops over experts make Dynamo give up a function, unless operators of data-dependent sizes may be traced.
            self._tracing.enter_context(torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracing.close()
        self._replays.leave(self)
        told = Counter({self._layer_of.get(column, column): n for column, n in self.given.fallback.items()})
        with self._replays.lock:
            self._replays.fallback.update(told - self._told)
        self._told = told
        if kind is None:
            self._settle()

    def _settle(self) -> None:
        """Raises if what ran inside left out a layer that routes."""
        if not self.forwards:
            if self.backward:
                return  # entered again for the backward alone
            raise NoRouterFound(
                "replay: no compiled graph that routes ran inside of the context, so whatever ran in it routed live. "
                "The model was compiled "
                f"with another backend, or not at all, or its code fell back to eager. {_ADVICE}."
            )
        assert self.model is not None, "known since the first forward"
        binding = layers_of(self.model)
        expected = sorted({*binding.layers, *binding.expected()})
        most = max(self.forwards.values())
        missing = [layer for layer in expected if self.forwards[layer] < most]
        if missing:
            raise PartialCapture(
                f"replay: {len(expected) - len(missing)} of {len(expected)} MoE layers took the given routes; layers "
                f"{', '.join(map(str, missing))} routed live in at least one forward: their graph did not run (eager "
                "code, a graph break, "
                f"torch._dynamo.config.recompile_limit, a wrapper that was passed by). Drop this step. {_ADVICE}."
            )

    # ---- calls --------------------------------------------------------------------------------------------------
    def binding_for(self, weights: Sequence[Any]) -> Binding | None:
        """Where the weights of a call are in the replayed model; None for another model than the one that was named."""
        if self.model is None:
            self.model = self._replays.model_of(weights)
        if self.model is None:
            raise RefusedConfiguration(
                "replay: which layer a compiled graph serves is found by its weights, and the model that these "
                "belong to is not known: it "
                "was compiled in parts, or shares the code of another one. Name it: backend.replay(routes, model=model)."
            )
        binding = layers_of(self.model)
        if not any(map(binding.owns, weights)):
            binding.claim()  # weights may have been replaced
        if any(map(binding.owns, weights)):
            return binding
        if self._named:
            return None
        raise RefusedConfiguration(
            f"replay: a second model ran inside of the context, beside the {type(self.model).__name__} that was "
            "replayed first. Call it "
            "outside, or name the one that is meant: backend.replay(routes, model=model)."
        )

    def may_be(self, other: Replay) -> bool:
        """Whether a forward could belong to either of two contexts."""
        return not (self._named and other._named) or self.model is other.model

    def block(self, graph: ForcedGraph, binding: Binding, placement: Placement, tokens: int) -> Tensor:
        """int32 [N, T, K] for one call of a graph, checked."""
        known = self._blocks.get(id(placement))
        if known is not None and known[0] is placement and known[1].shape[1] == tokens:
            return known[1]
        with self._replays.lock:
            made = self._make(graph, binding, placement, tokens)
            self._blocks[id(placement)] = placement, made
        return made

    def _make(self, graph: ForcedGraph, binding: Binding, placement: Placement, tokens: int) -> Tensor:
        given = self.given
        columns: list[int | None] = []
        for number, stored in enumerate(placement.numbers):
            site, why = graph.witnesses.sites[number], graph.unforced[number]
            if stored < 0 or site.fixed:
                columns.append(None)
                continue
            layer = binding.layers[stored]
            if why:
                name = binding.modules.get(layer, site.module)
                raise PartialCapture(f"replay: layer {layer} ({name}, {site.form}) cannot take given routes: {why}.")
            column = self._column(binding, layer)
            given.check(column, layer, binding.named.get(layer, site.num_experts), site.top_k)
            columns.append(column)
        laid = given.laid(tokens, graph.device)
        width = graph.top_k
        first = columns[0]
        if first is not None and width == given.columns and columns == list(range(first, first + len(columns))):
            return laid[first : first + len(columns)]
        live = laid.new_full((1, tokens, width), -1)
        more = max(0, width - given.columns)
        parts = [
            live if c is None else torch.nn.functional.pad(laid[c : c + 1, :, :width], (0, more), value=-1)
            for c in columns
        ]
        return torch.cat(parts)

    def _column(self, binding: Binding, layer: int) -> int:
        """Which of the given layers is a decoder layer's: all decoder layers are given, or those that route."""
        assert binding.container is not None, "a layer was placed"
        given = self.given
        every = binding.count_layers(binding.container)
        routed = sorted({*binding.layers, *binding.expected()})
        if given.layers == every:
            dense = next((n for n in range(every) if n not in routed and given.summary.valid[n]), None)
            if dense is not None:
                raise InvalidRoutes(
                    f"routes[..., {dense}, :] holds expert ids, and layer {dense} has no experts (MoE layers: "
                    f"{', '.join(map(str, routed))}): the layers are shifted, or the routes are those of another model."
                )
            self._layer_of[layer] = layer
            return layer
        if given.layers != len(routed) or self._routed not in ([], routed):
            raise InvalidRoutes(
                f"the routes have {given.layers} layers; the model has {every} decoder layers, of which "
                f"{len(routed)} route "
                f"({', '.join(map(str, routed))}). Give one of the two."
            )
        self._routed = routed
        self._layer_of[routed.index(layer)] = layer
        return routed.index(layer)


class ForcedGraph:
    """One routing graph of a backend that replays: live outside of the context, forced inside."""

    def __init__(
        self,
        replays: Replays,
        live: Compiled,
        forced: Compiled,
        made: Forced,
        module: fx.GraphModule,
        refused: Sequence[str],
        device: torch.device,
    ) -> None:
        self.replays = replays
        self.live = live
        self.forced = forced
        self.witnesses = Witnesses(module, made.occurrences)
        self.unforced = made.unforced
        self.refused = tuple(refused)
        self.top_k = made.top_k
        self.device = device
        replays.device = device
        self._tokens = _token_counter(module, made.tokens)
        self.placed: dict[tuple[int, Place], None] = {}

    def __call__(self, *args: Any) -> Any:
        inside = self.replays.active is not None
        weights = self.witnesses.weights(args)
        if not weights:
            if inside:
                raise RefusedConfiguration(
                    "replay: a graph that routes has no weights in it, so its layer cannot be known."
                )
            return self.live(*args)
        replay, binding = (self.replays.find(weights) or (None, None)) if inside else (None, None)
        if inside and replay is None:
            return self.live(*args)  # another model than those that are replayed
        recomputes = torch._C._current_graph_task_id() != -1
        hooked = torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        number = self.replays.number(replay.given) if replay is not None and hooked else 0
        if not hooked and (recomputes or (replay is not None and not torch.is_grad_enabled())):
            linked = self._link(weights[0], replay)
        else:
            linked = False
        if recomputes and not linked:
            self._expect(weights[0], number, hooked, replay is not None)
        if replay is not None and binding is not None:
            results = self._force(replay, binding, weights, args, recomputes)
        else:
            results = self.live(*args)
        if not recomputes:
            self.replays.last[weights[0]] = replay is not None
        if hooked or replay is not None:
            mark = _Mark(number, replay.given if replay is not None else None) if hooked else None
            self._watch(results, weights[0], mark, recomputes)
        return results

    def _force(
        self, replay: Replay, binding: Binding, weights: tuple[Any, ...], args: tuple[Any, ...], recomputes: bool
    ) -> Any:
        session = next((o.binding for w in weights if (o := owner_of(w)) is not None), None)
        if session is not None and session.recording:
            raise RefusedConfiguration(
                "replay: a session's step is open. What would be recorded is what is replayed: close one of the two."
            )
        self.replays.refuse(weights, self.refused)
        placement = binding.place(self.witnesses, weights, self.placed)
        if placement.problems:
            raise RefusedConfiguration("replay: " + "; ".join(placement.problems))
        block = replay.block(self, binding, placement, self._tokens(args))
        results = self.forced(*args, block)
        if not recomputes:
            layers = [binding.layers[m] for m in placement.stored]
            with self.replays.lock:
                replay.forwards.update(layers)
                self.replays.forwards.update(layers)
        return results

    # ---- recomputation ------------------------------------------------------------------------------------------
    def _link(self, weight: Tensor, replay: Replay | None) -> bool:
        """Hold the second run of a reentrant region against its first, and remember a first one.

        Returns: whether this is a second run. Raises if it takes other routes.
        """
        forwards, backward = running()
        if not forwards and backward is None:
            return False
        regions, given = self.replays.regions, replay.given if replay is not None else None
        number = self.replays.number(given)
        if backward is not None:
            mark = regions.get(backward, {}).get(id(weight))
            if number != (mark.number if mark is not None else 0):
                raise _other_routes(replay is not None)
        if given is not None:
            with self.replays.lock:
                for region in forwards:
                    regions.setdefault(region, {})[id(weight)] = _Mark(number, given)
        return backward is not None

    def _expect(self, weight: Tensor, number: int, hooked: bool, replayed: bool) -> None:
        """Raises if a recomputation in the backward takes other routes than every forward that may need one."""
        marks = {mark.number for mark in self.replays.marks.get(weight, ())}
        if (hooked and marks and number not in marks) or (
            not hooked and not marks and replayed != self.replays.last.get(weight, replayed)
        ):
            raise _other_routes(replayed)

    def _watch(self, results: Any, weight: Tensor, mark: _Mark | None, recomputes: bool) -> None:
        """See this forward's backward; in a checkpointed region, compare the routes of its recomputation with these.

        Args:
            mark: None outside of checkpointed regions.
        """
        leaves = results if isinstance(results, tuple | list) else ()
        nodes = {id(t.grad_fn): t.grad_fn for t in leaves if isinstance(t, Tensor) and t.grad_fn is not None}
        kept: Tensor | None = None  # the node itself does not keep what it saved, in torch 2.11
        if mark is not None:
            anchor = torch.zeros(1, requires_grad=True)
            kept = _Saved.apply(anchor, torch.tensor([mark.number]))  # type: ignore[no-untyped-call]
            if not recomputes:
                marks = self.replays.marks.get(weight)
                if marks is None:
                    marks = self.replays.marks[weight] = weakref.WeakSet()
                marks.add(mark)
        replays = self.replays

        compared: set[int] = set()

        def before_backward(grads: Any) -> None:
            active = replays.active
            if active is not None:
                active.backward = True
            task = torch._C._current_graph_task_id()
            if mark is None or kept is None or task in compared:
                return
            compared.add(task)  # outputs have several nodes, and what is saved can be read once
            try:
                saved: Any = kept.grad_fn
                (again,) = saved.saved_tensors
            except CheckpointError as error:
                if replays.number(active.given if active is not None else None) == mark.number:
                    raise  # the routes are the same: something else differs
                raise _other_routes(active is not None) from error
            if int(again) != mark.number:
                raise _other_routes(active is not None)

        for node in nodes.values():
            node.register_prehook(before_backward)


_NUMBERS = itertools.count(1)


class _Mark:
    """Which routes a forward took; lives as long as the graph that autograd made of it."""

    __slots__ = ("__weakref__", "given", "number")

    def __init__(self, number: int, given: Given | None) -> None:
        self.number = number
        self.given = given  # kept, so that equal routes get the same number as long as this forward may be recomputed


class _Saved(torch.autograd.Function):
    """Saves one tensor the way an operator does, so that checkpointing drops it and makes it again."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, number: Tensor) -> Tensor:
        ctx.save_for_backward(number)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


def _other_routes(replayed: bool) -> R3Error:
    how = "by other routes than its forward" if replayed else "live, and its forward was replayed"
    return RefusedConfiguration(
        f"replay: a checkpointed region runs again in the backward and would route {how}. Run the backward inside of "
        "the context of its "
        "own forward, or enter backend.replay(the same routes) again around it."
    )


def _token_counter(module: fx.GraphModule, tokens: Any) -> Callable[[Sequence[Any]], int]:
    """A function from a call's arguments to the number of tokens that it routes."""
    if isinstance(tokens, int):
        return lambda args: tokens
    places: dict[Any, tuple[int, int | None]] = {}
    for number, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder"):
        seen = value(node)
        if isinstance(seen, torch.SymInt):
            places.setdefault(plain(seen), (number, None))
        elif isinstance(seen, Tensor):
            for dim, size in enumerate(seen.shape):
                places.setdefault(plain(size), (number, dim))
    wanted = sorted(tokens.free_symbols, key=str)
    where = [places[symbol] for symbol in wanted]
    count = sympy.lambdify(wanted, tokens, "math")
    return lambda args: int(count(*(args[n] if dim is None else args[n].shape[dim] for n, dim in where)))


def frames() -> list[nn.Module]:
    """The modules in whose forward Dynamo is compiling, as far out as code that it was told to compile reaches."""
    found: list[Any] = []
    running = getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)
    if running is not None:
        found.extend(running.output.root_tx.f_locals.values())
    within: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        within.extend(frame.f_locals.values())
        if frame.f_code.co_filename == torch._dynamo.eval_frame.__file__:  # entered compiled code here
            found.extend(within)
            within = []
        frame = frame.f_back
    modules = (getattr(held, "_orig_mod", held) for held in found if isinstance(held, nn.Module))
    return [held for held in modules if isinstance(held, nn.Module) and not isinstance(held, fx.GraphModule)]
