"""What a model's modules and config say about its routing, independent of any graph.

Which list of blocks are the decoder layers, which layer owns a weight, which layers hold experts: the expectation that the
captured sites are held against. Found by shape and structure, not by name.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import nn

_SEPARATE = "experts, each a module"
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_decoder_layers")
_TOP_K = re.compile(
    r"^(num_experts_per_tok(en)?|num_selected_experts|(moe_|router_)?top_?k(_experts)?|moe_k|num_experts_per_token)$"
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A place in a list of blocks: `Block("model.layers", 3)` is `model.layers.3`."""

    container: str
    index: int

    def __str__(self) -> str:
        return f"{self.container}.{self.index}" if self.container else str(self.index)


@dataclasses.dataclass(frozen=True)
class Structure:
    """A model as the runtime sees it.

    Attributes:
        blocks: by list of blocks, how many it has (highest index + 1).
        experts: blocks that hold experts, with what was seen there.
        config_layers: layer counts that the config gives, by name.
        top_k: experts per token by the config, a hint; None if it does not say.
        separate_experts: experts are modules of their own, which code loops over.
        may_route: False only if no block has anything that experts could be: a dense model.
    """

    blocks: dict[str, int]
    experts: dict[Block, str]
    config_layers: dict[str, int]
    top_k: int | None
    separate_experts: bool
    may_route: bool

    def num_layers(self, container: str) -> int:
        """Decoder layers of the target: the config's count where it fits the list of blocks, else the list's own."""
        listed = self.blocks.get(container, 0)
        counts = list(self.config_layers.values())
        if listed in counts or not counts:
            return listed
        return counts[0]

    def expected(self, container: str) -> tuple[int, ...]:
        """Indices of the decoder layers in one list that hold experts; blocks past the model's layers are a drafter's."""
        count = self.num_layers(container)
        return tuple(sorted(b.index for b in self.experts if b.container == container and b.index < count))

    @property
    def main_container(self) -> str | None:
        """The list of blocks whose blocks hold experts; None if none or several do."""
        found = {b.container for b in self.experts}
        return found.pop() if len(found) == 1 else None


def inspect(model: nn.Module) -> Structure:
    """Read a model's modules and config. No weight is touched: meta and fake tensors will do."""
    blocks: dict[str, int] = {}
    members: dict[Block, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named_weights(model):
        block = block_of(name)
        if block is not None:
            blocks[block.container] = max(blocks.get(block.container, 0), block.index + 1)
            members.setdefault(block, []).append((name, tensor))
    for alias in _aliases(members):
        blocks.pop(alias)
        members = {block: tensors for block, tensors in members.items() if block.container != alias}
    experts: dict[Block, str] = {}
    may_route = not blocks
    for block, tensors in members.items():
        evidence = _experts_in(model, block, tensors)
        if evidence is not None:
            experts[block] = evidence
        may_route = may_route or evidence is not None or _loose_evidence(tensors)
    separate = any(_SEPARATE in evidence for evidence in experts.values())
    return Structure(blocks, experts, _layer_counts(model), _top_k(model), separate, may_route)


def _aliases(members: dict[Block, list[tuple[str, torch.Tensor]]]) -> list[str]:
    """Lists of blocks that only name again what another, larger list holds."""
    held: dict[str, set[int]] = {}
    for block, tensors in members.items():
        held.setdefault(block.container, set()).update(id(t) for _, t in tensors)
    return [a for a in held if any(a != b and held[a] < held[b] for b in held)]


def named_weights(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """All parameters and buffers under all of their names."""
    found: list[tuple[str, torch.Tensor]] = list(model.named_parameters(remove_duplicate=False))
    found.extend(model.named_buffers(remove_duplicate=False))
    return found


def block_of(name: str) -> Block | None:
    """The block that owns a weight, by the first number in its path; None outside any list of blocks."""
    parts = name.split(".")
    for position, part in enumerate(parts[:-1]):
        if part.isdigit():
            return Block(".".join(parts[:position]), int(part))
    return None


def _experts_in(model: nn.Module, block: Block, tensors: list[tuple[str, torch.Tensor]]) -> str | None:
    """Evidence of routed experts in a block: a bank [E, ., .] or E like modules, beside a weight that scores E choices."""
    scored = {size for _, t in tensors if t.dim() == 2 and t.is_floating_point() for size in t.shape}
    for name, tensor in tensors:
        if tensor.dim() < 3 or tensor.shape[0] < 2 or _is_convolution(model, name):
            continue
        if any(
            tensor.shape[0] <= size <= 2 * tensor.shape[0] for size in scored
        ):  # a gate may be padded, or score more
            return f"{name} holds {tensor.shape[0]} experts"
    prefix = str(block) + "."
    for path, module in model.named_modules(remove_duplicate=False):
        if not path.startswith(prefix) or not isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        children = list(module.children())
        if len(children) >= 2 and len({type(c) for c in children}) == 1 and len(children) in scored:
            shapes = {tuple(tuple(p.shape) for p in c.parameters()) for c in children}
            if len(shapes) == 1 and shapes != {()}:
                return f"{path} holds {len(children)} {_SEPARATE}"
    return None


def _loose_evidence(tensors: list[tuple[str, torch.Tensor]]) -> bool:
    """Anything that experts could be made of: enough to wait for the graphs before calling a model dense."""
    numbered = any(sum(p.isdigit() for p in name.split(".")) >= 2 for name, _ in tensors)
    return (
        numbered
        or any(t.dim() >= 3 for _, t in tensors)
        or any("expert" in name or "rout" in name for name, _ in tensors)
    )


def _is_convolution(model: nn.Module, name: str) -> bool:
    owner = model.get_submodule(name.rpartition(".")[0])
    return isinstance(owner, nn.modules.conv._ConvNd)


def text_config(model: nn.Module) -> Any:
    """The config of the language model, where the model has a config."""
    config = getattr(model, "config", None)
    getter = getattr(config, "get_text_config", None)
    if callable(getter):
        return getter(decoder=True)
    return getattr(config, "text_config", config)


def _layer_counts(model: nn.Module) -> dict[str, int]:
    config = text_config(model)
    found = {name: getattr(config, name, None) for name in _LAYER_COUNTS}
    return {name: count for name, count in found.items() if isinstance(count, int) and not isinstance(count, bool)}


def _top_k(model: nn.Module) -> int | None:
    config = text_config(model)
    seen: list[int] = []
    for source in (config, getattr(config, "ffn_config", None)):
        fields = source if isinstance(source, dict) else getattr(source, "__dict__", {})
        for name, number in fields.items():
            if _TOP_K.match(name) and isinstance(number, int) and not isinstance(number, bool) and number > 0:
                seen.append(number)
    preferred = getattr(config, "num_experts_per_tok", None)
    if isinstance(preferred, int) and preferred > 0:
        return preferred
    return seen[0] if len(set(seen)) == 1 else None
