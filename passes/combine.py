"""Choices of one router: which of them are one site together, which one is its routing, and which cannot be told apart."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from r3_pass.passes.places import reject
from r3_pass.passes.site import Accepted, Match, Rejected
from r3_pass.registry.dataflow import DataFlow
from r3_pass.registry.form import Selection
from r3_pass.registry.operators import spelling
from r3_pass.registry.shapes import dims
from r3_pass.registry.trace import Trace

Decision = Accepted | Rejected


def combine(flow: DataFlow, decided: list[tuple[Selection, Trace | None, Decision]]) -> Match:
    """Join the choices of one router; two whole selections on one router, both reaching experts, cannot both be its routing."""
    sites: list[Accepted] = []
    rejected = [d for _, _, d in decided if isinstance(d, Rejected)]
    by_router: dict[frozenset[fx.Node], list[tuple[Selection, Accepted]]] = {}
    for selection, trace, decision in decided:
        if isinstance(decision, Accepted):
            router = frozenset(r.node for r in trace.roots) if trace is not None else frozenset({selection.node})
            by_router.setdefault(router, []).append((selection, decision))
    for group in by_router.values():
        found = [site for _, site in group]
        if len(found) == 1:
            sites.append(found[0])
        elif all(not s.alone for s, _ in group):
            sites.append(_joined(_distinct(group)))
        elif sum(site.proved for site in found) == 1:
            sites.extend(site for site in found if site.proved)
            rejected.extend(
                reject(s.selections[0], "another selection on this router is the one that reaches experts")
                for s in found
                if not s.proved
            )
        else:
            last = _final(flow, group)
            if last is not None:
                sites.append(last)
            else:
                rejected.extend(
                    reject(s.selections[0], "several selections on one router reach experts", True, s.gate)
                    for s in found
                )
    sites.sort(key=lambda s: flow.order[s.selections[0]])
    return Match(tuple(sites), tuple(rejected))


def _final(flow: DataFlow, group: list[tuple[Selection, Accepted]]) -> Accepted | None:
    """Product keys: partial selections whose ids the last one picks among all record one and the same value."""
    recorded = {site.columns[0] for _, site in group}
    return group[-1][1] if len(recorded) == 1 else None


def _distinct(group: list[tuple[Selection, Accepted]]) -> list[Accepted]:
    """Choices of the same scores in the same direction are one choice (`max` for the weight, `argmax` for the id)."""
    choices: dict[tuple[Any, ...], Accepted] = {}
    for selection, site in group:
        rank = len(dims(selection.scores)) if selection.scores is not None else 1
        lowest = spelling(selection.node) in ("argmin", "min")
        key = selection.scores, selection.dim % rank, lowest
        known = choices.get(key)
        choices[key] = dataclasses.replace(known, choices=known.choices + site.choices) if known is not None else site
    return list(choices.values())


def _joined(found: list[Accepted]) -> Accepted:
    first = found[0]
    if len(found) == 1:
        return first
    return Accepted(
        form=first.form.replace("top1", f"top1x{len(found)}"),
        num_experts=first.num_experts,
        top_k=len(found),
        columns=tuple(site.columns[0] for site in found),
        id_dim=first.id_dim,
        gate=first.gate,
        experts=tuple(dict.fromkeys(w for site in found for w in site.experts)),
        module=first.module,
        layer=first.layer,
        proved=any(site.proved for site in found),
        selections=tuple(site.selections[0] for site in found),
        overwritten=any(site.overwritten for site in found),
        shared=any(site.shared for site in found),
        choices=tuple((selection, number) for number, site in enumerate(found) for selection, _ in site.choices),
        roots=first.roots,
        named=first.named,
    )
