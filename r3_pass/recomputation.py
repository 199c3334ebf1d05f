"""Recomputed regions: each has to take the routes that its forward took.

Checkpointing runs a region again in the backward, in whatever thread autograd uses. Each forward of a graph in such a region leaves
a mark among the tensors that the region saves, and the mark that comes back from the recomputation is compared; of a reentrant
region, which saves none, both runs stand on the stack with the same context.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError
from torch.utils.weak import WeakTensorKeyDictionary

from r3_pass.errors import R3Error, RefusedConfiguration
from r3_pass.given import Given
from r3_pass.regions import Context, running

if TYPE_CHECKING:
    from r3_pass.replay import Replay
    from r3_pass.replays import Replays


class Recomputations:
    """Of one backend: forwards that may yet be recomputed. Grad mode tells graphs apart, so these stand here.

    Attributes:
        marks: by weight, those in checkpointed regions.
        last: by weight, whether its last forward was replayed.
        regions: by reentrant region, and by weight, the replayed forwards in it.
    """

    def __init__(self, replays: Replays) -> None:
        self.marks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.last: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.regions: weakref.WeakKeyDictionary[Context, dict[int, _Mark]] = weakref.WeakKeyDictionary()
        self._replays = replays

    def link(self, weight: Tensor, replay: Replay | None) -> bool:
        """Hold the second run of a reentrant region against its first, and remember a first one.

        Returns: whether this is a second run. Raises if it takes other routes.
        """
        forwards, backward = running()
        if not forwards and backward is None:
            return False
        regions, given = self.regions, replay.given if replay is not None else None
        number = self._replays.number(given)
        if backward is not None:
            mark = regions.get(backward, {}).get(id(weight))
            if number != (mark.number if mark is not None else 0):
                raise _other_routes(replay is not None)
        if given is not None:
            with self._replays.lock:
                for region in forwards:
                    regions.setdefault(region, {})[id(weight)] = _Mark(number, given)
        return backward is not None

    def expect(self, weight: Tensor, number: int, hooked: bool, replayed: bool) -> None:
        """Raises if a recomputation in the backward takes other routes than every forward that may need one."""
        marks = {mark.number for mark in self.marks.get(weight, ())}
        if (hooked and marks and number not in marks) or (
            not hooked and not marks and replayed != self.last.get(weight, replayed)
        ):
            raise _other_routes(replayed)

    def watch(self, results: Any, weight: Tensor, replay: Replay | None, hooked: bool, recomputes: bool) -> None:
        """See this forward's backward; in a checkpointed region, compare the routes of its recomputation with these.

        Args:
            hooked: whether it is in one.
        """
        given = replay.given if replay is not None else None
        mark = _Mark(self._replays.number(given), given) if hooked else None
        leaves = results if isinstance(results, tuple | list) else ()
        nodes = {id(t.grad_fn): t.grad_fn for t in leaves if isinstance(t, Tensor) and t.grad_fn is not None}
        kept: Tensor | None = None  # the node itself does not keep what it saved, in torch 2.11
        if mark is not None:
            anchor = torch.zeros(1, requires_grad=True)
            kept = _Saved.apply(anchor, torch.tensor([mark.number]))  # type: ignore[no-untyped-call]
            if not recomputes:
                marks = self.marks.get(weight)
                if marks is None:
                    marks = self.marks[weight] = weakref.WeakSet()
                marks.add(mark)
        replays = self._replays

        compared: set[int] = set()

        def before_backward(grads: Any) -> None:
            active = replays.active
            if active is not None:
                active.backward = True
            task = torch._C._current_graph_task_id()
            if mark is None or kept is None or task in compared:
                return
            compared.add(task)  # outputs have several nodes, and what is saved can be read once
            try:
                saved: Any = kept.grad_fn
                (again,) = saved.saved_tensors
            except CheckpointError as error:
                if replays.number(active.given if active is not None else None) == mark.number:
                    raise  # the routes are the same: something else differs
                raise _other_routes(active is not None) from error
            if int(again) != mark.number:
                raise _other_routes(active is not None)

        for node in nodes.values():
            node.register_prehook(before_backward)


class _Mark:
    """Which routes a forward took; lives as long as the graph that autograd made of it."""

    __slots__ = ("__weakref__", "given", "number")

    def __init__(self, number: int, given: Given | None) -> None:
        self.number = number
        self.given = given  # kept, so that equal routes get the same number as long as this forward may be recomputed


class _Saved(torch.autograd.Function):
    """Saves one tensor the way an operator does, so that checkpointing drops it and makes it again."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, number: Tensor) -> Tensor:
        ctx.save_for_backward(number)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


def _other_routes(replayed: bool) -> R3Error:
    how = "by other routes than its forward" if replayed else "live, and its forward was replayed"
    return RefusedConfiguration(
        f"replay: a checkpointed region runs again in the backward and would route {how}. Run the backward inside of "
        "the context of its "
        "own forward, or enter backend.replay(the same routes) again around it."
    )
