"""Routers by their parts: every router that can be fused, spelled as models spell it, and models that have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tiny import Block, D, MoE, Net, gathered, linear, tap
from torch import Tensor, nn

from r3_pass.passes.router import MARGIN
from r3_pass.registry.routing import Routing

Routes = Callable[[Tensor, Tensor | None, Routing], tuple[Tensor, Tensor]]
NEVER = float("-inf")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A router.

    Attributes:
        scores: "logits", "softmax" or "sigmoid", which is what is selected over; with `bias`, that plus a bias.
        groups, best, kept: groups, of which the `kept` best stay by the sum of their `best` best scores; 1 for none.
        fill: what becomes of the scores of other groups.
        after: "softmax" or "sigmoid" of the chosen logits.
        epsilon: added to the sum that the weights are divided by; None if they are not.
        dtype: of the logits, and of the weights at last.
        spelling: which of the ways to write the same.
    """

    experts: int = 8
    top_k: int = 2
    scores: str = "softmax"
    bias: bool = False
    groups: int = 1
    best: int = 1
    kept: int = 1
    fill: float = NEVER
    after: str = ""
    epsilon: float | None = None
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    spelling: int = 0

    @property
    def routing(self) -> Routing:
        """What the reader must make of it."""
        return Routing(
            self.top_k,
            self.scores,  # type: ignore[arg-type]
            self.groups,
            self.best,
            self.kept,
            None if self.groups == 1 or self.fill == NEVER or not self.bias else self.fill,
            self.after or "scores",  # type: ignore[arg-type]
            self.epsilon,
            1.0 if self.scale is None else self.scale,
            self.dtype,
        ).simplified()

    def route(self, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids as a model computes them: in float32, or in the dtype of wider logits."""
        wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
        odd = self.spelling % 2 == 1
        if self.scores == "softmax":
            scores = torch.softmax(logits, -1, dtype=wide) if odd else logits.to(wide).softmax(dim=-1)
        else:
            scores = logits.to(wide).sigmoid() if self.scores == "sigmoid" else logits
        choice = scores + bias.to(wide) if self.bias else scores
        if self.groups > 1:
            choice = self.limited(choice)
        values, ids = torch.topk(choice, self.top_k, dim=-1, sorted=not odd)
        weights = scores.gather(-1, ids) if self.bias or (odd and self.scores != "logits") else values
        if self.after == "softmax":
            weights = weights.softmax(-1, dtype=wide)
        elif self.after == "sigmoid":
            weights = weights.to(wide).sigmoid() if wide is torch.float64 else weights.sigmoid()
        if self.epsilon is not None:
            total = weights.sum(dim=-1, keepdim=True)
            total = total + self.epsilon if self.epsilon else total
            if odd:
                weights /= total
            else:
                weights = weights / total
        if self.scale is not None:
            weights = weights * self.scale
        return weights if wide is torch.float64 else weights.to(self.dtype), ids

    def limited(self, choice: Tensor) -> Tensor:
        """Scores outside of the best groups filled, in one of several spellings."""
        size = self.experts // self.groups
        grouped = choice.view(-1, self.groups, size)
        if self.best == 2:
            score = grouped.topk(2, dim=-1)[0].sum(dim=-1)
        else:
            score = grouped.max(dim=-1).values if self.spelling % 2 else grouped.amax(-1)
        best = torch.topk(score, k=self.kept, dim=-1, sorted=False)[1]
        if self.spelling < 2:
            mask = torch.zeros_like(score)
            mask.scatter_(1, best, 1)
            mask = mask.unsqueeze(-1).expand(-1, self.groups, size).reshape(-1, self.experts)
            return choice.masked_fill(~mask.bool(), self.fill)
        if self.spelling == 2:
            dropped = score.new_ones(score.shape, dtype=torch.bool).scatter_(1, best, False)
            return grouped.masked_fill(dropped.unsqueeze(-1), self.fill).flatten(1)
        mask = torch.zeros_like(score).scatter(1, best, 1.0).repeat_interleave(size, dim=-1)
        return torch.where(mask.bool(), choice, self.fill)


def fusable(spec: Spec, layers: int = 2) -> Net:
    """A language model whose layers route by `spec`, in its dtype."""

    def route(moe: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = spec.route(moe.gate(x), moe.bias)
        tap(moe, ids)
        return ids, weights

    return model_of(route, spec, layers)


def model_of(route: Any, spec: Spec = Spec(), layers: int = 2) -> Net:
    """A language model whose layers route by a function."""

    def mlp() -> nn.Module:
        made = MoE(route, gathered, experts=spec.experts, gate=linear(spec.experts, D, scale=2.0))
        made.register_buffer("bias", torch.randn(spec.experts) * 0.1)
        return made

    return Net([Block(mlp()) for _ in range(layers)]).eval().requires_grad_(False).to(spec.dtype)


def is_clear(spec: Spec, logits: Tensor, bias: Tensor, margin: float) -> Tensor:
    """bool [T]: no choice of experts or groups hangs on a difference of `margin` or less, times the scores if they are above 1."""
    wide, offset = logits.double(), bias.double()
    scores = wide.softmax(-1) if spec.scores == "softmax" else wide.sigmoid() if spec.scores == "sigmoid" else wide
    choice = scores + offset if spec.bias else scores
    clear = torch.ones(len(choice), dtype=torch.bool, device=choice.device)
    if spec.groups > 1:
        members = spec.experts // spec.groups
        grouped = choice.view(-1, spec.groups, members).topk(spec.best, dim=-1)[0].sum(-1)
        clear = _apart(grouped, spec.kept, margin)
        left_out = torch.ones_like(grouped, dtype=torch.bool).scatter(-1, grouped.topk(spec.kept).indices, False)
        nothing = 0.0 if spec.fill == 0.0 else float(choice.min()) - 1.0  # -inf is far from all
        choice = choice.masked_fill(left_out.repeat_interleave(members, dim=-1), nothing)
    clear &= _apart(choice, spec.top_k, margin)
    return clear


def _apart(scores: Tensor, k: int, margin: float) -> Tensor:
    best = scores.sort(-1, descending=True).values[:, : k + 1]
    gaps = best[:, :-1] - best[:, 1:]
    return (gaps > margin * best.abs().amax(-1, keepdim=True).clamp(min=1.0)).all(-1)


FORMS = {
    "softmax": Spec(scores="softmax"),
    "softmax_normalised": Spec(scores="softmax", epsilon=0.0),
    "softmax_normalised_with_epsilon": Spec(scores="softmax", epsilon=1e-20, scale=16.0),
    "softmax_bias": Spec(scores="softmax", bias=True, scale=6.0),
    "topk_softmax": Spec(scores="logits", after="softmax"),
    "topk_sigmoid": Spec(scores="logits", after="sigmoid"),
    "topk": Spec(scores="logits"),
    "sigmoid": Spec(scores="sigmoid", epsilon=0.0),
    "sigmoid_bias": Spec(scores="sigmoid", bias=True, epsilon=1e-20, scale=2.5),
    "sigmoid_bias_groups": Spec(scores="sigmoid", bias=True, groups=4, best=2, kept=2, epsilon=1e-20, scale=2.5),
    "sigmoid_bias_six_groups": Spec(scores="sigmoid", bias=True, groups=6, best=2, kept=5, fill=0.0, scale=2.5),
    "softmax_groups_by_max": Spec(scores="softmax", groups=4, best=1, kept=2, fill=0.0, scale=16.0),
}
"""Routers by name; weights in float32, and E and K are to be replaced."""


def check_routes(
    route: Routes,
    form: Spec,
    dtype: torch.dtype,
    sizes: Mapping[tuple[int, int], Sequence[int]],
    device: str = "cpu",
    unfused: Callable[[Spec], Any] = lambda spec: spec.route,
) -> None:
    """Compare routes with the unfused graph's and with float64, over random logits of several sizes.

    Args:
        dtype: of the logits.
        sizes: for E and K, numbers of tokens; those that the form cannot have are left out.
        unfused: makes a function of logits and bias that computes the same with PyTorch.
    """
    errors, theirs, clear_rows, rows = 0.0, 0.0, 0, 0
    for (experts, top_k), counts in sizes.items():
        if experts % form.groups or experts < 2 * form.groups or top_k > form.kept * experts // form.groups:
            continue
        spec = dataclasses.replace(form, experts=experts, top_k=top_k)
        for tokens in counts:
            logits = (2.0 * torch.randn(tokens, experts, device=device)).to(dtype)
            bias = 0.1 * torch.randn(experts, device=device)
            weights, ids = route(logits, bias if spec.bias else None, spec.routing)
            assert weights.shape == ids.shape == (tokens, top_k)
            assert weights.dtype is torch.float32 and ids.dtype is torch.int64
            if not tokens:
                continue
            true, true_ids = spec.route(logits.double(), bias.double())
            other, other_ids = unfused(spec)(logits, bias)
            clear = is_clear(spec, logits, bias, MARGIN)
            assert torch.equal(ids[clear], other_ids[clear]) and torch.equal(ids[clear], true_ids[clear])
            if clear.any():
                errors = max(errors, float((weights.double() - true)[clear].abs().max()))
                theirs = max(theirs, float((other.double() - true)[clear].abs().max()))
            clear_rows, rows = clear_rows + int(clear.sum()), rows + tokens
    # In half precision scores of groups tie often: those of float32 hardly ever.
    least = rows // 4 if dtype is torch.float32 else rows // 20
    assert clear_rows > least, f"{rows - clear_rows} of {rows} choices are near-ties: little was checked"
    assert errors <= theirs, f"off by {errors}, the unfused graph by {theirs}"
