"""What the matcher says of a candidate: a routing site, or why it is none."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from r3_pass.registry.form import Selection
from r3_pass.registry.shapes import dims, plain, product


@dataclasses.dataclass(frozen=True)
class Accepted:
    """A place in the graph where experts are chosen for tokens.

    Attributes:
        form: how it is spelled, e.g. "softmax_topk", "sigmoid_bias_grouped_topk".
        num_experts: E, what the selection runs over (zero and identity experts included); 0 if a table does not tell.
        top_k: columns that it records.
        columns: values holding the ids; one of [..., k], or several of [...] or [..., 1] in the order of choice.
        id_dim: dimension of k in `columns[0]`; None if that has none (k = 1 each).
        gate: weight placeholders (or attributes) of the router's product; they name the layer.
        experts: weight placeholders that the ids were seen to choose from; they name the layer where the gate cannot.
        module: the module path that the selection was traced in, relative to the compiled frame ("" if unknown).
        layer: decoder layer as the module path tells it, from a frame that holds the whole block list; else None.
        proved: False if the ids leave the graph before they reach experts: the model's structure must confirm the site.
        selections: the selection operators, for reports.
        named: how many of the E choices name an expert; less than E where the router's weight is padded. None if the graph does
            not show it.
        overwritten: the graph changes the ids in place later; what the router chose must be kept before that.
        shared: what runs after the graph may change the ids in place; what is read of them later must be a copy.
        choices: every selection that makes the same choice (equal ones, too), and the first column of `columns` that it makes.
        roots: the products that the scores come from.
        fixed: the ids follow from the token alone; there is nothing to replay.
        no_replay: why its form cannot be replayed; "" if it can.
    """

    form: str
    num_experts: int
    top_k: int
    columns: tuple[fx.Node, ...]
    id_dim: int | None
    gate: tuple[fx.Node, ...]
    experts: tuple[fx.Node, ...]
    module: str
    layer: int | None
    proved: bool
    selections: tuple[fx.Node, ...]
    overwritten: bool = False
    shared: bool = False
    choices: tuple[tuple[Selection, int], ...] = ()
    roots: tuple[fx.Node, ...] = ()
    fixed: bool = False
    no_replay: str = ""
    named: int | None = None

    def __bool__(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A candidate that is not recorded.

    Attributes:
        node: name of the selection operator in the graph.
        reason: why, for a person.
        routing: True if it does choose experts but cannot be recorded (no fixed ids per token, say): that is an error at run time.
        module: module path that it was traced in.
        gate: weight placeholders of the product behind it, where one was found.
    """

    node: str
    reason: str
    routing: bool
    module: str
    gate: tuple[fx.Node, ...] = ()

    def __bool__(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class Match:
    """All decisions about one graph, in graph order."""

    sites: tuple[Accepted, ...]
    rejected: tuple[Rejected, ...]


def tokens_of(site: Accepted) -> Any:
    """T of a site: an int, or an expression of the graph's symbols."""
    shape = dims(site.columns[0])
    at = None if site.id_dim is None else site.id_dim % max(len(shape), 1)
    return plain(product([size for dim, size in enumerate(shape) if dim != at]))
