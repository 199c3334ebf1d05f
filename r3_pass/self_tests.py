"""Self-tests of replay with exact answers, on a user's own model.

1. The model's own forward, recorded and replayed: the same loss and gradients, bit for bit.
2. Random experts: the loss and gradients of the eager model that is made to choose them (`oracle.py`).
3. Negative controls: rows shifted by one token, and layers swapped, must change the loss; else test 1 shows nothing.
4. Activation checkpointing around the whole forward: the same bits as without.
5. Rows of -1: the same bits as without replay.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from r3_pass.backend import Backend
from r3_pass.errors import RefusedConfiguration
from r3_pass.oracle import find, forced
from r3_pass.runtime.attach import attach, unwrap

Loss = Callable[[Any], Tensor]


@dataclasses.dataclass(frozen=True)
class Result:
    """One self-test: what was compared, whether it came out as it must, and the largest difference that was seen."""

    name: str
    ok: bool
    detail: str


@dataclasses.dataclass(frozen=True)
class SelfTests:
    """All self-tests; `print` it for a table."""

    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.results)

    def __str__(self) -> str:
        width = max(len(r.name) for r in self.results)
        return "\n".join(f"{'ok  ' if r.ok else 'FAIL'}  {r.name.ljust(width)}  {r.detail}" for r in self.results)


@dataclasses.dataclass(frozen=True)
class _Outcome:
    loss: Tensor
    gradients: dict[str, Tensor]

    def same(self, other: _Outcome) -> bool:
        return torch.equal(self.loss, other.loss) and all(
            torch.equal(g, other.gradients[name]) for name, g in self.gradients.items()
        )

    def apart(self, other: _Outcome) -> tuple[float, str]:
        """The largest relative difference of the loss or a gradient (norm over norm), and whose it is."""
        pairs = {"loss": (self.loss, other.loss)} | {n: (g, other.gradients[n]) for n, g in self.gradients.items()}
        found = {
            n: float((a - b).norm() / b.norm().clamp(min=1e-12)) for n, (a, b) in pairs.items() if a.norm() > 1e-10
        }
        worst = max(found, key=lambda name: found[name], default="loss")
        return found.get(worst, 0.0), worst


def self_test(
    compiled: Any, backend: Backend, *args: Any, model: nn.Module | None = None, loss: Loss | None = None, **kwargs: Any
) -> SelfTests:
    """Run the self-tests on one batch.

    Args:
        compiled: what to call with `args` and `kwargs`; the model is put back as it was.
        backend: what it was compiled with, `mode="both"`: routes are recorded and replayed. No session may be attached.
        model: the model, where `compiled` does not show it.
        loss: a scalar of the output; by default a weighted sum of its first floating-point tensor.

    Raises: RefusedConfiguration for another mode.
    """
    if backend.mode != "both":
        raise RefusedConfiguration(
            f"self_test records and replays, and this backend is mode={backend.mode!r}. Compile with "
            "r3_pass.backend(mode='both')."
        )
    found = unwrap(compiled)[0] if model is None else model
    test = _Test(compiled, backend, found, loss or _weighted, args, kwargs)
    with _deterministic():
        return SelfTests(tuple(test.run()))


class _Test:
    def __init__(
        self,
        compiled: Any,
        backend: Backend,
        model: nn.Module,
        loss: Loss,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.compiled = compiled
        self.backend = backend
        self.model = model
        self.loss = loss
        self.args = args
        self.kwargs = kwargs
        self.tokens = _count(args, kwargs)

    def run(self) -> Iterator[Result]:
        off = self._outcome(self._forward)
        rows = self._record()
        routed = [layer for layer in range(rows.shape[1]) if bool((rows[:, layer] >= 0).any())]
        own = self._replayed(rows)
        yield _bits("own routes, recorded and replayed", own, off)
        yield self._against_eager(rows, routed)
        shifted = rows.roll(1, 0)
        yield _differs("control: rows shifted by one token", self._replayed(shifted), own, torch.equal(shifted, rows))
        swapped = rows.clone()
        swapped[:, routed] = rows[:, routed[::-1]]
        yield self._swapped(swapped, own, torch.equal(swapped, rows))
        yield _bits("activation checkpointing on and off", self._replayed(rows, self._checkpointed), own)
        yield _bits("rows of -1 and no replay", self._replayed(torch.full_like(rows, -1)), off)

    def _forward(self) -> Any:
        return self.compiled(*self.args, **self.kwargs)

    def _checkpointed(self) -> Any:
        return torch.utils.checkpoint.checkpoint(self.compiled, *self.args, use_reentrant=False, **self.kwargs)

    def _outcome(self, forward: Callable[[], Any]) -> _Outcome:
        torch.manual_seed(0)
        loss = self.loss(forward())
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not loss.requires_grad:
            return _Outcome(loss.detach(), {})
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return _Outcome(loss.detach(), {name: g for name, g in zip(named, gradients, strict=True) if g is not None})

    def _replayed(self, rows: Tensor, forward: Callable[[], Any] | None = None) -> _Outcome:
        with self.backend.replay(rows, model=self.model):
            return self._outcome(forward or self._forward)

    def _record(self) -> Tensor:
        """int16 [T, L, K] of the model's own forward."""
        session = attach(self.model, backend=self.backend, num_slots=self.tokens)
        try:
            with session.step(range(self.tokens)):
                torch.manual_seed(0)
                self._forward()
            return torch.from_numpy(session.read(range(self.tokens)).copy())
        finally:
            session.detach()

    def _against_eager(self, rows: Tensor, routed: list[int]) -> Result:
        name = "random experts and the eager model"
        sites = {s.layer: s for s in self.backend.report().sites}
        generator = torch.Generator().manual_seed(0)
        random = torch.full_like(rows, -1)
        for layer in routed:
            site = sites[layer]
            if site.form == "table":
                random[:, layer] = rows[:, layer]
                continue
            order = torch.rand(self.tokens, site.num_experts, generator=generator).argsort(-1)
            random[:, layer, : site.top_k] = order[:, : site.top_k].to(random.dtype)
        found = self._replayed(random)
        blocks = _blocks(self.model, rows, routed)
        native = {block: rows[:, layer, : sites[layer].top_k] for layer, block in blocks.items()}
        given = {block: random[:, layer, : sites[layer].top_k].long() for layer, block in blocks.items()}

        def eager() -> Any:
            torch.manual_seed(0)
            return self.model(*self.args, **self.kwargs)

        chosen = find(native, eager)

        def routing(module: nn.Module, number: int, scores: Tensor, ids: Tensor) -> bool:
            return number in chosen[module]

        with forced({block: ids.to(_device(self.model)) for block, ids in given.items()}, routing) as mode:
            want = self._outcome(eager)
        known = sum(map(bool, chosen.values()))
        if known < len(given) or not mode.forced:
            unseen = ", ".join(str(layer) for layer, block in blocks.items() if not chosen[block])
            return Result(
                name,
                False,
                f"not compared: where the eager model chooses was found in {known} of {len(given)} layers (not in {unseen}). "
                "It is looked for in what torch.topk, sort, argmax and the like return inside of a call of the layer's module: "
                "call that module itself, or force the ids in a copy of your router and compare loss and gradients",
            )
        apart, whose = found.apart(want)
        exact = all(p.dtype in (torch.float32, torch.float64) for p in self.model.parameters())
        return Result(name, apart < (1e-5 if exact else 5e-2), f"apart by {apart:.1e} at most ({whose})")

    def _swapped(self, rows: Tensor, own: _Outcome, same: bool) -> Result:
        name = "control: layers swapped"
        return _differs(name, self._replayed(rows), own, same)


def _bits(name: str, got: _Outcome, want: _Outcome) -> Result:
    apart, whose = got.apart(want)
    same = got.same(want)
    return Result(name, same, "the same bits" if same else f"apart by {apart:.1e} at most ({whose})")


def _differs(name: str, got: _Outcome, own: _Outcome, nothing: bool) -> Result:
    if nothing:
        return Result(name, True, "nothing to swap: the rows are the same")
    apart, _ = got.apart(own)
    differs = not torch.equal(got.loss, own.loss)
    return Result(
        name, differs, f"the loss changes, as it must (apart by {apart:.1e})" if differs else "the loss did not change"
    )


def _blocks(model: nn.Module, rows: Tensor, routed: list[int]) -> dict[int, nn.Module]:
    from r3_pass.replays import layers_of

    binding = layers_of(model)
    container = f"{binding.container}." if binding.container else ""
    return {layer: model.get_submodule(f"{container}{layer}") for layer in routed}


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tokens of a batch: the elements of its first integer tensor, or the rows of its first tensor."""
    tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    ids = next((t for t in tensors if not t.is_floating_point()), None)
    if ids is not None:
        return ids.numel()
    if not tensors:
        raise ValueError("self_test needs the arguments of a forward: no tensor is among them")
    return tensors[0].shape[:-1].numel()


def _weighted(output: Any) -> Tensor:
    """A scalar to which no element of the output is indifferent."""
    leaves = torch.utils._pytree.tree_leaves(output.to_tuple() if hasattr(output, "to_tuple") else output)
    first = next(t for t in leaves if isinstance(t, Tensor) and t.is_floating_point())
    weights = torch.linspace(-1, 1, first.numel(), device=first.device).sin().reshape(first.shape)
    return (first.float() * weights).sum() / max(first.shape[-1], 1)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
