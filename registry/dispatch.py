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
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from r3_pass.registry.dataflow import (
    CONTRACTIONS,
    CREATION,
    RANDOM,
    DataFlow,
    argument,
    dims,
    is_opaque,
    is_tensor,
    spelling,
    value,
)
from r3_pass.registry.dispatched import Dispatch
from r3_pass.registry.dropped import without_weight
from r3_pass.registry.order import out_of_order
from r3_pass.registry.scores import Root
from r3_pass.registry.unchanged import Unchanged, number_of

IDS, MASK, PERM, SEL, TOK, PROD = "IDS", "MASK", "PERM", "SEL", "TOK", "PROD"

_COMPARISONS = frozenset(["eq", "ne", "gt", "ge", "lt", "le", "isin"])
_SELECTIONS = frozenset(["topk", "argmax", "argmin", "max", "min", "kthvalue", "multinomial", "argsort", "sort"])
_PICKING = frozenset(["getitem", "embedding", "index_select", "gather", "take_along_dim", "take"])
_REARRANGE = frozenset({
    "view", "transpose", "permute", "expand", "contiguous", "clone", "detach", "to", "type_as", "float", "half",
    "bfloat16", "long", "int", "repeat",
})  # fmt: skip
_SHAPED = frozenset({"view", "expand", "expand_as", "type_as", "to", "sum_to_size"})
_JOINS = frozenset({"where", "or", "maximum", "add", "setitem", "masked_scatter", "scatter", "index_put"})
_KEEPS_MASKS = _REARRANGE | {
    "getitem", "select", "narrow", "slice", "unbind", "chunk", "split", "tensor_split", "split_with_sizes", "cat", "stack",
    "movedim", "t", "T", "mT", "bool", "double", "short", "char", "int", "expand_as", "broadcast_to", "repeat_interleave", "sum",
    "amax", "max", "any", "mean", "cumsum", "bincount", "histc", "and", "or", "not", "mul", "div", "add", "sub", "eq", "ne", "gt",
    "ge", "lt", "le", "masked_fill", "where", "setitem", "index_put", "scatter", "scatter_add", "scatter_reduce", "index_add",
    "index_copy", "index_select", "gather", "take_along_dim", "embedding", "take", "nonzero", "argwhere", "masked_select",
    "softmax", "log", "relu", "clamp", "clamp_min", "clamp_max", "clip", "normalize", "dropout", "maximum", "minimum", "copy",
    "convert_element_type", "alias", "numel", "item", "tolist", *CONTRACTIONS,
}  # fmt: skip
_COUNTS = frozenset({"cumsum", "bincount", "histc"})
_GROUPED = frozenset(["grouped_mm"])
_MIXING = frozenset(
    {"masked_fill", "add", "sub", "mul", "where", "masked_scatter", "setitem", "index_put", "maximum", "minimum", "xor"}
)
_LEFT_OUT = "they name the experts that are left out, not those that are chosen"
_BOUNDS = frozenset({
    "gt", "ge", "lt", "le", "clamp", "clip", "clamp_min", "clamp_max", "minimum", "maximum", "where", "masked_fill",
})  # fmt: skip
_CHOOSING = frozenset({"where", "masked_scatter", "maximum", "minimum", "setitem", "index_put"})
_UNCHANGED = _REARRANGE | {"getitem", "cat", "stack", "gather", "roll", "flip", "index_select", "narrow", "select"}
_SCORING = frozenset({
    "softmax", "log_softmax", "sigmoid", "add", "mul", "div", "to", "float", "view", "masked_fill", "tanh", "exp", "getitem",
    "where", "contiguous", "type_as", "transpose",
})  # fmt: skip


class _Follow:
    def __init__(
        self, flow: DataFlow, ids: Sequence[fx.Node], roots: Sequence[Root], num_experts: Any, k_dim: int | None
    ) -> None:
        self.flow = flow
        self.k_dim = k_dim
        self.at: fx.Node | None = None
        self.came: dict[fx.Node, set[fx.Node]] = {}  # any followed value, or a proof: what it was reached from
        self.parents: dict[fx.Node, set[fx.Node]] = {}  # IDS: the IDS it was reached from
        self.counted: set[fx.Node] = set()  # MASK that only counts
        self.shifted: set[fx.Node] = set()  # MASK less a number
        self.mask_of: dict[fx.Node, set[fx.Node]] = {}
        self.other_masks: dict[fx.Node, str] = {}
        self.roots = {r.node for r in roots}
        self.gate = {w for r in roots for w in r.weights}
        self.first = min((flow.order[n] for n in (self.roots or set(ids)) if n in flow.order), default=0)
        self.experts = num_experts
        self.starts = set(ids)
        self.found = Dispatch(chain=dict.fromkeys(ids))
        self.labels: dict[fx.Node, set[str]] = {}
        self.pending: list[tuple[fx.Node, str, fx.Node]] = [
            (n, IDS, n) for n in ids
        ]  # value, label, the IDS it came from
        self.inverse: set[fx.Node] = set()  # MASK that is zero where the ids are
        self.upright: set[fx.Node] = set()
        self.indexing: list[tuple[fx.Node, fx.Node]] = []  # parameters that ids pick, and the ids
        self.vectors: dict[fx.Node, set[fx.Node]] = {}  # two-dimensional SEL: value -> sources
        self.vector_sources: set[fx.Node] = set()
        self.vector_hits: list[tuple[fx.Node, fx.Node]] = []
        self.births: dict[fx.Node, fx.Node] = {}  # TOK: where its tokens were told apart from those of other experts
        self.expert_hits: list[
            tuple[fx.Node, fx.Node, fx.Node, fx.Node]
        ] = []  # product, weight, birth, the IDS it came from

    def run(self) -> Dispatch:
        seen: set[tuple[fx.Node, str, fx.Node]] = set()
        while self.pending:
            item = self.pending.pop()
            if item in seen or len(seen) > 4000:
                continue
            seen.add(item)
            node, label, origin = item
            self.at = node
            self.labels.setdefault(node, set()).add(label)
            if node in self.flow.outputs:
                self._leaves(node, label)
            for user in self.flow.users(node):
                if user.op != "output":
                    getattr(self, f"_{label.lower()}")(node, user, spelling(user), origin)
        births = {birth: weight for _, weight, birth, _ in self.expert_hits}
        if (
            len(set(births.values())) >= 2
        ):  # each its own tokens and its own weight: siblings, not the layers of one network
            for user, weight, _, origin in self.expert_hits:
                self._event(user, "experts", origin, [weight])
        if len(self.vector_sources) >= 2:
            for user, origin in self.vector_hits:
                self._event(user, "weights", origin, list(self.vector_sources))
        self._judge()
        if not self.found.proved and self.vector_sources:
            self.found.fates[
                "they pick rows of a table (values, codes or embeddings), which no token is multiplied with"
            ] = None
        return self.found

    def _judge(self) -> None:
        """Which IDS are still the selection's, and which masks are no longer of the chosen."""
        ids = [n for n, labels in self.labels.items() if IDS in labels]
        kept = Unchanged(
            self.flow,
            list(self.starts),
            self.k_dim,
            self.experts,
            lambda n: IDS in self.labels.get(n, ()),
            lambda n: n not in self.starts and bool({PERM, IDS} & self.labels.get(n, set())),
        )
        kept.read(ids)
        for user, source in self.indexing:
            kept.indexes(user, source)
        for node, how in kept.changes.items():
            self.found.mixed.setdefault(node, how)
        self.found.columns = {n: layout.columns for n, layout in kept.layouts.items()}
        self.found.offsets = {n: layout.offset for n, layout in kept.layouts.items()}
        self.found.turned = {n for n, layout in kept.layouts.items() if layout.turned}
        experts = self.experts if isinstance(self.experts, int) else None
        for drop in dict.fromkeys(kept.drops):
            if not without_weight(
                self.flow,
                drop,
                list(self.starts),
                kept.layouts,
                experts,
                self.found,
                lambda n: IDS in self.labels.get(n, ()),
            ):
                self.found.mixed.setdefault(drop.node, f"{spelling(drop.node)} ({drop.node.name}) {drop.how}")
        self.found.used = _reached(self.found.direct, self.parents)
        alive = _reached(self.found.events, self.came)
        for node in sorted(self.came, key=self.flow.order.__getitem__):
            if spelling(node) in _COUNTS or self.came[node] & self.counted or self._adds_tokens_up(node):
                self.counted.add(node)
        self.found.masks = {
            n: how
            for n, how in self.other_masks.items()
            if n in alive and not any(IDS in self.labels[m] or m in self.counted for m in self.mask_of.get(n, ()))
        }

    # ---- helpers ------------------------------------------------------------------------------------------------
    def _leaves(self, node: fx.Node, label: str) -> None:
        if label in (IDS, PERM, TOK) or (label == MASK and len(dims(node)) >= 2):
            self.found.escapes = True
        self.found.fates["they are returned" if label == IDS else "what is counted or masked by them is returned"] = (
            None
        )

    def _from_here(self, node: fx.Node) -> None:
        if self.at is not None:
            self.came.setdefault(node, set()).add(self.at)

    def _go(self, node: fx.Node, label: str, origin: fx.Node) -> None:
        self._from_here(node)
        self.pending.append((node, label, origin))

    def _ids_go(self, node: fx.Node, user: fx.Node, origin: fx.Node) -> None:
        self.parents.setdefault(user, set()).add(node if IDS in self.labels.get(node, ()) else origin)
        self.found.chain.setdefault(user, origin)
        how = self._mixing(node, user)
        if how:
            self.found.mixed[user] = how
        self._go(user, IDS, user)

    def _mixing(self, node: fx.Node, user: fx.Node) -> str:
        """How an operator makes of the chosen ids something that no router chose for this token; "" if it does not."""
        name = spelling(user)
        if name in ("roll", "flip", "fliplr", "flipud"):
            return f"{name} ({user.name}) moves them to other tokens or columns"
        if out_of_order(self.flow, user):
            return f"{name} ({user.name}) moves them to other tokens"
        if name not in _MIXING:
            return ""
        for other in self._others(user, node):
            seen = value(other)
            if (
                not is_tensor(other)
                or seen.dtype.is_floating_point
                or seen.dtype.is_complex
                or seen.dtype == torch.bool
            ):
                continue
            if name in _CHOOSING and self._is_choice(other):
                return f"{name} ({user.name}) takes one or another of them ({node.name}, {other.name})"
            if all(size == 1 for size in dims(other)) or self.labels.get(other):
                continue
            if spelling(other) in RANDOM or (self.flow.kind(other) == "data" and not self._made_of_ids(other)):
                return f"{name} ({user.name}) mixes them with other integers ({other.name})"
        return ""

    def _is_choice(self, node: fx.Node) -> bool:
        """Whether a value is these ids, or some of them, as they were chosen."""
        stack, seen = [node], {node}
        while stack:
            top = stack.pop()
            if top in self.starts:
                return True
            if spelling(top) not in _UNCHANGED:
                continue
            for source in self.flow.inputs(top):
                if source not in seen and is_tensor(source) and not value(source).dtype.is_floating_point:
                    seen.add(source)
                    stack.append(source)
        return False

    def _made_of_ids(self, node: fx.Node) -> bool:
        """Whether a value comes from these ids (and their scores) alone: a place in an expert's queue, say."""
        stack, seen, found = [node], {node}, False
        while stack:
            top = stack.pop()
            if top in self.starts or top in self.roots:
                found = True
                continue
            if self.flow.kind(top) != "data":
                continue
            if top.op == "placeholder" or self.flow.order[top] < self.first or spelling(top) in _SELECTIONS:
                return False
            for source in self.flow.inputs(top):
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return found

    def _depends(self, node: fx.Node) -> bool:
        """Whether a value depends on these ids."""
        stack, seen = [node], {node}
        while stack:
            top = stack.pop()
            if top in self.starts:
                return True
            for source in self.flow.inputs(top):
                if source not in seen and self.flow.order.get(source, 0) > self.first:
                    seen.add(source)
                    stack.append(source)
        return False

    def _told_apart(self, node: fx.Node, user: fx.Node, origin: fx.Node, birth: fx.Node | None = None) -> None:
        """TOK goes on; a value that was split off another one is a set of tokens of its own."""
        split = spelling(user) in ("getitem", "select", "unbind", "index_select", "narrow") and node in self.births
        self.births.setdefault(user, birth or (user if split or node not in self.births else self.births[node]))
        self._go(user, TOK, origin)

    def _scores_a_choice(self, node: fx.Node) -> bool:
        """Whether a product is scores of a further selection (a second level of routing), rather than an expert's work."""
        stack, seen = [node], {node}
        while stack and len(seen) < 40:
            for user in self.flow.users(stack.pop()):
                if (spelling(user) in _SELECTIONS and spelling(user) not in ("max", "min")) or _picks_along_a_dimension(
                    user
                ):
                    return True
                if user in seen or spelling(user) in CONTRACTIONS or is_opaque(user) or user.op == "output":
                    continue
                if spelling(user) in _SCORING:
                    seen.add(user)
                    stack.append(user)
        return False

    def _event(self, user: fx.Node, kind: str, origin: fx.Node, weights: Sequence[fx.Node]) -> None:
        self.found.events[user] = kind
        self.found.direct.add(origin)
        self._from_here(user)
        for source in weights:
            for weight in self.flow.weights(source):
                self.found.weights[weight] = None

    def _others(self, user: fx.Node, node: fx.Node) -> list[fx.Node]:
        return [n for n in self.flow.inputs(user) if n is not node and (is_tensor(n) or spelling(n) == "setitem")]

    def _beyond(self, node: fx.Node) -> bool:
        """True if the value depends on the token by another way than the router's scores."""
        if self.flow.kind(node) != "data":
            return False
        stack, seen = [node], {node}
        while stack:
            top = stack.pop()
            if top in self.roots or self.flow.kind(top) != "data":
                continue
            if top.op == "placeholder" or self.flow.order[top] < self.first:
                if is_tensor(top) or top.op != "placeholder":
                    return True
                continue
            for source in self.flow.inputs(top):
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return False

    def _counts_experts(self, size: Any) -> bool:
        """Whether a size can be the number of experts: what was chosen among, or less where the router's weight is padded."""
        if size == self.experts:
            return True
        return isinstance(size, int) and isinstance(self.experts, int) and 2 <= size < self.experts <= 2 * size

    def _is_bank(self, weight: fx.Node) -> bool:
        """Whether a weight holds all experts' parameters."""
        shape = dims(weight)
        return len(shape) >= 3 and (self.experts in shape or self._counts_experts(shape[0]))

    def _made_by_experts(self, node: fx.Node) -> bool:
        """True if parameters with an expert dimension, or several experts stacked, are contracted on the way to this value."""
        stack, seen = [node], {node}
        while stack and len(seen) < 400:
            top = stack.pop()
            name = spelling(top)
            if (
                name in ("stack", "cat")
                and len(self.flow.inputs(top)) >= 2
                and (self.experts is None or self._counts_experts(len(self.flow.inputs(top))))
            ):
                return True
            if name in CONTRACTIONS or is_opaque(top):
                weights = [n for n in self.flow.inputs(top) if self.flow.kind(n) == "weight"]
                if any(self._is_bank(w) for w in weights):
                    return True
            for source in self.flow.inputs(top):
                if (
                    source not in seen
                    and self.flow.order.get(source, 0) > self.first
                    and self.flow.kind(source) == "data"
                ):
                    seen.add(source)
                    stack.append(source)
        return False

    def _fused(self, node: fx.Node, user: fx.Node, origin: fx.Node) -> bool:
        """A custom or grouped product that takes tokens and weights beside what came from the ids."""
        others = self._others(user, node)
        weights = [n for n in others if self.flow.kind(n) == "weight" and len(dims(n)) >= 2]
        tokens = [n for n in others if self._beyond(n) or TOK in self.labels.get(n, ())]
        picked = [n for n in others if SEL in self.labels.get(n, ())]
        if tokens and (weights or picked or any(dims(t) == dims(user) and dims(user) for t in tokens)):
            self._event(user, "grouped", origin, weights)
            return True
        return False

    # ---- one rule set for each label ----------------------------------------------------------------------------
    def _ids(self, node: fx.Node, user: fx.Node, name: str, origin: fx.Node) -> None:
        others = self._others(user, node)
        self._range(node, user, name)
        if name in _SHAPED and self.flow.operand(user, argument(user, 0, "input", "self")) is not node:
            return  # its shape or its dtype alone
        if is_opaque(user) or name in _GROUPED:
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
        if name in _COMPARISONS or name in ("one_hot", "bincount", "histc", "bucketize"):
            self._turned(user, name == "ne")
            self._go(user, MASK, origin)
            return
        if name in ("nonzero", "where") and len(others) == 0:
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
        if name in _PICKING and self._picks(node, user, name, origin):
            return
        if name in _SELECTIONS or name in CONTRACTIONS or name in CREATION:
            return
        if is_tensor(user) and (value(user).dtype.is_floating_point is False or name in _REARRANGE):
            if name in ("cumsum", "sum", "prod", "any", "all"):
                self._go(user, MASK, origin)
            else:
                self._ids_go(node, user, origin)
        elif value(user) is not None and not is_tensor(user) and not _picks_along_a_dimension(user):
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
            self._beyond(n) for n in self._others(user, node)
        ):
            self._told_apart(node, user, origin)  # tokens laid into their experts' buffers
        else:
            given = argument(user, 2 if name in ("setitem", "index_put") else 3, "value", "src", "values")
            low = target is not None and _is_low(target)
            if target is not None and self._thresholded(target):
                self.other_masks[user] = f"{name} ({user.name}) joins them with experts that a threshold chose"
            self._turned(user, _is_low(given) or (_is_zero(given) and not low))
            self._go(user, MASK, origin)

    def _turned(self, mask: fx.Node, inverse: bool) -> None:
        """Note whether a MASK is zero (or -inf) where the ids are, rather than elsewhere."""
        (self.inverse if inverse else self.upright).add(mask)

    def _left_out(self, mask: fx.Node) -> bool:
        return mask in self.inverse and mask not in self.upright

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
        elif self._beyond(source):
            axis = argument(user, 1, "dim") if name in ("gather", "index_select") else argument(user, 2, "dim")
            position = axis if isinstance(axis, int) else _indexed_dimension(user, node, self.flow)
            shape = dims(source)
            expert_axis = position is not None and shape and self._counts_experts(shape[position % len(shape)])
            if expert_axis and len(shape) >= 3 and self._made_by_experts(source):
                self._event(user, "outputs", origin, [])
            elif IDS in self.labels.get(source, ()):
                self._ids_go(node, user, origin)
            else:
                self.found.fates["they index activations (tokens, positions, keys or classes), not parameters"] = None
        return True

    def _mask(self, node: fx.Node, user: fx.Node, name: str, origin: fx.Node) -> None:
        others = self._others(user, node)
        turned = self._left_out(node) != self._turns(node, user, name)
        if how := self._another_mask(node, user, name):
            self.other_masks[user] = f"{name} ({user.name}) {how}"
            self.mask_of.setdefault(user, set()).add(node)
        if name == "div" and self.flow.operand(user, user.args[1]) is node and any(self._depends(n) for n in others):
            return  # a sum that weights are divided by
        for result in (user, *(() if is_tensor(user) else self.flow.users(user))):
            self._turned(result, turned)
        if turned and (name in CONTRACTIONS or name in ("nonzero", "argwhere", "masked_select") or is_opaque(user)):
            self.found.fates[_LEFT_OUT] = None
            return
        if is_opaque(user) or name in _GROUPED:
            if not self._fused(node, user, origin):
                self._go(user, MASK, origin)
            return
        if name in ("nonzero", "where", "argwhere") and not others:
            self._go(user, PERM, origin)
            for item in self.flow.users(user):
                self._go(item, PERM, origin)
            return
        if name in _SELECTIONS:
            self.found.fates["they mask another selection (a group, or a choice already made)"] = None
            return
        tokens = [n for n in others if self._beyond(n)]
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
            weights = [n for n in others if self.flow.kind(n) == "weight" and len(dims(n)) >= 2]
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

    def _another_mask(self, node: fx.Node, user: fx.Node, name: str) -> str:
        """How an operator makes of a mask one that says something else than who was chosen; "" if it is known not to."""
        given = [self.flow.operand(user, a) for a in user.args[:2]]
        others = self._others(user, node)
        numbers = [number_of(a) for a in user.args[:2]]
        number = next((n for n in numbers if n is not None and not isinstance(n, bool)), None)
        if name in CREATION or is_opaque(user) or name in _GROUPED or name in _SELECTIONS:
            return ""
        if name == "sub":
            reverse = "rsub" in str(user.target)
            first = given[0] if given else None
            if reverse or (first is not None and first is not node and MASK not in self.labels.get(first, ())):
                return "takes those that were chosen away from the others"
            if number is not None and first is node:
                self.shifted.add(user)
        if node in self.shifted:
            if name in ("mul", "div", *_REARRANGE):
                self.shifted.add(user)
            elif name not in ("add", "sub"):
                return "does not keep who was chosen"
        if name == "mul" and number is not None and number < 0:
            return "turns chosen and not chosen about"
        if name == "add" and number is not None and number > 0 and node not in self.shifted:
            return "gives weight to those that were not chosen"
        if name in ("clamp", "clamp_min", "clip") and argument(user, 1, "min") not in (None, 0):
            return "gives weight to those that were not chosen"
        if name in ("add", "sub") and argument(user, 2, "alpha", default=1) != 1:
            return "takes those that were chosen away from the others"
        if name == "ne" and not (len(user.args) > 1 and _is_zero(user.args[1])):
            return "does not keep who was chosen"
        source = given[0] if given and given[0] is not node else None
        looked_up = name == "getitem" and source is not None and self.flow.kind(source) != "data" and is_tensor(node)
        if looked_up and value(node).dtype != torch.bool:
            return "looks up another value for those that were chosen"
        if name == "where" and user.op != "call_method" and given and given[0] is node and others:
            branches = user.args[1:3]
            plain = [b for b in branches if _is_zero(b) or _is_low(b)]
            if not plain and not any(self._beyond(n) for n in others):
                return "takes one or another value by them"
        if name in ("masked_fill", "setitem", "index_put") and node in given[1:] + self._index_of(user):
            filled = argument(user, 2, "value", "values")
            if number_of(filled) is None and not any(self._beyond(n) for n in others):
                return "writes another value over those that were chosen"
        if name in _JOINS and any(self._thresholded(n) for n in others):
            return "joins them with experts that a threshold chose"
        if out_of_order(self.flow, user) or self._shuffled(node, user, name):
            return "moves them to other tokens or experts"
        return "" if name in _KEEPS_MASKS else "is not known to keep who was chosen"

    def _index_of(self, user: fx.Node) -> list[fx.Node | None]:
        index = user.args[1] if len(user.args) > 1 else None
        return [self.flow.operand(user, i) for i in index] if isinstance(index, tuple | list) else []

    def _shuffled(self, node: fx.Node, user: fx.Node, name: str) -> bool:
        """Whether a mask is indexed by what is not made of the ids: rows of other tokens, or columns of other experts."""
        cut = name in ("getitem", "select", "narrow") and is_tensor(node) and not self._others(user, node)
        if cut and self._without_tokens(node, user):
            return True
        if name not in _PICKING or self.flow.operand(user, user.args[0]) is not node:
            return name in ("cat", "stack") and self._crossed(user)
        if name == "getitem":
            index = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
            if any(isinstance(i, list) for i in index):
                return True
        indices = [n for n in self.flow.inputs(user) if n is not node and is_tensor(n)]
        return bool(indices) and not any(self.labels.get(n) for n in indices)

    def _without_tokens(self, node: fx.Node, user: fx.Node) -> bool:
        """Whether a dimension of tokens is gone, or shorter."""
        tokens = {
            size
            for ids in self.starts
            for at, size in enumerate(dims(ids))
            if self.k_dim is None or at != self.k_dim % len(dims(ids))
        }
        before, after = list(dims(node)), list(dims(user))
        return any(before.count(size) > after.count(size) for size in tokens - {1, self.experts})

    def _adds_tokens_up(self, node: fx.Node) -> bool:
        """Whether a mask is counted over tokens."""
        source = self.flow.operand(node, node.args[0]) if node.args and spelling(node) == "sum" else None
        return source is not None and MASK in self.labels.get(source, ()) and self._without_tokens(source, node)

    def _crossed(self, user: fx.Node) -> bool:
        """Whether pieces of one value are joined in another order than they had."""
        parts = argument(user, 0, "tensors")
        pieces = [self.flow.operand(user, p) for p in parts] if isinstance(parts, tuple | list) else []
        cut = [p.args for p in pieces if p is not None and spelling(p) == "getitem" and not is_tensor(p.args[0])]
        whole = {source for source, *_ in cut}
        numbers = [number for _, number in cut]
        return len(cut) == len(pieces) > 1 and (len(whole) > 1 or numbers != sorted(numbers))  # type: ignore[type-var]

    def _thresholded(self, node: fx.Node) -> bool:
        """Whether a value is made of scores by comparing them with something, without a selection between."""
        if MASK in self.labels.get(node, ()):
            return False
        stack, seen, compared = [node], {node}, False
        while stack:
            top = stack.pop()
            if self.flow.kind(top) != "data" or spelling(top) in _SELECTIONS or top in self.starts:
                continue
            if top in self.roots or top.op == "placeholder" or self.flow.order[top] < self.first:
                continue
            sources = self.flow.inputs(top)
            if spelling(top) in ("gt", "ge", "lt", "le") and any(
                is_tensor(n) and value(n).dtype.is_floating_point and self._scored(n) for n in sources
            ):
                compared = True
            for source in sources:
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return compared

    def _scored(self, node: fx.Node) -> bool:
        """Whether a value comes from the router's product with no selection between."""
        stack, seen = [node], {node}
        while stack:
            top = stack.pop()
            if top in self.roots:
                return True
            if spelling(top) in _SELECTIONS or top in self.starts or self.flow.order.get(top, 0) < self.first:
                continue
            for source in self.flow.inputs(top):
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return False

    def _turns(self, node: fx.Node, user: fx.Node, name: str) -> bool:
        """Whether an operator makes of a mask the mask of everything else."""
        if name == "not":
            return True
        if name == "sub":
            return not isinstance(user.args[0], fx.Node)
        if name in ("eq", "lt", "le"):
            known = number_of(argument(user, 1, "other")) is not None
            return known and (name != "eq" or _is_zero(argument(user, 1, "other")))
        place = {"masked_fill": (1, 2), "where": (0, 1), "setitem": (1, 2), "index_put": (1, 2)}.get(name)
        if place is None or (name == "where" and user.op == "call_method"):
            return False
        index = user.args[place[0]] if len(user.args) > place[0] else None
        masks = index if isinstance(index, tuple | list) else (index,)
        filled = argument(user, place[1], "value", "input", "values")
        return any(isinstance(m, fx.Node) and self.flow.operand(user, m) is node for m in masks) and (
            _is_zero(filled) or _is_low(filled)
        )

    def _weighs(self, user: fx.Node, partner: fx.Node, origin: fx.Node) -> None:
        if self._made_by_experts(partner):
            self._event(user, "combine", origin, [])
        else:
            self._told_apart(user, user, origin)
            late = self.flow.order[partner] > self.first
            if late and self._own_expert(partner) and not self._depends(partner):
                self._from_here(user)
                self.expert_hits.append((user, partner, self.births[user], origin))

    def _own_expert(self, partner: fx.Node) -> bool:
        """True if the value is what one expert makes of the token: contracted with a weight since the router."""
        stack, seen = [partner], {partner}
        while stack and len(seen) < 60:
            top = stack.pop()
            if spelling(top) in CONTRACTIONS and any(self.flow.kind(n) == "weight" for n in self.flow.inputs(top)):
                return True
            for source in self.flow.inputs(top):
                if (
                    source not in seen
                    and self.flow.order.get(source, 0) > self.first
                    and self.flow.kind(source) == "data"
                ):
                    seen.add(source)
                    stack.append(source)
        return False

    def _perm(self, node: fx.Node, user: fx.Node, name: str, origin: fx.Node) -> None:
        others = self._others(user, node)
        if is_opaque(user):
            self._fused(node, user, origin)
            return
        if name in _PICKING:
            source = self.flow.operand(user, argument(user, 1 if name == "embedding" else 0, "input", "self"))
            if source is node:
                self._go(user, PERM, origin)
            elif source is not None and IDS in self.labels.get(source, ()):
                self._ids_go(node, user, origin)
            elif source is not None and self._beyond(source):
                self._told_apart(node, user, origin)
            elif source is not None and self.flow.kind(source) == "const":
                self._go(user, PERM, origin)
            elif source is not None and self.flow.kind(source) == "data":
                for known in self.labels.get(source, ()):
                    if known in (IDS, MASK):
                        self._go(user, known, origin)
            return
        if name in ("setitem", "scatter", "index_put", "index_copy", "index_add", "scatter_add"):
            if all(self.flow.kind(n) != "data" for n in others):
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
        others = self._others(user, node)
        tokens = [
            n for n in others if self._beyond(n) or TOK in self.labels.get(n, ()) or PROD in self.labels.get(n, ())
        ]
        vector = self.vectors.get(node)
        if (name in CONTRACTIONS or is_opaque(user)) and tokens and self._scores_a_choice(user):
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
        if tokens or name in CREATION or (name in CONTRACTIONS and any(self.flow.kind(n) == "weight" for n in others)):
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
        elif name in _REARRANGE:
            self._go(user, PROD, origin)
            if node in self.vectors:
                self.vectors.setdefault(user, set()).update(self.vectors[node])

    def _tok(self, node: fx.Node, user: fx.Node, name: str, origin: fx.Node) -> None:
        others = self._others(user, node)
        if is_opaque(user) or name in CONTRACTIONS:
            weights = [n for n in others if self.flow.kind(n) == "weight" and len(dims(n)) >= 2]
            if any(self._is_bank(w) for w in weights) and name not in _GROUPED:
                self._event(user, "experts", origin, weights)
            elif weights and name not in _GROUPED:
                birth = self.births.get(node, node)
                self.came.setdefault(user, set()).add(node)
                self.expert_hits.extend((user, weight, birth, origin) for weight in weights)
            return
        if (
            name in _SELECTIONS
            or name in CREATION
            or name in ("sum", "mean", "index_add", "scatter_add", "index_copy", "add", "setitem")
        ):
            return
        results = [user] if is_tensor(user) else list(self.flow.users(user))
        for result in results:
            self._told_apart(node, result, origin)


def _reached(ends: Iterable[fx.Node], before: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    stack, seen = list(ends), set(ends)
    while stack:
        for source in before.get(stack.pop(), ()):
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return seen


def _is_zero(given: Any) -> bool:
    return number_of(given) == 0


def _is_low(given: Any) -> bool:
    """-inf, or what stands for it: any number below what a score that is kept has."""
    found = number_of(given)
    return found is not None and found < 0


def _picks_along_a_dimension(node: fx.Node) -> bool:
    """`max(dim)` or `min(dim)`, which return indices as well."""
    return spelling(node) in ("max", "min") and not is_tensor(node)


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
