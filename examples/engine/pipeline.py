"""Pipeline parallel: every process has some of the decoder layers, and all of them run the same engine in lockstep.

    torch.distributed.init_process_group(...)
    engine = Engine(model, backend, pipeline=Pipeline(device))       # the same calls in every process

Requests, schedules and samples are the same everywhere; hidden states travel from stage to stage, logits from the last one
to all. What one process alone may find out (a row that is void, a draft) is told to the others, or they would part ways.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_NORMS = ("norm", "final_layernorm", "ln_f")


class Pipeline:
    """This process's stage. The ranks of the default process group are the stages.

    Attributes:
        rank, size: which stage, of how many.
        layers: decoder layers of this stage, once `split`.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.layers: tuple[int, ...] = ()
        self._device = torch.device(device)
        self._objects: Any = dist.new_group(backend="gloo")
        self._shape: tuple[int, int] = (0, 0)
        self._dtype = torch.float32

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1

    def split(self, model: nn.Module) -> None:
        """Leave the stage's layers in a causal model of transformers. They keep their numbers; the others pass on what they get.

        Raises: ValueError for a model that is put together otherwise, or has fewer layers than there are stages.
        """
        whole: Any = model
        decoder, head = whole.get_decoder(), whole.get_output_embeddings()
        layers = getattr(decoder, "layers", None)
        norm = next((name for name in _NORMS if hasattr(decoder, name)), None)
        if not isinstance(layers, nn.ModuleList) or norm is None or len(layers) < self.size:
            raise ValueError(f"{type(model).__name__} has no list of {self.size} layers or more before its last norm.")
        cuts = [len(layers) * n // self.size for n in range(self.size + 1)]
        self.layers = tuple(range(cuts[self.rank], cuts[self.rank + 1]))
        self._shape = (whole.get_input_embeddings().embedding_dim, head.out_features)
        self._dtype = next(layers.parameters()).dtype
        for layer in range(len(layers)):
            if layer not in self.layers:
                layers[layer] = _Passing()
        if not self.last:
            setattr(decoder, norm, nn.Identity())
            whole.set_output_embeddings(nn.Identity())

    # ---- tensors ------------------------------------------------------------------------------------------------
    def nothing(self, tokens: int) -> Tensor:
        """Hidden states of a forward that is nobody's."""
        return torch.zeros(tokens, self._shape[0], dtype=self._dtype, device=self._device)

    def receive(self, tokens: int) -> Tensor:
        """Hidden states [tokens, hidden] of the stage before."""
        hidden = self.nothing(tokens)
        dist.recv(hidden, self.rank - 1)
        return hidden

    def deliver(self, out: Tensor, count: int) -> Tensor:
        """Send hidden states to the next stage, or logits to all.

        Returns: logits [count, vocabulary]."""
        if self.last:
            logits = out[:count].contiguous()
        else:
            dist.send(out.contiguous(), self.rank + 1)
            logits = torch.empty(count, self._shape[1], dtype=self._dtype, device=self._device)
        dist.broadcast(logits, self.size - 1)
        return logits

    # ---- what one process knows ---------------------------------------------------------------------------------
    def gather(self, mine: Any) -> list[Any]:
        """What every stage has, in order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self._objects)
        return found

    def agree(self, mine: Any) -> Any:
        """What the first stage has."""
        said = [mine]
        dist.broadcast_object_list(said, 0, group=self._objects)
        return said[0]


class _Passing(nn.Module):
    """Stands for a layer of another stage."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states
