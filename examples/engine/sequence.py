"""A request on its way through the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(eq=False)
class Result:
    """What a request comes to.

    Attributes:
        token_ids: generated tokens; log_probs: of each, under the weights that made it.
        finish_reason: "stop" (a stop token, the last of token_ids), "length", "abort" or "error".
        routed_experts: int16 [len(prompt) + len(token_ids) - 1, num_layers, top_k] when a recorder is attached.
        error: why this request alone failed, if it did.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    routed_experts: Any = None
    error: Exception | None = None


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request that waits or runs.

    Attributes:
        token_ids: prompt and generated tokens whose values are known on the host.
        num_pending: sampled tokens whose values are still on the device only: one while a forward is launched.
        num_computed: positions whose KV is in the cache, or in a forward that was launched.
        num_drafted: positions whose KV is in the drafter's cache.
        drafts: tokens that the next forward verifies.
        block_table: KV blocks, in the order of positions.
        num_sealed: of them, those that the block manager was told are full.
        num_streamed: generated tokens that `on_token` was called with.
        finish_reason: as in `Result`; "" while it waits or runs.
    """

    request_id: str
    token_ids: list[int]
    num_prompt: int
    max_tokens: int
    temperature: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    on_token: Callable[[str, int], None] | None = None
    log_probs: list[float] = dataclasses.field(default_factory=list)
    block_table: list[int] = dataclasses.field(default_factory=list)
    drafts: list[int] = dataclasses.field(default_factory=list)
    num_pending: int = 0
    num_computed: int = 0
    num_drafted: int = 0
    num_sealed: int = 0
    num_streamed: int = 0
    finish_reason: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def exhausted(self) -> bool:
        """All tokens that it may have are sampled: nothing is left to forward."""
        return self.num_tokens - self.num_prompt >= self.max_tokens

    def result(self) -> Result:
        return Result(
            self.request_id,
            self.token_ids[: self.num_prompt],
            self.token_ids[self.num_prompt :],
            list(self.log_probs),
            self.finish_reason,
        )
