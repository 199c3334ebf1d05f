"""What became of a selection's ids: the proofs that they choose parameters, and what was done to them on the way."""

from __future__ import annotations

import dataclasses

from torch import fx

from r3_pass.registry.shapes import dims

IDS, MASK, PERM, SEL, TOK, PROD = "IDS", "MASK", "PERM", "SEL", "TOK", "PROD"
"""What a value is followed as: see `dispatch`; PROD is a SEL that was multiplied with the token, and not added up yet."""


@dataclasses.dataclass
class Dispatch:
    """What became of the ids.

    Attributes:
        events: kinds of proof that were found, with the node of each.
        weights: weight placeholders that the proofs involve: they belong to the layer's experts.
        chain: for each IDS value, the IDS value it was made from; the start maps to None.
        used: IDS values from which a proof was reached.
        escapes: the ids leave the graph as a result.
        left: IDS values that leave so; left_otherwise: masks, orders or tokens that are made of them do.
        fates: what else they were used for, in words.
        direct: IDS values that a proof starts from at once, without another IDS value between.
        mixed: IDS values in which other choices than the selection's were mixed, and how.
        among: of how many things ids pick one, wherever that is seen: rows of a bank or a table, classes of a one-hot.
        equal_to: numbers that ids are compared with, one expert after the other.
        columns: for each IDS value that is known to be the selection's, which of its columns it holds.
        offsets: for each of them, what was added to each id.
        turned: those of them in which a token's choices stand in another order.
        masks: masks made of the ids that say something else than who was chosen, and how; of those that reach a proof.
        bounded: ids are compared by size or clamped: what lies past the experts has a meaning of its own (zero experts, say).
    """

    events: dict[fx.Node, str] = dataclasses.field(default_factory=dict)
    weights: dict[fx.Node, None] = dataclasses.field(default_factory=dict)
    chain: dict[fx.Node, fx.Node | None] = dataclasses.field(default_factory=dict)
    used: set[fx.Node] = dataclasses.field(default_factory=set)
    escapes: bool = False
    left: set[fx.Node] = dataclasses.field(default_factory=set)
    left_otherwise: bool = False
    fates: dict[str, None] = dataclasses.field(default_factory=dict)
    direct: set[fx.Node] = dataclasses.field(default_factory=set)
    mixed: dict[fx.Node, str] = dataclasses.field(default_factory=dict)
    among: set[int] = dataclasses.field(default_factory=set)
    equal_to: set[int] = dataclasses.field(default_factory=set)
    bounded: bool = False
    columns: dict[fx.Node, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    offsets: dict[fx.Node, int] = dataclasses.field(default_factory=dict)
    turned: set[fx.Node] = dataclasses.field(default_factory=set)
    masks: dict[fx.Node, str] = dataclasses.field(default_factory=dict)

    @property
    def proved(self) -> bool:
        return bool(self.events)

    def named(self, choices: int) -> int | None:
        """How many of the choices name an expert: all but the padding of a router's weight. None if this graph does not show it."""
        if self.bounded:
            return choices
        if self.among:
            return min(max(self.among), choices)
        if len(self.equal_to) >= 2 and self.equal_to == set(range(len(self.equal_to))):
            return min(len(self.equal_to), choices)
        banks = [dims(w) for w in self.weights if len(dims(w)) >= 3]
        first = {shape[0] for shape in banks}
        if len(first) == 1 and not any(choices in shape for shape in banks):
            (held,) = first
            return int(held) if isinstance(held, int) and held < choices <= 2 * held else choices
        return None if not banks else choices
