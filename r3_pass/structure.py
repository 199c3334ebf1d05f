"""What a model's modules and config say about its routing, independent of any graph.

Which list of blocks are the decoder layers, which layer owns a weight, which layers hold experts: the expectation that the
captured sites are held against. Found by shape and structure, not by name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_decoder_layers")
_TOP_K = re.compile(
    r"^(num_experts_per_tok(en)?|num_selected_experts|(moe_|router_)?top_?k(_experts)?|moe_k|num_experts_per_token)$"
)
_ATTENTION = re.compile(r"(^|_)(attn|attention)$")


def in_attention(path: str) -> bool:
    """Whether a module path below a block goes through its attention."""
    return any(_ATTENTION.search(part) for part in path.lower().split("."))


@dataclasses.dataclass(frozen=True)
class Block:
    """A place in a list of blocks: `Block("model.layers", 3)` is `model.layers.3`."""

    container: str
    index: int

    def __str__(self) -> str:
        return f"{self.container}.{self.index}" if self.container else str(self.index)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Experts that were seen in a model: "layers.3.mlp.up holds 8 experts", 8, and the path of that bank or list."""

    text: str
    count: int
    path: str


@dataclasses.dataclass(frozen=True)
class Lists:
    """Which of a model's numbered lists hold its decoder layers.

    Attributes:
        layers: the lists whose children are layers that hold experts.
        experts: the lists whose children are experts.
        nested: lists inside one another of which none is the one of the layers for certain; () if all is clear.
    """

    layers: frozenset[str]
    experts: frozenset[str]
    nested: tuple[str, ...]

    def block_of(self, name: str) -> Block | None:
        """The block that owns a weight; None outside any list of blocks.

        That of a list of layers; elsewhere by the first number in its path, unless that list holds experts or lists of layers.
        """
        numbers = _numbers(name.split(".")[:-1])
        for container, index in numbers:
            if container in self.layers:
                return Block(container, index)
        if not numbers:
            return None
        container, index = numbers[0]
        inside = f"{container}." if container else ""
        if container in self.experts or any(path.startswith(inside) for path in self.layers):
            return None
        return Block(container, index)


@dataclasses.dataclass(frozen=True)
class Structure:
    """A model as the runtime sees it.

    Attributes:
        lists: which lists are those of the layers.
        blocks: by list of blocks, how many it has (highest index + 1).
        experts: blocks that hold experts, with what was seen there.
        loose: experts that are in no block.
        config_layers: layer counts that the config gives, by name.
        top_k: experts per token by the config, a hint; None if it does not say.
        separate_experts: experts are modules of their own, which code loops over.
        may_route: False only if no block has anything that experts could be: a dense model.
    """

    lists: Lists
    blocks: dict[str, int]
    experts: dict[Block, Evidence]
    loose: tuple[str, ...]
    config_layers: dict[str, int]
    top_k: int | None
    separate_experts: bool
    may_route: bool

    def block_of(self, name: str) -> Block | None:
        """The block that owns a weight, by its name; None outside any list of blocks."""
        return self.lists.block_of(name)

    def num_layers(self, container: str) -> int:
        """Decoder layers of the target: the config's count where it fits the list of blocks, else the list's own."""
        listed = self.blocks.get(container, 0)
        counts = list(self.config_layers.values())
        if listed in counts or not counts:
            return listed
        return counts[0]

    def expected(self, container: str, count: int | None = None) -> tuple[int, ...]:
        """Indices of the decoder layers in one list that hold experts; blocks past the model's layers are a drafter's.

        Args:
            count: the model's decoder layers, where they are known better than here.
        """
        count = count or self.num_layers(container)
        return tuple(sorted(b.index for b in self.experts if b.container == container and b.index < count))

    @property
    def main_container(self) -> str | None:
        """The list of blocks whose blocks hold experts; None if none or several do."""
        found = {b.container for b in self.experts}
        return found.pop() if len(found) == 1 else None


def inspect(model: nn.Module, experts: Mapping[str, int] | None = None) -> Structure:
    """Read a model's modules and config. No weight is touched: meta and fake tensors will do.

    Args:
        experts: name of a weight of each layer's experts, and how many they are, where an engine knows; else they are looked for.
    """
    weights = named_weights(model)
    counts = _layer_counts(model)
    banks = _banks(model, weights) if experts is None else list(experts)
    separate = _expert_lists(model, weights, banks, counts) if experts is None else []
    lists = _lists(model, banks, separate, counts)
    blocks: dict[str, int] = {}
    members: dict[Block, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in weights:
        block = lists.block_of(name)
        if block is not None:
            blocks[block.container] = max(blocks.get(block.container, 0), block.index + 1)
            members.setdefault(block, []).append((name, tensor))
    for alias in _aliases(members):
        blocks.pop(alias)
        members = {block: tensors for block, tensors in members.items() if block.container != alias}
    found: dict[Block, Evidence] = {}
    may_route = not blocks or bool(banks or separate)
    for block, tensors in members.items():
        evidence = _experts_in(model, block, tensors, separate) if experts is None else _told(experts, block, lists)
        if evidence is not None:
            found[block] = evidence
        may_route = may_route or evidence is not None or (experts is None and _loose_evidence(tensors))
    loose = tuple(path for path in (*banks, *separate) if lists.block_of(f"{path}.") is None)
    return Structure(lists, blocks, found, loose, counts, _top_k(model), bool(separate), may_route)


def _told(experts: Mapping[str, int], block: Block, lists: Lists) -> Evidence | None:
    """What an engine says of a block."""
    for name, count in experts.items():
        if lists.block_of(name) == block:
            return Evidence(f"{name.rpartition('.')[0]} holds {count} experts", count, name)
    return None


def numbered(name: str) -> bool:
    """Whether a weight's path goes through a numbered module, as that of a layer does."""
    return bool(_numbers(name.split(".")[:-1]))


def _numbers(path: list[str]) -> list[tuple[str, int]]:
    """[("layers", 3), ("layers.3.mlp.experts", 7)] of layers.3.mlp.experts.7"""
    return [(".".join(path[:n]), int(part)) for n, part in enumerate(path) if part.isdigit()]


def _lists(model: nn.Module, banks: list[str], separate: list[str], counts: dict[str, int]) -> Lists:
    """Of the lists around each piece of evidence, the one whose children are the layers.

    That is the only one of the config's length; else the only one of several children of one class; else the outermost.
    """
    layers: set[str] = set()
    nested: tuple[str, ...] = ()
    for path in (*(bank.rpartition(".")[0] for bank in banks), *separate):
        around = [c for c, _ in _numbers(path.split(".")) if c not in separate]
        children = {c: list(model.get_submodule(c).children()) for c in around}
        several = [c for c in around if len(children[c]) >= 2]
        alike = [c for c in several if len({type(child) for child in children[c]}) == 1]
        fitting = [[c for c in held if len(children[c]) in counts.values()] for held in (several, alike)]
        found = next((held for held in (*fitting, alike) if len(held) == 1), around[:1] if not alike else [])
        layers.update(found)
        if alike and not found:
            nested = nested or tuple(alike)
    return Lists(frozenset(layers), frozenset(separate), nested)


def _banks(model: nn.Module, weights: list[tuple[str, torch.Tensor]]) -> list[str]:
    """Parameters [E, ., .] beside a weight that scores E choices, in the same outermost block."""
    scored: dict[tuple[str, int] | None, set[int]] = {}
    for name, tensor in weights:
        scored.setdefault(_outermost(name), set()).update(_scores(tensor))
    return [n for n, t in weights if _is_bank(model, n, t, scored[_outermost(n)])]


def _expert_lists(
    model: nn.Module, weights: list[tuple[str, torch.Tensor]], banks: list[str], counts: dict[str, int]
) -> list[str]:
    """Lists of E modules alike with no experts inside, beside a weight that scores E choices."""
    found: list[str] = []
    by_block: dict[tuple[str, int] | None, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in weights:
        by_block.setdefault(_outermost(name), []).append((name, tensor))
    for path, module in model.named_modules(remove_duplicate=False):
        number = len(module._modules)
        if not path or not isinstance(module, nn.ModuleList | nn.ModuleDict) or not _alike(module):
            continue
        outermost = _outermost(f"{path}.")
        if outermost is not None:
            beside = [t for n, t in by_block.get(outermost, []) if not n.startswith(f"{path}.")]
            chosen = number in {size for t in beside for size in _scores(t)}
        else:  # not in any list: a list of layers looks alike, so only what scores as a router does counts
            around = path.rpartition(".")[0]
            inside = f"{around}." if around else ""
            beside = [t for n, t in weights if n.startswith(inside) and not n.startswith(f"{path}.")]
            chosen = number not in counts.values() and any(number == t.shape[0] for t in beside if _scores(t))
        if chosen:
            found.append(path)
    evidence = [*banks, *found]
    return [path for path in found if not any(inner.startswith(f"{path}.") for inner in evidence)]


def _outermost(name: str) -> tuple[str, int] | None:
    return next(iter(_numbers(name.split(".")[:-1])), None)


def _scores(tensor: torch.Tensor) -> tuple[int, ...]:
    """How many choices a weight could score."""
    return tuple(tensor.shape) if tensor.dim() == 2 and tensor.is_floating_point() else ()


def _is_bank(model: nn.Module, name: str, tensor: torch.Tensor, scored: set[int]) -> bool:
    if tensor.dim() < 3 or tensor.shape[0] < 2 or _is_convolution(model, name) or _is_cache(name, tensor):
        return False
    return any(tensor.shape[0] <= size <= 2 * tensor.shape[0] for size in scored)  # a gate may be padded, or score more


def _alike(module: nn.Module) -> bool:
    """Whether a list has several children of one class, with weights of the same shapes."""
    children = list(module.children())
    if len(children) < 2 or len({type(c) for c in children}) != 1:
        return False
    shapes = {tuple(tuple(p.shape) for p in c.parameters()) for c in children}
    return len(shapes) == 1 and shapes != {()}


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


def _experts_in(
    model: nn.Module, block: Block, tensors: list[tuple[str, torch.Tensor]], separate: list[str]
) -> Evidence | None:
    """Evidence of routed experts in a block: a bank [E, ., .] or E like modules, beside a weight that scores E choices."""
    scored = {size for _, t in tensors for size in _scores(t)}
    banks = [(name, tensor) for name, tensor in tensors if _is_bank(model, name, tensor, scored)]
    for name, tensor in banks:
        if isinstance(tensor, nn.Parameter):
            return Evidence(f"{name} holds {tensor.shape[0]} experts", tensor.shape[0], name)
    for path in separate:
        count = len(model.get_submodule(path)._modules)
        if path.startswith(f"{block}.") and count in scored:
            return Evidence(f"{path} holds {count} experts, each a module", count, path)
    if banks:  # last: it may be a KV cache
        name, tensor = banks[0]
        text = f"{name} (a buffer; if it is a KV cache, name a module around it attn or attention) holds"
        return Evidence(f"{text} {tensor.shape[0]} experts", tensor.shape[0], name)
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


def _is_cache(name: str, tensor: torch.Tensor) -> bool:
    """Whether this may be a KV cache, [slots, heads, head_dim]: a buffer in an attention."""
    return not isinstance(tensor, nn.Parameter) and in_attention(name.rpartition(".")[0])


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
