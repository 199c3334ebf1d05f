"""What hand-written routers are made of: blocks, experts and dispatches in their smallest form, and the tap that tells the truth.

A case is a model whose layers call `tap(module, ids, scores)` where they choose. In `Case.truth`, one plain eager run, the taps are
open; otherwise they do nothing and leave nothing in a graph. So the truth depends on no graph and on no rule of the matcher.

Legend: T tokens in the step, E experts, K top-k, D features.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HIDDEN, VOCAB, E = 16, 8, 61, 8
"""Features, features inside an expert, tokens, experts of every model here."""

MARGIN = 1e-5
"""Least distance between the chosen and the next score, in standard deviations: below it a choice would be rounding noise."""

Verdict = Literal["captured", "refused", "nothing"]
Inputs = Sequence[tuple[Tensor, ...]]
Make = Callable[[], nn.Module]

_taps: list[tuple[nn.Module, Tensor, Tensor | None]] | None = None


def tap(module: nn.Module, ids: Tensor, scores: Tensor | None = None) -> None:
    """Tell what `module` chose: ids [..., K], and the scores [..., E] that it chose by (None where they do not tell)."""
    if _taps is not None:
        _taps.append((module, ids.clone(), scores))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and what recording it must come to.

    Attributes:
        verdict: captured (the ids equal the truth), refused (an R3Error that says why), or nothing (no routing is found).
        also: verdicts that are no fault either, where reasonable people differ.
        reason: for refused, a pattern that the error's text must have.
        ordered: whether the router promises an order of its K choices.
        slow: left out of CI; the table of architectures has it.
    """

    name: str
    make: Make
    verdict: Verdict
    why: str
    also: tuple[Verdict, ...] = ()
    reason: str = ""
    ordered: bool = True
    inputs: Callable[[], Inputs] = lambda: tokens((2, 6), (3, 5))
    seed: int = 0
    slow: bool = False

    def build(self) -> tuple[nn.Module, Inputs]:
        torch.manual_seed(zlib.crc32(self.name.encode()) + self.seed)
        return self.make().eval(), self.inputs()

    def truth(self, model: nn.Module, args: tuple[Tensor, ...]) -> dict[int, Tensor]:
        """int64 [T, K] by layer, from one eager run. Asserts that no choice is a near-tie."""
        global _taps
        _taps = []
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                seeded_call(model, args)
            taken = _taps
        finally:
            _taps = None
        paths = {module: path for path, module in model.named_modules()}
        found: dict[int, Tensor] = {}
        for module, ids, scores in taken:
            layer = int(re.findall(r"\d+", paths[module])[0])
            assert layer not in found, f"{self.name}: layer {layer} chose twice"
            found[layer] = ids.reshape(-1, ids.shape[-1]).long()
            if scores is not None:
                assert margin(scores, ids.shape[-1]) > MARGIN, f"{self.name}: a near-tie; give it another seed"
        return found


def margin(scores: Tensor, k: int) -> float:
    """Least distance between neighbours among the k + 1 best scores of a row, in standard deviations of all scores."""
    best = scores.float().flatten(0, -2).sort(-1, descending=True).values[:, : k + 1]
    gaps = torch.nan_to_num(best[:, :-1] - best[:, 1:], nan=torch.inf, posinf=torch.inf)
    return float(gaps.min() / scores[scores.isfinite()].float().std())


def seeded_call(model: Callable[..., Any], args: tuple[Tensor, ...]) -> Any:
    """Call a model with the same random numbers every time: noisy routers draw theirs in the forward."""
    torch.manual_seed(7)
    return model(*args)


class Cases(dict[str, Case]):
    """Cases by name. Its three methods are decorators for functions that make a model; the docstring says what the case is."""

    def captured(self, **options: Any) -> Callable[[Make], Make]:
        return self._adds("captured", options)

    def refused(self, reason: str, **options: Any) -> Callable[[Make], Make]:
        return self._adds("refused", {"reason": reason, **options})

    def nothing(self, **options: Any) -> Callable[[Make], Make]:
        return self._adds("nothing", options)

    def _adds(self, verdict: Verdict, options: dict[str, Any]) -> Callable[[Make], Make]:
        def add(make: Make) -> Make:
            assert make.__name__ not in self and make.__doc__
            self[make.__name__] = Case(make.__name__, make, verdict, make.__doc__, **options)
            return make

        return add


def tokens(*shapes: tuple[int, ...]) -> Inputs:
    return [(torch.randint(VOCAB, shape),) for shape in shapes]


def weight(*shape: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * scale * shape[-1] ** -0.5)


def linear(outputs: int, inputs: int = D, bias: bool = False, scale: float = 1.0) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias)
    made.weight = weight(outputs, inputs, scale=scale)
    return made


def gate(outputs: int = E, bias: bool = False) -> nn.Linear:
    """A router's linear, with weights large enough for clear choices."""
    return linear(outputs, bias=bias, scale=2.0)


class Gated(nn.Module):
    """The usual dense MLP."""

    def __init__(self, inputs: int = D) -> None:
        super().__init__()
        self.a, self.b, self.out = linear(HIDDEN, inputs), linear(HIDDEN, inputs), linear(D, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.a(x)) * self.b(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = linear(3 * D), linear(D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Block(nn.Module):
    """`x + mlp(norm(x))`, behind an attention if there is one; an MLP may return an auxiliary loss beside its result."""

    def __init__(self, mlp: nn.Module, attention: nn.Module | None = None, name: str = "mlp") -> None:
        super().__init__()
        self.norm, self.attention, self.inner = nn.LayerNorm(D), attention, name
        self.add_module(name, mlp)

    def forward(self, x: Tensor) -> Any:
        if self.attention is not None:
            x = x + self.attention(x)
        y = getattr(self, self.inner)(self.norm(x))
        return (x + y[0], y[1]) if isinstance(y, tuple) else x + y


class Net(nn.Module):
    """Token ids in, logits out; the blocks stand under `path`, in a list or a dict."""

    def __init__(self, blocks: Sequence[nn.Module], path: str = "layers", as_dict: bool = False) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCAB, D), nn.LayerNorm(D), linear(VOCAB)
        self.path = path
        *parents, last = path.split(".")
        place: nn.Module = self
        for name in parents:
            place.add_module(name, nn.Module())
            place = place.get_submodule(name)
        named = {str(i): block for i, block in enumerate(blocks)}
        place.add_module(last, nn.ModuleDict(named) if as_dict else nn.ModuleList(blocks))

    def forward(self, ids: Tensor) -> Any:
        return self.decode(self.embed(ids))

    def decode(self, x: Tensor) -> Any:
        losses = []
        for block in self.get_submodule(self.path).children():
            x = block(x)
            if isinstance(x, tuple):
                x, loss = x
                losses.append(loss)
        logits = self.head(self.norm(x))
        return (logits, sum(losses)) if losses else logits


def stack(
    make: Make, n: int = 2, dense: Sequence[int] = (), name: str = "mlp", attention: bool = False, **more: Any
) -> Net:
    """A language model of n blocks with an MLP from `make` in each that is not `dense`."""
    mlps = [Gated() if i in dense else make() for i in range(n)]
    return Net([Block(mlp, Attention() if attention else None, name) for mlp in mlps], **more)


Routes = Callable[..., Any]
Dispatches = Callable[..., Tensor]


class MoE(nn.Module):
    """Experts [E, HIDDEN, D] and [E, D, HIDDEN], a way to route and a way to dispatch.

    Args:
        route: `route(self, x [T, D])` returns what `dispatch(self, x, *routed)` takes, mostly ids and weights [T, K].
        parts: modules, parameters and buffers, by the name under which `route` finds them.
    """

    def __init__(self, route: Routes, dispatch: Dispatches | None = None, experts: int = E, **parts: Any) -> None:
        super().__init__()
        self.route, self.dispatch = route, dispatch or gathered
        self.up, self.down = weight(experts, HIDDEN, D), weight(experts, D, HIDDEN)
        for name, part in parts.items():
            self.register_buffer(name, part) if type(part) is Tensor else setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        flat = x.reshape(-1, x.shape[-1])
        return self.dispatch(self, flat, *self.route(self, flat)).view(x.shape)


def softmax_topk(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The plain router, for cases that are about something else."""
    p = moe.gate(x).softmax(-1)
    w, ids = p.topk(2, dim=-1)
    tap(moe, ids, p)
    return ids, w


def gathered(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Each token fetches the weights of its experts."""
    h = F.silu(torch.einsum("td,tkfd->tkf", x, moe.up[ids]))
    return torch.einsum("tkf,tkdf,tk->td", h, moe.down[ids], w)


def permuted(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Tokens are put in the order of their experts, and added up in their own order again."""
    order = ids.flatten().argsort(stable=True)
    expert, source = ids.flatten()[order], order // ids.shape[1]
    h = F.gelu(torch.bmm(moe.up[expert], x[source].unsqueeze(-1)))
    y = torch.bmm(moe.down[expert], h).squeeze(-1) * w.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, source, y)


def dense(moe: Any, x: Tensor, weights: Tensor) -> Tensor:
    """Every expert runs on every token; weights [T, E] are zero where it was not chosen."""
    h = torch.einsum("td,efd->tef", x, moe.up).relu()
    return torch.einsum("tef,edf,te->td", h, moe.down, weights)


def looped(moe: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """One expert after the other, on the tokens that chose it: sizes depend on data, so Dynamo breaks the graph here."""
    out = torch.zeros_like(x)
    for number in range(moe.up.shape[0]):
        rows, column = torch.where(ids == number)
        out[rows] += w[rows, column, None] * (F.silu(x[rows] @ moe.up[number].T) @ moe.down[number].T)
    return out
