"""Find the routing in a graph: decide, never mutate.

For every operator that one of the forms claims (`registry.forms()`):

1. backwards: the scores must be a router's, that is a product with a weight whose free dimension is what the selection runs
   over (`registry.scores`);
2. forwards: the ids must choose parameters that then multiply the token (`registry.dispatch`);
3. what is recorded is the last value that all uses share: the slice `ids[:, :k]`, not the k + 1 that were computed; the router's
   own columns, not a shared expert's appended after them.

No model name, no module name and no layer number enters the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from r3_pass.passes.altered import altered, cut, folded, of_a_rank, recorded_ids
from r3_pass.passes.combine import Decision, combine
from r3_pass.passes.form_names import form_name
from r3_pass.passes.places import layer_in_path, module_path, reject
from r3_pass.passes.site import Accepted, Match, Rejected, tokens_of
from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.dispatch import follow_ids
from r3_pass.registry.dispatched import Dispatch
from r3_pass.registry.form import RoutingForm, Selection
from r3_pass.registry.forms import forms
from r3_pass.registry.operators import argument, is_opaque, spelling
from r3_pass.registry.order import reordering
from r3_pass.registry.partition import partition
from r3_pass.registry.scores import trace_scores
from r3_pass.registry.shapes import dims, is_tensor, value
from r3_pass.registry.trace import Root, Trace
from r3_pass.registry.walk import walk
from r3_pass.registry.writes import written


def is_weight(node: fx.Node) -> bool:
    """Whether a Dynamo placeholder is a parameter or buffer of the model, or another tensor that hangs on a module."""
    seen = value(node)
    if isinstance(seen, torch.nn.Parameter):
        return True
    if "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {}):
        return True
    source = getattr(node, "_dynamo_source", None)
    while source is not None:
        if type(source).__name__.endswith("NNModuleSource"):
            return True
        source = getattr(source, "base", None)
    return False


def match(
    graph: fx.Graph,
    broken: bool = False,
    weight: Callable[[fx.Node], bool] = is_weight,
    arriving: Collection[tuple[fx.Node, int]] = (),
) -> Match:
    """Decide about every selection operator of a graph.

    Args:
        graph: a Dynamo or AOT graph with traced values in its metadata; read only.
        broken: the graph ends in a graph break, so ids that leave it may yet reach experts.
        weight: tells weights from data among the placeholders.
        arriving: arguments that may hold another graph's choice, and among how many experts: what is looked up by them in a table
            of so many rows is where these experts are, and no choice.

    Returns: sites and rejections in graph order; choices of one router (repeated argmax) are one site.
    """
    flow = DataFlow(graph, weight)
    decided: list[tuple[Selection, Trace | None, Decision]] = []
    for node in list(flow.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        claims = [(form, found) for form in forms() if (found := form.find(flow, node)) is not None]
        if len(claims) == 1 and claims[0][0].fixed and any(_places(flow, node, *chosen) for chosen in arriving):
            continue
        if len(claims) > 1:
            names = ", ".join(form.name for form, _ in claims)
            decided.append(
                (
                    claims[0][1],
                    None,
                    reject(node, f"several forms claim it: {names}; make their `find` disjoint", True),
                )
            )
        elif claims:
            decided.append((claims[0][1], *_decide(flow, *claims[0], broken)))
    parts = {root for selection, _, decision in decided if isinstance(decision, Accepted) for root in selection.roots}
    for number, (selection, trace, _) in enumerate(decided):
        if selection.node in parts:
            why = "its choice is a part of a later one (product keys)"
            decided[number] = (selection, trace, reject(selection.node, why))
    combined = _of_the_tokens(combine(flow, decided))
    return Match(combined.sites, combined.rejected + _opaque(flow, combined.sites))


def _places(flow: DataFlow, lookup: fx.Node, ids: fx.Node, experts: int) -> bool:
    """Whether ids of so many experts alone say what is looked up, in a table that has a row for each of them."""
    sources = flow.inputs(lookup)
    tables = [dims(n)[:1] for n in sources if flow.kind(n) == "weight"]
    return tables == [(experts,)] and {n for n in _data_behind(flow, lookup) if n.op == "placeholder"} == {ids}


def _data_behind(flow: DataFlow, node: fx.Node) -> Iterable[fx.Node]:
    return walk(node, lambda top: [n for n in flow.inputs(top) if flow.kind(n) == "data"])


def _of_the_tokens(found: Match) -> Match:
    """Without choices that may be anything (a sampler's, behind the model) and are made for other tokens than the routers'."""
    routed = {tokens_of(site) for site in found.sites if site.proved}
    others = [site for site in found.sites if not site.proved and routed and tokens_of(site) not in routed]
    why = (
        "its ids leave the graph before they reach experts, and it chooses for other tokens than the routers beside it"
    )
    rejected = (reject(site.selections[0], why, gate=site.gate) for site in others)
    return Match(tuple(site for site in found.sites if site not in others), (*found.rejected, *rejected))


def _opaque(flow: DataFlow, sites: Sequence[Accepted]) -> tuple[Rejected, ...]:
    """Custom operators that take activations and weights of which no site knows: a router inside one shows no ids."""
    known = {weight for site in sites for weight in (*site.gate, *site.experts)}
    found = []
    for node in flow.nodes:
        if not is_opaque(node) or not any(flow.kind(n) == "data" and is_tensor(n) for n in flow.inputs(node)):
            continue
        weights = {w for n in flow.inputs(node) if flow.kind(n) == "weight" for w in flow.weights(n)}
        if (weights and not weights & known) or (_makes_integers(node) and not known):
            why = f"{spelling(node)} is a custom operator: a router's choice inside it is not in the graph"
            found.append(reject(node, why, gate=tuple(weights)))
    return tuple(found)


def _makes_integers(node: fx.Node) -> bool:
    """Whether an operator returns integers, or writes into some."""
    results = value(node)
    made = list(results) if isinstance(results, tuple | list) else [results]
    made += [value(n) for n in written(node)]
    return any(isinstance(r, torch.Tensor) and r.dtype in (torch.int64, torch.int32, torch.int16) for r in made)


def _is_cache(weight: fx.Node) -> bool:
    """A floating-point buffer in a graph that tells parameters from buffers: no router's weight, unless it is quantised."""
    seen = value(weight)
    if weight.op != "placeholder" or not isinstance(seen, torch.Tensor) or isinstance(seen, torch.nn.Parameter):
        return False
    if seen.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return any(isinstance(value(n), torch.nn.Parameter) for n in weight.graph.nodes if n.op == "placeholder")


def _decide(flow: DataFlow, form: RoutingForm, selection: Selection, broken: bool) -> tuple[Trace | None, Decision]:
    node = selection.node
    if selection.scores is None:
        return None, _decide_table(flow, form, selection)
    shape = dims(selection.scores)
    if not shape or not isinstance(shape[selection.dim], int):
        return None, reject(
            node,
            f"it runs over a dimension of no fixed size ({shape[selection.dim] if shape else '?'}): tokens, not experts",
        )
    experts = shape[selection.dim]
    if not selection.ids or not any(flow.users(i) or i in flow.outputs for i in selection.ids):
        return None, reject(node, "its indices are not used, only its values (the score of a group, say)")
    trace = trace_scores(flow, selection.scores, selection.dim)
    gate = tuple(dict.fromkeys(w for root in trace.roots for w in root.weights))
    if not trace.roots:
        return trace, reject(node, trace.why_not, trace.over_tokens and _experts_choose(flow, selection))
    if all(isinstance(r.width, int) and r.width < experts for r in trace.roots) and len(trace.roots) == 1:
        return trace, reject(
            node, f"it runs over {experts} values, the linear behind it has {trace.roots[0].width} outputs", gate=gate
        )
    if reshaped := next((by for n in selection.ids if (by := flow.reshaped(n)) is not None), None):
        why = f"{spelling(reshaped)} ({reshaped.name}) gives its ids another shape in place, so no graph shows the one they had"
        return trace, reject(node, why, gate=gate)
    split = partition(flow, selection.ids, trace.roots, experts, _k_dim(selection))
    if split is not None:
        dispatch, recorded, used, held = split.dispatch, split.ids, split.local, split.count
    else:
        dispatch = follow_ids(flow, selection.ids, trace.roots, experts, _k_dim(selection))
        recorded = recorded_ids(flow, selection, dispatch)
        used, held = recorded, int(experts)
    proved = dispatch.proved
    if not proved and not (broken and dispatch.escapes):
        return trace, reject(
            node, "its ids choose no parameters: " + ("; ".join(dispatch.fates) or "they are never used"), gate=gate
        )
    if not proved and gate and all(map(_is_cache, gate)):
        return trace, reject(
            node, "the scores are a product with a buffer (a cache or a memory), not with a parameter", gate=gate
        )
    if trace.couples_tokens is not None and proved:
        why = f"the scores of one token depend on the other tokens of the batch ({trace.couples_tokens.name}: sinkhorn or the like)"
        return trace, reject(node, why + ", so a token has no ids of its own to replay", True, gate)
    if trace.starts_late is not None and not _of_its_own(flow, trace, dispatch, int(experts)):
        why = f"it runs over a part of the router's outputs ({trace.starts_late.name}) that is not the first ones: its ids do not "
        return trace, reject(node, why + "number the experts", proved, gate)
    moved = next((m for root in trace.roots if root.weights and (m := reordering(flow, root.node)) is not None), None)
    if moved is not None:
        why = f"{spelling(moved)} ({moved.name}) moves tokens between the graph's inputs and the router"
        return trace, reject(node, why + ": rows would be in another order than the slot mapping", proved, gate)
    if proved and hasattr(value(recorded), "_local_tensor"):
        why = "its ids are a DTensor, of which a rank may hold some rows only. Choose among plain scores (scores.full_tensor())"
        return trace, reject(node, why, True, gate)
    if how := folded(dispatch, held):
        return trace, reject(node, f"its choices do not number the experts: {how}", True, gate)
    if how := altered(dispatch, used, held):
        return trace, reject(node, f"the ids that reach experts are not those that it chose: {how}", proved, gate)
    if how := cut(dispatch, used):
        return trace, reject(node, f"the ids that leave by a graph break are not those that it chose: {how}", gate=gate)
    if unseen := next((w for n in selection.ids if (w := flow.overwritten_unseen(n)) is not None), None):
        why = f"{spelling(unseen)} ({unseen.name}) may write others in their place before they are used"
        return trace, reject(node, f"the ids that reach experts may not be those that it chose: {why}", proved, gate)
    if split is None and (first := of_a_rank(flow, dispatch, selection, held, recorded in dispatch.mixed)):
        why = f"{first} numbers a part of the {experts} experts that it chooses among, and it is not proved that the weights "
        return trace, reject(node, why + "of the others are 0, each beside its choice, in all that is used", True, gate)
    id_dim, top_k = _columns_of(selection, recorded)
    if top_k is None or (selection.needs_slice and recorded in selection.ids):
        why = (
            "the number of experts differs from token to token (all of them in order, then a cut by value): "
            "no fixed ids per token"
        )
        return trace, reject(node, why, proved, gate)
    site = Accepted(
        form=form_name(flow, form, selection, trace),
        num_experts=int(experts),
        top_k=top_k,
        columns=(recorded,),
        id_dim=id_dim,
        gate=gate,
        experts=tuple(w for w in dispatch.weights if w not in gate),
        module=module_path(node),
        layer=layer_in_path(module_path(node)),
        proved=proved,
        selections=(node,),
        overwritten=flow.overwritten(recorded),
        shared=flow.shared(recorded),
        choices=((selection, 0),),
        roots=tuple(root.node for root in trace.roots),
        fixed=form.fixed,
        no_replay=form.no_replay,
        named=dispatch.named(int(experts)) if split is None else int(experts),
    )
    return trace, site


def _decide_table(flow: DataFlow, form: RoutingForm, selection: Selection) -> Decision:
    """Ids that are looked up: in a table of the model by the token, or among the pairs of two small selections."""
    node = selection.node
    k_dim = -1 if len(dims(node)) and _table_has_columns(node) else None
    dispatch = follow_ids(flow, selection.ids, [Root(n, (), None) for n in selection.roots], None, k_dim)
    if not dispatch.proved:
        fate = "; ".join(dispatch.fates) or "they are never used"
        return reject(node, f"looked-up integers that choose no parameters: {fate}")
    if how := altered(dispatch, node):
        return reject(node, f"the ids that reach experts are not those that were looked up: {how}", True)
    id_dim, top_k = _columns_of(selection, node)
    if top_k is None:
        return reject(node, "the number of expert ids that are looked up for a token is not fixed", True)
    table = flow.operand(node, node.args[1] if spelling(node) == "embedding" else node.args[0])
    banks = {dims(w)[0] for w in dispatch.weights if len(dims(w)) >= 3} or {
        dims(w)[0] for w in dispatch.weights if dims(w)
    }
    experts = banks.pop() if len(banks) == 1 else 0
    return Accepted(
        form=form.name,
        num_experts=int(experts),
        top_k=top_k,
        columns=(node,),
        id_dim=id_dim,
        gate=flow.weights(table) if table is not None and flow.kind(table) == "weight" else (),
        experts=tuple(dispatch.weights),
        module=module_path(node),
        layer=layer_in_path(module_path(node)),
        proved=True,
        selections=(node,),
        overwritten=flow.overwritten(node),
        shared=flow.shared(node),
        choices=((selection, 0),),
        fixed=form.fixed,
        no_replay=form.no_replay,
    )


def _experts_choose(flow: DataFlow, selection: Selection) -> bool:
    """Expert choice: each expert picks tokens, which its own parameters then multiply."""
    assert selection.scores is not None
    shape = dims(selection.scores)
    others = [s for i, s in enumerate(shape) if i != selection.dim % len(shape)]
    return any(
        isinstance(e, int) and e > 1 and bool(follow_ids(flow, selection.ids, (), e).events) for e in others
    ) or any(_picks_for_experts(flow, selection, e) for e in others)


def _picks_for_experts(flow: DataFlow, selection: Selection, experts: Any) -> bool:
    """Tokens gathered at the ids reach a weight that has one entry for each of the selection's other dimension."""
    if not isinstance(experts, int) or experts < 2:
        return False
    stack = list(selection.ids)
    seen = set(stack)
    while stack and len(seen) < 200:
        top = stack.pop()
        for user in flow.users(top):
            weights = [n for n in flow.inputs(user) if flow.kind(n) == "weight"]
            if any(len(dims(w)) >= 3 and experts in dims(w) for w in weights):
                return True
            if user not in seen and user.op != "output":
                seen.add(user)
                stack.append(user)
    return False


def _columns_of(selection: Selection, recorded: fx.Node) -> tuple[int | None, int | None]:
    """Where k stands in the recorded ids, and k; (None, 1) for one id per token without a dimension of its own."""
    shape = dims(recorded)
    if not selection.alone or selection.scores is None:
        scores = dims(selection.scores) if selection.scores is not None else ()
        if selection.scores is None:
            return (
                (len(shape) - 1, int(shape[-1]))
                if len(dims(selection.node)) and _table_has_columns(selection.node)
                else (None, 1)
            )
        if len(shape) == len(scores) and shape[selection.dim] == 1:
            return selection.dim % len(shape), 1
        return None, 1
    if not shape:
        return None, None
    dim = selection.dim % len(shape)
    return (dim, int(shape[dim])) if isinstance(shape[dim], int) else (dim, None)


def _of_its_own(flow: DataFlow, trace: Trace, dispatch: Dispatch, experts: int) -> bool:
    """Whether the part of a linear's outputs that is selected over are all of the router's: a gate fused with another linear."""
    late = trace.starts_late
    assert late is not None
    whole = flow.operand(late, late.args[0])
    if whole is not None and not is_tensor(whole):
        whole = flow.operand(whole, argument(whole, 0, "input", "tensor", "self"))
    steps = [i for i in (late.args[1] if isinstance(late.args[1], tuple) else ()) if isinstance(i, slice)]
    if whole not in [root.node for root in trace.roots] or any(i.step not in (None, 1) for i in steps):
        return False
    moved = any(
        spelling(n) in ("add", "sub") or any(flow.kind(i) != "data" for i in flow.inputs(n)) for n in dispatch.used
    )
    banks = {dims(w)[0] for w in dispatch.weights if len(dims(w)) >= 3}
    return not moved and banks <= {experts}


def _k_dim(selection: Selection) -> int | None:
    """Which dimension of the ids holds a token's choices; None if each token has one id."""
    shape = dims(selection.ids[0])
    scores = dims(selection.scores) if selection.scores is not None else shape
    return selection.dim if len(shape) == len(scores) else None


def _table_has_columns(node: fx.Node) -> bool:
    if spelling(node) in ("gather", "take_along_dim"):
        return True
    table = node.args[1] if spelling(node) == "embedding" else node.args[0]
    return isinstance(table, fx.Node) and len(dims(table)) == 2


__all__ = ["is_weight", "match"]
