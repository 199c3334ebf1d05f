"""What can be said of given routes without knowing what a router may choose: a few numbers for each layer.

Legend: R rows given, L layers given, K columns given.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass
class Summary:
    """Of each of L layers. A row "has ids" if one of its K is not negative.

    Attributes:
        largest: the largest id, 0 without any.
        valid: rows that have ids.
        fewest: ids of the row that has ids, but fewest; K + 1 without any.
        most: ids of the row that has most.
        equal: whether all rows that have ids are the same.
        broken: rows that are `twice` or `holes`.
    """

    largest: list[int]
    valid: list[int]
    fewest: list[int]
    most: list[int]
    equal: list[bool]
    broken: list[int]

    def replace(self, layer: int, one: Summary) -> None:
        """Take over the only layer of another summary."""
        for field in dataclasses.fields(self):
            getattr(self, field.name)[layer] = getattr(one, field.name)[0]


def nothing(layers: int, columns: int) -> Summary:
    """The summary of no rows."""
    none = [0] * layers
    return Summary(none, list(none), [columns + 1] * layers, list(none), [False] * layers, list(none))


def summarise(routes: Tensor) -> Summary:
    """The summary of int32 [L, R, K]; one synchronisation for rows on a GPU, and some forty launches."""
    layers, rows, columns = routes.shape
    if not rows:
        return nothing(layers, columns)
    bounds = torch.iinfo(torch.int32)
    count = (routes >= 0).sum(-1)
    some = count > 0
    low = torch.where(some.unsqueeze(-1), routes, bounds.max).amin(1)
    high = torch.where(some.unsqueeze(-1), routes, bounds.min).amax(1)
    numbers = [
        high.amax(-1).clamp(min=0),
        some.sum(1),
        torch.where(some, count, columns + 1).amin(1),
        count.amax(1),
        (low == high).all(-1),
        (twice(routes) | holes(routes)).sum(1),
    ]
    largest, valid, fewest, most, equal, broken = torch.stack([n.long() for n in numbers]).tolist()
    return Summary(largest, valid, fewest, most, list(map(bool, equal)), broken)


def twice(routes: Tensor) -> Tensor:
    """bool [...] of int32 [..., K]: rows in which an expert stands twice."""
    if routes.device.type != "cpu":  # where a launch costs more than a sort
        ordered = routes.sort(-1).values
        return ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)
    columns = routes.movedim(-1, 0).contiguous()
    found = torch.zeros(columns.shape[1:], dtype=torch.bool, device="cpu")
    for j in range(1, len(columns)):
        valid = columns[j] >= 0
        for i in range(j):
            found |= (columns[i] == columns[j]) & valid
    return found


def holes(routes: Tensor) -> Tensor:
    """bool [...] of int32 [..., K]: rows in which an id stands behind a -1, or is below -1."""
    columns = routes.movedim(-1, 0).contiguous()
    valid = columns >= 0
    below = (columns < -1).any(0)
    return (valid[1:] & ~valid[:-1]).any(0) | below if len(columns) > 1 else below
