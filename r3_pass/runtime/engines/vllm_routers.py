"""vLLM's own hook on its routers: logical ids before load balancing, called in every forward that runs the router in Python.

That is so in eager mode and inside the opaque operators `vllm.moe_forward*`, as on CUDA (there also while a CUDA graph is captured,
which then replays what the hook launched). Where Dynamo has inlined the router, the hook was traced away, and does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from r3_pass.structure import inspect


class Router:
    """The router of one decoder layer.

    Attributes:
        layer: which.
        module: its path in the model.
        why_not: why no hook can be set; "" if one can.
    """

    def __init__(self, layer: int, module: str, runner: Any) -> None:
        self.layer = layer
        self.module = module
        self._runner = runner

    @property
    def num_experts(self) -> int:
        """Logical experts: replicas that load balancing adds have no number of their own here."""
        return int(self._runner.moe_config.num_logical_experts)

    @property
    def top_k(self) -> int:
        return int(self._runner.router.top_k)

    @property
    def why_not(self) -> str:
        router = self._runner.router
        if self._runner.routed_experts.quant_method.is_monolithic:
            return f"{type(self._runner.routed_experts.quant_method).__name__} routes inside its kernel"
        if not (hasattr(router, "capture_fn") and hasattr(router, "set_capture_fn") and hasattr(router, "top_k")):
            return f"{type(router).__name__} has no capture hook"
        if router.capture_fn is not None:
            return f"the hook of its {type(router).__name__} is in use already ({router.capture_fn})"
        return ""

    def weight(self) -> nn.Parameter:
        """A parameter of its experts as it is now."""
        found: nn.Parameter = next(self._runner.routed_experts.parameters())
        return found

    @property
    def weight_name(self) -> str:
        name, _ = next(self._runner.routed_experts.named_parameters())
        return f"{self.module}.routed_experts.{name}"

    def set(self, hook: Callable[..., None] | None) -> None:
        self._runner.router.set_capture_fn(hook)


def find_routers(model: nn.Module) -> list[Router]:
    """Every MoE layer of a model of vLLM, in order."""
    structure = inspect(model, {})  # what the lists of blocks are; experts are told by the routers found here
    found = []
    for name, module in model.named_modules():
        if not any(c.__name__ == "MoERunner" for c in type(module).__mro__):
            continue
        block = structure.block_of(f"{name}.router")
        if block is not None and block.index < structure.num_layers(block.container):
            found.append(Router(block.index, name, module))
    return sorted(found, key=lambda r: r.layer)
