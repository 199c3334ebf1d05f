"""Run a model under the pass and hand back what was recorded: the one way in which these tests record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import r3_pass

SLOTS = 64

Rows = npt.NDArray[np.int16]


class Recorder:
    """A compiled model and its session.

    Attributes:
        backend: for its report.
        compiled: what to call; outside of `rows` it runs without recording.
    """

    def __init__(
        self, model: nn.Module, inner: str, layers: Sequence[nn.Module] = (), fuse_router: bool = False
    ) -> None:
        self.backend = r3_pass.backend(inner, fuse_router=fuse_router)
        self.compiled: Callable[..., Any] = compiled(model, self.backend, layers)
        self.session = r3_pass.runtime.attach(model if layers else self.compiled, backend=self.backend, num_slots=SLOTS)

    def rows(self, tokens: int, call: Callable[[], Any]) -> tuple[Any, Rows]:
        """One step: the call's result and int16 [tokens, L, K], after checking that no other slot was written."""
        self.session.weights_changed(None)
        slots = torch.randperm(SLOTS)
        with self.session.step(slots[:tokens]):
            result = call()
        assert (self.session.read(slots[tokens:]) == -1).all()
        return result, self.session.read(slots[:tokens])


@contextlib.contextmanager
def recording(
    model: nn.Module, inner: str = "aot_eager", layers: Sequence[nn.Module] = (), fuse_router: bool = False
) -> Iterator[Recorder]:
    """Compile the whole model, or each of `layers`, and attach; everything is taken back at the end."""
    recorder = Recorder(model, inner, layers, fuse_router)
    try:
        yield recorder
        recorder.session.check_integrity()
    finally:
        recorder.session.detach()
        for layer in layers:
            layer._compiled_call_impl = None


def compiled(model: nn.Module, backend: Any, layers: Sequence[nn.Module] = ()) -> Callable[..., Any]:
    """torch.compile for the whole model, or for each of its layers by itself."""
    if not layers:
        return torch.compile(model, backend=backend)
    for layer in layers:
        layer.compile(backend=backend)
    return model


def same_rows(rows: Rows, truth: dict[int, Tensor], ordered: bool = True) -> str:
    """What is wrong with recorded rows; "" if every row and layer is as it was routed, and everything else -1.

    Args:
        rows: int16 [T, L, K].
        truth: int64 [T, k] by layer, k <= K.
    """
    if not set(truth) <= set(range(rows.shape[1])):
        return f"recorded {rows.shape[1]} layers, but {sorted(truth)} route"
    for layer in range(rows.shape[1]):
        got = torch.from_numpy(rows[:, layer].astype(np.int64))
        want = truth.get(layer, got[:, :0])
        chosen, padding = got[:, : want.shape[1]], got[:, want.shape[1] :]
        if not ordered:
            chosen, want = chosen.sort(-1).values, want.sort(-1).values
        if not torch.equal(chosen, want):
            differ = int((chosen != want).any(-1).sum())
            return f"layer {layer}: {differ} of {len(want)} rows differ, e.g. {chosen[:3].tolist()} for {want[:3].tolist()}"
        if (padding != -1).any():
            return f"layer {layer}: {padding[:3].tolist()} in columns that were not routed"
    return ""


def same_outputs(a: Any, b: Any) -> bool:
    """Bit for bit, in every tensor of a tuple or dict; there must be one."""
    left, right = ([t for t in torch.utils._pytree.tree_leaves(x) if isinstance(t, Tensor)] for x in (a, b))
    return len(left) > 0 and len(left) == len(right) and all(map(torch.equal, left, right))
