"""Attention over a paged KV cache, behind transformers' attention interface: so any of its causal models can be served.

Legend: T tokens of the forward (padding included), R sequences, W blocks of the longest, H and G heads of queries and keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

NAME = "reference_engine"


@dataclasses.dataclass
class Paged:
    """What one forward's attention reads.

    Attributes:
        kv: keys [blocks + 1, block_size, G, D] and values of each layer; the last block is the bin of padded tokens.
        slot_mapping: int64 [T], block * block_size + offset; -1 is padding.
        positions: int64 [T].
        block_table: int64 [R, W].
        layout: int64 [2 or more, 3] on the host: (sequences that have equally many tokens each, tokens of each, 0), and for each
            of the others (first token, tokens, first position). Rows of zeros mean nothing.
    """

    kv: list[tuple[Tensor, Tensor]]
    slot_mapping: Tensor
    positions: Tensor
    block_table: Tensor
    layout: Tensor


@dataclasses.dataclass
class Shapes:
    """Stands for `Paged` in one plain forward that finds out what each layer caches: (heads, width) of keys and values."""

    found: dict[int, tuple[torch.Size, torch.Size]] = dataclasses.field(default_factory=dict)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: Paged | Shapes,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query [1, H, T, D]; returns [1, T, H, width of values]."""
    layer: Any = module.layer_idx
    if softcap is not None:
        raise ValueError("this engine does not cap attention scores (softcap): serve another model.")
    if isinstance(paged, Shapes):
        paged.found[layer] = (key.shape[1::2], value.shape[1::2])
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    k_cache, v_cache = paged.kv[layer]
    out: Tensor = paged_attention(
        *(t[0].transpose(0, 1) for t in (query, key, value)),
        k_cache,
        v_cache,
        paged.slot_mapping,
        paged.positions,
        paged.block_table,
        paged.layout,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        s_aux,
    )
    return out[None], None


transformers.AttentionInterface.register(NAME, attention)


@torch.library.custom_op("reference_engine::paged_attention", mutates_args=("k_cache", "v_cache"))
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    block_table: Tensor,
    layout: Tensor,
    scaling: float,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """Write keys and values [T, G, D] to their slots, then attend. Returns: [T, H, width of values]."""
    k_cache.flatten(0, 1)[slot_mapping] = key
    v_cache.flatten(0, 1)[slot_mapping] = value
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    (num, length, _), *others = layout.tolist()
    end = num * length
    groups = [(0, end, num, block_table[:num])] if num else []
    for row, (first, count, start) in enumerate(others, num):
        if count:
            used = -(-(start + count) // k_cache.shape[1])
            groups.append((first, first + count, 1, block_table[row : row + 1, :used]))
    for first, last, rows, table in groups:
        out[first:last] = _attend(
            query[first:last].unflatten(0, (rows, -1)),
            k_cache[table].flatten(1, 2),
            v_cache[table].flatten(1, 2),
            positions[first:last].view(rows, -1),
            scaling,
            window,
            sinks,
        ).flatten(0, 1)
    return out


@paged_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[2])


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scaling: float, window: int, sinks: Tensor | None
) -> Tensor:
    """query [R, Q, H, D] at positions [R, Q], keys [R, S, G, D]. Heads that share keys count as more queries of one head."""
    rows, count, heads, _ = query.shape
    kv_heads = keys.shape[2]
    shared = heads // kv_heads
    past = torch.arange(keys.shape[1], device=query.device)
    seen = past <= positions[:, :, None]
    if window:
        seen = seen & (past > positions[:, :, None] - window)
    mask = seen[:, None].repeat(1, 1, shared, 1)
    grouped = query.unflatten(2, (kv_heads, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if sinks is None:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    else:
        scores = (grouped @ keys.transpose(2, 3) * scaling).masked_fill(~mask, float("-inf"))
        sink = sinks.view(1, kv_heads, shared, 1).expand(rows, -1, -1, count).flatten(2)[..., None]
        out = torch.cat([scores, sink.to(scores.dtype)], -1).softmax(-1)[..., :-1].to(values.dtype) @ values
    merged: Tensor = out.unflatten(2, (shared, count)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return merged
