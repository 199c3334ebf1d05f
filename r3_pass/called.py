"""What Dynamo calls for a graph that routes: the flavour is chosen at the call, by whose step is running, if any.

A graph serves every layer that runs the same code, and several models: whose call it is, the weights tell that arrive with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from r3_pass.behind import Carried, LeftIds
from r3_pass.binding import Binding, Placement, find_binding
from r3_pass.errors import R3Error, RefusedConfiguration
from r3_pass.inner import Compiled
from r3_pass.passes.behind import choice_of
from r3_pass.passes.site import Rejected
from r3_pass.passes.witness import Witnesses
from r3_pass.places import Place
from r3_pass.registry.shapes import value
from r3_pass.replays import Replays
from r3_pass.report import GraphRecord


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
            self.replays.refuse(weights, texts_of(self.refused))
        binding = find_binding(weights, tuple, {})
        if binding is not None and binding.recording:
            binding.learn(self.graphs)
            binding.refuse(self.refused)
        return self.plain(*args)


def texts_of(refused: Sequence[Rejected]) -> list[str]:
    return [f"{r.module or r.node}: {r.reason}" for r in refused]
