"""Ids on their way over a graph break: which tensors hold them, and what the graphs that get these do with them.

The code behind a break is compiled as graphs of its own, and gets the very tensors that the graph before it returned. What such a
graph does with them is known since it was compiled (`passes.behind`); that they are a router's ids, and which layer's, is seen at
the call. What runs between two graphs is seen by neither.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from r3_pass.inner import Compiled
from r3_pass.passes.altered import alone
from r3_pass.passes.behind import Choice, Use, choice_of
from r3_pass.passes.site import Accepted, Rejected

if TYPE_CHECKING:
    from r3_pass.binding import Binding


@dataclasses.dataclass(frozen=True)
class Carried:
    """A choice in a tensor between two graphs.

    Attributes:
        binding: whose step recorded it.
        layer: decoder layer; module: path of its router.
        reached: which of its columns came to experts so far, in whichever graph; shared by all tensors that hold it.
        how: what made the tensor differ from what was recorded; "" if nothing did.
    """

    binding: weakref.ref[Binding]
    layer: int
    module: str
    choice: Choice
    reached: set[int]
    how: str = ""


class LeftIds:
    """What left the graphs of one backend.

    Attributes:
        choices: all that graphs compiled so far may hand on.
        tensors: those that hold one now; each as long as the tensor lives.
    """

    def __init__(self) -> None:
        self.choices: dict[Choice, None] = {}
        self.tensors: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def saw(self, sites: Iterable[Accepted]) -> None:
        """Sites whose ids leave a graph."""
        self.choices.update(dict.fromkeys(map(choice_of, sites)))

    def put(self, tensor: Any, carried: Carried) -> None:
        if isinstance(tensor, Tensor):
            self.tensors[tensor] = carried


class BehindABreak:
    """What Dynamo calls for a graph whose arguments may hold ids that left another one.

    Where experts get others than were recorded, or those of another layer, the step is refused.
    """

    def __init__(self, compiled: Compiled, uses: Sequence[Use], left: LeftIds) -> None:
        self._compiled = compiled
        self._uses = tuple(uses)
        self._left = left

    def __call__(self, *args: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            return self._compiled(*args)  # a checkpointed region that a backward runs again
        arrived = [(use, carried) for use in self._uses if (carried := self._arrived(use, args)) is not None]
        for use, carried in arrived:
            if use.chooses:
                _check(use, carried, args)
        results = self._compiled(*args)
        for use, carried in arrived:
            for number, how in use.left:
                self._left.put(results[number], dataclasses.replace(carried, how=carried.how or how))
            if use.written:
                self._left.put(args[use.argument], dataclasses.replace(carried, how=carried.how or use.written))
        return results

    def _arrived(self, use: Use, args: Sequence[Any]) -> Carried | None:
        tensor = args[use.argument]
        carried: Carried | None = self._left.tensors.get(tensor) if isinstance(tensor, Tensor) else None
        if carried is None or carried.choice != use.choice:
            return None
        binding = carried.binding()
        return carried if binding is not None and binding.recording else None


def _check(use: Use, carried: Carried, args: Sequence[Any]) -> None:
    binding = carried.binding()
    if binding is None:
        return
    how = carried.how or use.how
    if not how and use.experts:
        owner = binding.marks.owner(args[use.experts[0]])
        layers = (
            {block.index for block in owner.blocks if block.container == binding.container} if owner is not None else ()
        )
        if layers and carried.layer not in layers:
            how = f"they choose among the experts of layer {', '.join(map(str, sorted(layers)))}"
    held = set(range(carried.choice.top_k))
    missing = alone(held, carried.reached)
    carried.reached.update(use.columns)
    if missing:
        binding.withdraw([_refusal(carried, missing)])
    if how := how or alone(held, carried.reached):
        binding.refuse([_refusal(carried, how)])


def _refusal(carried: Carried, how: str) -> Rejected:
    why = f"the ids of layer {carried.layer} leave its graph by a graph break, and experts behind it get others: {how}"
    return Rejected(carried.module, why, True, carried.module)
