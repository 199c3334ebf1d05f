"""The slot buffer's bytes before there is a session: for an engine that sizes its KV cache."""

from __future__ import annotations

from torch import nn

from r3_pass.errors import NoRouterFound, RefusedConfiguration
from r3_pass.runtime.inputs import count
from r3_pass.runtime.slots import Geometry
from r3_pass.structure import inspect


def plan(model: nn.Module, num_slots: int, top_k: int | None = None, num_layers: int | None = None) -> Geometry:
    """The layout that `attach` will allocate for this model, from its modules and config; nothing is allocated or run.

        geometry = r3_pass.runtime.plan(model, num_slots=1)
        geometry.bytes_per_slot, geometry.bytes_per_block(16), geometry.spare_row_bytes      # charge these to the KV budget

    Every rank of a tensor-parallel engine gets the same numbers, whichever of them records. Meta tensors will do.

    Args:
        num_slots: KV slots.
        top_k: experts per token, largest of all layers; by default what the config says.
        num_layers: decoder layers, where neither config nor the list of blocks says it.

    Raises:
        NoRouterFound: the model is dense.
        RefusedConfiguration: modules and config do not say which layers route, or the top-k. Run a step, then ask
            the session's geometry.
    """
    num_slots = count("num_slots", num_slots)
    top_k = None if top_k is None else count("top_k", top_k)
    structure = inspect(model)
    name = type(model).__name__
    if not structure.may_route:
        raise NoRouterFound(f"{name} is dense: none of its blocks holds experts. There is no routing to record.")
    container = structure.main_container
    stored = structure.expected(container, num_layers) if container is not None else ()
    if container is None or not stored:
        raise RefusedConfiguration(
            f"the modules of {name} do not show which layers hold experts. Attach, run one step (all slots -1 will do), and ask "
            "session.geometry."
        )
    top_k = structure.top_k if top_k is None else top_k
    if top_k is None:
        raise RefusedConfiguration(f"the config of {name} does not say how many experts a token gets. Pass top_k=.")
    layers = num_layers or max(structure.num_layers(container), stored[-1] + 1)
    return Geometry(num_slots, layers, stored, top_k)
