"""Models that this engine cannot serve right, by name. What no name tells, `ModelRunner` finds by comparing logits."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

# Layer kinds whose whole state is keys and values of single tokens.
_SERVED = {"full_attention", "sliding_attention", "chunked_attention"}

_STATE = {
    "linear_attention": "a recurrent state",
    "conv": "the last inputs of a convolution",
    "indexed_attention": "the keys of an indexer",
}


def refuse(model: nn.Module) -> None:
    """Raises: ValueError for a model whose next token depends on more than the keys and values of the tokens before it."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise ValueError(f"{name} is no transformers model, whose attention could be replaced.")
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder: this engine has no place for an encoder's output.")
    text = config.get_text_config()
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _SERVED:
            state = _STATE.get(kind, "something that is not known here")
            raise ValueError(f"{name} has {kind} layers, which keep {state}: this engine caches keys and values only.")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{name} takes no position_ids: it cannot be told where in a sequence a token stands.")
    if any(getattr(module, "attn_temperature_tuning", False) for module in model.modules()):
        raise ValueError(f"{name} scales attention (attn_temperature_tuning) by positions that it counts by itself.")
    if model.get_output_embeddings() is None:  # type: ignore[operator]
        raise ValueError(f"{name} has no head that gives logits: serve the causal model around it.")
    for rope in _rope_types(model):
        if "dynamic" in rope or rope == "longrope":
            raise ValueError(
                f"{name} has {rope} rotary embeddings, whose frequencies depend on the longest sequence of a batch: a token's "
                "keys would depend on who is served beside it."
            )


def _rope_types(model: nn.Module) -> set[str]:
    found: set[str] = set()
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        found.update(kinds.values() if isinstance(kinds, dict) else [kinds] if isinstance(kinds, str) else [])
    return found
