"""An eager model whose routers are made to choose given experts: the truth that replay is held to.

It knows no graph and no form. A function mode stands above autograd and sees every operator that selects something while a
module runs; the one whose choice is the routing returns the given ids, and the scores at these ids in place of the best ones.
Scores that the router has masked are those before the mask, recognised by their values: what differs from the softmax (or
sigmoid) is 0 or -inf.

Legend: T tokens, E experts, k a layer's top-k.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_NAMES = {"topk", "max", "argmax", "sort", "argsort", "multinomial"}
_SCORES = {"softmax", "sigmoid"}


Routing = Callable[[nn.Module, int, Tensor, Tensor], bool]
"""Tells, of (module that runs, number of the selection in it, scores [..., E], native ids), whether that is the routing."""


class Forcing(TorchFunctionMode):
    """Forces selections of the running router.

    Attributes:
        forced: how many selections were forced.
    """

    def __init__(self, routing: Routing) -> None:
        TorchFunctionMode.__init__(self)
        self.routing = routing
        self.module: nn.Module | None = None
        self.given: Tensor | None = None
        self.column = 0
        self.number = 0
        self.forced = 0
        self.scores: list[Tensor] = []

    def begin(self, module: nn.Module, given: Tensor) -> None:
        self.module, self.given, self.column, self.number, self.scores = module, given, 0, 0, []

    def end(self) -> None:
        self.module = self.given = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if self.module is None:
            return result
        if name in _SCORES and isinstance(result, Tensor):
            self.scores.append(result.clone())
        if name not in _NAMES or (name == "max" and isinstance(result, Tensor)):
            return result
        ids = result if isinstance(result, Tensor) else result[1]
        self.number += 1
        if not self.routing(self.module, self.number, args[0], ids):
            return result
        return self._force(name, args, kwargs or {}, result, ids)

    def _force(self, name: str, args: Any, kwargs: Any, result: Any, ids: Tensor) -> Any:
        assert self.given is not None
        scores = args[0]
        at = {"topk": 2}.get(name, 1)
        dim = -1 if name == "multinomial" else kwargs.get("dim", args[at] if len(args) > at else -1)
        wide = ids.dim() == scores.dim()
        last = ids.movedim(dim, -1) if wide else ids.unsqueeze(-1)
        k = min(last.shape[-1], self.given.shape[-1])
        first = self.column if name in ("max", "argmax") else 0
        self.column += name in ("max", "argmax")
        given = self.given[:, first : first + k].reshape(*last.shape[:-1], k)
        chosen = torch.where(given < 0, last[..., :k], given)
        chosen = torch.cat([chosen, last[..., k:]], -1)
        index = chosen.movedim(-1, dim) if wide else chosen.squeeze(-1)
        self.forced += 1
        if isinstance(result, Tensor):
            return index
        source = self._unmasked(scores)
        values = source.gather(dim, index) if wide else source.gather(dim, index.unsqueeze(dim)).squeeze(dim)
        return type(result)((values, index))

    def _unmasked(self, scores: Tensor) -> Tensor:
        for before in reversed(self.scores):
            if before.numel() != scores.numel():
                continue
            before = before.reshape(scores.shape)
            differ = scores.detach()[scores.detach() != before.detach()]
            if bool(((differ == 0) | (differ == -torch.inf)).all()):
                return before
        return scores


@contextlib.contextmanager
def forced(routers: Mapping[nn.Module, Tensor], routing: Routing) -> Iterator[Forcing]:
    """Inside, each of these modules chooses its int64 [T, k], -1 for its own choice; nothing is compiled."""
    mode = Forcing(routing)

    def begin(module: nn.Module, args: Any) -> None:
        mode.begin(module, routers[module])
        # By module: a recomputation in the backward runs outside of modes that were entered before.
        mode.__enter__()  # type: ignore[no-untyped-call]

    def end(module: nn.Module, args: Any, result: Any) -> None:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        mode.end()

    with contextlib.ExitStack() as stack:
        for module in routers:
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end, always_call=True).remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield mode


def find(native: Mapping[nn.Module, Tensor], call: Callable[[], Any]) -> dict[nn.Module, set[int]]:
    """Which selections in each module chose the ids that are known of an eager run, by their number in the module."""
    found: dict[nn.Module, set[int]] = {module: set() for module in native}

    def look(module: nn.Module, number: int, scores: Tensor, ids: Tensor) -> bool:
        if _chose(native[module], ids.detach().cpu()):
            found[module].add(number)
        return False

    with torch.no_grad(), forced(native, look):
        call()
    return found


def _chose(native: Tensor, ids: Tensor) -> bool:
    """Whether a selection returned known ids [T, k] as its first k columns, or one column of them."""
    rows, k = native.shape
    if not ids.numel() or ids.numel() % rows:
        return False
    layouts = [ids.reshape(rows, -1)]
    if ids.dim() >= 2:
        layouts += [ids.movedim(dim, -1).reshape(rows, -1) for dim in range(ids.dim() - 1)]
    for flat in layouts:
        if flat.shape[1] == 1 and any(torch.equal(flat[:, 0].long(), native[:, c].long()) for c in range(k)):
            return True
        if flat.shape[1] >= k and torch.equal(flat[:, :k].long(), native.long()):
            return True
    return False
