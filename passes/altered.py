"""Which value is recorded for a selection, and what may stand between it and the experts.

What is recorded is the last value that all uses share. What experts then get has to be that, in every column, and to number all
experts.
"""

from __future__ import annotations

from torch import fx

from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.dispatched import Dispatch
from r3_pass.registry.form import Selection
from r3_pass.registry.operators import spelling
from r3_pass.registry.partition import shares
from r3_pass.registry.scores import index_mapping
from r3_pass.registry.shapes import dims

_RENUMBERING = frozenset({
    "sub", "add", "where", "masked_fill", "setitem", "index_put", "clamp", "clamp_min", "clamp_max", "clip",
})  # fmt: skip


def recorded_ids(flow: DataFlow, selection: Selection, dispatch: Dispatch) -> fx.Node:
    """Walk from the selection's indices to the last narrowing that all uses of the ids share."""
    alive = dispatch.used if dispatch.proved else set(dispatch.chain)
    current = next((i for i in selection.ids if i in alive), selection.ids[0])
    while len(selection.ids) == 1 and current not in dispatch.direct and current not in flow.outputs:
        steps = [n for n, origin in dispatch.chain.items() if origin is current and n in alive]
        if len(steps) != 1 or not (_narrows(steps[0]) or _replaces(dispatch, current, steps[0])):
            break
        current = steps[0]
    return current


def _replaces(dispatch: Dispatch, ids: fx.Node, step: fx.Node) -> bool:
    """`where(forced >= 0, forced, ids)` and the like: what is used, and so recorded, is the result."""
    return step in dispatch.mixed and spelling(step) in ("where", "masked_scatter") and dims(step) == dims(ids)


def _narrows(node: fx.Node) -> bool:
    """A slice that keeps all tokens and cuts columns."""
    if spelling(node) not in ("getitem", "narrow", "slice"):
        return False
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return False
    before, after = dims(source), dims(node)
    if spelling(node) == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if index_mapping(index, len(before)) != list(range(len(before))):
            return False
    return len(before) == len(after) and sum(a != b for a, b in zip(before, after, strict=True)) == 1


def altered(dispatch: Dispatch, recorded: fx.Node, experts: int = 0) -> str:
    """How the ids that reach experts differ from the recorded ones; "" if they do not."""
    how = changed(dispatch, recorded, experts)
    if how or not dispatch.proved:
        return how
    return alone(set(dispatch.columns.get(recorded, ())), reached(dispatch, recorded))


def reached(dispatch: Dispatch, recorded: fx.Node) -> set[int]:
    """Which columns of the recorded ids reach experts."""
    held = set(dispatch.columns.get(recorded, ()))
    return {c for n in dispatch.direct for c in dispatch.columns.get(n, held)}


def alone(held: set[int], reached: set[int]) -> str:
    """What is wrong where, of the columns that are recorded, these reach experts; "" if nothing is."""
    if not held - reached:
        return ""
    return f"of {len(held)} columns, {sorted(reached)} alone reach experts, in a way that is no plain slice"


def changed(dispatch: Dispatch, recorded: fx.Node, experts: int = 0) -> str:
    """How the ids that reach experts differ from the recorded ones, whichever columns do; "" if they do not."""
    alive = dispatch.used if dispatch.proved else set(dispatch.chain)
    before: set[fx.Node | None] = set()
    step: fx.Node | None = recorded
    while step is not None:
        before.add(step)
        step = dispatch.chain.get(step)
    rest = sorted((n for n in dispatch.mixed if n in alive and n not in before), key=list(dispatch.chain).index)
    if rest:
        return dispatch.mixed[rest[0]]
    if dispatch.masks:
        return next(iter(dispatch.masks.values()))
    banks = {dims(w)[0] for w in dispatch.weights if len(dims(w)) >= 3}
    first = max((-dispatch.offsets.get(n, 0) for n in dispatch.direct), default=0)
    if first > 0 and any(isinstance(b, int) and b < experts and experts % b for b in banks):
        return f"{first} is taken from each, and the first of {experts} choices names none of {min(banks)} experts"
    return ""


def cut(dispatch: Dispatch, recorded: fx.Node) -> str:
    """Which columns of ids that leave by a graph break are not among what leaves; "" if all are, or if that is not known."""
    held = set(dispatch.columns.get(recorded, ()))
    left = {c for n in dispatch.left for c in dispatch.columns.get(n, held)}
    if dispatch.proved or dispatch.left_otherwise or not left or not held - left:
        return ""
    return f"of {len(held)} columns, {sorted(left)} alone leave the graph, in a way that is no plain slice"


def of_a_rank(flow: DataFlow, dispatch: Dispatch, selection: Selection, experts: int, replaced: bool) -> str:
    """Which operator makes numbers of one rank's experts of the ids, as far as that can be told; "" if none does.

    Args: replaced: what is recorded has other numbers in the place of some ids.
    """
    held = {dims(w)[0] for w in dispatch.weights if len(dims(w)) >= 3}
    if not dispatch.proved or len(held) != 1 or not all(isinstance(h, int) and 0 < h < experts for h in held):
        return ""
    (count,) = held
    changed = [n for n in dispatch.used if spelling(n) in _RENUMBERING]
    moved = any(dispatch.offsets.get(n, 0) < 0 for n in dispatch.used)
    whole = set() if experts % count else {tuple(range(n, n + count)) for n in range(experts - count + 1)}
    kept = shares(flow, selection.ids[0], experts) if changed and whole else set()
    return (
        f"{spelling(changed[0])} ({changed[0].name})"
        if changed and (moved or replaced or (kept and kept <= whole))
        else ""
    )


def folded(dispatch: Dispatch, choices: int) -> str:
    """How several choices become one expert (replicas, say): a division whose remainder is not used, or the other way about."""
    parts = {spelling(n) for n in dispatch.used}
    quotient, remainder = parts & {"floordiv", "div", "rshift"}, parts & {"mod", "and"}
    held = {dims(w)[0] for w in dispatch.weights if len(dims(w)) >= 3}
    if bool(quotient) == bool(remainder) or not held or max(held) >= choices:
        return ""
    (name, *_) = quotient or remainder
    return f"{name} makes one of {max(held)} experts of each of {choices} choices"
