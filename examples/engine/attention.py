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
        block_table: int64 [R, W]; row r is the r-th sequence's.
        layout: int64 [2 or more, 3] on the host: how the T tokens are cut into sequences, one after the other. A row (n, q, w)
            is the next n of them, of q tokens each and w blocks at most, attended to as one batch. Zeros for nothing.
    """

    kv: list[tuple[Tensor, Tensor]]
    slot_mapping: Tensor
    positions: Tensor
    block_table: Tensor
    layout: Tensor


@dataclasses.dataclass
class Shapes:
    """Stands for `Paged` in one plain forward that finds out what each layer caches of a token: keys and values [G, D]."""

    found: dict[int, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: Paged | Shapes | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query [1, H, T, D]; returns [1, T, H, width of values].

    Raises: ValueError, while shapes are looked for, if a token should attend to others than those before it; without `paged`.
    """
    if paged is None:
        raise ValueError(
            f"{type(module).__name__} was given no KV cache: the model does not pass keyword arguments on."
        )
    layer: Any = module.layer_idx
    if isinstance(paged, Shapes):
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal or attention_mask is not None:
            raise ValueError(f"{type(module).__name__} has a mask of its own: this engine's attention is causal.")
        paged.found[layer] = (key[0, :, 0], value[0, :, 0])
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
        _chunk_size(module),
        softcap or 0.0,
        s_aux,
    )
    return out[None], None


def _chunk_size(module: Any) -> int:
    """Tokens of the chunk that a layer attends within; 0 for no chunks."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    chunked = kinds and kinds[module.layer_idx % len(kinds)] == "chunked_attention"
    return int(config.attention_chunk_size) if chunked else 0


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
    chunk: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Write keys and values [T, G, D] to their slots, then attend. Returns: [T, H, width of values], zeros for padding.

    Args: window, chunk, softcap: 0 for none; sinks: [H], a score that takes attention and gives nothing.
    """
    k_cache.flatten(0, 1)[slot_mapping] = key
    v_cache.flatten(0, 1)[slot_mapping] = value
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    row = first = 0
    for rows, count, used in layout.tolist():
        if not rows:
            continue
        last = first + rows * count
        table = block_table[row : row + rows, :used]
        out[first:last] = _attend(
            query[first:last].unflatten(0, (rows, -1)),
            k_cache[table].flatten(1, 2),
            v_cache[table].flatten(1, 2),
            positions[first:last].view(rows, -1),
            scaling,
            window,
            chunk,
            softcap,
            sinks,
        ).flatten(0, 1)
        row, first = row + rows, last
    return out


@paged_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[2])


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scaling: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """query [R, Q, H, D] at positions [R, Q], keys [R, S, G, D]. Heads that share keys count as more queries of one head."""
    rows, count, heads, _ = query.shape
    kv_heads = keys.shape[2]
    shared = heads // kv_heads
    past = torch.arange(keys.shape[1], device=query.device)
    seen = past <= positions[:, :, None]
    if window:
        seen = seen & (past > positions[:, :, None] - window)
    if chunk:
        seen = seen & (past // chunk == positions[:, :, None] // chunk)
    mask = seen[:, None].repeat(1, 1, shared, 1)
    grouped = query.unflatten(2, (kv_heads, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if sinks is None and not softcap:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    else:
        scores = grouped @ keys.transpose(2, 3) * scaling
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            sink = sinks.view(1, kv_heads, shared, 1).expand(rows, -1, -1, count).flatten(2)[..., None]
            scores = torch.cat([scores, sink.to(scores.dtype)], -1)
        out = scores.softmax(-1)[..., : keys.shape[2]].to(values.dtype) @ values
    merged: Tensor = out.unflatten(2, (shared, count)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return merged
