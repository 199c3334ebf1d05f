"""Values that are followed from a selection's ids on, what each was reached from, and the verdict at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.dispatched import IDS, MASK, PERM, TOK, Dispatch
from r3_pass.registry.dropped import without_weight
from r3_pass.registry.experts import Experts
from r3_pass.registry.masks import Masks
from r3_pass.registry.mixing import mixing
from r3_pass.registry.operators import spelling
from r3_pass.registry.origins import Origins
from r3_pass.registry.shapes import dims
from r3_pass.registry.trace import Root
from r3_pass.registry.unchanged import Unchanged

Rule = Callable[[fx.Node, fx.Node, str, fx.Node], None]
"""`rule(value, user, the user's name, the ids that the value came from)`."""

_COUNTS = frozenset({"cumsum", "bincount", "histc"})
_MAX_VALUES = 4000


class Trail(ABC):
    """What became of a selection's ids so far.

    Args: as of `dispatch.follow_ids`.
    """

    def __init__(
        self, flow: DataFlow, ids: Sequence[fx.Node], roots: Sequence[Root], num_experts: Any, k_dim: int | None
    ) -> None:
        self.flow = flow
        self.k_dim = k_dim
        self.at: fx.Node | None = None
        self.came: dict[fx.Node, set[fx.Node]] = {}  # any followed value, or a proof: what it was reached from
        self.parents: dict[fx.Node, set[fx.Node]] = {}  # IDS: the IDS it was reached from
        self.counted: set[fx.Node] = set()  # MASK that only counts
        self.gate = {w for r in roots for w in r.weights}
        self.labels: dict[fx.Node, set[str]] = {}
        self.origins = Origins(flow, ids, roots)
        self.experts = Experts(flow, num_experts, self.origins.first)
        self.masks = Masks(flow, self.origins, k_dim, num_experts, self.labels)
        self.found = Dispatch(chain=dict.fromkeys(ids))
        # value, label, the IDS it came from
        self.pending: list[tuple[fx.Node, str, fx.Node]] = [(n, IDS, n) for n in ids]
        self.indexing: list[tuple[fx.Node, fx.Node]] = []  # parameters that ids pick, and the ids
        self.vectors: dict[fx.Node, set[fx.Node]] = {}  # two-dimensional SEL: value -> sources
        self.vector_sources: set[fx.Node] = set()
        self.vector_hits: list[tuple[fx.Node, fx.Node]] = []
        self.births: dict[fx.Node, fx.Node] = {}  # TOK: where its tokens were told apart from those of other experts
        # product, weight, birth, the IDS it came from
        self.expert_hits: list[tuple[fx.Node, fx.Node, fx.Node, fx.Node]] = []

    def run(self) -> Dispatch:
        seen: set[tuple[fx.Node, str, fx.Node]] = set()
        while self.pending:
            item = self.pending.pop()
            if item in seen or len(seen) > _MAX_VALUES:
                continue
            seen.add(item)
            node, label, origin = item
            self.at = node
            self.labels.setdefault(node, set()).add(label)
            if node in self.flow.outputs:
                self._leaves(node, label)
            for user in self.flow.users(node):
                if user.op != "output":
                    self._rule(label)(node, user, spelling(user), origin)
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

    @abstractmethod
    def _rule(self, label: str) -> Rule:
        """What values of a label may become."""

    def _judge(self) -> None:
        """Which IDS are still the selection's, and which masks are no longer of the chosen."""
        ids = [n for n, labels in self.labels.items() if IDS in labels]
        kept = Unchanged(
            self.flow,
            list(self.origins.starts),
            self.k_dim,
            self.experts.number,
            lambda n: IDS in self.labels.get(n, ()),
            lambda n: n not in self.origins.starts and bool({PERM, IDS} & self.labels.get(n, set())),
        )
        kept.read(ids)
        for user, source in self.indexing:
            kept.indexes(user, source)
        for node, how in kept.changes.items():
            self.found.mixed.setdefault(node, how)
        self.found.columns = {n: layout.columns for n, layout in kept.layouts.items()}
        self.found.offsets = {n: layout.offset for n, layout in kept.layouts.items()}
        self.found.turned = {n for n, layout in kept.layouts.items() if layout.turned}
        experts = self.experts.number if isinstance(self.experts.number, int) else None
        for drop in dict.fromkeys(kept.drops):
            if not without_weight(
                self.flow,
                drop,
                list(self.origins.starts),
                kept.layouts,
                experts,
                self.found,
                lambda n: IDS in self.labels.get(n, ()),
            ):
                self.found.mixed.setdefault(drop.node, f"{spelling(drop.node)} ({drop.node.name}) {drop.how}")
        self.found.used = _reached(self.found.direct, self.parents)
        alive = _reached(self.found.events, self.came)
        for node in sorted(self.came, key=self.flow.order.__getitem__):
            if spelling(node) in _COUNTS or self.came[node] & self.counted or self.masks.adds_tokens_up(node):
                self.counted.add(node)
        self.found.masks = {
            n: how
            for n, how in self.masks.changes.items()
            if n in alive and not any(IDS in self.labels[m] or m in self.counted for m in self.masks.made_of.get(n, ()))
        }

    def _leaves(self, node: fx.Node, label: str) -> None:
        if label in (IDS, PERM, TOK) or (label == MASK and len(dims(node)) >= 2):
            self.found.escapes = True
            if label == IDS:
                self.found.left.add(node)
            else:
                self.found.left_otherwise = True
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
        how = mixing(self.origins, node, user, self.labels)
        if how:
            self.found.mixed[user] = how
        self._go(user, IDS, user)

    def _told_apart(self, node: fx.Node, user: fx.Node, origin: fx.Node, birth: fx.Node | None = None) -> None:
        """TOK goes on; a value that was split off another one is a set of tokens of its own."""
        split = spelling(user) in ("getitem", "select", "unbind", "index_select", "narrow") and node in self.births
        self.births.setdefault(user, birth or (user if split or node not in self.births else self.births[node]))
        self._go(user, TOK, origin)

    def _event(self, user: fx.Node, kind: str, origin: fx.Node, weights: Sequence[fx.Node]) -> None:
        self.found.events[user] = kind
        self.found.direct.add(origin)
        self._from_here(user)
        for source in weights:
            for weight in self.flow.weights(source):
                self.found.weights[weight] = None


def _reached(ends: Iterable[fx.Node], before: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    stack, seen = list(ends), set(ends)
    while stack:
        for source in before.get(stack.pop(), ()):
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return seen
