"""Where in a model an operator was traced."""

from __future__ import annotations

import re

from torch import fx

from r3_pass.passes.site import Rejected


def reject(node: fx.Node, reason: str, routing: bool = False, gate: tuple[fx.Node, ...] = ()) -> Rejected:
    return Rejected(node.name, reason, routing, module_path(node), gate)


def module_path(node: fx.Node) -> str:
    """The innermost module that the node was traced in, as a path from the compiled frame's own module."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = re.sub(r"^[LG]\['[^']*'\]", "", str(path))
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", path)
    return path.strip(".")


def layer_in_path(path: str) -> int | None:
    """The first number in a module path: the block's place in the list of blocks."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)
