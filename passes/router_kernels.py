"""The Triton form of `r3_pass::route`: a token's experts chosen in registers, K rounds of "the best of what is left".

Scores are compared as integers that order as the floats do, with NaN on top: an integer maximum over a warp is one instruction, and
what was taken drops below everything. Experts lie in a row of G x (E/G) padded to powers of two, so that groups are a reshape.
Half-precision logits leave room for the expert's number in the low bits of the same integer, and one maximum finds both.

The choice takes the fast exponential; the weights of the chosen few take an accurate one, and float64 for their sum and quotient.

Legend: T tokens, E experts, K top-k, G groups of E/G experts each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from r3_pass.registry.routing import Routing

_TAKEN = tl.constexpr(-(2**31))
_NAN = tl.constexpr(2**31 - 1)
_LOW = tl.constexpr(2**13 - 1)  # the bits of a float32 that no half-precision number uses
_LOG2E = tl.constexpr(1.4426950408889634)
_LOG2E_REST = tl.constexpr(1.925963033500e-08)  # of the rounding of log2(e) to float32


@triton.jit
def _exp(x):  # type: ignore[no-untyped-def]
    """exp within one unit in the last place; 0 below -87, infinity above 88."""
    held = tl.minimum(tl.maximum(x, -87.0), 88.0)
    whole = tl.floor(held * _LOG2E + 0.5)
    part = tl.fma(held, _LOG2E, -whole) + held * _LOG2E_REST  # in [-1/2, 1/2]
    # 2 ** part: Taylor, whose first term left out is below 2 ** -27
    power = tl.fma(part, 1.525273380405984e-05, 0.0001540353039338161)
    power = tl.fma(power, part, 0.0013333558146428443)
    power = tl.fma(power, part, 0.009618129107628477)
    power = tl.fma(power, part, 0.05550410866482158)
    power = tl.fma(power, part, 0.2402265069591007)
    power = tl.fma(power, part, 0.6931471805599453)
    power = tl.fma(power, part, 1.0)
    power *= ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    power = tl.where(x < -87.0, 0.0, tl.where(x > 88.0, float("inf"), power))
    return tl.where(x != x, x, power)


@triton.jit
def _exp_between(x, y):  # type: ignore[no-untyped-def]
    """float64: exp(x - y), with the rounding error of the difference put back."""
    exact = x.to(tl.float64) - y.to(tl.float64)
    near = exact.to(tl.float32)
    rest = exact - near.to(tl.float64)
    power = _exp(near).to(tl.float64)
    return tl.where(tl.abs(rest) < 1.0, power + power * rest, power)  # not where it is infinite or NaN


@triton.jit
def _quotient(x, y):  # type: ignore[no-untyped-def]
    """x / y in float64 by one Newton step from a float32 reciprocal, to about 2 ** -45: a division takes five times as long."""
    start = (1.0 / y.to(tl.float32)).to(tl.float64)
    fits = (y > 1e-37) & (y < 1e37)
    return x * tl.where(fits, start * (2.0 - y * start), start)


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """int32 that order as the floats do."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, _NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _float(key):  # type: ignore[no-untyped-def]
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _kept(  # type: ignore[no-untyped-def]
    key, BLOCK: tl.constexpr, G: tl.constexpr, G_BLOCK: tl.constexpr, M_BLOCK: tl.constexpr, BEST: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Which of the columns belong to one of the KEPT best groups; [BLOCK, G_BLOCK * M_BLOCK]."""
    grouped = tl.reshape(key, (BLOCK, G_BLOCK, M_BLOCK))
    first = tl.max(grouped, 2)
    score = _float(first)
    if BEST == 2:
        equal = tl.sum((grouped == first[:, :, None]).to(tl.int32), 2)
        below = tl.max(tl.where(grouped < first[:, :, None], grouped, _TAKEN), 2)
        score += _float(tl.where(equal > 1, first, below))
    number = tl.arange(0, G_BLOCK)[None, :]
    group_key = tl.where(number < G, _ordered(score), _TAKEN)
    better = tl.zeros_like(group_key)
    for other in tl.static_range(G):
        theirs = tl.max(tl.where(number == other, group_key, _TAKEN), 1)[:, None]
        better += ((theirs > group_key) | ((theirs == group_key) & (other < number))).to(tl.int32)
    kept = ((better < KEPT) & (number < G)).to(tl.int32)
    return tl.reshape(tl.broadcast_to(kept[:, :, None], (BLOCK, G_BLOCK, M_BLOCK)), (BLOCK, G_BLOCK * M_BLOCK)) > 0


@triton.jit
def route_kernel(  # type: ignore[no-untyped-def]
    logits, bias, weights, ids, tokens, stride, fill, normalise, scale,
    E: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    SCORES: tl.constexpr, BIASED: tl.constexpr, PACKED: tl.constexpr,
    G: tl.constexpr, G_BLOCK: tl.constexpr, M_BLOCK: tl.constexpr, BEST: tl.constexpr, KEPT: tl.constexpr,
    WEIGHTS: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    """One program chooses for BLOCK tokens. Strides in elements; PACKED: half-precision logits are what is compared."""
    M: tl.constexpr = E // G
    P: tl.constexpr = G_BLOCK * M_BLOCK
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    row = token.to(tl.int64)[:, None] * stride
    place = tl.arange(0, P)
    expert = (place // M_BLOCK) * M + place % M_BLOCK
    real = ((place % M_BLOCK < M) & (place // M_BLOCK < G))[None, :]
    value = tl.load(logits + row + expert[None, :], mask=inside[:, None] & real, other=float("-inf")).to(tl.float32)
    plain: tl.constexpr = SCORES == "logits" or (SCORES == "softmax" and not BIASED and G == 1)
    whole: tl.constexpr = SCORES == "softmax" and (not plain or WEIGHTS == "scores")
    top = tl.max(value, 1)
    total = top.to(tl.float64)
    score = value
    if whole:
        part = tl.where(real, _exp(value - top[:, None]), 0.0)
        total = tl.sum(part.to(tl.float64), 1)
        if not plain:
            score = part / total.to(tl.float32)[:, None]
    if SCORES == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-value))
    if BIASED:
        score += tl.load(bias + expert[None, :], mask=real, other=0.0).to(tl.float32)
    key = tl.where(real, _ordered(score), _TAKEN)
    if G > 1:
        dropped = tl.where(real, _ordered(fill + tl.zeros_like(score)), _TAKEN)
        key = tl.where(_kept(key, BLOCK, G, G_BLOCK, M_BLOCK, BEST, KEPT), key, dropped)
    if PACKED:
        key = tl.where(real, (key & ~_LOW) | (_LOW - place[None, :]), _TAKEN)
    column = tl.arange(0, K_BLOCK)[None, :]
    chosen = tl.zeros([BLOCK, K_BLOCK], tl.int32)
    left = key
    best = top.to(tl.int32)
    for turn in tl.static_range(K):
        best = tl.max(left, 1)
        # Nothing waits for the place of the best: the next round takes out all that equals it.
        first = _LOW - (best & _LOW) if PACKED else tl.min(tl.where(left == best[:, None], place[None, :], P), 1)
        left = tl.where(left == best[:, None], _TAKEN, left)
        chosen = tl.where(column == turn, first[:, None], chosen)
    if not PACKED:
        above = tl.sum((key >= best[:, None]).to(tl.int32), 1)
        equal = inside & ((above > K) | (best == _TAKEN))
        if tl.max(equal.to(tl.int32), 0) > 0:  # equal scores among the best: once more, one at a time
            for turn in tl.static_range(K):
                best = tl.max(key, 1)
                first = tl.min(tl.where(key == best[:, None], place[None, :], P), 1)
                key = tl.where(place[None, :] == first[:, None], _TAKEN, key)
                chosen = tl.where(column == turn, first[:, None], chosen)
    if G > 1:
        chosen = (chosen // M_BLOCK) * M + chosen % M_BLOCK
    shown = inside[:, None] & (column < K)
    target = token.to(tl.int64)[:, None] * K + column
    tl.store(ids + target, chosen.to(tl.int64), mask=shown)
    value = tl.load(logits + row + chosen, mask=shown, other=float("-inf")).to(tl.float32)
    weight = value.to(tl.float64)
    if WEIGHTS == "softmax":
        part = tl.where(column < K, _exp_between(value, tl.max(value, 1)[:, None]), 0.0)
        weight = _quotient(part, tl.sum(part, 1)[:, None])
    elif WEIGHTS == "sigmoid" or SCORES == "sigmoid":
        weight = _quotient(1.0, 1.0 + _exp(-value).to(tl.float64))
    elif SCORES == "softmax":
        weight = _quotient(_exp_between(value, top[:, None]), total[:, None])
    if NORMALISED:
        weight = tl.where(column < K, weight, 0.0)
        weight = _quotient(weight, (tl.sum(weight, 1) + normalise)[:, None])
    tl.store(weights + target, (weight * scale).to(tl.float32).to(weights.dtype.element_ty), mask=shown)


def route(logits: Tensor, bias: Tensor | None, routing: Routing, block: int | None = None) -> tuple[Tensor, Tensor]:
    """See `router.route_reference`, which this equals but for rounding.

    Args:
        block: tokens a program; None for what was measured to be fastest on an H200.
    """
    experts, top_k, groups = logits.shape[-1], routing.top_k, routing.groups
    shape = (*logits.shape[:-1], top_k)
    weights = torch.empty(shape, dtype=routing.dtype, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    rows = logits.reshape(-1, experts)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    tokens = rows.shape[0]
    if tokens == 0:
        return weights, ids
    plain = routing.scores == "logits" or (routing.scores == "softmax" and bias is None and groups == 1)
    columns = triton.next_power_of_2(groups) * triton.next_power_of_2(experts // groups)
    block = block or (1 if tokens <= 1024 else min(4, max(1, 512 // columns)))
    route_kernel[(triton.cdiv(tokens, block),)](
        rows, rows if bias is None else bias, weights, ids, tokens, rows.stride(0),
        float("-inf") if routing.fill is None else routing.fill, routing.normalise or 0.0, routing.scale,
        E=experts, K=top_k, K_BLOCK=triton.next_power_of_2(top_k), BLOCK=block,
        SCORES=routing.scores, BIASED=bias is not None, PACKED=plain and groups == 1 and logits.dtype != torch.float32,
        G=groups, G_BLOCK=triton.next_power_of_2(groups), M_BLOCK=triton.next_power_of_2(experts // groups),
        BEST=routing.best, KEPT=routing.kept, WEIGHTS=routing.weights, NORMALISED=routing.normalise is not None,
        num_warps=1,
    )  # fmt: skip
    return weights, ids
