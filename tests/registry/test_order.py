"""Spellings of moving tokens on the way to a router, beside those that move none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hostile_routers import around
from tiny import VOCAB, D
from torch import Tensor

import r3_pass

B, S = 2, 6
Turn = Callable[[Tensor], Tensor]


def exchanged(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, :3] = x[:, 3:]
    out[:, 3:] = x[:, :3]
    return out


def exchanged_in_views(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, :3].copy_(x[:, 3:])
    out[:, 3:].copy_(x[:, :3])
    return out


def laid_in_place(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, :3] = 2 * x[:, :3]
    out[:, 3:].copy_(x[:, 3:])
    return out


def halves_of_features_exchanged(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, :, : D // 2] = -x[:, :, D // 2 :]
    out[:, :, D // 2 :] = x[:, :, : D // 2]
    return out


def image_written_over_text(x: Tensor) -> Tensor:
    out = x.clone()
    out[:, 1:3] = torch.ones(B, 4, D).cumsum(-1)[:, :2]
    return out


def mixed_with_the_token_before(x: Tensor) -> Tensor:
    return 0.3 * F.pad(x, (0, 0, 1, -1)) + 0.7 * x


def smeared(x: Tensor) -> Tensor:
    """A causal convolution."""
    return F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), torch.ones(D, 1, 3) / 3, groups=D).transpose(1, 2)


def exchanged_by_half(x: Tensor) -> Tensor:
    half, out = x.shape[1] // 2, torch.empty_like(x)
    out[:, :half], out[:, half:] = x[:, -half:], x[:, :-half]
    return out


def laid_by_half(x: Tensor) -> Tensor:
    half, out = x.shape[1] // 2, torch.empty_like(x)
    out[:, :half], out[:, half:] = x[:, :half], x[:, half:]
    return out


def halves(x: Tensor, *order: int) -> Tensor:
    size, half = x.shape[1], x.shape[1] // 2
    parts = x.narrow(1, 0, half), x.narrow(1, half, size - half)
    return torch.cat([parts[n] for n in order], 1)


MOVED: dict[str, Turn] = {
    "hstack": lambda x: torch.hstack([x[:, 3:], x[:, :3]]),
    "column_stack": lambda x: torch.column_stack([x[:, 3:], x[:, :3]]),
    "vstack": lambda x: torch.vstack([x[1:], x[:1]]),
    "hsplit": lambda x: torch.cat(list(torch.hsplit(x, 2))[::-1], 1),
    "narrow": lambda x: torch.cat([x.narrow(1, 3, 3), x.narrow(1, 0, 3)], 1),
    "select": lambda x: torch.stack([x.select(1, i) for i in (3, 1, 0, 5, 2, 4)], 1),
    "pad": lambda x: F.pad(x, (0, 0, 1, -1)),
    "pad_and_slice": lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "setitem": exchanged,
    "copy": exchanged_in_views,
    "setitem_by_half": exchanged_by_half,
    "narrow_by_half": lambda x: halves(x, 1, 0),
    "constant_pad_nd": lambda x: torch.constant_pad_nd(x, (0, 0, 1, -1)),
}
KEPT: dict[str, Turn] = {
    "hstack": lambda x: torch.hstack([x[:, :3], x[:, 3:]]),
    "vstack": lambda x: torch.vstack([x[:1], x[1:]]),
    "hsplit": lambda x: torch.hstack(torch.hsplit(x, 2)),
    "narrow": lambda x: torch.cat([x.narrow(1, 0, 3), x[:, 3:]], 1),
    "select": lambda x: torch.stack([x.select(1, i) for i in range(S)], 1),
    "pad_behind": lambda x: F.pad(x, (0, 0, 0, 2))[:, :S],
    "pad_in_front": lambda x: F.pad(x, (0, 0, 2, 0))[:, 2:],
    "pad_of_features": lambda x: F.pad(x, (1, -1)),
    "setitem": laid_in_place,
    "setitem_by_half": laid_by_half,
    "narrow_by_half": lambda x: halves(x, 0, 1),
    "features": halves_of_features_exchanged,
    "image": image_written_over_text,
    "token_shift": mixed_with_the_token_before,
    "convolution": smeared,
}


def record(turn: Turn, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = around(turn, lambda x: x).eval()
    compiled = torch.compile(model, backend=r3_pass.backend("eager"), dynamic=dynamic)
    session = r3_pass.runtime.attach(compiled, num_slots=B * S)
    with torch.no_grad(), session.step(range(B * S)):
        compiled(torch.randint(VOCAB, (B, S)))
    assert (session.read(range(B * S)) >= 0).all()


@pytest.mark.parametrize("name", MOVED)
def test_moved(name: str) -> None:
    with pytest.raises(r3_pass.RefusedConfiguration, match="another order"):
        record(MOVED[name], dynamic=name.endswith("by_half"))


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    record(KEPT[name], dynamic=name.endswith("by_half"))
