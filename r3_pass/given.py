"""Routes that a caller hands to replay: brought into one shape, and checked for what no router would have chosen.

Legend: R rows given, T tokens of the forward, L layers given, K columns given, E experts, k a layer's own top-k.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from r3_pass import streams
from r3_pass.errors import InvalidRoutes
from r3_pass.pinned import pinned
from r3_pass.routes import refuse_masked
from r3_pass.summary import Summary, holes, summarise, twice

OnBadRow = Literal["error", "live"]

_CHANCE = 1e-6
"""Rows that are all equal are an empty capture if a router would choose them less often than this."""


class Given:
    """Routes as int32 [L, R, K], -1 for the live router; a copy, on a GPU where one is named or they came from one.

    Args:
        device: where they will be needed, if that is known.
        beside: a stream of that GPU on which rows from the host are uploaded and summarised, so that the host waits for
            that alone and not for what is queued already; None for the current stream.

    Attributes:
        routes: int32 [L, R, K].
        rows: R.
        sequences: B of padded [B, S, L, K]; None for flat rows. positions: S.
        fallback: rows of each of L layers that were bad and went to the live router.

    Raises: InvalidRoutes if the array has another shape or dtype.
    """

    def __init__(
        self,
        routes: Any,
        on_bad_row: OnBadRow = "error",
        device: torch.device | None = None,
        beside: torch.cuda.Stream | None = None,
    ) -> None:
        if on_bad_row not in ("error", "live"):
            raise ValueError(f"on_bad_row is 'error' or 'live', got {on_bad_row!r}")
        self.on_bad_row = on_bad_row
        given = _integers(routes)
        self.sequences = int(given.shape[0]) if given.dim() == 4 else None
        self.positions = int(given.shape[1]) if given.dim() == 4 else None
        given = given.flatten(0, 1) if given.dim() == 4 else given
        self.rows, self.layers, self.columns = map(int, given.shape)
        self._made_on: streams.Raw | None = None
        self.routes, self._summarise = self._bring(given, device, beside)
        self.fallback: dict[int, int] = {}
        self._checked: set[int] = set()
        self._laid: dict[tuple[int, torch.device], Tensor] = {}

    def _bring(
        self, given: Tensor, device: torch.device | None, beside: torch.cuda.Stream | None
    ) -> tuple[Tensor, Callable[[], Summary]]:
        """Copy [R, L, K] to where it is needed, by layer; on a GPU everything is queued and nothing waited for."""
        if device is None or device.type != "cuda":
            device = given.device
        if device.type == "cpu" or (start := _kernel(device)) is None:
            routes = torch.empty((self.layers, self.rows, self.columns), dtype=torch.int32, device=device)
            routes.copy_(given.movedim(1, 0))
            return routes, lambda: summarise(routes)
        with contextlib.ExitStack() as on:
            on.enter_context(torch.cuda.device(device))
            if given.device.type == "cpu":
                on.enter_context(torch.cuda.stream(beside))
                host, given = given, pinned(given)
                given = given.to(device, non_blocking=given is not host)  # the caller may write to what is their own
            else:
                given = given.to(device)
            self._made_on = streams.current(given.device)
            return start(given.contiguous())

    def _use(self) -> None:
        """Make the routes the current stream's to read: they are there, and the allocator knows who reads them."""
        _ = self.summary
        if self._made_on is not None and self._made_on != (now := streams.current(self.routes.device)):
            self.routes.record_stream(streams.stream(now, self.routes.device))

    @functools.cached_property
    def summary(self) -> Summary:
        """Everything that can be said without a layer's E and k; the host waits for it once."""
        return self._summarise()

    def same(self, other: Given) -> bool:
        if self is other:
            return True
        if self.sequences != other.sequences or self.routes.shape != other.routes.shape:
            return False
        self._use()
        other._use()
        return torch.equal(self.routes, other.routes.to(self.routes.device))

    # ---- checks -------------------------------------------------------------------------------------------------
    def check_order(self, tokens: int, leading: Iterable[tuple[int, ...]]) -> None:
        """Hold rows against how the forward's tokens lie.

        Args:
            tokens: T.
            leading: the first two sizes of each tensor that a graph was given; of a vector, its one.

        Raises: InvalidRoutes if rows would go to other tokens: padded routes [B, S, ...] of tokens that lie as [S, B]; T - 1 flat
            rows, one sequence's, of tokens that lie as several sequences.
        """
        if self.sequences is not None:
            mine = self.sequences, self.positions
            found = {sizes for sizes in leading if math.prod(sizes) == tokens}
            if 1 not in mine and mine not in found and (swapped := (self.positions, self.sequences)) in found:
                raise InvalidRoutes(
                    f"the routes are {list(mine)} sequences and positions, and the forward's tokens lie as {list(swapped)}: rows "
                    "would go to other tokens. Give padded routes in the order of the forward's tokens (routes.swapaxes(0, 1)), or "
                    "flat ones [tokens, layers, top_k]."
                )
        elif self.rows + 1 == tokens:
            found = set(leading)
            flat = any(sizes[0] == tokens or sizes == (1, tokens) for sizes in found)
            lie = next((sizes for sizes in found if math.prod(sizes) == tokens and len(sizes) == 2), None)
            if lie is not None and not flat:
                raise InvalidRoutes(
                    f"the routes are {self.rows} flat rows, one less than the forward has tokens, and these lie as {list(lie)}: "
                    "each sequence has a last token, and rows behind one that is missing would go to other tokens. Join the rows "
                    "of the sequences with r3_pass.routes.pad."
                )

    def check(self, column: int, layer: int, experts: int, top_k: int) -> None:
        """Check one layer's rows against what its router can choose; once per layer.

        Args:
            experts: E; 0 if the graph does not tell.

        Raises: InvalidRoutes, naming the first bad row.
        """
        if column in self._checked:
            return
        seen = self.summary
        if seen.most[column] and top_k > self.columns:
            raise InvalidRoutes(
                f"layer {layer} chooses {top_k} experts for a token, the routes have {self.columns} columns: they are "
                "those of another model, or columns were cut off."
            )
        self._refuse_constant(
            column, layer, experts, top_k
        )  # before single rows are looked at: it explains all of them
        outside = experts > 0 and seen.largest[column] >= experts
        partial = seen.most[column] > 0 and (seen.fewest[column], seen.most[column]) != (top_k, top_k)
        if seen.broken[column] or outside or partial:
            self._use()
            ids = self.routes[column]
            count = (ids >= 0).sum(-1)
            wrong = {
                "an expert twice": twice(ids),
                "-1 before an expert, or an id below -1": holes(ids),
                f"an expert that does not exist (there are {experts})": (ids >= (experts or 1 << 31)).any(-1),
                f"other than {top_k} experts": (count > 0) & (count != top_k),
            }
            self._drop(column, layer, top_k, wrong)
        self._refuse_constant(column, layer, experts, top_k)
        self._checked.add(column)

    def _drop(self, column: int, layer: int, top_k: int, wrong: dict[str, Tensor]) -> None:
        """Leave a layer's bad rows to the live router, or raise."""
        bad = torch.stack(list(wrong.values())).any(0)
        count = int(bad.sum())
        if self.on_bad_row == "error":
            if self.summary.most[column] and (fewest := self.summary.fewest[column]) > top_k:
                raise InvalidRoutes(
                    f"layer {layer} (routes[..., {column}, :]) chooses {top_k} experts for a token, and each row there has "
                    f"{fewest} or more: the routes are those of another model, or of another layer."
                )
            what, mask = next((what, mask) for what, mask in wrong.items() if bool(mask.any()))
            row = int(mask.nonzero()[0])
            raise InvalidRoutes(
                f"layer {layer} (routes[..., {column}, :]): row {row} has {what}: {self.routes[column, row].tolist()}; {count} of "
                f"{self.rows} rows are bad. No router chose that: look at where the rows come from (padding is -1), or "
                "pass on_bad_row='live' to leave such rows to the live router."
            )
        self.fallback[column] = count
        self._use()
        self.routes = (
            self.routes.clone()
        )  # what other layers took is part of the old one, and saved for their backwards
        self.routes[column].masked_fill_(bad.unsqueeze(-1), -1)
        self._laid.clear()
        self.summary.replace(column, summarise(self.routes[column : column + 1]))

    def _refuse_constant(self, column: int, layer: int, experts: int, top_k: int) -> None:
        """An empty capture: the same experts for every token, more often than routers do that."""
        ways = math.perm(max(experts, top_k + 1), top_k)
        rows = self.summary.valid[column]
        if not self.summary.equal[column] or rows < 2 or (1 / ways) ** (rows - 1) > _CHANCE:
            return
        shown = next(row for row in self.routes[column].tolist() if max(row) >= 0)
        raise InvalidRoutes(
            f"layer {layer} (routes[..., {column}, :]): all {rows} rows are {shown}. No router sends every token to the same "
            "experts: this is an empty capture (a buffer that was never written). Give -1 for rows that were not recorded."
        )

    # ---- layout -------------------------------------------------------------------------------------------------
    def laid(self, tokens: int, device: torch.device) -> Tensor:
        """int32 [L, T, K] on a device: one block a layer, the last token of each sequence live where its row is
        missing.

        Raises: InvalidRoutes if the rows are not those of so many tokens.
        """
        self._use()
        known = self._laid.get((tokens, device))
        if known is not None:
            return known
        laid = self.routes
        if self.rows != tokens:
            lengths = self.sequences or 1
            if self.rows + lengths != tokens:
                raise InvalidRoutes(
                    f"the forward has {tokens} tokens, the routes have {self.rows} rows: there is one row a token, "
                    "or one less for each "
                    "sequence (its last token, which recorded rows do not have). Flatten padded batches with "
                    "r3_pass.routes.pad, packed ones "
                    "with r3_pass.routes.pack."
                )
            laid = laid.view(self.layers, lengths, -1, self.columns)
            laid = torch.nn.functional.pad(laid, (0, 0, 0, 1), value=-1).flatten(1, 2)
        laid = laid.to(device)
        self._laid[(tokens, device)] = laid
        return laid


def _kernel(device: torch.device) -> Callable[[Tensor], tuple[Tensor, Callable[[], Summary]]] | None:
    """What summarises routes on a device in one launch, where there is such a thing."""
    if device.type != "cuda":
        return None
    try:
        from r3_pass import summary_kernel  # Triton is imported where there is a GPU only
    except ImportError:
        return None
    return summary_kernel.start


def _integers(routes: Any) -> Tensor:
    """[R, L, K] or [B, S, L, K] of signed integers of up to 32 bits; may be the caller's own memory."""
    refuse_masked(routes)
    if isinstance(routes, np.ndarray):
        if routes.dtype.kind not in "iu":
            raise InvalidRoutes(f"routes are integers, got {routes.dtype}. Pass expert ids, -1 for the live router.")
        if routes.dtype.itemsize > 4 or routes.dtype in (np.uint32,):
            _refuse_wide(*((int(routes.min()), int(routes.max())) if routes.size else (0, 0)))
        kind = np.int32 if routes.dtype.itemsize > 2 or routes.dtype.kind == "u" else np.int16
        found = torch.from_numpy(np.require(routes, kind, ["C", "W"]))
    elif isinstance(routes, Tensor):
        if routes.dtype.is_floating_point or routes.dtype.is_complex or routes.dtype == torch.bool:
            raise InvalidRoutes(f"routes are integers, got {routes.dtype}. Pass expert ids, -1 for the live router.")
        if routes.is_nested or routes.layout is not torch.strided or routes.is_meta:
            what = "nested" if routes.is_nested else "meta" if routes.is_meta else str(routes.layout)
            raise InvalidRoutes(
                f"routes are a dense tensor with data, got one that is {what}. Pad the rows of several sequences with "
                "r3_pass.routes.pad, or join them with r3_pass.routes.pack."
            )
        found = routes.detach()
        if found.dtype in (torch.int64, torch.uint64, torch.uint32):
            found = found.long()  # min and max of the others are not implemented everywhere
            _refuse_wide(*(torch.stack(found.aminmax()).tolist() if found.numel() else (0, 0)))
        if found.dtype not in (torch.int8, torch.int16, torch.int32):
            found = found.to(torch.int32)
    else:
        raise InvalidRoutes(
            f"routes are a numpy array or a torch tensor of integers, got {type(routes).__name__}. Join the "
            "rows of several sequences with r3_pass.routes.pad (one row a sequence) or r3_pass.routes.pack."
        )
    if found.dim() not in (3, 4) or 0 in found.shape[-2:]:
        raise InvalidRoutes(
            f"routes have the shape {tuple(found.shape)}: [tokens, layers, top_k] in the order of the forward's "
            "tokens, or padded "
            "[batch, seq, layers, top_k]."
        )
    return found


def _refuse_wide(least: int, most: int) -> None:
    """Before 64 bits are cut to 32: an id that wraps around would look like one that exists."""
    bounds = torch.iinfo(torch.int32)
    for number in (most, least):
        if not bounds.min <= number <= bounds.max:
            raise InvalidRoutes(f"routes hold the id {number}: no model has so many experts.")
