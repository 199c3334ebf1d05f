"""What `routed_experts` weighs on its way from a rollout fleet to the trainer, and how small it can be made without loss.

    python tests/benchmarks/traffic.py [--tokens 65536] [--gpus 1000] [--rate 2000] [--out results.json]

Two tables. The first is arithmetic: bytes a token of known geometries in each encoding, and what that is for a fleet. The second
encodes real routes, those of the trained model of `examples/mismatch.py` over its held-out text (all of them recorded by r3_pass on
this machine), and decodes them again: bytes a token, and megabytes of int16 a second in one thread. Encodings:

    int16            as `finish` returns them, layers that route only (`save_routes`)
    uint8            where no layer has more than 256 experts
    bits             ceil(log2 E) bits an id
    zlib             uint8, laid out by layer and column, deflated at level 1

The floor beside them is the entropy of an id given its layer and column: no code without a context goes below it.
"""

from __future__ import annotations

import math
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from bench import Bench, arguments, table

import r3_pass

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/mismatch"))

GEOMETRIES = {
    "DeepSeek-R1": (58, 8, 256),
    "Qwen3-235B-A22B": (94, 8, 128),
    "Qwen3-30B-A3B": (48, 8, 128),
}
Rows = npt.NDArray[np.int16]
Encode = Callable[[Rows, int], bytes]
Decode = Callable[[bytes, tuple[int, ...], int], Rows]


def _width(experts: int) -> int:
    return max(1, math.ceil(math.log2(experts)))


def _bits(rows: Rows, experts: int) -> bytes:
    width = _width(experts)
    shifts = np.arange(width - 1, -1, -1)
    return np.packbits((rows.reshape(-1, 1) >> shifts & 1).astype(np.uint8)).tobytes()


def _unbits(data: bytes, shape: tuple[int, ...], experts: int) -> Rows:
    width, count = _width(experts), math.prod(shape)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=count * width).reshape(count, width)
    return (bits @ (1 << np.arange(width - 1, -1, -1))).astype(np.int16).reshape(shape)


def _zlib(rows: Rows, experts: int) -> bytes:
    return zlib.compress(np.ascontiguousarray(rows.astype(np.uint8).transpose(1, 2, 0)).tobytes(), 1)


def _unzlib(data: bytes, shape: tuple[int, ...], experts: int) -> Rows:
    laid = np.frombuffer(zlib.decompress(data), np.uint8).reshape(shape[1], shape[2], shape[0])
    return laid.transpose(2, 0, 1).astype(np.int16)


ENCODINGS: dict[str, tuple[Encode, Decode]] = {
    "int16": (lambda rows, _: rows.tobytes(), lambda data, shape, _: np.frombuffer(data, np.int16).reshape(shape)),
    "uint8": (
        lambda rows, _: rows.astype(np.uint8).tobytes(),
        lambda data, shape, _: np.frombuffer(data, np.uint8).reshape(shape).astype(np.int16),
    ),
    "bits": (_bits, _unbits),
    "zlib": (_zlib, _unzlib),
}


def real_routes(tokens: int) -> tuple[Rows, int]:
    """int16 [tokens, M, K] that a trained model chose over text that it has not seen, and its number of experts."""
    from model import SETUP, load

    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join((library / name).read_bytes() for name in SETUP["held_out"])
    text = (text * -(-tokens // len(text)))[:tokens]
    model = load("moe", torch.float32, "cpu", "batched_mm", "sdpa").requires_grad_(False)
    compiled = torch.compile(model, backend=r3_pass.backend("aot_eager"), dynamic=False)
    length = 512
    session = r3_pass.runtime.attach(compiled, num_slots=length)
    found = []
    for first in range(0, len(text) - length + 1, length):
        with session.step(range(length)):
            compiled(torch.tensor([list(text[first : first + length])]), use_cache=False)
        found.append(session.read(range(length)))
    layers = session.describe().layers
    session.detach()
    return np.ascontiguousarray(np.concatenate(found)[:, list(layers)]), SETUP["moe"]["num_experts"]


def entropy(rows: Rows, experts: int) -> float:
    """Bytes a token of a code that knows how often each expert comes in each layer and column."""
    bits = 0.0
    for layer in range(rows.shape[1]):
        for column in range(rows.shape[2]):
            share = np.bincount(rows[:, layer, column], minlength=experts) / len(rows)
            bits -= float((share[share > 0] * np.log2(share[share > 0])).sum())
    return bits / 8


def timed(run: Callable[[], Any], size: int) -> tuple[Any, float]:
    """What it returns, and megabytes of `size` a second, the best of three."""
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        found = run()
        best = min(best, time.perf_counter() - start)
    return found, size / best / 1e6


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=2000, help="tokens a GPU forwards a second")
    given = parser.parse_args()
    if given.tiny:
        given.tokens = 512
    bench = Bench(given)
    for name, (layers, top_k, experts) in GEOMETRIES.items():
        for encoding, bits in (("int16", 16), ("uint8", 8), ("bits", _width(experts))):
            size = layers * top_k * bits / 8
            moved = {
                "MB/s of a GPU": size * given.rate / 1e6, "GB/s": size * given.rate * given.gpus / 1e9,
                "TB an hour": size * given.rate * given.gpus * 3600 / 1e12,
            }  # fmt: skip
            bench.add("scale", {"model": name, "encoding": encoding, "bytes a token": size, **moved})
    rows, experts = real_routes(given.tokens)
    whole = rows.shape[1] * rows.shape[2] * 2
    for name, (encode, decode) in ENCODINGS.items():
        data, packing = timed(lambda encode=encode: encode(rows, experts), rows.nbytes)  # type: ignore[misc]
        back, unpacking = timed(lambda decode=decode, data=data: decode(data, rows.shape, experts), rows.nbytes)  # type: ignore[misc]
        if not np.array_equal(back, rows):
            raise SystemExit(f"{name} lost something")
        size = len(data) / len(rows)
        bench.add("real", {"encoding": name, "bytes a token": size, "encode, MB/s": packing, "decode, MB/s": unpacking})
    floor = entropy(rows, experts)
    bench.add("entropy", {"bytes a token": floor})
    print(
        table(
            ["model", "encoding", "bytes a token", "MB/s of a GPU", "GB/s of the fleet", "TB an hour"],
            [
                (
                    row["model"], row["encoding"], f"{row['bytes a token']:.0f}", f"{row['MB/s of a GPU']:.2f}",
                    f"{row['GB/s']:.2f}", f"{row['TB an hour']:.2f}",
                )
                for row in bench.rows["scale"]
            ],
        )
    )  # fmt: skip
    print(f"\n{given.gpus} GPUs, {given.rate:.0f} tokens a second each")
    measured = [
        (
            row["encoding"], f"{row['bytes a token']:.1f}", f"{row['bytes a token'] / whole:.2f}", f"{row['encode, MB/s']:.0f}",
            f"{row['decode, MB/s']:.0f}",
        )
        for row in bench.rows["real"]
    ]  # fmt: skip
    measured.append(("floor (entropy by layer and column)", f"{floor:.1f}", f"{floor / whole:.2f}", "", ""))
    print(table(["encoding", "bytes a token", "of int16", "encode, MB/s", "decode, MB/s"], measured))
    print(f"\nreal routes: {len(rows)} tokens, {rows.shape[1]} layers, top {rows.shape[2]} of {experts} experts")
    bench.finish()


if __name__ == "__main__":
    main()
