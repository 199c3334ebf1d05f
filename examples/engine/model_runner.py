"""One model's forwards: from scheduled chunks to tensors, through the compiled model or a CUDA graph of it.

Legend: T tokens of the forward (padding included), R sequences, W blocks of the longest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.fx.experimental import _config

from engine.attention import NAME, Paged, Shapes
from engine.pipeline import Pipeline
from engine.scheduler import Chunk
from engine.sequence import Sequence as Request
from engine.support import refuse

Ints = npt.NDArray[np.int64]

_PAD = 8
_SHAPES: Any = _config
_CHECKED_TOKENS = 24
_MAX_SCORES = 1 << 22  # queries times keys of prompts that are attended to as one batch: bounds its memory
_FEW_QUERIES = 128  # the scores of so many take about the memory of the keys and values


@dataclasses.dataclass(eq=False)
class Batch:
    """A forward as arrays on the host; chunks one after the other from token 0, then padding.

    Attributes:
        chunks: those of `query_len` tokens first; none in a dummy run.
        token_ids: int64 [T]; -1 - i where the token is still on the device: the i-th that the forward before sampled.
        positions, slot_mapping: int64 [T]; a slot of -1 is padding.
        block_table: int64 [R, W]; a row for each chunk, in order, and at least one that pads.
        layout: int64 [2 or more, 3], as in `Paged`.
        outputs: int64, indices of the tokens after which one is sampled, chunk by chunk.
        query_len: the runner's, if all chunks have so many tokens (a decode, which a CUDA graph may serve); 0 if not.
    """

    chunks: list[Chunk]
    token_ids: Ints
    positions: Ints
    slot_mapping: Ints
    block_table: Ints
    layout: Ints
    outputs: Ints
    query_len: int


class ModelRunner:
    """A causal model of transformers, its compiled forward and its KV cache.

    Args:
        backend: what torch.compile compiles the forward with.
        query_len: tokens of a sequence in a decode: one, and those that it verifies.
        pipeline: leaves some of the layers here, and has the others elsewhere.

    Attributes:
        sampled: int64, the tokens that the forward before sampled, on the device.
        graphs: by number of sequences: a captured decode, its static inputs, its static logits.

    Raises: ValueError for a model that it cannot serve right.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Any,
        num_blocks: int,
        block_size: int,
        query_len: int,
        pipeline: Pipeline | None = None,
    ) -> None:
        refuse(model)
        self.pipeline = pipeline
        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.block_size = block_size
        self.query_len = query_len
        self.compiled: Callable[..., Any] = torch.compile(model, backend=backend, dynamic=True)
        self.kv: list[tuple[Tensor, Tensor]] = []
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Tensor]] = {}
        self.sampled = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._replace_attention()
        self.allocate(num_blocks)

    # ---- the model's attention ----------------------------------------------------------------------------------
    def _replace_attention(self) -> None:
        """Put the engine's attention into the model, if it then still computes the same.

        Raises: ValueError if not; the model has its own attention again."""
        ids = (torch.arange(_CHECKED_TOKENS, device=self.device) * 7 + 3) % self.vocab_size
        model: Any = self.model
        if model.config._attn_implementation == NAME:  # it was served by another engine
            model.set_attn_implementation("eager")
        before = model.config._attn_implementation
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            expected = model(ids[None], use_cache=False).logits[0].float()
            model.set_attn_implementation(NAME)
            try:
                self.cached = self._find_cached(ids)
                if self.pipeline is not None:
                    self.pipeline.split(model)
                self._check(ids, expected)
            except BaseException:
                model.set_attn_implementation(before)
                raise
            finally:
                self.release()

    def _find_cached(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        probe = Shapes()
        positions = torch.arange(len(ids), device=self.device)
        self.model(ids[None], position_ids=positions[None], use_cache=False, paged=probe)
        if sorted(probe.found) != list(range(len(probe.found))) or not probe.found:
            raise ValueError(
                f"{type(self.model).__name__} has attention that is not transformers' attention interface."
            )
        return [probe.found[layer] for layer in sorted(probe.found)]

    def _check(self, ids: Tensor, expected: Tensor) -> None:
        """Serve a prompt in chunks and single tokens from scattered blocks: logits are those of the model by itself."""
        num_blocks = -(-_CHECKED_TOKENS // self.block_size)
        self.allocate(num_blocks)
        seq = Request("check", ids.tolist(), _CHECKED_TOKENS, 1, block_table=list(range(num_blocks))[::-1])
        found, start = [], 0
        for length in (9, 1, 1, 6, _CHECKED_TOKENS - 17):
            batch = self.batch([Chunk(seq, start, length, length)], [np.array(seq.token_ids[start : start + length])])
            logits = self._run_plain(self.model, batch)
            found.append(logits[:length].float())
            start += length
        error = (torch.cat(found) - expected).norm(dim=-1) / expected.norm(dim=-1)
        tolerance = 1e-3 if self.cached[0][0].dtype.itemsize >= 4 else 0.1
        if not error.median() <= tolerance:  # not the largest: a near-tie between experts may fall either way
            raise ValueError(
                f"{type(self.model).__name__} computes something else with its state in a KV cache of blocks: logits differ by "
                f"{error.median():.1%} for half of the tokens. It keeps other state, or its attention is of a kind that is not "
                "known here."
            )

    @property
    def vocab_size(self) -> int:
        """Token ids that the model takes are below it."""
        model: Any = self.model
        return int(model.get_input_embeddings().num_embeddings)

    # ---- KV cache -----------------------------------------------------------------------------------------------
    def allocate(self, num_blocks: int) -> None:
        """A KV cache of `num_blocks` blocks and a bin for padded tokens."""
        self.kv = []
        for layer, (k, v) in enumerate(self.cached):
            here = self.pipeline is None or layer in self.pipeline.layers
            pages = (num_blocks + 1 if here else 0, self.block_size)
            self.kv.append((k.new_zeros(*pages, *k.shape), v.new_zeros(*pages, *v.shape)))

    def release(self) -> None:
        """Free the KV cache, and the graphs that hold on to it."""
        self.kv = []
        self.graphs = {}

    def move_blocks(self, moved: dict[int, int]) -> None:
        """Copy the KV of blocks to others, none of which is a source."""
        src, dst = (torch.tensor(list(blocks), device=self.device) for blocks in (moved, moved.values()))
        for cache in (tensor for pair in self.kv for tensor in pair if len(tensor)):
            cache[dst] = cache[src]

    # ---- batches ------------------------------------------------------------------------------------------------
    def batch(self, chunks: Sequence[Chunk], token_ids: Sequence[Ints]) -> Batch:
        """Chunks of sequences and their tokens, those with `query_len` tokens (decodes) first."""
        size = self.block_size
        num = next((i for i, chunk in enumerate(chunks) if chunk.length != self.query_len), len(chunks))
        lengths = np.array([chunk.length for chunk in chunks])
        firsts = np.cumsum(lengths) - lengths
        total = int(lengths.sum())
        positions = np.arange(total) + np.repeat([chunk.start for chunk in chunks] - firsts, lengths)
        rows = self._padded_rows(len(chunks)) if num == len(chunks) else len(chunks) + 2
        padded = rows * self.query_len if num == len(chunks) else -(-total // _PAD) * _PAD
        table = np.zeros((rows, max(2, max(len(chunk.seq.block_table) for chunk in chunks))), np.int64)
        for row, chunk in enumerate(chunks):
            table[row, : len(chunk.seq.block_table)] = chunk.seq.block_table
        owner = np.repeat(np.arange(len(chunks)), lengths)
        slots = table[owner, positions // size] * size + positions % size
        outputs = [
            np.arange(first + chunk.length - chunk.num_outputs, first + chunk.length)
            for first, chunk in zip(firsts, chunks, strict=True)
        ]
        return Batch(
            list(chunks),
            _pad(np.concatenate(token_ids), padded, 0),
            _pad(positions, padded, 0),
            _pad(slots, padded, -1),
            table,
            self._layout(chunks, rows if num == len(chunks) else 0),
            np.concatenate(outputs),
            self.query_len if num == len(chunks) else 0,
        )

    def _layout(self, chunks: Sequence[Chunk], rows: int) -> Ints:
        """`Batch.layout`: decodes are one group, `rows` of them with padding; so are a few equally long chunks in a row."""
        groups: list[tuple[int, int, int]] = []
        for chunk in chunks:
            blocks = -(-(chunk.start + chunk.length) // self.block_size)
            num, length, most = groups[-1] if groups else (0, 0, 0)
            most = max(most, blocks)
            scores = (num + 1) * max(chunk.length, _FEW_QUERIES) * most * self.block_size
            if chunk.length == length and (length == self.query_len or scores <= _MAX_SCORES):
                groups[-1] = (num + 1, length, most)
            else:
                groups.append((1, chunk.length, blocks))
        if rows:
            groups[0] = (rows, *groups[0][1:])
        return np.array([*groups, (0, 0, 0)])

    def dummy(self, num_seqs: int, num_blocks: int = 2) -> Batch:
        """A decode of nobody, of so many blocks each: every token is padding."""
        tokens = num_seqs * self.query_len
        zeros = np.zeros(tokens, np.int64)
        return Batch(
            [],
            zeros,
            zeros,
            zeros - 1,
            np.zeros((num_seqs, num_blocks), np.int64),
            np.array([(num_seqs, self.query_len, num_blocks), (0, 0, 0)]),
            np.arange(tokens),
            self.query_len,
        )

    def _padded_rows(self, count: int) -> int:
        """Sequences of a decode with padding: a power of two, two or more, so that few graphs serve all."""
        return max(2, 1 << (count - 1).bit_length())

    # ---- forwards -----------------------------------------------------------------------------------------------
    def run(self, batch: Batch) -> Tensor:
        """One forward, in a CUDA graph if one fits.

        Returns: logits [outputs or more, vocabulary] on the device, in the order of `batch.outputs`."""
        graph = self.graphs.get(len(batch.block_table)) if batch.query_len else None
        if graph is None or batch.block_table.shape[1] > graph[1]["block_table"].shape[1]:
            return self._run_plain(self.compiled, batch)
        captured, static, out = graph
        width = static["block_table"].shape[1]
        wide = np.pad(batch.block_table, ((0, 0), (0, width - batch.block_table.shape[1])))
        for name, value in self._received(dataclasses.replace(batch, block_table=wide)).items():
            if name != "outputs":
                static[name].copy_(value)
        captured.replay()
        if self.pipeline is not None and not self.pipeline.last:
            return self.pipeline.deliver(out, len(batch.outputs))
        logits = out[self._tensor(batch.outputs)]
        return logits if self.pipeline is None else self.pipeline.deliver(logits, len(batch.outputs))

    def _run_plain(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """A forward of all stages without a CUDA graph."""
        out = self._forward(model, self._received(batch), torch.from_numpy(batch.layout))
        return out if self.pipeline is None else self.pipeline.deliver(out, len(batch.outputs))

    def _received(self, batch: Batch) -> dict[str, Tensor]:
        """The inputs of a forward, those from the stage before included."""
        inputs = self._on_device(batch)
        if "hidden" in inputs and self.pipeline is not None:
            inputs["hidden"] = self.pipeline.receive(len(batch.token_ids))
        return inputs

    def capture(self, num_seqs: int, max_blocks: int) -> None:
        """Capture the decode of so many sequences, of `max_blocks` blocks at most, as a CUDA graph."""
        batch = self.dummy(num_seqs, max_blocks)
        static = self._on_device(batch)
        self.run_captured(batch, static, None)
        graph = torch.cuda.CUDAGraph()
        logits = self.run_captured(batch, static, graph)
        self.graphs[num_seqs] = (graph, static, logits)

    def run_captured(self, batch: Batch, static: dict[str, Tensor], graph: torch.cuda.CUDAGraph | None) -> Tensor:
        """A forward of nobody on static inputs: plain, or while a graph captures it. Returns: its logits, static if captured."""
        layout = torch.from_numpy(batch.layout)
        if graph is None:
            return self._forward(self.compiled, static, layout)
        with torch.cuda.graph(graph):
            return self._forward(self.compiled, static, layout)

    def _forward(self, model: Callable[..., Any], inputs: dict[str, Tensor], layout: Tensor) -> Tensor:
        """Logits, or the hidden states of every token where another stage goes on."""
        paged = Paged(self.kv, inputs["slot_mapping"], inputs["positions"], inputs["block_table"], layout)
        with torch.no_grad(), _SHAPES.patch(use_duck_shape=False):  # no graph for sizes that happen to be equal
            out: Tensor = model(
                inputs["token_ids"][None] if "hidden" not in inputs else None,
                inputs_embeds=inputs["hidden"][None] if "hidden" in inputs else None,
                position_ids=inputs["positions"][None],
                use_cache=False,
                logits_to_keep=inputs["outputs"] if self.pipeline is None or self.pipeline.last else 0,
                paged=paged,
            ).logits[0]
        return out

    def _on_device(self, batch: Batch) -> dict[str, Tensor]:
        ids = self._tensor(batch.token_ids)
        if (batch.token_ids < 0).any():
            ids = torch.where(ids < 0, self.sampled[(-1 - ids).clamp_min(0)], ids)
        outputs = _pad(batch.outputs, max(2, -(-len(batch.outputs) // _PAD) * _PAD), 0)
        later = self.pipeline is not None and not self.pipeline.first
        return {
            **({"hidden": self.pipeline.nothing(len(ids))} if later and self.pipeline is not None else {}),
            "token_ids": ids,
            "positions": self._tensor(batch.positions),
            "slot_mapping": self._tensor(batch.slot_mapping),
            "block_table": self._tensor(batch.block_table),
            "outputs": self._tensor(outputs),
        }

    def _tensor(self, array: Ints) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def _pad(array: Ints, length: int, value: int) -> Ints:
    return np.pad(array, (0, length - len(array)), constant_values=value)
