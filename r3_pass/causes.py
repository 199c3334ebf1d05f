"""Why a graph that routes did not run, for messages: one cause a line, the likeliest first, each with what to do about it."""

from __future__ import annotations

from collections.abc import Iterable

LIMIT = (
    "Dynamo's recompilation limit, of which it warns once: set a higher torch._dynamo.config.recompile_limit and call "
    "torch._dynamo.reset()."
)
HOOK = (
    "A hook on a gate breaks the graph between its top-k and its experts (transformers sets one for output_router_logits=True, "
    "which works in a model that is compiled whole only): compile the model whole, or do without the hook."
)
LOOP = (
    "A loop over experts in the function that calls the router (torch.where(ids == e) for each) breaks it, too: put the loop into "
    "a module of its own, or set torch._dynamo.config.capture_dynamic_output_shape_ops = True; then call torch._dynamo.reset()."
)


def listed(causes: Iterable[str]) -> str:
    """Each on a line of its own, which a line break begins."""
    return "".join(f"\n  - {cause}" for cause in causes)
