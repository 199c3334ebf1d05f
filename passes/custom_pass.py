"""The rewrite as an Inductor custom pass, for those who compile through a pipeline of their own.

    inductor_config.pre_grad_custom_pass = r3_pass.passes.RecordPass()

Inductor hands a custom pass one graph and takes no new inputs from it: the graph must have the record op's four inputs already,
as placeholders whose names end in `r3_buffer`, `r3_state`, `r3_slots` and `r3_columns` (`passes.inputs.add_input` makes them).
`r3_pass.backend()` is what adds them and runs the rewrite where it always runs; this is the same rewrite without that.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from r3_pass.passes import ops
from r3_pass.passes.match import is_weight, match
from r3_pass.passes.record import BUFFER, COLUMNS, SLOTS, STATE, Occurrence, insert_record, kept, unequal
from r3_pass.passes.site import Match
from r3_pass.registry.forms import forms

_INPUTS = (BUFFER, STATE, SLOTS, COLUMNS)


class RecordPass(CustomGraphPass):
    """Match a graph and record its sites, in place.

    Before:  a graph with the four inputs, unused.
    After:   r3_pass.record(buffer, state, slots, columns, [ids, ...]) before the output; column n is that of the n-th site.

    A graph without routing, or whose record op stands in it already, is left as it is; one with routing and without the inputs is a
    ValueError, since nothing would be recorded.

    Args:
        weight: tells weights from data among the placeholders, where the graph is not Dynamo's.
    """

    def __init__(self, weight: Callable[[fx.Node], bool] = is_weight) -> None:
        self.weight = weight
        self.last: Match | None = None

    def __call__(self, graph: fx.Graph) -> None:
        if any(node.target is ops.record for node in graph.nodes):
            return
        self.last = found = match(graph, weight=self.weight)
        if not found.sites:
            return
        placeholders = {
            name: node
            for node in graph.nodes
            if node.op == "placeholder"
            for name in _INPUTS
            if node.name.endswith(f"r3_{name}")
        }
        missing = [f"r3_{name}" for name in _INPUTS if name not in placeholders]
        if missing:
            raise ValueError(
                f"the graph routes ({len(found.sites)} sites) and lacks the inputs {missing}: add them with "
                "r3_pass.passes.inputs.add_input "
                "before compilation, or compile with r3_pass.backend(), which does."
            )
        nested = [s.module for s in found.sites if any(c.graph is not graph for c in s.columns)]
        if nested:
            raise ValueError(
                f"routing inside nested graphs ({nested[0]}) needs r3_pass.backend(), which rewrites those too."
            )
        output = next(n for n in graph.nodes if n.op == "output")
        sites = [
            Occurrence(s, s.gate, s.experts, tuple(kept(graph, c) if s.overwritten else c for c in s.columns))
            for s in found.sites
        ]
        if reason := unequal(sites):
            raise ValueError(f"the graph cannot be recorded: {reason}.")
        with graph.inserting_before(output):
            insert_record(graph, sites, [placeholders[name] for name in _INPUTS], count=False)
        graph.lint()

    def uuid(self) -> str | None:
        """Changes with everything that changes the rewritten graph: this project's sources, the forms, the test of weights, torch.

        None, so that Inductor caches nothing, where one of these functions cannot be told by its code and what it closes over.
        """
        digest = hashlib.sha256(torch.__version__.encode())
        here = Path(__file__).parent
        for source in sorted([*here.glob("*.py"), *(here.parent / "registry").glob("*.py")]):
            digest.update(source.name.encode() + source.read_bytes())
        try:
            for function in (*(form.find for form in forms()), self.weight):
                digest.update(repr(_identity(function)).encode())
        except TypeError:
            return None
        return digest.hexdigest()


def _identity(thing: object) -> object:
    """Plain values that differ wherever two functions could decide differently.

    Raises: TypeError for what has none.
    """
    if thing is None or thing is Ellipsis or isinstance(thing, bool | int | float | complex | str | bytes):
        return thing
    if isinstance(thing, tuple | list):
        return type(thing).__name__, [_identity(item) for item in thing]
    if isinstance(thing, set | frozenset):
        return "set", sorted(repr(_identity(item)) for item in thing)
    if isinstance(thing, dict):
        return "dict", [(_identity(key), _identity(item)) for key, item in thing.items()]
    if isinstance(thing, types.CodeType):
        return thing.co_code, thing.co_names, thing.co_varnames, _identity(thing.co_consts)
    if isinstance(thing, types.FunctionType):
        closed = tuple(cell.cell_contents for cell in thing.__closure__ or ())
        held = (thing.__defaults__, thing.__kwdefaults__, closed)
        return thing.__module__, thing.__qualname__, _identity(thing.__code__), _identity(held)
    if isinstance(thing, type | types.ModuleType | types.BuiltinFunctionType):
        return repr(thing)
    raise TypeError(f"{type(thing).__name__} has no identity that holds in another process")
