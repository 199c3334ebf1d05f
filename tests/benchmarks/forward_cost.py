"""What recording adds to a whole decode forward, and what the fused router takes off it again.

    python tests/benchmarks/forward_cost.py [--layers 8] [--out results.json]
    python tests/benchmarks/forward_cost.py --parts blocks --layers 48           # all layers: 61 GB of weights

Qwen3-30B-A3B's geometry with random weights in bfloat16, served by the reference engine (`examples/engine`): one decode of `batch`
sequences at a context of `context` tokens, their tokens random (so that all experts are used), in a CUDA graph. Milliseconds of GPU
time:

    off      the compiler without r3_pass
    on       r3_pass.backend(), in a step whose rows go to their requests: ids of all layers recorded, and written to the host
    fused    r3_pass.backend(fuse_router=True), the same

Two engines of the same code differ by more than recording costs: their memory lies elsewhere, and Inductor chooses some kernels by
chance. So there are several engines of off and of on, made in turn, and each one's decode is captured several times. Replays of
all take turns; a ratio is the median over the rounds of each round's own: the mean of the variant's engines over that of the
others', an engine being its median capture. What recording itself takes is what the same captures take more in a step than
"outside" of one, where they write nothing, beside "off" both times.

`--parts model` compiles the model as one, for this one batch size (minutes for each compilation of 48 layers, so 8 is the default);
`--parts blocks` compiles each layer's MoE block by itself, whose graph serves all layers, and leaves the rest eager. Engines have
modules, KV caches and sessions of their own over the same weights. The floor is the time to read what a decode must read: all
weights but the embedding, and all keys and values, once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from bench import CUDA, Bench, arguments, inner, table
from graphs import floors, microseconds
from qwen3 import (
    BLOCK,
    PARTS,
    attach,
    backend_of,
    build,
    engine_of,
    read_bytes,
    settle,
    sharing_weights,
    unfused,
)

from r3_pass.runtime import SegmentBatch

Times = npt.NDArray[np.float64]
"""Milliseconds by engine, round and capture."""
LIMITS = {"on": ("<=", 1.002), "fused": ("<", 1.0)}


class Decode:
    """One engine's decode, captured several times; all that it needs lives as long as it does."""

    def __init__(self, variant: str, model: Any, given: Any, tokens: np.ndarray) -> None:
        began = time.perf_counter()
        self.backend = backend_of(variant, inner(given))
        blocks = -(-given.context // BLOCK)
        batch = given.batch
        self.engine = engine_of(
            sharing_weights(model), self.backend, given.parts, False, num_blocks=batch * blocks, max_num_seqs=batch
        )
        self.session = attach(self.engine, self.backend)
        self.names = [f"req_{i}" for i in range(batch)]
        block_table = np.arange(batch * blocks).reshape(batch, blocks)
        last = given.context - 1
        self.slots = block_table[:, last // BLOCK] * BLOCK + last % BLOCK
        self.batch = dataclasses.replace(
            self.engine.runner.dummy(batch, blocks), token_ids=tokens, positions=np.full(batch, last), slot_mapping=self.slots,
            block_table=block_table,
        )  # fmt: skip
        self.open: Any = None
        self.logits = torch.zeros(0)
        self.captures: list[Any] = []
        if CUDA:
            for _ in range(given.captures):
                self._capture(batch, blocks)
        else:
            self.replay()
        settle()
        self.seconds = time.perf_counter() - began

    def _capture(self, batch: int, blocks: int) -> None:
        self.engine.runner.capture(batch, blocks)
        graph, static, self.logits = self.engine.runner.graphs[batch]
        for name in ("token_ids", "positions", "slot_mapping", "block_table"):
            static[name].copy_(torch.from_numpy(getattr(self.batch, name)))
        self.captures.append((graph, static, self.logits))

    @property
    def replays(self) -> list[Callable[[], Any]]:
        """One for each capture."""
        return [graph.replay for graph, _, _ in self.captures] if CUDA else [self.replay]

    def replay(self) -> None:
        """The last capture's, whose logits `logits` are."""
        if CUDA:
            self.captures[-1][0].replay()
        else:
            self.logits = self.engine.runner.run(self.batch)

    def rows(self) -> np.ndarray:
        """What one decode records, int16 [batch, layers, top_k]: every layer, and the same from each capture."""
        found: list[np.ndarray] = []
        for replay in self.replays:
            with self.session.step(self.slots, self._segments(0)) if CUDA else contextlib.nullcontext():
                replay()
            found.append(self.session.read(self.slots))
            if not (found[-1][:, list(self.session.describe().layers)] >= 0).all():
                raise SystemExit("a layer was not recorded")
            if not (found[-1] == found[0]).all():
                raise SystemExit("two captures of one decode recorded different rows")
            self.session.assign(self.slots)
        return found[0]

    def record(self) -> None:
        """Have every replay from now on record, in a step that is never left."""
        if CUDA and self.session is not None:
            self.open = self.session.step(self.slots, self._segments(1))
            self.open.__enter__()

    def _segments(self, start: int) -> SegmentBatch:
        count = len(self.names)
        return SegmentBatch(self.names, np.full(count, start), np.ones(count, np.int64))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--parts", choices=PARTS, default="model", help="what is compiled")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--replays", type=int, default=5)
    parser.add_argument("--captures", type=int, default=2, help="of each engine's decode")
    parser.add_argument("--engines", type=int, default=2, help="of off, and of on")
    given = parser.parse_args()
    if given.tiny:
        given.layers, given.batch, given.context, given.rounds, given.replays = 2, 4, 32, 2, 1
    elif not CUDA:
        raise SystemExit("this benchmark measures GPU time: it needs a CUDA device, or --tiny")
    bench = Bench(given)
    floor = floors()
    bench.add("floors", floor)
    with torch.no_grad():
        model = build(given.layers, given.tiny)
        measure(bench, model, floor["memory, GB/s"])
    report(bench)
    bench.finish()


def measure(bench: Bench, model: Any, bandwidth: float) -> None:
    given = bench.given
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, given.batch)
    floor = read_bytes(model, given.batch * given.context) / bandwidth / 1e6
    made: dict[str, list[Decode]] = {"off": [], "on": []}
    rows: dict[str, np.ndarray] = {}

    def make(variant: str) -> None:
        decode = Decode(variant, model, given, tokens)
        print(f"{variant}: compiled and captured in {decode.seconds:.0f} s", flush=True)
        if decode.session is not None:
            rows[variant] = decode.rows()
        made.setdefault(variant, []).append(decode)

    for _ in range(given.engines):
        make("off")
        make("on")
    compare(bench, "on", made, {"floor, ms": floor})
    for variant in ("off", "on"):  # a cache for each takes what memory there is
        del made[variant][1:]
    gc.collect()
    make("fused")
    differ = int((rows["fused"] != rows["on"]).any((1, 2)).sum())
    compare(bench, "fused", made, {"floor, ms": floor, "rows that differ from on": differ})


def compare(bench: Bench, variant: str, made: dict[str, list[Decode]], more: dict[str, Any]) -> None:
    """A variant's engines beside those of "off", outside of steps and in steps."""
    given = bench.given
    names = [name for name in ("off", variant) for _ in made[name]]
    engines = made["off"] + made[variant]
    ours = np.array([name == variant for name in names])

    def share(times: Times) -> float:
        level = np.median(times, axis=2)
        return float(np.median(level[ours].mean(0) / level[~ours].mean(0)))

    outside = measured(engines, given)
    for decode in made[variant]:
        decode.record()
    inside = measured(engines, given)
    row: dict[str, Any] = {"variant": variant, "parts": given.parts, "layers": given.layers, **more}
    row |= {"of off": share(inside), "outside of steps, of off": share(outside)}
    for name, which in (("off", ~ours), (variant, ours)):
        level = np.median(inside[which], axis=2)
        row[f"{name}, ms"] = float(np.median(level.mean(0)))
        row[f"{name}, engines, ms"] = np.median(level, axis=1).tolist()
        row[f"{name}, captures, ms"] = np.median(inside[which], axis=1).tolist()
    decode, off = made[variant][0], made["off"][0]
    row["logits differ by"] = float((decode.logits - off.logits).abs().max())
    row["compiled in, s"] = decode.seconds
    row["not fused"] = unfused(decode.backend)
    row["all, ms"] = {f"{name} {number}": inside[number].tolist() for number, name in enumerate(names)}
    bench.add("forward", row)
    must, limit = LIMITS[variant]
    figure = f"decode forward, {given.layers} layers, compiled {_compiled(given.parts)}, {variant} / off"
    bench.bar(figure, row["of off"], must, limit, explain={"off": off.replay, variant: decode.replay})


def measured(engines: list[Decode], given: Any) -> Times:
    """Replays of all captures of all engines, in turn."""
    for decode in engines:
        for replay in decode.replays:
            replay()
    settle()
    times: list[list[list[float]]] = [[] for _ in engines]
    for number in range(given.rounds):
        for decode, seen in list(zip(engines, times, strict=True))[:: -1 if number % 2 else 1]:
            seen.append([microseconds(replay, given.replays) / 1e3 for replay in decode.replays])
    return np.array(times)


def _compiled(parts: str) -> str:
    return "as one" if parts == "model" else "by MoE block"


def report(bench: Bench) -> None:
    def engines(row: dict[str, Any], name: str) -> str:
        return ", ".join(f"{ms:.3f}" for ms in row[f"{name}, engines, ms"])

    print(
        table(
            ["", "of off", "outside of steps", "its engines, ms", "those of off, ms", "floor, ms", "logits differ by"],
            [
                (
                    row["variant"], f"{row['of off']:.4f}", f"{row['outside of steps, of off']:.4f}",
                    engines(row, row["variant"]), engines(row, "off"), f"{row['floor, ms']:.3f}", f"{row['logits differ by']:.3g}",
                )
                for row in bench.rows["forward"]
            ],
        )
    )  # fmt: skip
    given = bench.given
    print(
        f"\n{given.layers} of 48 layers, compiled {_compiled(given.parts)}, batch {given.batch}, context {given.context}; "
        "one decode in a CUDA graph"
    )
    for row in bench.rows["forward"]:
        for site in row["not fused"]:
            print(f"NOT FUSED {site}")


if __name__ == "__main__":
    main()
