"""An eager model whose routers are made to choose given experts: the truth that replay is held to.

It knows no graph and no form. A function mode stands above autograd and sees every operator that selects something while a
router runs; the one whose choice is the routing returns the given ids, and the scores at these ids in place of the best ones.
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


class Forcing(TorchFunctionMode):
    """Forces selections of the running router.

    Args:
        routing: tells, of (operator, scores [..., E], native ids), whether that choice is the routing.
    """

    def __init__(self, routing: Callable[[str, Tensor, Tensor], bool]) -> None:
        super().__init__()
        self.routing = routing
        self.given: Tensor | None = None
        self.column = 0
        self.forced = 0
        self.scores: list[Tensor] = []

    def begin(self, given: Tensor) -> None:
        self.given, self.column, self.scores = given, 0, []

    def end(self) -> None:
        self.given = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if self.given is None:
            return result
        if name in _SCORES and isinstance(result, Tensor):
            self.scores.append(result.clone())
        if name not in _NAMES or (name == "max" and isinstance(result, Tensor)):
            return result
        ids = result if isinstance(result, Tensor) else result[1]
        if not self.routing(name, args[0], ids):
            return result
        return self._force(name, args, kwargs or {}, result, ids)

    def _force(self, name: str, args: Any, kwargs: Any, result: Any, ids: Tensor) -> Any:
        assert self.given is not None
        scores = args[0]
        at = {"topk": 2}.get(name, 1)
        dim = kwargs.get("dim", args[at] if len(args) > at else -1)
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
def forced(routers: Mapping[nn.Module, Tensor], routing: Callable[[str, Tensor, Tensor], bool]) -> Iterator[Forcing]:
    """Inside, each of these modules chooses its int64 [T, k], -1 for its own choice."""
    mode = Forcing(routing)
    with contextlib.ExitStack() as stack:
        for module, given in routers.items():
            stack.callback(module.register_forward_pre_hook(lambda m, a, g=given: mode.begin(g)).remove)
            stack.callback(module.register_forward_hook(lambda m, a, r: mode.end()).remove)
        stack.enter_context(mode)
        yield mode


def random_ids(tokens: int, experts: int, k: int, seed: int = 0, live: float = 0.2) -> Tensor:
    """int64 [T, k]: different experts for each token; some rows are -1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :k]
    ids[torch.rand(tokens, generator=generator) < live] = -1
    return ids


def loss_of(output: Any) -> Tensor:
    """A scalar that depends on every element of the first tensor of an output."""
    logits = output if isinstance(output, Tensor) else output[0]
    weights = torch.linspace(-1, 1, logits.numel(), dtype=torch.float32).sin().reshape(logits.shape)
    return (logits.float() * weights).sum() / logits.shape[-1]


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference of a gradient, norm over norm, and whose it is."""
    assert got.keys() == want.keys(), f"other parameters have gradients: {sorted(got.keys() ^ want.keys())}"
    return max(
        (float((got[name] - want[name]).norm() / want[name].norm().clamp(min=1e-12)), name)
        for name in want
        if want[name].norm() > 1e-10 or got[name].norm() > 1e-10
    )
