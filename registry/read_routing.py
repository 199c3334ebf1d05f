"""What a router computes between its logits and the ids and weights of the chosen experts, as a whole.

What `read_routing` returns is not what the graph resembles, but what it computes: the scores (`score_terms`), and what is done to
those of the chosen (`chosen_weights`), as far as one value stands for all of them: what is done to them behind it stays in the
graph.

Legend: E experts, K top-k.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from r3_pass.registry.chosen_weights import first_weights, follow
from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.form import Selection
from r3_pass.registry.routing import Routing, Unread
from r3_pass.registry.score_terms import Rows, ScoreReader
from r3_pass.registry.shapes import dims


@dataclasses.dataclass(frozen=True)
class Reading:
    """A router that is understood.

    Attributes:
        logits: [..., E], in a dtype that float32 holds exactly.
        bias: E numbers of the model, added for the choice alone; None if there are none.
        weights: the value that `routing` says, [..., K].
        between: all that computes ids and weights from the logits, itself included.
    """

    routing: Routing
    logits: fx.Node
    bias: fx.Node | None
    weights: fx.Node
    between: frozenset[fx.Node]


def read_routing(flow: DataFlow, selection: Selection, logits: fx.Node) -> Reading:
    """Read the router of one selection.

    Args:
        selection: a `topk` over the last dimension of its scores, largest first.
        logits: the product that its scores come from.

    Raises: Unread if it is none of the routers that `Routing` can say.
    """
    assert selection.scores is not None, "a selection over scores"
    reader = ScoreReader(flow, logits)
    choice = reader.read(selection.scores)
    if not isinstance(choice, Rows) or choice.grouped:
        raise Unread(f"it selects over something else than a row of scores ({selection.scores.name})")
    top_k = dims(selection.ids[0])[-1]
    routing = Routing(top_k, choice.function)
    if choice.mask is not None:
        score = choice.mask.score
        groups = score.rows.grouped
        routing = dataclasses.replace(routing, groups=groups, best=score.best, kept=choice.mask.kept)
        if top_k > choice.mask.kept * (reader.experts // groups):
            raise Unread(f"it chooses {top_k} experts of {choice.mask.kept} groups that hold fewer")
        never = choice.fill == float("-inf") or (choice.bias is None and choice.fill <= 0.0)
        routing = dataclasses.replace(routing, fill=None if never else choice.fill)
    between = {selection.node, *selection.ids, *(selection.values or ()), *reader.between}
    start, scored = first_weights(flow, selection, choice, routing, logits)
    routing, weights, steps = follow(flow, routing, start, selection.ids[0])
    return Reading(routing.simplified(), logits, choice.bias, weights, frozenset({*between, *scored, start, *steps}))
