"""`session.self_test()`: a right recording passes, and every way in which one could be wrong fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from decoder import VOCAB, Decoder, Moe, decoder, prompt
from torch import Tensor, nn

import r3_pass
from r3_pass.runtime import Segment
from r3_pass.runtime.session import Session

Rows = np.ndarray[Any, Any]
SEVERAL = {"layers": 4, "top_k": [2, 2, 3, 2], "config": {"vocab_size": VOCAB}}


@pytest.fixture
def attached() -> Iterator[Callable[[nn.Module], Session]]:
    opened: list[Session] = []

    def attach(model: nn.Module) -> Session:
        opened.append(r3_pass.runtime.attach(torch.compile(model, backend=r3_pass.backend("eager")), num_slots=32))
        return opened[-1]

    yield attach
    for session in opened:
        session.detach()


@pytest.mark.parametrize("batch", [(), (prompt(9),)], ids=["default", "given"])
def test_a_right_recording(batch: tuple[Tensor, ...], attached: Callable[[nn.Module], Session]) -> None:
    """Every row of every layer is compared, by the layer's own selection, with its margin; the slots are void afterwards."""
    session = attached(decoder(**SEVERAL))
    result = session.self_test(*batch)
    rows = batch[0].numel() if batch else 16
    assert result.ok and [(r.layer, r.rows, r.equal, r.near_ties) for r in result.layers] == [
        (layer, rows, rows, 0) for layer in (1, 2, 3)
    ]
    assert all(r.selection == "topk" and r.margin > 1e-4 for r in result.layers)
    assert f"layer 2: {rows} of {rows} rows equal (topk, smallest margin" in str(result)
    assert (session.read(range(rows)) == -1).all()


def shifted(rows: Rows) -> Rows:
    return np.roll(rows, 1, axis=0)


def swapped(rows: Rows) -> Rows:
    return rows[:, [0, 3, 2, 1]]


def one_altered(rows: Rows) -> Rows:
    rows = rows.copy()
    rows[4, 1, 1] = next(e for e in range(8) if e not in rows[4, 1])
    return rows


def reversed_order(rows: Rows) -> Rows:
    rows = rows.copy()
    rows[:, 3, :2] = rows[:, 3, 1::-1]
    return rows


def one_column_for_all(rows: Rows) -> Rows:
    rows = rows.copy()
    rows[:, 1, 1] = rows[:, 1, 0]
    return rows


WRONG: list[tuple[Callable[[Rows], Rows], set[int]]] = [
    (shifted, {1, 2, 3}),
    (swapped, {1, 3}),
    (one_altered, {1}),
    (reversed_order, {3}),
    (one_column_for_all, {1}),
]


@pytest.mark.parametrize(("alter", "layers"), WRONG, ids=[alter.__name__ for alter, _ in WRONG])
def test_a_wrong_recording(
    alter: Callable[[Rows], Rows],
    layers: set[int],
    attached: Callable[[nn.Module], Session],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error shows each layer, and which of them are wrong."""
    session = attached(decoder(**SEVERAL))
    real = session.read
    monkeypatch.setattr(session, "read", lambda slots: alter(real(slots)))
    with pytest.raises(r3_pass.RefusedConfiguration, match="the self-test failed") as error:
        session.self_test(prompt(9))
    lines = [line for line in str(error.value).splitlines() if line.startswith("layer")]
    assert {int(line[6]) for line in lines if "9 of 9 rows equal" not in line} == layers
    if alter is one_altered:
        assert "layer 1: 8 of 9 rows equal (topk" in lines[0]


class Tied(Moe):
    """Experts 0 and 1 score all but the same, and are the best two of every token; experts 2 and 3 are far behind."""

    def __init__(self, gap: float) -> None:
        super().__init__(experts=4, top_k=1)
        self.gap = gap

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        logits = self.gate(flat) * 1e-9 + torch.tensor([5.0, 5.0 - self.gap, 0.0, 1.0])
        weights, ids = logits.topk(1, dim=-1)
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
        return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights).view(x.shape)


@pytest.mark.parametrize(
    ("gap", "expert", "ties"), [(1e-5, 1, 9), (1e-2, 1, None), (1e-5, 3, None)], ids=["near tie", "clear", "another"]
)
def test_near_ties(
    gap: float,
    expert: int,
    ties: int | None,
    attached: Callable[[nn.Module], Session],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The runner-up in place of the best is no error where they all but tie; a third expert is one, however near these two are."""
    session = attached(decoder(layers=2, moe=lambda k: Tied(gap)))
    real = session.read

    def other(slots: Any) -> Rows:
        rows = real(slots)
        rows[:, 1] = expert
        return rows

    monkeypatch.setattr(session, "read", other)
    if ties is None:
        with pytest.raises(r3_pass.RefusedConfiguration, match="0 of 9 rows equal"):
            session.self_test(prompt(9))
    else:
        (result,) = session.self_test(prompt(9)).layers
        assert (result.equal, result.near_ties, result.ok) == (0, ties, True) and result.margin < 1e-4


class Groups(Moe):
    """Two groups of four experts: the better group is selected before the experts are."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        probs = self.gate(flat).softmax(-1)
        group = probs.view(-1, 4, 2).amax(-1).topk(2, dim=-1).indices
        kept = torch.zeros(len(flat), 4).scatter(1, group, 1.0).repeat_interleave(2, dim=1)
        weights, ids = (probs * kept).topk(2, dim=-1)
        self.seen = group
        hidden = torch.relu(torch.einsum("td,tkfd->tkf", flat, self.up[ids]))
        return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[ids], weights).view(x.shape)


def test_the_selection_of_a_group_is_not_the_routers(
    attached: Callable[[nn.Module], Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording of the groups that were kept equals a selection that the layer did make, but not one among its experts."""
    model = decoder(layers=2, moe=lambda k: Groups(top_k=k))
    session = attached(model)
    assert session.self_test(prompt(9)).ok
    real = session.read

    def groups(slots: Any) -> Rows:
        rows = real(slots)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model(prompt(9))
        rows[:, 1] = model.layers[1].mlp.seen.numpy()
        return rows

    monkeypatch.setattr(session, "read", groups)
    with pytest.raises(r3_pass.RefusedConfiguration, match="the self-test failed"):
        session.self_test(prompt(9))


class Noisy(Moe):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


def test_a_router_with_noise_cannot_be_compared(attached: Callable[[nn.Module], Session]) -> None:
    """A second run chooses otherwise: the test has to say so, not to pass."""
    session = attached(decoder(layers=2, moe=lambda k: Noisy(top_k=k)))
    with pytest.raises(r3_pass.RefusedConfiguration, match="the self-test failed"):
        session.self_test(prompt(9))


def test_what_it_refuses(attached: Callable[[nn.Module], Session]) -> None:
    session = attached(decoder())
    with pytest.raises(r3_pass.RefusedConfiguration, match=r"Pass one: session\.self_test\(inputs\)"):
        session.self_test()
    with pytest.raises(r3_pass.RefusedConfiguration, match="needs a tensor"):
        session.self_test("a prompt")
    with torch.no_grad(), session.step(range(3), [Segment("a", 0, 3)]):
        session._call(prompt(3))
    with pytest.raises(r3_pass.RefusedConfiguration, match="requests are running"):
        session.self_test(prompt(3))


def test_layers_that_are_compiled_by_themselves() -> None:
    """The oracle runs them uncompiled, too."""
    model: Decoder = decoder(**SEVERAL)
    backend = r3_pass.backend("eager")
    for layer in model.layers:
        layer.compile(backend=backend)
    session = r3_pass.runtime.attach(model, backend=backend, num_slots=32)
    assert session.self_test(prompt(9)).ok
    session.detach()
