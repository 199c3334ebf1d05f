"""From expert ids forwards: do they choose parameters that then multiply the token?

The ids are followed as one of five things, each with few rules of what it may become:

    IDS   expert ids, in any layout: views, casts, arithmetic, clamps, slices, further columns
    MASK  one-hot, membership, counts, or dense weights [.., E, ..] scattered at the ids
    PERM  positions: the order that sorts tokens by expert, or the tokens that chose an expert
    SEL   parameters picked by the ids: `weight[ids]`
    TOK   tokens picked or masked by expert

and dispatch is proved by one of these events:

    weights   SEL is contracted with the token                       (gathered expert weights)
    grouped   a grouped or custom product takes tokens, weights and what came from the ids
    experts   TOK is contracted with several experts' parameters     (loops, capacity buffers)
    combine   MASK weighs the experts' outputs [.., E, feature]      (dense mixtures)
    outputs   the ids pick among the experts' outputs [.., E, feature]

Where they pick tokens, positions, rows that are only added up, or are counted or returned, nothing is proved. Ids that leave
through a graph break prove nothing here and are said to escape: the model's structure has to confirm them.

This file has the rules. `trail` follows and judges; whether ids are still the selection's is `unchanged`'s and `mixing`'s, whether
those whose place an expert's number took have no weight `dropped`'s, and what a mask says `masks`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.dispatched import IDS, MASK, PERM, PROD, SEL, TOK, Dispatch
from r3_pass.registry.experts import picks_along_a_dimension, scores_a_choice
from r3_pass.registry.masks import NEVER
from r3_pass.registry.numbers import is_low, is_zero, number_of
from r3_pass.registry.operators import (
    COMPARISONS,
    CONTRACTIONS,
    CREATION,
    GROUPED,
    PICKS,
    REARRANGE,
    SELECTIONS,
    argument,
    is_opaque,
    spelling,
)
from r3_pass.registry.origins import others
from r3_pass.registry.shapes import dims, is_tensor, value
from r3_pass.registry.trace import Root
from r3_pass.registry.trail import Rule, Trail

_SHAPED = frozenset({"view", "expand", "expand_as", "type_as", "to", "sum_to_size"})
_LEFT_OUT = "they name the experts that are left out, not those that are chosen"
_BOUNDS = frozenset({
    "gt", "ge", "lt", "le", "clamp", "clip", "clamp_min", "clamp_max", "minimum", "maximum", "where", "masked_fill",
})  # fmt: skip


class _Follow(Trail):
    """The rules: what each of the five things may become."""

    def _rule(self, label: str) -> Rule:
        rules: dict[str, Rule] = {
            IDS: self._ids, MASK: self._mask, PERM: self._perm, SEL: self._sel, TOK: self._tok, PROD: self._prod,
        }  # fmt: skip
        return rules[label]

    def _fused(self, node: fx.Node, user: fx.Node, origin: fx.Node) -> bool:
        """A custom or grouped product that takes tokens and weights beside what came from the ids."""
        beside = others(self.flow, user, node)
        weights = [n for n in beside if self.flow.kind(n) == "weight" and len(dims(n)) >= 2]
        tokens = [n for n in beside if self.origins.beyond(n) or TOK in self.labels.get(n, ())]
        picked = [n for n in beside if SEL in self.labels.get(n, ())]
        if tokens and (weights or picked or any(dims(t) == dims(user) and dims(user) for t in tokens)):
            self._event(user, "grouped", origin, weights)
            return True
        return False

    # ---- one rule set for each label ----------------------------------------------------------------------------
    def _ids(self, node: fx.Node, user: fx.Node, name: str, origin: fx.Node) -> None:
        beside = others(self.flow, user, node)
        self._range(node, user, name)
        if name in _SHAPED and self.flow.operand(user, argument(user, 0, "input", "self")) is not node:
            return  # its shape or its dtype alone
        if is_opaque(user) or name in GROUPED:
            if not self._fused(node, user, origin):
                self._ids_go(node, user, origin)
            return
        if name in ("sort", "argsort", "unique_consecutive", "unique", "msort"):
            if name == "argsort":
                self._go(user, PERM, origin)
            for item in self.flow.users(user):
                if spelling(item) == "getitem" and item.args[1] == 0:
                    self._ids_go(node, item, origin)
                elif spelling(item) == "getitem":
                    self._go(item, PERM, origin)
            if name == "msort":
                self._ids_go(node, user, origin)
            return
        if name in COMPARISONS or name in ("one_hot", "bincount", "histc", "bucketize"):
            self.masks.mark(user, name == "ne")
            self._go(user, MASK, origin)
            return
        if name in ("nonzero", "where") and len(beside) == 0:
            self._go(user, PERM, origin)
            return
        if name in (
            "scatter",
            "scatter_add",
            "scatter_reduce",
            "index_add",
            "index_put",
            "index_fill",
            "setitem",
            "index_copy",
        ):
            self._scattered(node, user, name, origin)
            return
        if name in PICKS and self._picks(node, user, name, origin):
            return
        if name in SELECTIONS or name in CONTRACTIONS or name in CREATION:
            return
        if is_tensor(user) and (value(user).dtype.is_floating_point is False or name in REARRANGE):
            if name in ("cumsum", "sum", "prod", "any", "all"):
                self._go(user, MASK, origin)
            else:
                self._ids_go(node, user, origin)
        elif value(user) is not None and not is_tensor(user) and not picks_along_a_dimension(user):
            for item in self.flow.users(user):
                if is_tensor(item) and not value(item).dtype.is_floating_point:
                    self._ids_go(node, item, origin)

    def _range(self, node: fx.Node, user: fx.Node, name: str) -> None:
        """Note what an operator says of how many experts the ids can name."""
        if name in _BOUNDS:
            self.found.bounded = True
        elif name == "eq" and isinstance(number := argument(user, 1, "other"), int):
            self.found.equal_to.add(number)
        elif name == "one_hot" and isinstance(classes := argument(user, 1, "num_classes"), int) and classes > 0:
            self.found.among.add(classes)

    def _scattered(self, node: fx.Node, user: fx.Node, name: str, origin: fx.Node) -> None:
        target = self.flow.operand(user, user.args[0]) if user.args else None
        if target is node:
            self._ids_go(node, user, origin)  # some ids are replaced: -1 for dropped tokens, say
        elif name in ("index_copy", "index_add", "index_put") and any(
            self.origins.beyond(n) for n in others(self.flow, user, node)
        ):
            self._told_apart(node, user, origin)  # tokens laid into their experts' buffers
        else:
            given = argument(user, 2 if name in ("setitem", "index_put") else 3, "value", "src", "values")
            low = target is not None and is_low(target)
            if target is not None and (base := number_of(target)) is not None and base < NEVER:
                self.masks.low.add(user)
            if target is not None and self.masks.thresholded(target):
                self.masks.changes[user] = f"{name} ({user.name}) joins them with experts that a threshold chose"
            self.masks.mark(user, is_low(given) or (is_zero(given) and not low))
            self._go(user, MASK, origin)

    def _picks(self, node: fx.Node, user: fx.Node, name: str, origin: fx.Node) -> bool:
        """`source[ids]` in all its spellings; False if the ids are the source here."""
        source_at, index_at = (1, 0) if name == "embedding" else (0, 2 if name in ("gather", "index_select") else 1)
        source = self.flow.operand(
            user, argument(user, source_at, "weight" if name == "embedding" else "input", "self")
        )
        index = argument(user, index_at, "input" if name == "embedding" else "index", "indices")
        if name == "gather" and not isinstance(index, fx.Node):
            index = argument(user, 1, "dim")
        if source is node or source is None:
            if name == "gather" or name == "take_along_dim":  # ids of ids: a second selection picks among them
                self._ids_go(node, user, origin)
                return True
            return False
        kind = self.flow.kind(source)
        if kind == "weight" and isinstance(held := next(iter(dims(source)), None), int):
            self.found.among.add(held)
        if kind == "const" or (
            kind == "weight"
            and is_tensor(source)
            and not value(source).dtype.is_floating_point
            and len(dims(source)) <= 2
        ):
            self._ids_go(node, user, origin)  # a table from logical to physical ids, or back
        elif kind == "weight" and set(self.flow.weights(source)) <= self.gate:
            self.found.fates["they pick rows of the router's own weight (keys or codes)"] = None
        elif kind == "weight":
            self.indexing.append((user, node))
            self._go(user, SEL, origin)
            if len(dims(source)) < 3:
                self.vectors.setdefault(user, set()).add(source)
                self.vector_sources.add(source)
        elif self.origins.beyond(source):
            axis = argument(user, 1, "dim") if name in ("gather", "index_select") else argument(user, 2, "dim")
            position = axis if isinstance(axis, int) else _indexed_dimension(user, node, self.flow)
            shape = dims(source)
            expert_axis = position is not None and shape and self.experts.counts(shape[position % len(shape)])
            if expert_axis and len(shape) >= 3 and self.experts.made_together(source):
                self._event(user, "outputs", origin, [])
            elif IDS in self.labels.get(source, ()):
                self._ids_go(node, user, origin)
            else:
                self.found.fates["they index activations (tokens, positions, keys or classes), not parameters"] = None
        return True

    def _mask(self, node: fx.Node, user: fx.Node, name: str, origin: fx.Node) -> None:
        beside = others(self.flow, user, node)
        turned = self.masks.left_out(node) != self.masks.turns(node, user, name)
        self.masks.note(node, user, name)
        if (
            name == "div"
            and self.flow.operand(user, user.args[1]) is node
            and any(self.origins.depends(n) for n in beside)
        ):
            return  # a sum that weights are divided by
        for result in (user, *(() if is_tensor(user) else self.flow.users(user))):
            self.masks.mark(result, turned)
        if turned and (name in CONTRACTIONS or name in ("nonzero", "argwhere", "masked_select") or is_opaque(user)):
            self.found.fates[_LEFT_OUT] = None
            return
        if is_opaque(user) or name in GROUPED:
            if not self._fused(node, user, origin):
                self._go(user, MASK, origin)
            return
        if name in ("nonzero", "where", "argwhere") and not beside:
            self._go(user, PERM, origin)
            for item in self.flow.users(user):
                self._go(item, PERM, origin)
            return
        if name in SELECTIONS:
            self.found.fates["they mask another selection (a group, or a choice already made)"] = None
            return
        tokens = [n for n in beside if self.origins.beyond(n)]
        if (
            name in ("getitem", "masked_select", "index_select")
            and tokens
            and self.flow.operand(user, user.args[0]) in tokens
        ):
            self._told_apart(node, user, origin)
            return
        if name in CREATION:
            return
        if not tokens:
            weights = [n for n in beside if self.flow.kind(n) == "weight" and len(dims(n)) >= 2]
            if name in CONTRACTIONS and weights:
                self._go(user, SEL, origin)
                for weight in weights:
                    if len(dims(weight)) < 3:
                        self.vectors.setdefault(user, set()).add(weight)
                        self.vector_sources.add(weight)
            elif name in ("chunk", "split", "unbind"):
                for item in self.flow.users(user):
                    self._go(item, MASK, origin)
            elif is_tensor(user) or name == "setitem":
                self._go(user, MASK, origin)
            return
        for partner in tokens:
            if turned:
                self.found.fates[_LEFT_OUT] = None
            elif name in CONTRACTIONS:
                self._weighs(user, partner, origin)
            elif name in ("mul", "where", "masked_fill", "div") and len(dims(user)) >= 1:
                have, mine = dims(partner), dims(node)
                spreads = bool(mine) and bool(have) and have[-1] != 1 and (mine[-1] == 1 or len(mine) < len(have))
                if spreads or TOK in self.labels.get(partner, ()):
                    self._weighs(user, partner, origin)

    def _weighs(self, user: fx.Node, partner: fx.Node, origin: fx.Node) -> None:
        if self.experts.made_together(partner):
            self._event(user, "combine", origin, [])
        else:
            self._told_apart(user, user, origin)
            late = self.flow.order[partner] > self.origins.first
            if late and self.experts.made_by_one(partner) and not self.origins.depends(partner):
                self._from_here(user)
                self.expert_hits.append((user, partner, self.births[user], origin))

    def _perm(self, node: fx.Node, user: fx.Node, name: str, origin: fx.Node) -> None:
        beside = others(self.flow, user, node)
        if is_opaque(user):
            self._fused(node, user, origin)
            return
        if name in PICKS:
            source = self.flow.operand(user, argument(user, 1 if name == "embedding" else 0, "input", "self"))
            if source is node:
                self._go(user, PERM, origin)
            elif source is not None and IDS in self.labels.get(source, ()):
                self._ids_go(node, user, origin)
            elif source is not None and self.origins.beyond(source):
                self._told_apart(node, user, origin)
            elif source is not None and self.flow.kind(source) == "const":
                self._go(user, PERM, origin)
            elif source is not None and self.flow.kind(source) == "data":
                for known in self.labels.get(source, ()):
                    if known in (IDS, MASK):
                        self._go(user, known, origin)
            return
        if name in ("setitem", "scatter", "index_put", "index_copy", "index_add", "scatter_add"):
            if all(self.flow.kind(n) != "data" for n in beside):
                self._go(user, PERM, origin)
            return
        if name in ("argsort", "sort"):
            self._go(user, PERM, origin)
            return
        if name in CONTRACTIONS or name in CREATION:
            return
        if is_tensor(user) and not value(user).dtype.is_floating_point:
            self._go(user, PERM, origin)
        elif value(user) is not None and not is_tensor(user):
            for item in self.flow.users(user):
                self._go(item, PERM, origin)

    def _sel(self, node: fx.Node, user: fx.Node, name: str, origin: fx.Node) -> None:
        beside = others(self.flow, user, node)
        tokens = [
            n
            for n in beside
            if self.origins.beyond(n) or TOK in self.labels.get(n, ()) or PROD in self.labels.get(n, ())
        ]
        vector = self.vectors.get(node)
        if (name in CONTRACTIONS or is_opaque(user)) and tokens and scores_a_choice(self.flow, user):
            self.found.fates["they pick a second router, whose choice this is not"] = None
            return
        if (name in CONTRACTIONS or is_opaque(user)) and tokens:
            self._event(user, "weights", origin, [node]) if vector is None else self.vector_hits.append((user, origin))
            if vector is None:
                self.found.weights.update(
                    dict.fromkeys(w for s in self._picked_from(node) for w in self.flow.weights(s))
                )
            return
        if name == "mul" and tokens:
            self._go(user, PROD, origin)
            if vector is not None:
                self.vectors.setdefault(user, set()).update(vector)
            return
        if tokens or name in CREATION or (name in CONTRACTIONS and any(self.flow.kind(n) == "weight" for n in beside)):
            return
        results = [user] if is_tensor(user) else list(self.flow.users(user))
        for result in results:
            if vector is not None:
                self.vectors.setdefault(result, set()).update(vector)
            self._go(result, SEL, origin)

    def _picked_from(self, node: fx.Node) -> list[fx.Node]:
        """The parameters that a SEL value was picked from."""
        stack, seen, found = [node], {node}, []
        while stack:
            top = stack.pop()
            for source in self.flow.inputs(top):
                if self.flow.kind(source) == "weight" and len(dims(source)) >= 2:
                    found.append(source)
                elif source not in seen and SEL in self.labels.get(source, ()):
                    seen.add(source)
                    stack.append(source)
        return found

    def _prod(self, node: fx.Node, user: fx.Node, name: str, origin: fx.Node) -> None:
        if name in ("sum", "mean"):
            if node in self.vectors:
                self.vector_hits.append((user, origin))
            else:
                self._event(user, "weights", origin, [])
        elif name in REARRANGE:
            self._go(user, PROD, origin)
            if node in self.vectors:
                self.vectors.setdefault(user, set()).update(self.vectors[node])

    def _tok(self, node: fx.Node, user: fx.Node, name: str, origin: fx.Node) -> None:
        beside = others(self.flow, user, node)
        if is_opaque(user) or name in CONTRACTIONS:
            weights = [n for n in beside if self.flow.kind(n) == "weight" and len(dims(n)) >= 2]
            if any(self.experts.is_bank(w) for w in weights) and name not in GROUPED:
                self._event(user, "experts", origin, weights)
            elif weights and name not in GROUPED:
                birth = self.births.get(node, node)
                self.came.setdefault(user, set()).add(node)
                self.expert_hits.extend((user, weight, birth, origin) for weight in weights)
            return
        if (
            name in SELECTIONS
            or name in CREATION
            or name in ("sum", "mean", "index_add", "scatter_add", "index_copy", "add", "setitem")
        ):
            return
        results = [user] if is_tensor(user) else list(self.flow.users(user))
        for result in results:
            self._told_apart(node, result, origin)


def _indexed_dimension(user: fx.Node, ids: fx.Node, flow: DataFlow) -> int | None:
    """Which dimension of `source[a, b, ids]` the ids index."""
    if spelling(user) != "getitem":
        return None
    index = user.args[1]
    for position, item in enumerate(index if isinstance(index, tuple | list) else (index,)):
        if isinstance(item, fx.Node) and flow.operand(user, item) is ids:
            return position
    return None


def follow_ids(
    flow: DataFlow, ids: Sequence[fx.Node], roots: Sequence[Root], num_experts: Any, k_dim: int | None = -1
) -> Dispatch:
    """Follow expert ids to what they are used for.

    Args:
        ids: the values that hold the ids, as the selection returned them.
        roots: the router products behind the selection (see `scores.trace_scores`); values that depend on the token only
            through them are weights, not tokens.
        num_experts: E, an int; None if not known (a table of ids).
        k_dim: the dimension of `ids` that holds a token's choices; None if none does.
    """
    return _Follow(flow, ids, roots, num_experts, k_dim).run()
