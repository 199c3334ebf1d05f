"""What there is while an engine has a KV cache: the slot mapping and the slot buffer, bound to the compiled graphs.

Legend: L decoder layers, M stored (MoE) layers, K top-k, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from r3_pass.binding import Binding
from r3_pass.errors import BufferLayoutError, RefusedConfiguration
from r3_pass.passes.ops import ERROR_DUPLICATE, STATE_CALLS, STATE_ERRORS, state_size
from r3_pass.runtime.mapping import SlotMapping
from r3_pass.runtime.memory import Placement
from r3_pass.runtime.slots import Geometry, SlotBuffer


class SlotStore:
    """Attributes:
    binding: what graphs see of all this.
    buffer, mapping, num_slots: None without a KV cache; `buffer` also until the layout is known.
    proved: a step has shown that the layout is complete, so it changes no more.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        num_layers: int | None,
        laid_out: Callable[[Geometry], None],
        placement: Placement = "device",
        experts: Mapping[str, int] | None = None,
    ) -> None:
        """Args: laid_out: told of every new layout; experts: as `structure.inspect` takes them."""
        self.buffer: SlotBuffer | None = None
        self.mapping: SlotMapping | None = None
        self.num_slots: int | None = None
        self.proved = False
        self.binding = Binding(model, device, self._lay_out, num_layers=num_layers, experts=experts)
        self._device = device
        self._num_layers = num_layers
        self._laid_out = laid_out
        self._placement = placement
        # What CUDA graphs of a released buffer still read: it tells them to write nothing.
        self._retired: list[tuple[object, ...]] = []

    def wake(self, num_slots: int, max_tokens: int) -> None:
        """A KV cache of this size exists.

        Raises: RefusedConfiguration if the device has no room for what belongs to it; nothing is there then.
        """
        self.release()
        binding = self.binding
        self.proved = False
        try:
            self.mapping = SlotMapping(max_tokens, self._device)
            self.num_slots = num_slots
            binding.mapping = self.mapping.static
            layers = binding.layers or binding.expected()
            top_k = binding.top_k or binding.structure.top_k or 0
            if layers and top_k:
                self._lay_out(layers, top_k)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """The KV cache is gone, and so is all of this."""
        binding = self.binding
        if self.mapping is not None and binding.captured:
            self._retired.append((self.mapping, binding.state, *binding.columns()))
        self.buffer = self.mapping = self.num_slots = None
        binding.buffer = None
        binding.captured = False

    def required(self) -> SlotBuffer:
        """The buffer.

        Raises: RefusedConfiguration while there is none.
        """
        if self.buffer is None:
            if self.num_slots is None:
                raise RefusedConfiguration(
                    "the slot buffer is not laid out: the engine has no KV cache now (released, or not started). Ask again when "
                    "it has served or wakes; if the steps are yours to drive, attach with num_slots=."
                )
            raise RefusedConfiguration(
                "the slot buffer is not laid out: no routing graph has run yet, and the model's config does not say its top-k. "
                "Run one step (all slots -1 will do), then ask again."
            )
        return self.buffer

    @property
    def geometry(self) -> Geometry:
        """The layout of rows, also while there is no buffer."""
        if self.buffer is not None:
            return self.buffer.geometry
        layers = self.binding.layers
        return Geometry(1, self.count_layers(layers), layers, self.binding.top_k)

    @property
    def host_bytes(self) -> int:
        """Of a buffer that lies on the host beside a GPU."""
        return self.buffer.data.nbytes if self.buffer is not None and self._placement == "pinned" else 0

    def count_layers(self, layers: tuple[int, ...]) -> int:
        """L, of a model whose stored layers are these."""
        if self._num_layers is not None:
            return self._num_layers
        container = self.binding.container
        known = self.binding.count_layers(container) if container is not None else 0
        return max(known, layers[-1] + 1)

    def _lay_out(self, layers: tuple[int, ...], top_k: int) -> None:
        """Allocate the buffer for these stored layers, keeping rows that are there; called by the binding at a first graph too."""
        binding = self.binding
        if self.num_slots is None:
            binding.layers, binding.top_k = layers, top_k
            return
        if self.proved and (layers != binding.layers or top_k != binding.top_k):
            raise BufferLayoutError(
                f"a graph routes layers {sorted(set(layers) - set(binding.layers))} with top-k {top_k}; the "
                "buffer was laid out in the first "
                f"step for {len(binding.layers)} layers and top-k {binding.top_k}. Compile all of the model before its first step."
            )
        geometry = Geometry(self.num_slots, self.count_layers(layers), layers, top_k)
        fresh = SlotBuffer(geometry, self._device, self._placement)
        with torch.inference_mode(False):
            state = torch.zeros(state_size(len(layers)), dtype=torch.int32, device=self._device)
        calls = [0] * len(layers)
        if self.buffer is not None:  # another layer of the first step: those before it were written already
            self.buffer.settle()
            at = [layers.index(layer) for layer in self.buffer.geometry.stored]
            fresh.data[:, at, : self.buffer.geometry.top_k] = self.buffer.data
            state[STATE_ERRORS] = binding.state[STATE_ERRORS]
            for column, held in enumerate(at):
                state[STATE_CALLS + held] = binding.state[STATE_CALLS + column]
                calls[held] = binding.calls[column]
        first = self.buffer is None
        binding.layers, binding.top_k = layers, top_k
        binding.bind(fresh.data, state, calls)
        self.buffer = fresh
        if first and binding.tokens and self.mapping is not None:
            self.flag_duplicates(self.mapping.slots(binding.tokens))
        self._laid_out(geometry)

    def flag_duplicates(self, slots: Tensor) -> None:
        """Queue the check that no slot of a mapping on the device stands twice."""
        if self.buffer is None or slots.shape[0] < 2:
            return
        ordered = torch.sort(slots).values
        twice = ((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).any()
        self.binding.state[STATE_ERRORS] |= twice.to(torch.int32) * ERROR_DUPLICATE

    def void(self, tokens: int | None) -> None:
        """The first `tokens` slots of the running step hold nobody's row."""
        if tokens and self.buffer is not None and self.mapping is not None:
            self.buffer.void(self.mapping.slots(tokens))

    def check_integrity(self) -> None:
        """Assert every invariant; for tests."""
        if self.buffer is not None:
            self.buffer.check_integrity()
            assert self.binding.buffer is self.buffer.data
            assert self.buffer.geometry.stored == self.binding.layers
        else:
            assert self.binding.buffer is None
        assert (self.mapping is None) == (self.num_slots is None)
