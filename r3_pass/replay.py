"""Replay: which routes a forward takes, and that every layer took them.

    with backend.replay(routes):
        loss = loss_fn(compiled(input_ids))
        loss.backward()

What is replayed now stands on the backend (`replays`), where a compiled graph asks at each call; what is run again in the backward
is held against its forward (`recomputation`).

Legend: T tokens, L decoder layers, M MoE layers, K columns of the routes, N sites of a graph.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from r3_pass.binding import Binding, Placement
from r3_pass.causes import HOOK, LIMIT, LOOP, listed
from r3_pass.errors import InvalidRoutes, NoRouterFound, PartialCapture, RefusedConfiguration
from r3_pass.given import Given, OnBadRow
from r3_pass.inner import Compiled
from r3_pass.marks import owner_of
from r3_pass.passes.replay import Forced
from r3_pass.passes.witness import Witnesses
from r3_pass.places import Place
from r3_pass.registry.shapes import plain, value
from r3_pass.replays import Replays, layers_of

_COMPILE = (
    "Eager code ran, or a wrapper was passed by: compile the blocks that route so that their graphs run in training, too (each MoE "
    "block by itself: block.mlp.compile(backend=backend)), and pass model= to replay()."
)
_WITHOUT = "No forward ran in it, or only in another context inside of it: put the context around the forward."
_DENSE = "The model is dense: leave the context out."
_BACKEND = "It was compiled with another backend, or not at all: compile it with the backend whose replay() this is."
_SEEN = "r3_pass.explain(model, ...) and backend.report() say what was seen."


class Replay:
    """One context: `with backend.replay(routes)`. May be entered again, also for a backward that comes later.

    Attributes:
        forwards: by layer, how many took the given routes since it was entered.
        backward: whether a backward ran in it.
        unplaced: whether a forward ran whose graph routes, and of which no layer is known to.
    """

    def __init__(self, replays: Replays, routes: Any, model: nn.Module | None, on_bad_row: OnBadRow) -> None:
        self.given = Given(routes, on_bad_row, replays.device, replays.beside())
        self.model = model
        self.forwards: Counter[int] = Counter()
        self.backward = False
        self.unplaced = False
        self._replays = replays
        self._tracing = contextlib.ExitStack()
        self._named = model is not None
        self._routed: list[int] = []
        self._layer_of: dict[int, int] = {}
        self._told: Counter[int] = Counter()
        self._blocks: dict[int, tuple[Placement, Tensor]] = {}
        self._routers: dict[int, frozenset[str]] = {}  # by layer, what the weights of its router are called

    def __enter__(self) -> Replay:
        self.forwards.clear()
        self.backward = self.unplaced = False
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
            if self.backward and not self.unplaced:
                return  # entered again for the backward alone
            raise NoRouterFound(self._nothing_ran())
        assert self.model is not None, "known since the first forward"
        binding = layers_of(self.model)
        expected = sorted({*binding.layers, *binding.expected()})
        most = max(self.forwards.values())
        missing = [layer for layer in expected if self.forwards[layer] < most]
        if missing:
            raise PartialCapture(
                f"replay: {len(expected) - len(missing)} of {len(expected)} MoE layers took the given routes; layers "
                f"{', '.join(map(str, missing))} routed live in at least one forward: their graph did not run. Drop this step. The "
                f"likeliest causes first:{listed((_COMPILE, LIMIT, HOOK, LOOP))}\n{_SEEN}"
            )

    def _nothing_ran(self) -> str:
        text = "replay: no compiled graph that routes ran inside of the context, so whatever ran in it routed live. "
        if self._named and self.model is not None:
            name = type(self.model).__name__
            if not layers_of(self.model).structure.may_route:
                return (
                    f"{text}{name}, which model= names, is dense: it has no experts to choose. Leave the context out."
                )
            text += f"model= names this {name}: forwards of another model, or of a copy, are none of it. "
        causes = (_WITHOUT, _BACKEND, _COMPILE, LIMIT, HOOK, LOOP, _DENSE)
        return f"{text}The likeliest causes first:{listed(causes)}\n{_SEEN}"

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
            self._one_router(layer, binding, placement, graph.witnesses.gates[number])
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

    def _one_router(self, layer: int, binding: Binding, placement: Placement, gates: Sequence[int]) -> None:
        """Raises: RefusedConfiguration if the layer's routes went to another router before, of a graph of its own."""
        owners = (binding.marks.owner(placement.weights[number]) for number in gates)
        names = frozenset(owner.names[0] for owner in owners if owner is not None and owner.names)
        known = self._routers.setdefault(layer, names) if names else names
        if names and known.isdisjoint(names):
            raise RefusedConfiguration(
                f"replay: layer {layer} routes twice in one forward ({min(known)} and {min(names)}): routed_experts has room for "
                "one choice per token and layer. Two routed MLPs in a layer cannot be replayed."
            )

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
        self._data = _data(module)
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
        recomputed, recomputes = self.replays.recomputed, torch._C._current_graph_task_id() != -1
        hooked = torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        number = self.replays.number(replay.given) if replay is not None and hooked else 0
        if not hooked and (recomputes or (replay is not None and not torch.is_grad_enabled())):
            linked = recomputed.link(weights[0], replay)
        else:
            linked = False
        if recomputes and not linked:
            recomputed.expect(weights[0], number, hooked, replay is not None)
        if replay is not None and binding is not None:
            results = self._force(replay, binding, weights, args, recomputes)
        else:
            results = self.live(*args)
        if not recomputes:
            recomputed.last[weights[0]] = replay is not None
        if hooked or replay is not None:
            recomputed.watch(results, weights[0], replay, hooked, recomputes)
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
        tokens = self._tokens(args)
        replay.given.check_order(tokens, (tuple(args[n].shape[:2]) for n in self._data))
        block = replay.block(self, binding, placement, tokens)
        results = self.forced(*args, block)
        if not recomputes:
            layers = [binding.layers[m] for m in placement.stored]
            replay.unplaced = replay.unplaced or not layers
            with self.replays.lock:
                replay.forwards.update(layers)
                self.replays.forwards.update(layers)
        return results


def _data(module: fx.GraphModule) -> tuple[int, ...]:
    """Which arguments are tensors, and no weights."""
    seen = [value(n) for n in module.graph.nodes if n.op == "placeholder"]
    return tuple(n for n, v in enumerate(seen) if isinstance(v, Tensor) and v.dim() and not isinstance(v, nn.Parameter))


def _token_counter(module: fx.GraphModule, tokens: Any) -> Callable[[Sequence[Any]], int]:
    """A function from a call's arguments to the number of tokens that it routes."""
    if isinstance(tokens, int):
        return lambda args: tokens
    places: dict[Any, tuple[int, int | None]] = {}
    for number, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder"):
        seen = value(node)
        if isinstance(seen, torch.SymInt):
            for name in _names(seen):
                places.setdefault(name, (number, None))
        elif isinstance(seen, Tensor):
            for dim, size in enumerate(seen.shape):
                for name in _names(size):
                    places.setdefault(name, (number, dim))
    wanted = sorted(tokens.free_symbols, key=str)
    where = [places[symbol] for symbol in wanted]
    count = sympy.lambdify(wanted, tokens, "math")
    return lambda args: int(count(*(args[n] if dim is None else args[n].shape[dim] for n, dim in where)))


def _names(size: Any) -> tuple[Any, ...]:
    """What a size is called: also by its symbol, which compiling the graph may have fixed to a number since."""
    symbol = getattr(size.node, "_expr", None) if isinstance(size, torch.SymInt) else None
    return (plain(size),) if symbol is None else (plain(size), symbol)
