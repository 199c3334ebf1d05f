"""What is replayed now, of one backend, and which model a weight that arrives belongs to.

It stands on the backend, under a lock, not in a thread: autograd recomputes in another one. A compiled graph asks at each call.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from r3_pass.binding import Binding
from r3_pass.errors import PartialCapture, RefusedConfiguration
from r3_pass.given import Given
from r3_pass.marks import owner_of
from r3_pass.recomputation import Recomputations

if TYPE_CHECKING:
    from r3_pass.replay import Replay


class _Layers:
    """On a model: which layer each of its weights is of. Copied and saved as an empty dict."""

    def __init__(self, model: nn.Module) -> None:
        self.binding = Binding(model, torch.device("cpu"), self._lay_out, mark=False)

    def _lay_out(self, layers: tuple[int, ...], top_k: int) -> None:
        self.binding.layers, self.binding.top_k = layers, top_k

    def __reduce__(self) -> tuple[type[OrderedDict[str, Any]], tuple[()]]:
        return OrderedDict, ()


def layers_of(model: nn.Module) -> Binding:
    held = model.__dict__.get("_r3_layers")
    if not isinstance(held, _Layers) or held.binding.model is not model:
        held = _Layers(model)
        model.__dict__["_r3_layers"] = held
    return held.binding


class Replays:
    """Replay's state of one backend.

    Attributes:
        lock: held while the state changes; calls of graphs only read.
        forwards: replayed forwards of each layer.
        fallback: rows of each layer that were bad and went to the live router.
        recomputed: forwards that may yet be recomputed.
        device: where the last graph that was compiled routes; routes are checked there.
    """

    def __init__(self) -> None:
        self.recomputed = Recomputations(self)
        self.lock = threading.RLock()
        self.forwards: Counter[int] = Counter()
        self.fallback: Counter[int] = Counter()
        self.device: torch.device | None = None
        self._beside: torch.cuda.Stream | None = None
        self._open: tuple[tuple[Replay, int], ...] = ()  # and by which thread
        self._frames: list[weakref.ref[nn.Module]] = []
        self._models: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[Given, int] = weakref.WeakKeyDictionary()

    @property
    def active(self) -> Replay | None:
        running = self._open
        return running[-1][0] if running else None

    def find(self, weights: Sequence[Any]) -> tuple[Replay, Binding] | None:
        """The innermost context that replays the model of these weights, and where they are in it.

        Raises: as `Replay.binding_for`.
        """
        for replay, _ in reversed(self._open):
            binding = replay.binding_for(weights)
            if binding is not None:
                return replay, binding
        return None

    def refuse(self, weights: Sequence[Any], reasons: Sequence[str]) -> None:
        """Raises for routing of a replayed model that cannot take given routes."""
        if reasons and self._open and (not weights or self.find(weights) is not None):
            raise PartialCapture("replay: routing that cannot take given routes ran: " + "; ".join(reasons) + ".")

    def beside(self) -> torch.cuda.Stream | None:
        """A stream for routes that come from the host; None where no graph runs on a GPU."""
        device = self.device
        if device is None or device.type != "cuda":
            return None
        if self._beside is None or self._beside.device != device:
            self._beside = torch.cuda.Stream(device)
        return self._beside

    def enter(self, replay: Replay) -> None:
        """Raises: RefusedConfiguration if a graph could not tell this context from one that another thread has open."""
        thread = threading.get_ident()
        with self.lock:
            for other, whose in self._open:
                if whose != thread and other.may_be(replay) and self.number(other.given) != self.number(replay.given):
                    raise RefusedConfiguration(
                        "replay: another thread replays other routes with this backend now, and a forward takes them in "
                        "whatever thread it runs. Let one thread open a context at a time, compile with a backend for "
                        "each thread, or, for several models, name each: backend.replay(routes, model=model)."
                    )
            self._open = (*self._open, (replay, thread))

    def leave(self, replay: Replay) -> None:
        with self.lock:
            at = max(n for n, (r, _) in enumerate(self._open) if r is replay)
            self._open = self._open[:at] + self._open[at + 1 :]

    def number(self, given: Given | None) -> int:
        """Names routes by what is in them; 0 is none."""
        if given is None:
            return 0
        with self.lock:
            if given not in self._numbers:
                known = next((n for g, n in self._numbers.items() if g.same(given)), None)
                self._numbers[given] = next(_NUMBERS) if known is None else known
            return self._numbers[given]

    # ---- models -------------------------------------------------------------------------------------------------
    def saw(self, frames: Iterable[nn.Module]) -> None:
        """Remember modules whose forward Dynamo compiles."""
        for frame in frames:
            if not any(known() is frame for known in self._frames):
                with self.lock:
                    self._frames = [*(known for known in self._frames if known() is not None), weakref.ref(frame)]

    def model_of(self, weights: Sequence[Any]) -> nn.Module | None:
        """The model that weights belong to: one that has a session, or else the largest whose forward was compiled."""
        owner = next((o for w in weights if (o := owner_of(w)) is not None), None)
        if owner is not None:
            return owner.binding.model
        known = self._models.get(weights[0])
        found: nn.Module | None = known() if known is not None else None
        if found is None:
            wanted = set(map(id, weights))
            frames = [frame for reference in self._frames if (frame := reference()) is not None]
            holding = [f for f in frames if any(id(p) in wanted for p in (*f.parameters(), *f.buffers()))]
            holding = [f for f in holding if self._names(f, weights)]
            found = max(holding, key=lambda f: sum(1 for _ in f.parameters()), default=None)
            if found is None:
                return None
            self._models[weights[0]] = weakref.ref(found)
        return found

    @staticmethod
    def _names(model: nn.Module, weights: Sequence[Any]) -> bool:
        """Whether one of these weights of a model is in one of its layers."""
        binding = layers_of(model)
        if not any(map(binding.owns, weights)):
            binding.claim()  # weights may have been replaced
        return any(map(binding.names_layer, weights))


_NUMBERS = itertools.count(1)


def frames() -> list[nn.Module]:
    """The modules in whose forward Dynamo is compiling, as far out as code that it was told to compile reaches."""
    found: list[Any] = []
    running = getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)
    if running is not None:
        found.extend(running.output.root_tx.f_locals.values())
    within: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        within.extend(frame.f_locals.values())
        if frame.f_code.co_filename == torch._dynamo.eval_frame.__file__:  # entered compiled code here
            found.extend(within)
            within = []
        frame = frame.f_back
    modules = (getattr(held, "_orig_mod", held) for held in found if isinstance(held, nn.Module))
    return [held for held in modules if isinstance(held, nn.Module) and not isinstance(held, fx.GraphModule)]
