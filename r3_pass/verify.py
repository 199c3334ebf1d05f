"""Did replay help, and is it right: the mismatch of rollout and trainer, agreement by layer, self-tests with exact answers.

    off = r3_pass.verify.mismatch(rollout_logps, trainer_logps, mask)
    on = r3_pass.verify.mismatch(rollout_logps, replayed_logps, mask)
    print(r3_pass.verify.table({"replay off": off, "replay on": on}))
    print(r3_pass.verify.self_test(compiled, backend, input_ids))

Compare before any optimizer step, on the same weights, on response tokens only.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from r3_pass.errors import InvalidRoutes
from r3_pass.given import Given
from r3_pass.self_tests import SelfTests, self_test

__all__ = ["Agreement", "Mismatch", "SelfTests", "agreement", "draw", "mismatch", "save", "self_test", "table"]

HEADINGS = ("tokens", "mean |d|", "k3 KL", "|d| > 0.1", "F(2)", "p99", "max")


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """How far two log-probabilities of the same sampled tokens are apart; d = trainer - rollout.

    Attributes:
        tokens: how many were compared.
        mean_abs: mean |d|.
        k3: the estimator mean(r - 1 - log r) of KL(rollout || trainer), r = exp(d); signed estimates hide flips, this one cannot.
        above_tenth: fraction of tokens with |d| > 0.1.
        above_factor_2: F(2), fraction with |d| > ln 2: the probability is off by more than a factor of two.
        p99, max: of |d|.
    """

    tokens: int
    mean_abs: float
    k3: float
    above_tenth: float
    above_factor_2: float
    p99: float
    max: float

    def row(self) -> tuple[str, ...]:
        rates = (self.mean_abs, self.k3, self.above_tenth, self.above_factor_2, self.p99, self.max)
        return (str(self.tokens), *(f"{rate:.3g}" for rate in rates))

    def __str__(self) -> str:
        return table({"": self})


def mismatch(rollout: Any, trainer: Any, mask: Any = None) -> Mismatch:
    """Compare the log-probabilities of sampled tokens.

    Args:
        rollout, trainer: floating-point tensors or arrays of one shape, natural logarithms.
        mask: of the same shape, True (or not 0) for response tokens; all tokens by default.

    Raises: ValueError if shapes differ, nothing is left to compare, or a value that is compared is not finite.
    """
    a, b = (torch.as_tensor(x).detach().double().cpu() for x in (rollout, trainer))
    if a.shape != b.shape:
        raise ValueError(f"rollout has the shape {tuple(a.shape)}, trainer {tuple(b.shape)}: one value a token in both")
    if mask is not None:
        kept = torch.as_tensor(mask).detach().cpu().bool()
        if kept.shape != a.shape:
            raise ValueError(f"the mask has the shape {tuple(kept.shape)}, the log-probabilities {tuple(a.shape)}")
        a, b = a[kept], b[kept]
    d = (b - a).flatten()
    if not d.numel():
        raise ValueError("no token is left to compare")
    if not bool(d.isfinite().all()):
        raise ValueError(
            f"{int((~d.isfinite()).sum())} of {d.numel()} compared tokens have a log-probability that is not finite"
        )
    size = d.abs()
    return Mismatch(
        tokens=d.numel(),
        mean_abs=float(size.mean()),
        k3=float((torch.expm1(d) - d).mean()),
        above_tenth=float((size > 0.1).double().mean()),
        above_factor_2=float((size > math.log(2)).double().mean()),
        p99=float(np.quantile(size.numpy(), 0.99)),
        max=float(size.max()),
    )


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How two choices of one layer agree, over the rows that both have.

    Attributes:
        layer: its number in the routes.
        rows: rows that both have.
        equal_sets: fraction of them with the same set of experts.
        overlap: mean fraction of the first one's experts that the second has, too.
        coverage: fraction of the rows that have ids in the second: the others go to the live router.
    """

    layer: int
    rows: int
    equal_sets: float
    overlap: float
    coverage: float


def agreement(native: Any, replayed: Any) -> tuple[Agreement, ...]:
    """Compare routes layer by layer: what the trainer's own routers choose with what the rollout chose, say.

    Args:
        native, replayed: integers [tokens, L, K] or [batch, seq, L, K] of one shape, -1 where nothing was chosen.

    Returns: one entry for each layer in which anything was chosen.
    """
    a, b = (Given(x, "live").routes.movedim(1, 0).cpu() for x in (native, replayed))
    if a.shape != b.shape:
        raise InvalidRoutes(f"the routes to compare have the shapes {tuple(a.shape)} and {tuple(b.shape)}")
    found = []
    for layer in range(a.shape[1]):
        one, other = a[:, layer], b[:, layer]
        first, second = (one >= 0).any(-1), (other >= 0).any(-1)
        both = first & second
        if not bool((first | second).any()):
            continue
        x, y = one[both], other[both]
        shared = ((x.unsqueeze(-1) == y.unsqueeze(-2)) & (x >= 0).unsqueeze(-1)).any(-1).sum(-1)
        k = (x >= 0).sum(-1)
        same = (shared == k) & (k == (y >= 0).sum(-1))
        rows = int(both.sum())
        found.append(
            Agreement(
                layer=layer,
                rows=rows,
                equal_sets=float(same.double().mean()) if rows else math.nan,
                overlap=float((shared / k).double().mean()) if rows else math.nan,
                coverage=float(second.double().mean()),
            )
        )
    return tuple(found)


def table(results: Mapping[str, Mismatch] | Sequence[Agreement]) -> str:
    """Results side by side, a row for each run or layer."""
    if isinstance(results, Mapping):
        rows = [("", *HEADINGS), *((name, *found.row()) for name, found in results.items())]
    else:
        rows = [("layer", "rows", "same set", "overlap", "coverage")]
        rows += [
            (str(r.layer), str(r.rows), f"{r.equal_sets:.4f}", f"{r.overlap:.4f}", f"{r.coverage:.4f}") for r in results
        ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    )


def save(results: Mapping[str, Mismatch] | Sequence[Agreement], path: str | Path) -> Path:
    """Write results as JSON, under the names of their attributes."""
    path = Path(path)
    content: Any = (
        {name: dataclasses.asdict(found) for name, found in results.items()}
        if isinstance(results, Mapping)
        else [dataclasses.asdict(found) for found in results]
    )
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def draw(
    runs: Mapping[str, tuple[Any, Any]],
    path: str | Path,
    mask: Any = None,
    layers: Mapping[str, Sequence[Agreement]] | None = None,
) -> Path:
    """Draw the share of tokens above each |d| for each run, and the share of equal expert sets by layer.

    Args:
        runs: name -> (rollout, trainer) log-probabilities.
        path: .png, .svg or .pdf.
        layers: name -> `agreement`.

    Raises: ImportError without matplotlib (`pip install 'r3_pass[plots]'`).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("verify.draw needs matplotlib: pip install 'r3_pass[plots]'") from error
    figure = Figure(figsize=(10 if layers else 5, 3.6), layout="constrained")
    axes = figure.subplots(1, 2 if layers else 1, squeeze=False)[0]
    for name, (rollout, trainer) in runs.items():
        a, b = (torch.as_tensor(x).detach().double().cpu() for x in (rollout, trainer))
        found = mismatch(a, b, mask)
        size = (b - a).abs() if mask is None else (b - a).abs()[torch.as_tensor(mask).cpu().bool()]
        ordered = np.sort(size.flatten().numpy())
        axes[0].plot(ordered, 1 - np.arange(len(ordered)) / len(ordered), label=f"{name}: k3 {found.k3:.2e}")
    axes[0].set(xscale="symlog", yscale="log", xlabel="|Δ log p| of a token", ylabel="share of tokens above")
    axes[0].set_xscale("symlog", linthresh=1e-3)
    axes[0].set_xlim(left=0)
    axes[0].axvline(0.1, color="grey", linewidth=0.8, linestyle=":")
    axes[0].legend()
    for name, entries in (layers or {}).items():
        axes[1].plot([e.layer for e in entries], [e.equal_sets for e in entries], marker="o", label=name)
    if layers:
        axes[1].set(xlabel="layer", ylabel="tokens with the same expert set", ylim=(None, 1.01))
        axes[1].legend()
    path = Path(path)
    figure.savefig(path)
    return path
