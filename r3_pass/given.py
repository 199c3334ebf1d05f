"""Routes that a caller hands to replay: brought into one shape, and checked for what no router would have chosen.

Legend: R rows given, T tokens of the forward, L layers given, K columns given, E experts, k a layer's own top-k.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from r3_pass.errors import InvalidRoutes

OnBadRow = Literal["error", "live"]

_CHANCE = 1e-6
"""Rows that are all equal are an empty capture if a router would choose them less often than this."""


class Given:
    """Routes as int32 [R, L, K], -1 for the live router; a copy, on a GPU where one is named or they came from one.

    Attributes:
        rows: R.
        sequences: B of padded [B, S, L, K]; None for flat rows.
        fallback: rows of each of L layers that were bad and went to the live router.

    Raises: InvalidRoutes if the array has another shape or dtype.
    """

    def __init__(self, routes: Any, on_bad_row: OnBadRow = "error", device: torch.device | None = None) -> None:
        if on_bad_row not in ("error", "live"):
            raise ValueError(f"on_bad_row is 'error' or 'live', got {on_bad_row!r}")
        self.on_bad_row = on_bad_row
        ids = _tensor(routes, device)
        self.sequences = int(ids.shape[0]) if ids.dim() == 4 else None
        self.ids = ids.flatten(0, 1) if ids.dim() == 4 else ids
        self.rows, self.layers, self.columns = map(int, self.ids.shape)
        self.fallback: dict[int, int] = {}
        self._checked: set[int] = set()
        self._laid: dict[tuple[int, torch.device], Tensor] = {}
        self._measure()

    def same(self, other: Given) -> bool:
        return self is other or (
            self.sequences == other.sequences
            and self.ids.shape == other.ids.shape
            and torch.equal(self.ids, other.ids.to(self.ids.device))
        )

    # ---- checks -------------------------------------------------------------------------------------------------
    def _measure(self) -> None:
        """Everything that can be said without a layer's E and k; one synchronisation for rows on a GPU."""
        ids = self.ids
        columns = ids.movedim(-1, 0).contiguous()
        valid = columns >= 0
        if ids.device.type == "cpu":
            twice = torch.zeros(columns.shape[1:], dtype=torch.bool)
            for j in range(1, self.columns):
                for i in range(j):
                    twice |= (columns[i] == columns[j]) & valid[j]
        else:  # where a launch costs more than a sort
            ordered = ids.sort(-1).values
            twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)
        hole = (valid[1:] & ~valid[:-1]).any(0) if self.columns > 1 else torch.zeros_like(twice)
        self._twice, self._hole = twice, hole | (columns < -1).any(0)
        self._summarise()

    def _summarise(self) -> None:
        ids = self.ids
        if not self.rows:
            self.largest = self.valid = self.fewest = self.most = self.equal = self.broken = [0] * self.layers
            return
        count = (ids >= 0).sum(-1)
        some = count > 0
        low = torch.where(some.unsqueeze(-1), ids, torch.iinfo(torch.int32).max).amin(0)
        high = ids.amax(0)
        numbers = [
            high.amax(-1),
            some.sum(0),
            torch.where(some, count, self.columns + 1).amin(0),
            count.amax(0),
            (low == high).all(-1),
            (self._twice | self._hole).sum(0),
        ]
        found = torch.stack([n.long() for n in numbers]).tolist()
        self.largest, self.valid, self.fewest, self.most, self.equal, self.broken = found

    def check(self, column: int, layer: int, experts: int, top_k: int) -> None:
        """Check one layer's rows against what its router can choose; once per layer.

        Args:
            experts: E; 0 if the graph does not tell.

        Raises: InvalidRoutes, naming the first bad row.
        """
        if column in self._checked:
            return
        if self.most[column] and top_k > self.columns:
            raise InvalidRoutes(
                f"layer {layer} chooses {top_k} experts for a token, the routes have {self.columns} columns: they are "
                "those of another model, or columns were cut off."
            )
        self._refuse_constant(
            column, layer, experts, top_k
        )  # before single rows are looked at: it explains all of them
        ids = self.ids[:, column]
        outside = experts > 0 and self.largest[column] >= experts
        partial = self.most[column] > 0 and (self.fewest[column], self.most[column]) != (top_k, top_k)
        if self.broken[column] or outside or partial:
            count = (ids >= 0).sum(-1)
            wrong = {
                "an expert twice": self._twice[:, column],
                "-1 before an expert, or an id below -1": self._hole[:, column],
                f"an expert that does not exist (there are {experts})": (ids >= (experts or 1 << 31)).any(-1),
                f"other than {top_k} experts": (count > 0) & (count != top_k),
            }
            self._drop(column, layer, wrong)
        self._refuse_constant(column, layer, experts, top_k)
        self._checked.add(column)

    def _drop(self, column: int, layer: int, wrong: dict[str, Tensor]) -> None:
        """Leave a layer's bad rows to the live router, or raise."""
        bad = torch.stack(list(wrong.values())).any(0)
        count = int(bad.sum())
        if self.on_bad_row == "error":
            what, mask = next((what, mask) for what, mask in wrong.items() if bool(mask.any()))
            row = int(mask.nonzero()[0])
            raise InvalidRoutes(
                f"layer {layer} (routes[..., {column}, :]): row {row} has {what}: {self.ids[row, column].tolist()}; {count} of "
                f"{self.rows} rows are bad. No router chose that: look at where the rows come from (padding is -1), or "
                "pass on_bad_row='live' to leave such rows to the live router."
            )
        self.fallback[column] = count
        self.ids[:, column] = torch.where(bad.unsqueeze(-1), -1, self.ids[:, column])
        self._twice[:, column] = self._hole[:, column] = False
        self._laid.clear()
        self._summarise()

    def _refuse_constant(self, column: int, layer: int, experts: int, top_k: int) -> None:
        """An empty capture: the same experts for every token, more often than routers do that."""
        ways = math.perm(max(experts, top_k + 1), top_k)
        rows = self.valid[column]
        if not self.equal[column] or rows < 2 or (1 / ways) ** (rows - 1) > _CHANCE:
            return
        shown = next(row for row in self.ids[:, column].tolist() if row[0] >= 0)
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
        known = self._laid.get((tokens, device))
        if known is not None:
            return known
        ids = self.ids
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
            ids = ids.view(lengths, -1, self.layers, self.columns)
            ids = torch.nn.functional.pad(ids, (0, 0, 0, 0, 0, 1), value=-1).flatten(0, 1)
        laid = ids.movedim(1, 0).contiguous()
        if device.type == "cuda" and laid.device.type == "cpu":
            laid = laid.pin_memory().to(device, non_blocking=True)
        laid = laid.to(device)
        self._laid[(tokens, device)] = laid
        return laid


def _tensor(routes: Any, device: torch.device | None) -> Tensor:
    """int32 [R, L, K] or [B, S, L, K], a copy; on the GPU that is named, checks are a matter of microseconds."""
    if isinstance(routes, np.ndarray):
        if routes.dtype.kind not in "iu":
            raise InvalidRoutes(f"routes are integers, got {routes.dtype}. Pass expert ids, -1 for the live router.")
        if routes.dtype.itemsize == 8 and routes.size and int(routes.max()) > torch.iinfo(torch.int32).max:
            raise InvalidRoutes(f"routes hold the id {int(routes.max())}: no model has so many experts.")
        found = torch.from_numpy(
            routes.astype(np.int32 if routes.dtype.itemsize > 2 or routes.dtype.kind == "u" else np.int16)
        )
    elif isinstance(routes, Tensor):
        if routes.dtype.is_floating_point or routes.dtype.is_complex or routes.dtype == torch.bool:
            raise InvalidRoutes(f"routes are integers, got {routes.dtype}. Pass expert ids, -1 for the live router.")
        wide = routes.dtype in (torch.int64, torch.uint64, torch.uint32) and routes.numel()
        if wide and int(routes.max()) > torch.iinfo(torch.int32).max:
            raise InvalidRoutes(f"routes hold the id {int(routes.max())}: no model has so many experts.")
        found = routes.detach()
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
    if device is not None and device.type == "cuda":
        found = found.to(device)
    return found.to(torch.int32, copy=True)
