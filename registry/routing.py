"""The routers that one kernel can compute: from the logits on, scores, groups, choice and weights, by name.

Legend: K top-k, E experts, G groups of E/G experts each.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

Scores = Literal["logits", "softmax", "sigmoid"]
Weights = Literal["scores", "softmax", "sigmoid"]


class Unread(Exception):
    """Why a router is not one of those that are understood; the text names what was seen."""


@dataclasses.dataclass(frozen=True)
class Routing:
    """What is computed between a router's logits and its ids and weights.

    Attributes:
        top_k: K.
        scores: what is selected over: the logits, or their softmax over all experts, or their sigmoid; plus the bias, if there is
            one.
        groups: G, 1 for none. The best `kept` groups stay, by the sum of their `best` best scores (1 or 2); the scores of all
            other experts become `fill`, or below all others if that is None.
        weights: of the chosen: their scores without bias; or softmax (over the K chosen) or sigmoid of their logits.
        normalise: what is added to the sum that they are then divided by; None if they are not.
        scale: what they are then multiplied by.
        dtype: what they are then cast to.
    """

    top_k: int
    scores: Scores
    groups: int = 1
    best: int = 1
    kept: int = 1
    fill: float | None = None
    weights: Weights = "scores"
    normalise: float | None = None
    scale: float = 1.0
    dtype: torch.dtype = torch.float32

    def simplified(self) -> Routing:
        """The same weights with less work: a softmax over all, divided by the sum of the chosen, is the softmax over the chosen."""
        if self.scores == "softmax" and self.weights == "scores" and self.normalise == 0.0:
            return dataclasses.replace(self, weights="softmax", normalise=None)
        return self
