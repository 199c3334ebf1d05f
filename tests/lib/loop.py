"""An engine in a few lines, for tests that drive a session by hand.

The decoder has no attention: the row of a token hangs on the token alone, so a request's truth is that of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from decoder import decoder, prompt, truth
from torch import Tensor

import r3_pass
from r3_pass.runtime import Segment, Session

SLOTS = 64


class Loop:
    """An engine in a few lines: it forwards tokens of requests, each at a slot."""

    def __init__(self, backend: Any = None, **options: Any) -> None:
        self.model = decoder(config={"num_experts_per_tok": 2, "num_hidden_layers": 3}, **options)
        self.backend = backend or r3_pass.backend("eager")
        self.compiled = torch.compile(self.model, backend=self.backend, dynamic=True)
        self.session: Session = r3_pass.runtime.attach(self.compiled, num_slots=SLOTS)

    def step(
        self, *parts: tuple[Any, int, Tensor, Any], padding: int = 0, call: Callable[[Tensor], Any] | None = None
    ) -> None:
        """Forward tokens [1, n] of requests, each as (request, start, tokens, slots)."""
        slots = np.concatenate([*(np.asarray(p[3]) for p in parts), np.full(padding, -1)])
        tokens = torch.cat([*(p[2] for p in parts), torch.zeros(1, padding, dtype=torch.int64)], 1)
        segments = [Segment(p[0], p[1], p[2].numel()) for p in parts]
        with torch.no_grad(), self.session.step(slots, segments):
            (call or self.compiled)(tokens)

    def truth(self, *tokens: Tensor) -> np.ndarray:
        return truth(self.model, torch.cat(tokens, 1))

    def goes_on(self, request: Any = "afterwards") -> None:
        """A whole request from its first token to its end."""
        tokens = prompt(6, 9)
        self.step((request, 0, tokens[:, :5], range(50, 55)), padding=2)
        self.step((request, 5, tokens[:, 5:], [55]))
        rows = self.session.finish(request, 7)
        assert (rows == self.truth(tokens)).all()
        assert (self.session.read(range(50, 56)) == rows).all()
        self.session.check_integrity()
