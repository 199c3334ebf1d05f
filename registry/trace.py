"""What lies between a selection and the linears that scored it, as far as it was followed."""

from __future__ import annotations

import dataclasses

from torch import fx

from r3_pass.registry.shapes import Dim

Span = tuple[int, int]  # first and last dimension, both included


@dataclasses.dataclass(frozen=True)
class Root:
    """Where router scores come from: a product of data with a weight, or a graph input if the product is in another graph.

    Attributes:
        node: the product (or the placeholder).
        weights: placeholders of the weight; empty for a graph input.
        width: size of the product's expert dimension, at least the number of experts that are selected over.
    """

    node: fx.Node
    weights: tuple[fx.Node, ...]
    width: Dim


@dataclasses.dataclass
class Trace:
    """What lies between a selection and its roots."""

    roots: list[Root] = dataclasses.field(default_factory=list)
    passed: list[fx.Node] = dataclasses.field(default_factory=list)
    couples_tokens: fx.Node | None = None
    starts_late: fx.Node | None = None
    over_tokens: bool = False
    dead_ends: list[str] = dataclasses.field(default_factory=list)

    @property
    def why_not(self) -> str:
        return self.dead_ends[0] if self.dead_ends else "no path from a linear to the selected scores"
