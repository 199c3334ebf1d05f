"""What the rows of a session mean, as a value that travels with them and that a trainer can check.

    description = session.describe()
    print(description)
    Description.from_json(description.to_json()) == description

Legend: L decoder layers, M stored (MoE) layers, K top-k.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from torch import nn

from r3_pass.errors import RefusedConfiguration
from r3_pass.structure import named_weights

DTYPE = "int16"

Tag = str | int | float | bool | None


@dataclasses.dataclass(frozen=True)
class Description:
    """How to read `routed_experts`, and whose routing it is.

    Attributes:
        model: class name of the model.
        fingerprint: SHA-256 of the names and shapes of its parameters and buffers, as hexadecimal digits.
        weights: tag of the weights that make rows now (`weights_changed`); of a tag that JSON has no type for, its repr.
        num_layers: L, second axis of the rows; dense layers included.
        top_k: K, third axis of the rows; the largest of all layers.
        layers: the decoder layer of each of the M layers that route, ascending; all others are -1.
        layer_top_k: top-k of each of these; None until the first step has shown it.
        num_experts: experts of each of these; None until the first step has shown it.
        dtype: of the rows.
        r3_pass: version that recorded them.

    Raises: RefusedConfiguration if the numbers contradict each other.
    """

    model: str
    fingerprint: str
    weights: Tag
    num_layers: int
    top_k: int
    layers: tuple[int, ...]
    layer_top_k: tuple[int | None, ...]
    num_experts: tuple[int | None, ...]
    dtype: str
    r3_pass: str

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise RefusedConfiguration(f"a description of routes that cannot be: {problem}.")

    def _problems(self) -> Iterator[str]:
        if self.dtype != DTYPE:
            yield f"dtype is {self.dtype!r}, expected {DTYPE!r}"
        if self.num_layers < 1 or self.top_k < 1:
            yield f"num_layers={self.num_layers} and top_k={self.top_k}, expected at least 1 each"
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            yield f"layers are ascending and at least one, got {self.layers}"
        elif self.layers[0] < 0 or self.layers[-1] >= self.num_layers:
            yield f"layers lie in 0 .. {self.num_layers - 1}, got {self.layers}"
        if not len(self.layers) == len(self.layer_top_k) == len(self.num_experts):
            counts = f"{len(self.layer_top_k)} top-k and {len(self.num_experts)} num_experts"
            yield f"one top-k and one num_experts a layer are expected, got {counts} of {len(self.layers)} layers"
        known = [k for k in self.layer_top_k if k is not None]
        if any(not 1 <= k <= self.top_k for k in known):
            yield f"top-k of a layer lies in 1 .. {self.top_k}, got {self.layer_top_k}"
        for k, experts in zip(self.layer_top_k, self.num_experts, strict=False):
            if experts is not None and not (k or 1) <= experts <= 2**15 - 1:
                yield f"a layer with top-k {k} has {k or 1} to {2**15 - 1} experts, got {experts}"

    def differences(self, other: Description) -> list[str]:
        """What keeps rows of one from being read as rows of the other; the model's name, its weights and r3_pass's version do not.

        What one of them does not know yet is no difference.
        """
        found = [
            f"{name} is {mine!r}, expected {theirs!r}"
            for name in ("num_layers", "top_k", "layers", "dtype")
            if (mine := getattr(self, name)) != (theirs := getattr(other, name))
        ]
        if self.layers == other.layers:
            for name in ("layer_top_k", "num_experts"):
                pairs = zip(self.layers, getattr(self, name), getattr(other, name), strict=True)
                found += [
                    f"{name} of layer {layer} is {mine}, expected {theirs}"
                    for layer, mine, theirs in pairs
                    if mine is not None and theirs is not None and mine != theirs
                ]
        return found

    @classmethod
    def of_stages(cls, stages: Iterable[Description]) -> Description:
        """Of the merged rows of pipeline stages, given the description of each that records, in order.

        Raises: RefusedConfiguration if they are not of one model and one version of the weights, or share a layer.
        """
        parts = list(stages)
        for name in ("model", "weights", "num_layers", "dtype", "r3_pass"):
            seen = {getattr(part, name) for part in parts}
            if len(seen) != 1:
                raise RefusedConfiguration(
                    f"descriptions of stages with {name} of {sorted(map(repr, seen))}, expected one."
                )
        first = parts[0]
        columns = sorted(
            column for part in parts for column in zip(part.layers, part.layer_top_k, part.num_experts, strict=True)
        )
        layers, layer_top_k, num_experts = zip(*columns, strict=True)
        digest = hashlib.sha256("".join(part.fingerprint for part in parts).encode()).hexdigest()
        return dataclasses.replace(
            first, fingerprint=digest, top_k=max(part.top_k for part in parts),
            layers=layers, layer_top_k=layer_top_k, num_experts=num_experts,
        )  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Description:
        """Raises: RefusedConfiguration if the text is no description."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise RefusedConfiguration(f"a description of routes is JSON, got {text[:80]!r} ({error}).") from error
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or set(fields) != names:
            got = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
            raise RefusedConfiguration(f"a description of routes has the fields {sorted(names)}, got {got}.")
        for name in ("layers", "layer_top_k", "num_experts"):
            optional = name != "layers"
            given = fields[name]
            if not isinstance(given, list) or not all(_is_int(n) or (optional and n is None) for n in given):
                raise RefusedConfiguration(f"{name} of a description is a list of whole numbers, got {given!r}.")
            fields[name] = tuple(given)
        for name in ("num_layers", "top_k"):
            if not _is_int(fields[name]):
                raise RefusedConfiguration(f"{name} of a description is a whole number, got {fields[name]!r}.")
        for name in ("model", "fingerprint", "dtype", "r3_pass"):
            if not isinstance(fields[name], str):
                raise RefusedConfiguration(f"{name} of a description is text, got {fields[name]!r}.")
        if not isinstance(fields["weights"], Tag):
            raise RefusedConfiguration(f"weights of a description is a tag, got {fields['weights']!r}.")
        return cls(**fields)

    def __str__(self) -> str:
        tag = "untagged" if self.weights is None else repr(self.weights)
        lines = [
            f"{self.model} {self.fingerprint[:12]}, weights {tag}, recorded by r3_pass {self.r3_pass}",
            f"routed_experts: {self.dtype} [tokens, {self.num_layers}, {self.top_k}]",
        ]
        rows = zip(self.layers, self.layer_top_k, self.num_experts, strict=True)
        # Layer minus its rank is the same through a run of layers that follow one another.
        runs = groupby(enumerate(rows), key=lambda n: (n[1][0] - n[0], n[1][1:]))
        for _, run in runs:
            (first, k, experts), *rest = (row for _, row in run)
            which = f"layers {first}-{rest[-1][0]}" if rest else f"layer {first}"
            known = f"top-{k} of {experts} experts" if k is not None else f"top-{self.top_k} at most"
            lines.append(f"{which}: {known}")
        others = self.num_layers - len(self.layers)
        return "\n".join(
            lines + ([f"{others} of {self.num_layers} layers are -1: they do not route"] if others else [])
        )


def describe_tag(tag: object) -> Tag:
    """A version tag as JSON can hold it."""
    return tag if isinstance(tag, Tag) else repr(tag)


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of the names and shapes of all parameters and buffers: of the architecture, not of the weights' values."""
    held = sorted(f"{name} {list(weight.shape)}\n" for name, weight in named_weights(model))
    return hashlib.sha256("".join(held).encode()).hexdigest()


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
