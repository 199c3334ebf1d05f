"""Routers that no graph shows: an engine's own hook hands over the ids of a layer, and they take the way of a graph's.

An operator that hides the router in a compiled graph, or a model that runs eagerly, leaves nothing to rewrite. Where the engine
calls back with the ids of each layer, that call is treated as a graph of one site: same buffer, same operator, same checks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from r3_pass.binding import Binding
from r3_pass.errors import R3Error, RefusedConfiguration
from r3_pass.passes.ops import record
from r3_pass.passes.site import Accepted
from r3_pass.places import Place

FORM = "router_hook"


class HookedRouter:
    """What the engine calls in each forward with the ids of one layer; without a step it does nothing.

    Safe in a CUDA graph capture inside a step: the operator reads what a step is from persistent tensors.

    Args:
        weight: a parameter that names the layer, asked for at each call: a reload may replace it.
        module: path of the router, for messages.
        num_experts: logical experts, of which ids are given.
        top_k: columns of the ids.
    """

    def __init__(
        self, binding: Binding, weight: Callable[[], nn.Parameter], module: str, num_experts: int, top_k: int
    ) -> None:
        self.sites: tuple[Accepted, ...] = (
            Accepted(
                form=FORM,
                num_experts=num_experts,
                top_k=top_k,
                columns=(),
                id_dim=1,
                gate=(),
                experts=(),
                module=module,
                layer=None,
                proved=True,
                selections=(),
            ),
        )
        self.gates: list[list[int]] = [[]]
        self.experts: list[list[int]] = [[0]]
        self.placed: dict[tuple[int, Place], None] = {}
        self._binding = binding
        self._weight = weight

    def __call__(self, ids: Tensor) -> None:
        """Record the ids [T, k] of the running step, logical and in the order of choice."""
        binding = self._binding
        if not binding.recording:
            return
        try:
            binding.begin()
            site = self.sites[0]
            if ids.dim() != 2 or ids.shape[1] != site.top_k:
                raise RefusedConfiguration(
                    f"{site.module} hands over ids {list(ids.shape)}, expected [tokens, {site.top_k}]: other choices (shared "
                    "experts, say) stand among them."
                )
            placement = binding.place(self, (self._weight(),), self.placed)
            if not placement.stored:
                return
            binding.before(placement)
            assert binding.buffer is not None, "placing laid it out"
            record(binding.buffer, binding.state, binding.mapping, placement.columns, [ids])
            binding.ran(placement, ids.shape[0])
        except R3Error as error:
            binding.problems[str(error)] = None  # the step fails, also where an engine swallows this
            raise
