"""A session driven by hand: requests, slots, weights, sleep, and every bad input with nothing lost by it.

The decoder has no attention: the row of a token hangs on the token alone, so a request's truth is that of its tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from decoder import Decoder, Dense, Moe, decoder, prompt, truth
from loop import SLOTS, Loop
from torch import Tensor, nn

import r3_pass
from r3_pass import (
    BufferLayoutError,
    MissingRoutes,
    NoRouterFound,
    PartialCapture,
    R3Error,
    RefusedConfiguration,
    StaleRoutes,
    UnsupportedEngine,
)
from r3_pass.passes.ops import record
from r3_pass.runtime import SavedRows, Segment, SegmentBatch, Session
from r3_pass.runtime.engines.base import EngineAdapter


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.session.check_integrity()
    made.session.detach()


# ---- requests -------------------------------------------------------------------------------------------------------
def test_requests_side_by_side(loop: Loop) -> None:
    """Prefill and decode in one step, padding behind: rows of a neighbour, or of a padded token, at the edges."""
    a, b = prompt(7, 1), prompt(9, 2)
    loop.step(("a", 0, a[:, :4], [3, 9, 1, 0]))
    loop.step(("a", 4, a[:, 4:5], [22]), ("b", 0, b[:, :6], range(40, 46)), padding=3)
    loop.step(("b", 6, b[:, 6:], [7, 8, 63]), ("a", 5, a[:, 5:], [30, 31]))
    rows = loop.session.finish("a", 8)
    assert rows.dtype == np.int16 and rows.shape == (7, 3, 2) and not rows.flags.writeable and rows.flags.c_contiguous
    assert (rows == loop.truth(a)).all()
    assert (loop.session.finish("b", 10) == loop.truth(b)).all()
    assert (loop.session.read([22, 40, 63]) == np.concatenate([loop.truth(a)[[4]], loop.truth(b)[[0, 8]]])).all()


def test_the_last_token_has_no_row(loop: Loop) -> None:
    """num_tokens - 1 rows: the last sampled token was never forwarded. A request of one token has none."""
    tokens = prompt(4)
    loop.step(("a", 0, tokens, range(4)))
    assert (loop.session.finish("a", 4) == loop.truth(tokens)[:3]).all()
    loop.step(("b", 0, tokens, range(4)))
    assert loop.session.finish("b", 1).shape == (0, 3, 2)


def test_padding_is_never_seen(loop: Loop) -> None:
    """Failure class 6: padded rows in slot 0, in the last slot, in a request, in a read."""
    for padding in (1, 5, 2):
        loop.step(("a", 0, prompt(3), [5, 6, 7]), padding=padding)
        assert (loop.session.read(np.setdiff1d(np.arange(SLOTS), [5, 6, 7])) == -1).all()
    with torch.no_grad(), loop.session.step(np.full(4, -1)):
        loop.compiled(prompt(4))
    assert (loop.session.read([-1, 5, -1])[[0, 2]] == -1).all()
    assert (loop.session.abort("a", 9) == loop.truth(prompt(3))).all()


def test_segments_as_columns(loop: Loop) -> None:
    """`SegmentBatch` is the way without an object per request; it must mean the same."""
    tokens = torch.cat([prompt(3, 1), prompt(2, 2)], 1)
    with torch.no_grad(), loop.session.step(range(5), SegmentBatch(("a", "b"), np.array([0, 0]), np.array([3, 2]))):
        loop.compiled(tokens)
    assert (loop.session.finish("b", 3) == loop.truth(prompt(2, 2))).all()
    assert (loop.session.finish("a", 4) == loop.truth(prompt(3, 1))).all()


@pytest.mark.parametrize(
    "mapping",
    [list, np.array, torch.tensor, lambda s: torch.tensor(s, dtype=torch.int32), lambda s: np.array(s, np.uint16)],
)
def test_kinds_of_mappings(loop: Loop, mapping: Callable[[list[int]], Any]) -> None:
    """What an engine has at hand: a list, an array, a tensor, any width."""
    with torch.no_grad(), loop.session.step(mapping([4, 2, 9])):
        loop.compiled(prompt(3))
    assert (loop.session.read(mapping([4, 2, 9])) == loop.truth(prompt(3))).all()


def test_a_mapping_that_the_engine_reuses(loop: Loop) -> None:
    """Failure class 5: a drafter rewrites `slot_mapping` in place before the rows were gathered."""
    slots, tokens = np.array([1, 2, 3]), prompt(3)
    with torch.no_grad(), loop.session.step(slots, [Segment("a", 0, 3)]):
        loop.compiled(tokens)
        slots[:] = 60
    assert (loop.session.finish("a", 4) == loop.truth(tokens)).all()
    assert (loop.session.read([1, 2, 3]) == loop.truth(tokens)).all()


def test_a_step_that_is_entered_again(loop: Loop) -> None:
    """Who ended while it was open the first time has nothing to do with the second."""
    tokens = prompt(4)
    step = loop.session.step(range(4), [Segment("a", 0, 4)])
    with torch.no_grad(), step:
        loop.compiled(tokens)
        assert len(loop.session.abort("a", 1)) == 0
    with torch.no_grad(), step:
        loop.compiled(tokens)
    assert (loop.session.finish("a", 5) == loop.truth(tokens)).all()


def test_rejected_drafts_are_replaced(loop: Loop) -> None:
    """A segment that starts before the end replaces rows, and cuts what lies behind it."""
    tokens, other = prompt(6, 1), prompt(2, 5)
    loop.step(("a", 0, tokens, range(6)))
    loop.step(("a", 3, other, [20, 21]))
    assert (loop.session.finish("a", 6) == loop.truth(tokens[:, :3], other)).all()


def test_abort_gives_the_prefix(loop: Loop) -> None:
    """What was computed may be trained on, also where the request was cancelled."""
    tokens = prompt(5)
    loop.step(("a", 0, tokens, range(5)))
    assert (loop.session.abort("a", 3) == loop.truth(tokens)[:2]).all()
    assert loop.session.abort("a", 3).shape == (0, 3, 2)
    loop.step(("b", 0, tokens, range(5)))
    rows = loop.session.abort("b", 100)
    assert (rows == loop.truth(tokens)).all() and not rows.flags.writeable


def test_preempted_rows_stay(loop: Loop) -> None:
    """Failure class 11: recomputed rows paired with log-probs of the first run."""
    first, again = prompt(5, 1), prompt(5, 2)
    loop.step(("a", 0, first, range(5)))
    loop.session.preempt("a", 5)
    loop.step(("a", 0, again, range(30, 35)))
    assert (loop.session.finish("a", 6) == loop.truth(first[:, :4], again[:, 4:])).all()


def test_steps_without_segments(loop: Loop) -> None:
    """Rows stay in the buffer: for those who read slots themselves."""
    loop_rows = loop.truth(prompt(3))
    with torch.no_grad(), loop.session.step([8, 9, 10]):
        loop.compiled(prompt(3))
    assert (loop.session.read([8, 9, 10]) == loop_rows).all()
    with loop.session.step([]):
        pass
    loop.goes_on()


# ---- slots ----------------------------------------------------------------------------------------------------------
def test_a_prefix_hit_takes_rows_over(loop: Loop) -> None:
    """The skipped positions were never forwarded for this request: their rows are those of whoever filled the slots."""
    shared, mine = prompt(5, 1), prompt(3, 2)
    loop.step(("a", 0, shared, range(5)))
    loop.session.prefix_hit("b", 0, range(4))
    loop.step(("b", 4, mine, [30, 31, 32]))
    loop.session.finish("a", 6)
    assert (loop.session.finish("b", 8) == loop.truth(shared[:, :4], mine)).all()


def test_a_prefix_hit_in_the_middle(loop: Loop) -> None:
    """A request that was forwarded in part goes on with cached blocks."""
    tokens = prompt(6)
    loop.step(("a", 0, tokens, range(6)))
    loop.step(("b", 0, tokens[:, :2], [40, 41]))
    loop.session.prefix_hit("b", 2, [2, 3, 4])
    loop.session.prefix_hit("b", 5, [])
    loop.step(("b", 5, tokens[:, 5:], [42]))
    assert (loop.session.finish("b", 7) == loop.truth(tokens)).all()


def test_rows_taken_over_are_a_copy(loop: Loop) -> None:
    """The slots may get another owner before the request finishes."""
    tokens = prompt(4)
    loop.step(("a", 0, tokens, range(4)))
    loop.session.prefix_hit("b", 0, range(4))
    loop.session.assign(range(4))
    loop.step(("c", 0, prompt(4, 5), range(4)))
    assert (loop.session.finish("b", 5) == loop.truth(tokens)).all()


@pytest.mark.parametrize("position", [0, 2])
def test_a_slot_of_a_new_owner_is_stale(loop: Loop, position: int) -> None:
    """Failure class 7. The request keeps what it had, may forward these tokens itself, and ends well."""
    tokens = prompt(6)
    loop.step(("a", 0, tokens, range(6)))
    loop.step(("b", 0, tokens[:, :1], [40]))
    loop.session.assign([1 + position])
    with pytest.raises(StaleRoutes, match=f"'b', position {1 + position}: the row of slot {1 + position}"):
        loop.session.prefix_hit("b", 1, [1, 2, 3])
    assert (loop.session.read([1 + position]) == -1).all()
    loop.step(("b", 1, tokens[:, 1:], range(41, 46)))
    assert (loop.session.finish("b", 7) == loop.truth(tokens)).all()
    assert (loop.session.finish("a", 7) == loop.truth(tokens)).all()


def test_a_prefix_hit_of_slots_never_written(loop: Loop) -> None:
    """A cache that holds KV from before the attachment."""
    loop.step(("a", 0, prompt(2), [0, 1]))
    with pytest.raises(StaleRoutes, match="position 1: the row of slot 33"):
        loop.session.prefix_hit("b", 0, [0, 33])
    loop.goes_on("b")


def test_assigned_slots_come_alive_by_a_forward(loop: Loop) -> None:
    loop.step(("a", 0, prompt(3), range(3)))
    loop.session.assign([1])
    assert (loop.session.read([0, 2]) == loop.truth(prompt(3))[[0, 2]]).all()
    loop.step(("b", 0, prompt(1, 7), [1]))
    loop.session.prefix_hit("c", 0, [0, 1, 2])
    assert (loop.session.finish("c", 4)[1] == loop.truth(prompt(1, 7))[0]).all()


def test_rows_move_with_their_kv(loop: Loop) -> None:
    """Block copies may overlap: the second block would be read after it was overwritten."""
    tokens = prompt(6)
    loop.step(("a", 0, tokens, range(6)))
    loop.session.move([0, 1, 2, 3], [1, 2, 3, 4])
    assert (loop.session.read(range(6)) == loop.truth(tokens)[[0, 0, 1, 2, 3, 5]]).all()
    loop.session.move([20], [0])
    assert (loop.session.read([0]) == -1).all(), "a void row moves too"


def test_rows_leave_and_come_back(loop: Loop) -> None:
    """Offload and restore: into other slots, of a session that has seen other steps meanwhile."""
    tokens = prompt(4)
    loop.step(("a", 0, tokens, range(4)))
    saved = loop.session.extract([0, 1, 2, 3])
    loop.session.assign(range(4))
    loop.session.insert([10, 11, 12, 13], saved)
    loop.session.prefix_hit("b", 0, range(10, 14))
    assert (loop.session.finish("b", 5) == loop.truth(tokens)).all()


def test_rows_that_do_not_belong_are_refused(loop: Loop) -> None:
    """Rows of other weights, of another layer map, or damaged on their way, would be wrong rows that look right."""
    loop.step(("a", 0, prompt(2), [0, 1]))
    saved = loop.session.extract([0, 1])
    broken = saved.rows.copy()
    broken[0, 0, 0] ^= 1
    wrong = [
        SavedRows(broken, saved.layers, saved.version, saved.checksum),
        SavedRows(saved.rows, (0, 1), saved.version, saved.checksum),
        SavedRows(saved.rows[:, :, :1], saved.layers, saved.version, saved.checksum),
        saved.rows,
    ]
    for rows in wrong:
        with pytest.raises(RefusedConfiguration):
            loop.session.insert([5, 6], rows)
    loop.session.weights_changed("v2")
    with pytest.raises(RefusedConfiguration, match="v2"):
        loop.session.insert([5, 6], saved)
    assert (loop.session.read([5, 6]) == -1).all()
    loop.goes_on()


# ---- weights, sleep, pauses -----------------------------------------------------------------------------------------
def test_new_weights_void_every_slot(loop: Loop) -> None:
    """Failure class 16: rows of the old weights under a prefix hit of the new ones. Running requests keep theirs, tagged."""
    tokens = prompt(6)
    old = loop.truth(tokens)
    loop.step(("a", 0, tokens[:, :3], range(3)))
    loop.model.load_state_dict(decoder(seed=3).state_dict())
    loop.session.weights_changed("v2")
    assert (loop.session.read(range(SLOTS)) == -1).all() and loop.session.version == "v2"
    with pytest.raises(StaleRoutes):
        loop.session.prefix_hit("b", 0, [0])
    loop.step(("a", 3, tokens[:, 3:], range(3, 6)))
    assert loop.session.versions("a") == [(0, None), (3, "v2")]
    assert loop.session.versions("nobody") == []
    assert (loop.session.finish("a", 7) == np.concatenate([old[:3], loop.truth(tokens)[3:]])).all()


def test_sleep_and_wake(loop: Loop) -> None:
    """The KV cache goes and comes back with another size, every row void; a step in between has no slots."""
    loop.step(("a", 0, prompt(3), range(3)))
    loop.session.release()
    with pytest.raises(RefusedConfiguration, match="wake"):
        loop.step(("a", 0, prompt(3), range(3)))
    with pytest.raises(RefusedConfiguration, match="no KV cache"):
        loop.session.read([0])
    with torch.no_grad():
        loop.compiled(prompt(3))
    loop.session.release()
    loop.session.wake(200)
    assert loop.session.geometry.num_slots == 200
    assert (loop.session.read(range(200)) == -1).all()
    with pytest.raises(MissingRoutes):
        loop.session.finish("a", 4)
    loop.goes_on()


def test_max_tokens_may_exceed_the_slots() -> None:
    """A forward that is mostly padding."""
    loop = Loop()
    session = loop.session
    session.wake(8, max_tokens=32)
    loop.step(("a", 0, prompt(3), [1, 2, 3]), padding=29)
    assert (session.finish("a", 4) == loop.truth(prompt(3))).all()
    with pytest.raises(BufferLayoutError, match=r"33 entries.*32 tokens"):
        loop.step(("a", 0, prompt(3), [1, 2, 3]), padding=30)
    session.detach()


def test_paused_forwards_write_nothing(loop: Loop) -> None:
    """Dummy runs, warm-up, a drafter on the target's graphs: inside a step and outside."""
    tokens = prompt(4)

    def call(ids: Tensor) -> None:
        with loop.session.paused():
            loop.compiled(prompt(7, 8))
        loop.compiled(ids)
        with loop.session.paused(), loop.session.paused():
            loop.compiled(prompt(4, 8))

    loop.step(("a", 0, tokens, range(4)), call=call)
    assert (loop.session.finish("a", 5) == loop.truth(tokens)).all()


def test_a_pause_ends_with_its_error(loop: Loop) -> None:
    """A step whose warm-up failed and was caught would go on unrecorded."""
    tokens = prompt(4)

    def call(ids: Tensor) -> None:
        with pytest.raises(KeyError), loop.session.paused():
            raise KeyError
        loop.compiled(ids)

    loop.step(("a", 0, tokens, range(4)), call=call)
    assert (loop.session.finish("a", 5) == loop.truth(tokens)).all()


def test_a_replayed_graph_is_paused_too(loop: Loop) -> None:
    """A captured CUDA graph is replayed without the host's branch: the header of its mapping must say that nothing is written.

    Here the op is called as a replay would.
    """
    loop.step(("a", 0, prompt(4), range(4)))
    binding = loop.session._binding
    ids = torch.zeros(4, 2, dtype=torch.int64)

    def replay() -> None:
        assert binding.buffer is not None
        record(binding.buffer, binding.state, binding.mapping, torch.tensor([0, 1]), [ids, ids])

    binding.captured = True
    with loop.session.step(range(10, 14)):
        with loop.session.paused():
            replay()
        assert (loop.session.read(range(10, 14)) == -1).all()
        replay()
    assert (loop.session.read(range(10, 14))[:, 1:] == 0).all()
    ids += 1
    replay()
    assert (loop.session.read(range(10, 14))[:, 1:] == 0).all(), "a replay after the step wrote"
    mapping, buffer = binding.mapping, binding.buffer
    loop.session.release()
    loop.session.wake(SLOTS)
    assert buffer is not None
    record(buffer, torch.zeros(3, dtype=torch.int32), mapping, torch.tensor([0, 1]), [ids, ids])
    assert (buffer[10:14] == 0).all(), "a graph of the released buffer wrote: its mapping must stay, closed"
    loop.goes_on()


@pytest.mark.parametrize("times", [0, 2])
def test_a_replayed_graph_is_counted(loop: Loop, times: int) -> None:
    """A graph captured without the op, or with two forwards: the host sees neither, the count in the state does."""
    loop.step(("a", 0, prompt(4), range(4)))
    binding = loop.session._binding
    binding.captured = True
    ids = torch.zeros(4, 2, dtype=torch.int64)
    with (
        pytest.raises(PartialCapture, match=f"written \\[{times}, {times}\\] times, expected 1"),
        loop.session.step(range(10, 14), [Segment("b", 0, 4)]),
    ):
        for _ in range(times):
            assert binding.buffer is not None
            record(binding.buffer, binding.state, binding.mapping, torch.tensor([0, 1]), [ids, ids])
    with pytest.raises(StaleRoutes):
        loop.session.finish("b", 5)
    assert loop.session.abort("b", 5).shape == (0, 3, 2)
    assert (loop.session.read(range(10, 14)) == -1).all(), "their KV is new, and no row is"
    assert (loop.session.finish("a", 5) == loop.truth(prompt(4))).all()
    loop.goes_on()


# ---- bad input: the model -------------------------------------------------------------------------------------------
def test_a_dense_model() -> None:
    """Found at attach, not after the weights are loaded and the first step has run (failure class 13)."""
    model = decoder(layers=2, dense=(0, 1))
    with pytest.raises(NoRouterFound, match="Decoder is dense: none of its 2 blocks"):
        r3_pass.runtime.attach(torch.compile(model, backend=r3_pass.backend("eager")), num_slots=SLOTS)
    assert not any("r3" in name for p in model.parameters() for name in vars(p))


def test_more_experts_than_the_dtype_holds() -> None:
    """40000 as int16 is -25536: a void row, or another expert."""

    class Huge(Moe):
        def __init__(self, top_k: int) -> None:
            super().__init__(experts=2, top_k=top_k)
            self.gate = nn.Linear(16, 40_000, bias=False)
            self.up, self.down = nn.Parameter(torch.zeros(40_000, 1, 16)), nn.Parameter(torch.zeros(40_000, 16, 1))

    model = decoder(layers=1, dense=(), moe=lambda k: Huge(k))
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    want = compiled(prompt(3))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    for _ in range(2):
        with pytest.raises(BufferLayoutError, match=r"40000 experts.*32767"), session.step(range(3)):
            compiled(prompt(3))
    session.detach()
    assert torch.equal(compiled(prompt(3)), want)


def test_an_encoder_decoder() -> None:
    """Layers of both number from 0."""
    model = TwoLists(config={"is_encoder_decoder": True}).requires_grad_(False)
    with pytest.raises(RefusedConfiguration, match="encoder-decoder"):
        r3_pass.runtime.attach(model, num_slots=SLOTS)
    part = decoder(config={"is_encoder_decoder": True})  # its decoder alone has the same config
    r3_pass.runtime.attach(part, num_slots=SLOTS).detach()


class TwoRouters(Moe):
    def __init__(self, top_k: int) -> None:
        super().__init__(top_k=top_k)
        self.second = Moe(top_k=top_k)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.second(x)


class Twice(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in (*self.layers, self.layers[1]):
            x = layer(x)
        return self.head(x)


class TwoLists(Decoder):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.more = Decoder(**options).layers

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in (*self.layers, *self.more):
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: decoder(moe=lambda k: TwoRouters(k)), "layer 1 .*routes (twice|a second time)"),
        (lambda: Twice().requires_grad_(False), "layer 1 .*routes (twice|a second time)"),
        (lambda: TwoLists().requires_grad_(False), "two lists of blocks"),
    ],
)
@pytest.mark.parametrize("layers", [False, True])
def test_shapes_that_have_no_place(make: Callable[[], Decoder], reason: str, layers: bool) -> None:
    """CONTRACT.md: two routed MLPs, a layer run twice, two stacks: refused by name, nothing written, the model runs on."""
    model, backend = make(), r3_pass.backend("eager")
    call: Any = model if layers else torch.compile(model, backend=backend)
    if layers:
        for layer in [*model.layers, *getattr(model, "more", [])]:
            layer.compile(backend=backend)
    want = call(prompt(3))
    session = r3_pass.runtime.attach(model, backend=backend, num_slots=SLOTS)
    for _ in range(2):
        with pytest.raises(RefusedConfiguration, match=reason), session.step(range(3)):
            call(prompt(3))
    assert session._store.buffer is None or (session.read(range(3)) == -1).all()
    session.detach()
    assert torch.equal(call(prompt(3)), want)


# ---- bad input: attach ----------------------------------------------------------------------------------------------
def test_attach_twice(loop: Loop) -> None:
    """Two sessions would take each other's rows; the first one goes on."""
    with pytest.raises(RefusedConfiguration, match=r"attached to this Decoder already.*detach"):
        r3_pass.runtime.attach(loop.compiled, num_slots=SLOTS)
    loop.goes_on()
    loop.session.detach()
    loop.session.detach()
    again = r3_pass.runtime.attach(loop.compiled, num_slots=SLOTS)
    again.detach()


def test_an_engine_of_unknown_type() -> None:
    """Names what is known and what can be done."""
    with pytest.raises(UnsupportedEngine, match=r"builtins\.dict.*EngineAdapter"):
        r3_pass.runtime.attach({})
    with pytest.raises(RefusedConfiguration, match="num_slots="):
        r3_pass.runtime.attach(decoder())
    with pytest.raises(RefusedConfiguration, match="does not record"):
        r3_pass.runtime.attach(decoder(), backend="inductor", num_slots=SLOTS)
    for wrong in ({"num_slots": 0}, {"num_slots": 4, "max_tokens": 0}):
        with pytest.raises(ValueError, match="counts from 1"):
            r3_pass.runtime.attach(decoder(), **wrong)


def test_a_backend_that_replays_only() -> None:
    """Its compiled code has no recording in it; that every layer is missing would be found in the first step, but not why."""
    backend = r3_pass.backend("eager", mode="replay")
    for call, given in ((torch.compile(decoder(), backend=backend), None), (decoder(), backend)):
        with pytest.raises(RefusedConfiguration, match=r"mode='replay'.*records none.*mode='both'"):
            r3_pass.runtime.attach(call, backend=given, num_slots=SLOTS)


@pytest.mark.parametrize("call", ["step", "read", "finish", "assign", "weights_changed", "wake"])
def test_a_detached_session_says_so(call: str) -> None:
    """Anything else would look like a session that records nothing."""
    loop = Loop()
    loop.session.detach()
    arguments: dict[str, tuple[Any, ...]] = {"finish": ("a", 3), "weights_changed": ("v",), "wake": (4,)}
    with pytest.raises(RefusedConfiguration, match="attach again"):
        result = getattr(loop.session, call)(*arguments.get(call, ([0],)))
        result.__enter__()


# ---- bad input: a step ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("slots", "segments", "error", "words"),
    [
        ([0, 1, SLOTS], [], BufferLayoutError, f"slot {SLOTS} of token 2 is out of range; expected 0 to {SLOTS - 1}"),
        ([0, -2, 1], [], BufferLayoutError, "slot -2 of token 1"),
        ([4, 5, 4], [], BufferLayoutError, "slot 4 stands twice"),
        ([4, -1, 5], [("b", 0, 2)], BufferLayoutError, "first 2 tokens"),
        ([4, 5, 6], [("b", 0, 2)], BufferLayoutError, "behind them must be -1"),
        ([4, 5], [("b", 0, 3)], BufferLayoutError, "cover 3 tokens, the slot mapping has 2"),
        ([*range(SLOTS), -1], [], BufferLayoutError, "laid out for 64 tokens"),
        ([[0], [1]], [], BufferLayoutError, "vector of integers"),
        ([0.0, 1.0], [], BufferLayoutError, "vector of integers"),
        ([[0], [1, 2]], [], BufferLayoutError, "list that numpy makes no array of"),
        (torch.zeros(2, dtype=torch.bfloat16), [], BufferLayoutError, r"torch.bfloat16\[2\]; expected a vector of integers"),
        (torch.zeros(2, requires_grad=True), [], BufferLayoutError, "vector of integers"),
        (np.array([0, 2**64 - 1], np.uint64), [], BufferLayoutError, "18446744073709551615, which no int64 holds"),
        ([4, 5], [("b", 1, 2)], MissingRoutes, "'b': position 0 comes next, the segment starts at 1"),
        ([4], [("a", 4, 1)], MissingRoutes, "'a': position 3 comes next, the segment starts at 4"),
        ([4, 5], [("b", 0, 1), ("b", 1, 1)], ValueError, "two segments"),
        ([4], [("b", 0, 0)], ValueError, "at least 1"),
        ([4], [("b", -1, 1)], ValueError, "at least 0"),
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_is_not_entered(
    loop: Loop, slots: Any, segments: Any, error: type[Exception], words: str
) -> None:
    """Found on the host before the forward: nothing runs, nothing is written, the next step is as if this one had not been."""
    tokens = prompt(4)
    loop.step(("a", 0, tokens[:, :3], range(3)))
    ran: list[int] = []
    with pytest.raises(error, match=words), loop.session.step(slots, [Segment(*s) for s in segments]):
        ran.append(1)
    assert not ran
    assert (loop.session.read(range(3, SLOTS)) == -1).all()
    loop.step(("a", 3, tokens[:, 3:], [3]))
    assert (loop.session.finish("a", 5) == loop.truth(tokens)).all()
    with pytest.raises(MissingRoutes):
        loop.session.finish("b", 2)
    with pytest.raises(ValueError, match="in a list"):
        loop.session.step([0], Segment("b", 0, 1))  # type: ignore[arg-type]
    with torch.no_grad(), loop.session.step([0], None):
        loop.compiled(prompt(1))
    loop.goes_on()


@pytest.mark.parametrize("tokens", [3, 6])
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_mapping_shorter_or_longer_than_the_forward(loop: Loop, tokens: int, swallowed: bool) -> None:
    """Tokens and slots shifted against each other. Where the engine swallows the forward's error, leaving the step raises."""
    loop.step(("a", 0, prompt(4), range(4)))
    before = loop.session.read(range(4))

    def call(ids: Tensor) -> None:
        try:
            loop.compiled(prompt(tokens, 3))
        except BufferLayoutError:
            if not swallowed:
                raise

    with pytest.raises(R3Error, match=f"ran over {tokens} tokens, the step's slot mapping has 4 entries"):
        loop.step(("a", 4, prompt(4, 2), range(10, 14)), call=call)
    assert (loop.session.read(range(4)) == before).all()
    assert (loop.session.read(range(10, 14)) == -1).all()
    loop.step(("a", 4, prompt(4, 2), range(10, 14)))
    assert (loop.session.finish("a", 9) == loop.truth(prompt(4), prompt(4, 2))).all()
    loop.goes_on()


@pytest.mark.parametrize("swallowed", [False, True])
def test_a_second_forward_in_a_step(loop: Loop, swallowed: bool) -> None:
    """Its rows would overwrite the first one's, under the same slots. Neither is kept: which was meant nobody knows."""

    def call(ids: Tensor) -> None:
        loop.compiled(ids)
        try:
            loop.compiled(prompt(4, 8))
        except RefusedConfiguration:
            if not swallowed:
                raise

    with pytest.raises(R3Error, match="second time in one step"):
        loop.step(("a", 0, prompt(4), range(4)), call=call)
    assert (loop.session.read(range(4)) == -1).all()
    loop.step(("a", 0, prompt(4), range(4)))
    assert (loop.session.finish("a", 5) == loop.truth(prompt(4))).all()
    loop.goes_on()


def bypassed(loop: Loop) -> Callable[[Tensor], Any]:
    return loop.model


def disabled(loop: Loop) -> Callable[[Tensor], Any]:
    return torch._dynamo.disable(loop.model.forward)


def force_eager(loop: Loop) -> Callable[[Tensor], Any]:
    def call(ids: Tensor) -> None:
        with torch.compiler.set_stance("force_eager"):
            loop.compiled(ids)

    return call


def recompilation_limit(loop: Loop) -> Callable[[Tensor], Any]:
    def call(ids: Tensor) -> None:
        with torch._dynamo.config.patch(recompile_limit=1), torch.autograd.set_grad_enabled(True):
            loop.compiled(ids)

    return call


@pytest.mark.parametrize("how", [bypassed, disabled, force_eager, recompilation_limit])
@pytest.mark.parametrize("first", [False, True])
def test_a_step_in_which_nothing_compiled_ran(
    loop: Loop, how: Callable[[Loop], Callable[[Tensor], Any]], first: bool
) -> None:
    """Failure class 1. An error at that step, not missing rows at the end of the request."""
    if first:
        loop.step(("a", 0, prompt(4), range(4)))
        loop.session.assign(range(4))
    with torch.no_grad():
        loop.compiled(prompt(4))
    with pytest.raises(NoRouterFound, match="2 were expected"):
        loop.step(("b", 0, prompt(4), range(4)), call=how(loop))
    assert (loop.session.read(range(4)) == -1).all()
    loop.step(("b", 0, prompt(4), range(4)))
    assert (loop.session.finish("b", 5) == loop.truth(prompt(4))).all()
    if how is not recompilation_limit:  # from there on Dynamo compiles no other shape of this model
        loop.goes_on()


@pytest.mark.parametrize("when", [0, 1])
def test_a_layer_that_does_not_run_in_one_step(when: int) -> None:
    """One layer of two fell back to eager: rows of the other, with the old owner's of the first, would look whole."""
    model, backend = decoder(config={"num_experts_per_tok": 2}), r3_pass.backend("eager")
    for layer in model.layers:
        layer.compile(backend=backend)
    session = r3_pass.runtime.attach(model, backend=backend, num_slots=SLOTS)

    def step(seed: int) -> None:
        with torch.no_grad(), session.step(range(4), [Segment(seed, 0, 4)]):
            model(prompt(4, seed))

    if when:
        step(0)
    held, model.layers[2]._compiled_call_impl = model.layers[2]._compiled_call_impl, None
    for _ in range(2):
        with pytest.raises(PartialCapture, match=r"1 of 2 MoE layers[\s\S]*layer 2: "):
            step(1)
        assert (session.read(range(4)) == -1).all()
    model.layers[2]._compiled_call_impl = held
    step(2)
    for seed in (0, 2) if when else (2,):
        assert (session.finish(seed, 5) == truth(model, prompt(4, seed))).all()
    with pytest.raises(MissingRoutes):
        session.finish(1, 5)
    session.detach()


def test_a_forward_that_raises(loop: Loop) -> None:
    """An engine that stopped in the middle of a step: the error is its own, what was not written in whole is void (it may have
    written KV), the next step is sound."""
    loop.step(("a", 0, prompt(4), range(4)))

    class Stop(Exception):
        pass

    def before(ids: Tensor) -> None:
        raise Stop

    def after(ids: Tensor) -> None:
        loop.compiled(ids)
        raise Stop

    for call, kept in ((after, loop.truth(prompt(4, 5))), (before, -1)):
        with pytest.raises(Stop):
            loop.step(("a", 4, prompt(4, 5), range(4)), call=call)
        assert (loop.session.read(range(4)) == kept).all()
    loop.step(("a", 4, prompt(2, 6), [10, 11]))
    assert (loop.session.finish("a", 7) == loop.truth(prompt(4), prompt(2, 6))).all()
    loop.goes_on()


def test_a_forward_that_raises_between_two_layers() -> None:
    """Slots of which only the first layers were written hold two requests' rows in one."""
    model, backend = decoder(config={"num_experts_per_tok": 2}), r3_pass.backend("eager")
    for layer in model.layers:
        layer.compile(backend=backend)
    session = r3_pass.runtime.attach(model, backend=backend, num_slots=SLOTS)
    with torch.no_grad(), session.step(range(4)):
        model(prompt(4))

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.layers[2].norm.register_forward_pre_hook(stop)
    model.layers[2]._compiled_call_impl = None
    with torch.no_grad(), pytest.raises(KeyboardInterrupt), session.step(range(4)):
        model(prompt(4, 1))
    hook.remove()
    model.layers[2].compile(backend=backend)
    assert (session.read(range(4)) == -1).all()
    with torch.no_grad(), session.step(range(4)):
        model(prompt(4, 1))
    assert (session.read(range(4)) == truth(model, prompt(4, 1))).all()
    session.detach()


@pytest.mark.parametrize(("way", "many"), [("whole", False), ("by layer", False), ("by layer, another compiler", True)])
def test_many_record_ops_write_nothing_to_the_host(way: str, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a forward has one record op for each of many layers, their rows are gathered at its end."""
    model = decoder(layers=7)
    backend = r3_pass.backend((lambda module, inputs, **_: module.forward) if many else "eager")
    call: Any = torch.compile(model, backend=backend) if way == "whole" else model
    if way != "whole":
        for layer in model.layers:
            layer.compile(backend=backend)
    session = r3_pass.runtime.attach(call, backend=backend, num_slots=SLOTS)
    asked: list[int] = []
    monkeypatch.setattr(session._delivery, "stage", lambda entries, geometry, num_rows: asked.append(num_rows))
    for start in (0, 4):
        with torch.no_grad(), session.step(range(start, start + 4), [Segment("a", start, 4)]):
            call(prompt(4))
    assert asked == ([] if many else [4])  # not in the first step, whose layout is not proved before it ends
    assert (session.finish("a", 9) == np.concatenate([truth(model, prompt(4))] * 2)).all()
    session.detach()


def test_a_step_that_was_never_left(loop: Loop) -> None:
    """An engine thread that died holds a step open: the next one says so, rows that are there can be had, a new session works."""
    loop.step(("a", 0, prompt(4), range(4)))
    lost = loop.session.step(range(4, 8))
    lost.__enter__()
    with pytest.raises(RefusedConfiguration, match=r"open already[\s\S]*abort\(\), then detach\(\)"):
        loop.goes_on()
    for call in (loop.session.release, lambda: loop.session.wake(10)):
        with pytest.raises(RefusedConfiguration, match="inside an open step"):
            call()
    assert (loop.session.abort("a", 5) == loop.truth(prompt(4))).all()
    loop.session.detach()
    lost.__exit__(None, None, None)
    loop.session = r3_pass.runtime.attach(loop.compiled, num_slots=SLOTS)
    loop.goes_on()


def test_a_step_inside_a_step(loop: Loop) -> None:
    """The inner one's slots would be the outer one's."""

    def call(ids: Tensor) -> None:
        with pytest.raises(RefusedConfiguration, match="open already"), loop.session.step([9]):
            pass
        loop.compiled(ids)

    loop.step(("a", 0, prompt(4), range(4)), call=call)
    assert (loop.session.finish("a", 5) == loop.truth(prompt(4))).all()


def test_detach_inside_a_step(loop: Loop) -> None:
    """The step's end finds nothing to do, and raises nothing over the engine's own error."""
    with loop.session.step(range(4)):
        loop.compiled(prompt(4))
        with loop.session.paused():
            loop.session.detach()
    with torch.no_grad():
        loop.compiled(prompt(4))


# ---- bad input: requests --------------------------------------------------------------------------------------------
def test_finish_of_an_unknown_request(loop: Loop) -> None:
    """Also before anything ran, and a second time."""
    with pytest.raises(MissingRoutes, match="'a'"):
        loop.session.finish("a", 3)
    assert loop.session.abort("a", 3).shape[0] == 0
    loop.step(("a", 0, prompt(4), range(4)))
    loop.session.finish("a", 5)
    for _ in range(2):
        with pytest.raises(MissingRoutes, match="'a' is unknown"):
            loop.session.finish("a", 5)
    loop.session.preempt("nobody", 4)
    loop.goes_on()


def test_finish_with_missing_rows(loop: Loop) -> None:
    """The request stays registered: it can be continued, or aborted for what there is."""
    loop.step(("a", 0, prompt(4), range(4)))
    with pytest.raises(MissingRoutes, match="7 rows were expected, 4 exist"):
        loop.session.finish("a", 8)
    loop.step(("a", 4, prompt(3, 2), range(4, 7)))
    assert (loop.session.finish("a", 8) == loop.truth(prompt(4), prompt(3, 2))).all()


def test_a_gap(loop: Loop) -> None:
    """What a prefix cache skipped must be reported; a row between would be invented."""
    loop.step(("a", 0, prompt(4), range(4)))
    with pytest.raises(MissingRoutes, match="prefix_hit"):
        loop.step(("a", 5, prompt(1), [9]))
    with pytest.raises(MissingRoutes, match="position 4 comes next"):
        loop.session.prefix_hit("a", 5, [0])
    loop.session.prefix_hit("a", 4, [0])
    loop.step(("a", 5, prompt(1), [9]))
    assert (loop.session.finish("a", 7) == loop.truth(prompt(4), prompt(4)[:, :1], prompt(1))).all()


@pytest.mark.parametrize("slots", [[SLOTS], [-2], [0.5], [[1]]])
def test_slots_that_cannot_be(loop: Loop, slots: Any) -> None:
    """Nothing is changed by them: no row reserved that never comes, no slot voided."""
    loop.step(("a", 0, prompt(4), range(4)))
    before = loop.session.read(range(SLOTS))
    calls: list[Callable[[], Any]] = [
        lambda: loop.session.read(slots),
        lambda: loop.session.assign(slots),
        lambda: loop.session.extract(slots),
        lambda: loop.session.move(slots, [0]),
        lambda: loop.session.move([0], slots),
        lambda: loop.session.prefix_hit("a", 4, slots),
        lambda: loop.session.insert(slots, loop.session.extract([0])),
    ]
    for call in calls:
        with pytest.raises((ValueError, R3Error)):
            call()
    assert (loop.session.read(range(SLOTS)) == before).all()
    loop.session.check_integrity()
    assert (loop.session.finish("a", 5) == loop.truth(prompt(4))).all()


@pytest.mark.parametrize("num_tokens", [0, -3])
def test_numbers_of_tokens_that_cannot_be(loop: Loop, num_tokens: int) -> None:
    """A ValueError, as for any argument that makes no sense by itself; the request stays."""
    loop.step(("a", 0, prompt(4), range(4)))
    for call in (loop.session.finish, loop.session.abort, loop.session.preempt):
        with pytest.raises(ValueError, match="num_tokens"):
            call("a", num_tokens)
    assert (loop.session.finish("a", 5) == loop.truth(prompt(4))).all()


# ---- threads --------------------------------------------------------------------------------------------------------
def test_requests_finish_in_another_thread(loop: Loop) -> None:
    """An engine's output thread finishes requests while its loop goes on."""
    done: dict[int, np.ndarray] = {}
    ready = threading.Semaphore(0)

    def finish() -> None:
        for n in range(20):
            ready.acquire()
            done[n] = loop.session.finish(n, 5)

    thread = threading.Thread(target=finish)
    thread.start()
    for n in range(20):
        loop.step((n, 0, prompt(4, n), range(4 * (n % 3), 4 * (n % 3) + 4)))
        ready.release()
    thread.join()
    assert all((done[n] == loop.truth(prompt(4, n))).all() for n in range(20))


@pytest.mark.cuda
@pytest.mark.parametrize("busy", ["forward", "step"])
def test_a_forward_on_a_stream_of_its_own(busy: str) -> None:
    """An engine's compute stream: rows gathered before it wrote them, or a mapping read too early, are older steps' rows."""
    model = decoder(config={"num_experts_per_tok": 2})
    model = model.cuda()
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    stream = torch.cuda.Stream()
    for seed in range(5):
        ids = prompt(8, seed).cuda()
        torch.cuda.synchronize()
        if busy == "step":
            torch.cuda._sleep(50_000_000)
        slots = np.random.default_rng(seed).permutation(SLOTS)[:8]
        with torch.no_grad(), session.step(slots, [Segment(seed, 0, 8)]), torch.cuda.stream(stream):
            if busy == "forward":
                torch.cuda._sleep(50_000_000)
            compiled(ids)
        assert (session.finish(seed, 9) == truth(model, ids)).all()
    session.detach()


# ---- pauses ---------------------------------------------------------------------------------------------------------
def test_a_step_inside_a_pause_is_not_entered(loop: Loop) -> None:
    """It would run without recording, or the pause would record."""
    with (
        loop.session.paused(),
        pytest.raises(RefusedConfiguration, match=r"while session\.paused"),
        loop.session.step([1]),
    ):
        pass
    loop.goes_on()


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("thread", [True, False])
def test_a_pause_that_outlives_its_step(loop: Loop, forward: bool, thread: bool) -> None:
    """The slots held another request's rows: the unrecorded forward left them there, as those of this one."""
    loop.step(("old", 0, prompt(4), range(4)))
    opened, over = threading.Event(), threading.Event()
    pause = loop.session.paused()

    def other() -> None:
        with loop.session.paused():
            opened.set()
            over.wait()

    beside = threading.Thread(target=other)
    with pytest.raises(RefusedConfiguration, match="a pause was open when the step ended"):  # noqa: SIM117
        with loop.session.step(range(4), [Segment("new", 0, 4)]):
            if thread:
                beside.start()
                opened.wait()
            else:
                pause.__enter__()
            if forward:
                loop.compiled(prompt(4, 8))
    if thread:
        over.set()
        beside.join()
    else:
        pause.__exit__(None, None, None)
    assert (loop.session.read(range(4)) == -1).all() and loop.session._binding.tokens is None
    loop.compiled(prompt(4, 8))
    assert (loop.session.read(range(4)) == -1).all(), "the end of the pause resurrected its step"
    with pytest.raises(MissingRoutes):
        loop.session.finish("new", 5)
    loop.goes_on()


# ---- bad input: what is left behind ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"num_slots": 16.5}, ValueError),
        ({"num_slots": "16"}, ValueError),
        ({"num_slots": True}, ValueError),
        ({"num_slots": 16, "max_tokens": 2.5}, ValueError),
        ({"num_slots": 16, "num_layers": 0}, ValueError),
        ({"num_slots": 16, "backend": 5}, ValueError),
        ({"num_slots": 16, "num_layers": 1}, RefusedConfiguration),
        ({"num_slots": 10**14}, RefusedConfiguration),
    ],
)
def test_a_failed_attach_leaves_nothing(given: dict[str, Any], error: type[Exception]) -> None:
    """The weights stayed marked, and no attach could succeed any more."""
    model = decoder(config={"num_experts_per_tok": 2, "num_hidden_layers": 3})
    with pytest.raises(error):
        r3_pass.runtime.attach(model, **given)
    assert not any(vars(p) for p in model.parameters())
    r3_pass.runtime.attach(model, num_slots=SLOTS).detach()


class Failing(EngineAdapter):
    """An engine whose methods cannot be wrapped."""

    num_slots = max_tokens = 8
    uninstalled = 0

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    @classmethod
    def accepts(cls, engine: object) -> bool:
        return False

    @property
    def model(self) -> nn.Module:
        return self._model

    def install(self, session: Any) -> None:
        raise RuntimeError("no such method")

    def uninstall(self) -> None:
        self.uninstalled += 1


def test_an_adapter_that_fails_to_install_is_undone() -> None:
    adapter = Failing(decoder())
    with pytest.raises(RuntimeError, match="no such method"):
        r3_pass.runtime.attach(adapter)
    assert adapter.uninstalled and not any(vars(p) for p in adapter.model.parameters())


@pytest.mark.parametrize("given", [(0,), (-3,), (2.5,), (None,), (8, 0)])
def test_wake_with_numbers_that_cannot_be(loop: Loop, given: tuple[Any, ...]) -> None:
    """The cache that is there was released first."""
    loop.step(("a", 0, prompt(3), range(3)))
    with pytest.raises(ValueError, match="counts from 1"):
        loop.session.wake(*given)
    assert (loop.session.finish("a", 4) == loop.truth(prompt(3))).all()
    loop.goes_on()


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.move([0, 1], [20, 20]),
        lambda s: s.insert([22, 22], s.extract([0, 1])),
        lambda s: s.finish(["a"], 3),
        lambda s: s.finish("a", "7"),
        lambda s: s.abort("a", 7.0),
        lambda s: s.preempt("a", None),
        lambda s: s.step(range(4), 3),
        lambda s: s.step(range(4), ("a", 0, 4)),
        lambda s: s.step(range(4), [("a", 0)]),
        lambda s: s.step(range(4), [Segment(["a"], 0, 4)]),
        lambda s: s.prefix_hit("b", 0, 3),
        lambda s: s.prefix_hit("b", 0, None),
        lambda s: s.prefix_hit("b", 0, [[1, 2]]),
        lambda s: s.prefix_hit("b", 0, (i for i in (1, 2))),
        lambda s: s.prefix_hit(["b"], 0, [1]),
    ],
)
def test_arguments_that_make_no_sense(loop: Loop, call: Callable[[Session], Any]) -> None:
    """A ValueError that says so, and nothing is lost by it."""
    loop.step(("a", 0, prompt(4), range(4)))
    with pytest.raises(ValueError):
        call(loop.session)
    assert (loop.session.finish("a", 5) == loop.truth(prompt(4))).all()
    assert "b" not in loop.session._delivery.table
    loop.goes_on()


def test_a_refused_prefix_hit_registers_nobody(loop: Loop) -> None:
    loop.step(("a", 0, prompt(4), range(4)))
    with pytest.raises(StaleRoutes):
        loop.session.prefix_hit("b", 0, [30])
    with pytest.raises(MissingRoutes, match="unknown"):
        loop.session.finish("b", 1)
    loop.goes_on()


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_a_prefix_hit_without_a_slot(loop: Loop, make: Callable[[list[int]], Any]) -> None:
    """-1 has had no owner; its row was called void, after the rows before it were queued."""
    tokens = prompt(6)
    loop.step(("a", 0, tokens, range(6)))
    loop.step(("b", 0, tokens[:, :2], [20, 21]))
    for name, start in (("b", 2), ("b", 1), ("c", 0)):
        with pytest.raises(ValueError, match=rf"'{name}', position {start + 1}: -1 is no slot.*from {start} on"):
            loop.session.prefix_hit(name, start, make([start, -1, 4]))
    assert "c" not in loop.session._delivery.table
    loop.session.prefix_hit("b", 2, make([2, 3, 4, 5]))
    assert (loop.session.finish("b", 7) == loop.truth(tokens)).all()


# ---- geometry -------------------------------------------------------------------------------------------------------
def test_the_number_of_layers() -> None:
    """Trailing dense layers count; a number that is given wins over what the config says."""
    for options, given, layers in (
        ({"layers": 4, "dense": (0, 3)}, None, 4),
        ({"config": {"num_hidden_layers": 5, "num_experts_per_tok": 2}}, None, 5),
        ({"config": {"num_hidden_layers": 5, "num_experts_per_tok": 2}}, 7, 7),
    ):
        model = decoder(**options)
        compiled = torch.compile(model, backend=r3_pass.backend("eager"))
        session = r3_pass.runtime.attach(compiled, num_slots=SLOTS, num_layers=given)
        with torch.no_grad(), session.step(range(3)):
            compiled(prompt(3))
        rows = session.read(range(3))
        assert rows.shape == (3, layers, 2) and session.geometry.num_layers == layers
        assert (rows[:, 1] >= 0).all() and (rows[:, 3:] == -1).all() and (rows[:, 0] == -1).all()
        session.detach()


def test_bytes_before_the_top_k_is_known() -> None:
    """Allocation waits for the first graph; a guess would be too small."""
    model = decoder()
    compiled = torch.compile(model, backend=r3_pass.backend("eager"))
    session = r3_pass.runtime.attach(compiled, num_slots=SLOTS)
    with pytest.raises(RefusedConfiguration, match=r"does not say its top-k.*Run one step"):
        session.geometry.nbytes  # noqa: B018
    with torch.no_grad(), session.step(np.full(3, -1)):
        compiled(prompt(3))
    assert session.geometry.nbytes == (SLOTS + 1) * 2 * 2 * 2
    assert (session.read(range(SLOTS)) == -1).all()
    session.detach()


def test_bytes_are_known_from_the_config(loop: Loop) -> None:
    """An engine asks before its first forward, to size its KV cache."""
    assert loop.session.geometry.bytes_per_slot == 2 * 2 * 2
    assert loop.session.geometry.row_shape == (2, 2)


def test_dense_mlps_are_no_moe() -> None:
    """The helper's own claim: a dense block has no router."""
    assert not hasattr(Dense(), "gate")
