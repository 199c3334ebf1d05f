"""Which weights name the layer of each site, and where a call of the graph brings them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from r3_pass.passes.record import Occurrence
from r3_pass.passes.site import Accepted


class Witnesses:
    """The weights of a graph's sites among its arguments.

    Attributes:
        sites: one for each entry of the record op's `columns`.
        gates, experts: for each site, which of `weights(args)` are its router's and its experts'.
    """

    def __init__(self, module: fx.GraphModule, occurrences: Sequence[Occurrence]) -> None:
        self.sites: tuple[Accepted, ...] = tuple(o.site for o in occurrences)
        places = {n.name: i for i, n in enumerate(n for n in module.graph.nodes if n.op == "placeholder")}
        nodes = list(dict.fromkeys(n for o in occurrences for n in (*o.gate, *o.experts)))
        arguments = [n for n in nodes if n.op == "placeholder" and n.name in places]
        constants = [n for n in nodes if n.op == "get_attr"]
        positions = [places[n.name] for n in arguments]
        # Called at every call of the graph: no loop of Python's over the layers. (For one position an itemgetter returns no tuple.)
        several = operator.itemgetter(*positions) if len(positions) > 1 else None
        self._arrived: Callable[[Sequence[Any]], tuple[Any, ...]] = several or (
            lambda args: tuple(args[i] for i in positions)
        )
        self._constants: list[Tensor] = [_attribute(module, str(n.target)) for n in constants]
        number = {n: i for i, n in enumerate([*arguments, *constants])}
        self.gates = [[number[n] for n in o.gate if n in number] for o in occurrences]
        self.experts = [[number[n] for n in o.experts if n in number] for o in occurrences]

    def weights(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The weights that arrived in this call, and those that the graph holds itself."""
        return (*self._arrived(args), *self._constants)


def _attribute(module: fx.GraphModule, target: str) -> Any:
    found: Any = module
    for part in target.split("."):
        found = getattr(found, part)
    return found
