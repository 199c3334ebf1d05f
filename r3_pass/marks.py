"""Which weights are a model's, and what their names are now: a mark on each of them.

Nothing is kept in a table of the process, and nothing is looked up by `id` alone. Replay marks nothing, and keeps weak references.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.weak import TensorWeakRef

from r3_pass.errors import RefusedConfiguration
from r3_pass.structure import Block, Structure, named_weights, numbered

if TYPE_CHECKING:
    from r3_pass.binding import Binding

_OWNER = "_r3_owner"


class Owner:
    """On a weight: which binding it belongs to, and as what. Saved and copied as an empty dict, which any loader reads."""

    __slots__ = ("binding", "names")

    def __init__(self, binding: Binding, names: tuple[str, ...]) -> None:
        self.binding = binding
        self.names = names

    def __reduce__(self) -> tuple[type[OrderedDict[str, Any]], tuple[()]]:
        return OrderedDict, ()

    @property
    def blocks(self) -> frozenset[Block]:
        return frozenset(b for name in self.names if (b := self.binding.structure.block_of(name)) is not None)


def owner_of(weight: Any) -> Owner | None:
    found = getattr(weight, _OWNER, None)
    return found if isinstance(found, Owner) else None


class Marks:
    """The weights of one model, marked for one binding.

    Args:
        moved: called when a weight hangs elsewhere than before, so that what was placed by it has to be placed again.
        mark: False keeps the marks here, and leaves the weights as they are.
    """

    def __init__(
        self, model: nn.Module, structure: Structure, binding: Binding, moved: Callable[[], None], mark: bool
    ) -> None:
        self.model = model
        self.structure = structure
        self._binding = binding
        self._moved = moved
        self._unmarked: dict[int, tuple[TensorWeakRef, Owner]] | None = None if mark else {}
        self._tagged: list[Any] = []
        self._released = False
        self._links: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._watched: tuple[tuple[Any, ...], ...] | None = None  # the columns of _links; None when they changed

    def claim(self) -> bool:
        """Mark every weight of the model as this binding's, under its present names; True if that changed any mark.

        Raises: RefusedConfiguration if another session holds them.
        """
        if self._released:
            return False
        names: dict[int, tuple[Any, list[str]]] = {}
        for name, weight in named_weights(self.model):
            block = self.structure.block_of(name)
            if block is None or block.container in self.structure.blocks or not self.structure.blocks:
                names.setdefault(id(weight), (weight, []))[1].append(name)
            else:
                names.setdefault(id(weight), (weight, []))
        if self._unmarked is not None:
            known = {id(w): (TensorWeakRef(w), Owner(self._binding, tuple(found))) for w, found in names.values()}
            # A weight that FSDP gathers comes back with each forward of its block.
            for key, held in self._unmarked.items():
                if key not in known and held[1].names and held[0]() is not None:
                    known[key] = held
            before = {key: held[1].names for key, held in self._unmarked.items()}
            if any(before.get(key, held[1].names) != held[1].names for key, held in known.items()):
                self._moved()  # a block that moved brings the same weights to another layer
            self._unmarked = known
            return False
        for weight, _ in names.values():
            owner = owner_of(weight)
            if owner is not None and owner.binding is not self._binding:
                which = f" (weight {owner.names[0]})" if owner.names else ""
                raise RefusedConfiguration(
                    f"a session is attached to this {type(self.model).__name__} already{which}; "
                    "two would write each other's rows. Call detach() on that session first."
                )
        changed = False
        tagged = []
        for weight, found in names.values():
            owner = owner_of(weight)
            if owner is None or owner.names != tuple(found):
                setattr(weight, _OWNER, Owner(self._binding, tuple(found)))
                changed = True
            tagged.append(weight)
        kept = {id(w) for w in tagged}
        for weight in self._tagged:
            if id(weight) not in kept:
                self._release_weight(weight)
        self._tagged = tagged
        if changed or self.replaced():
            self._moved()
            self._links.clear()
            self._watched = None
        first = next((weight for name, weight in self.model.named_parameters() if numbered(name)), None)
        if first is not None:
            self.link(first)
        return changed

    def owner(self, weight: Any) -> Owner | None:
        """The mark of a weight, if it is the model's, as far as was seen."""
        if self._unmarked is not None:
            ref, found = self._unmarked.get(id(weight), (None, None))
            if ref is None or found is None or ref() is not weight:
                return None
            return found if not found.names or self._hangs(weight, found.names[0]) else None
        owner = owner_of(weight)
        return owner if owner is not None and owner.binding is self._binding else None

    def hangs_as_named(self, weight: Any) -> bool:
        """Whether a weight is the model's, and its marks say where."""
        owner = self.owner(weight)
        if owner is None or not owner.names:
            return owner is not None
        path, _, name = owner.names[0].rpartition(".")
        try:
            return getattr(self.model.get_submodule(path), name, None) is weight
        except AttributeError:  # the module is gone
            return False

    def _hangs(self, weight: Any, name: str) -> bool:
        """Whether the model has a weight under a name."""
        *path, last = name.split(".")
        module = self.model
        for part in path:
            child = module._modules.get(part)
            if child is None:
                return False
            module = child
        return module._parameters.get(last) is weight or module._buffers.get(last) is weight

    def link(self, weight: Any) -> None:
        """Remember each module on the way from the model to a weight that names a layer."""
        owner = self.owner(weight)
        if owner is None or not owner.names:
            return
        *path, name = owner.names[0].split(".")
        module = self.model
        for part in path:
            child = module._modules[part]
            assert child is not None, "named_parameters passes through modules"
            self._links[(id(module._modules), part)] = module._modules, part, child
            module = child
        held: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        self._links[(id(held), name)] = held, name, weight
        self._watched = None

    def replaced(self) -> bool:
        """Whether weights hang elsewhere than their marks say: replaced (`load_state_dict(assign=True)`), or moved in the model."""
        if self._watched is None:
            self._watched = tuple(zip(*self._links.values(), strict=True)) or ((), (), ())
        held, names, things = self._watched  # asked at every step: no loop of Python's over the layers
        return not all(map(operator.is_, map(dict.get, held, names), things))

    def release(self) -> None:
        """Take every mark off again, for good."""
        self._released = True
        for weight in self._tagged:
            self._release_weight(weight)
        self._tagged = []

    def _release_weight(self, weight: Any) -> None:
        owner = owner_of(weight)
        if owner is not None and owner.binding is self._binding:
            delattr(weight, _OWNER)
