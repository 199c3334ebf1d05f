"""One attachment: the steps of an engine in, `routed_experts` out.

The session is the face, and decides nothing: `store` has the buffer and the slot mapping while there is a KV cache, `step` what
begins and ends with a forward, `delivery` the copies on their way and the rows of each request.

Legend: T tokens in the step, L decoder layers, M stored (MoE) layers, K top-k, S slots.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from r3_pass.description import DTYPE, Description, describe_tag, fingerprint
from r3_pass.errors import R3Error, RefusedConfiguration
from r3_pass.report import GraphRecord, Report, SiteEntry
from r3_pass.runtime.agreement import agree, check_group
from r3_pass.runtime.arrivals import past_experts
from r3_pass.runtime.coverage import reasons_of
from r3_pass.runtime.delivery import Delivery
from r3_pass.runtime.engines.base import NO_PROBE, EngineAdapter
from r3_pass.runtime.hooked import FORM, HookedRouter
from r3_pass.runtime.inputs import batch_of, count, distinct, first_position, token_count, without_padding
from r3_pass.runtime.inputs import length as length_of
from r3_pass.runtime.memory import Placement
from r3_pass.runtime.refusals import Deployment
from r3_pass.runtime.saved import SavedRows, restore, save
from r3_pass.runtime.segments import Segment, SegmentBatch
from r3_pass.runtime.self_test import SelfTest, compare, probe, tokens_of
from r3_pass.runtime.slots import Geometry, SlotBuffer, Slots
from r3_pass.runtime.step import Step, Steps
from r3_pass.runtime.store import SlotStore
from r3_pass.version import __version__

Rows = npt.NDArray[np.int16]


class Session:
    """Made by `r3_pass.runtime.attach`. All methods may be called from any thread; a lock orders them.

    Attributes:
        version: tag of the weights that make rows now (see `weights_changed`).
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        num_slots: int | None,
        max_tokens: int | None,
        num_layers: int | None = None,
        adapter: EngineAdapter | None = None,
        call: Any = None,
        placement: Placement = "device",
        graphs: Callable[[], Iterable[GraphRecord]] = tuple,
    ) -> None:
        if num_slots is not None:
            num_slots, max_tokens = (
                count("num_slots", num_slots),
                count("max_tokens", num_slots if max_tokens is None else max_tokens),
            )
        if num_layers is not None:
            num_layers = count("num_layers", num_layers)
        self.version: Hashable = None
        self._lock = threading.RLock()
        self._device = device
        self._adapter = adapter
        self._call = call
        self._given_graphs = graphs
        self._hooked: dict[int, HookedRouter] = {}
        self._delivery = Delivery(device)
        experts = adapter.experts if adapter is not None else None
        self._store = SlotStore(
            model, device, num_layers, lambda g: self._delivery.laid_out(g, self.version), placement, experts
        )
        self._binding = self._store.binding
        self._delivery.named = self._binding.named
        self._steps = Steps(self._lock, device, self._store, self._delivery, reasons_of(self._graphs))
        if num_slots is not None and max_tokens is not None:
            try:
                self._store.wake(num_slots, max_tokens)
                if (
                    num_layers is not None
                    and self._binding.structure.main_container is not None
                    and not self._binding.expected()
                ):
                    raise RefusedConfiguration(
                        f"num_layers={num_layers} leaves out every layer that holds experts, of which the first is "
                        f"{min(map(str, self._binding.structure.experts))}. Pass the number of all decoder layers."
                    )
            except BaseException:
                self._binding.release_weights()
                raise

    # ---- layout -------------------------------------------------------------------------------------------------
    @property
    def geometry(self) -> Geometry:
        """Shape and bytes of the slot buffer.

        Raises: RefusedConfiguration while they are not known: before the first graph has shown the router's top-k, or without
            a KV cache.
        """
        with self._lock:
            return self._store.required().geometry

    @property
    def host_bytes(self) -> int:
        """Host memory that rows take now: those of running requests, the page-locked blocks that copies arrive in, and the slot
        buffer with `placement="pinned"`."""
        with self._lock:
            return self._delivery.host_bytes + self._store.host_bytes

    def describe(self) -> Description:
        """What the rows mean and whose they are, for whoever trains on them; `print` it, or send its `to_json()` along.

        Raises: RefusedConfiguration while the layout is not known, as `geometry`.
        """
        with self._lock:
            self._usable()
            binding = self._binding
            if not binding.layers or not binding.top_k:
                self._store.required()
            routed = [binding.routed.get(layer, (None, None)) for layer in binding.layers]
            return Description(
                model=type(binding.model).__name__,
                fingerprint=fingerprint(binding.model),
                weights=describe_tag(self.version),
                num_layers=self._store.count_layers(binding.layers),
                top_k=binding.top_k,
                layers=binding.layers,
                layer_top_k=tuple(top_k for top_k, _ in routed),
                num_experts=tuple(experts for _, experts in routed),
                dtype=DTYPE,
                r3_pass=__version__,
            )

    def report(self) -> Report:
        """What is recorded of each layer and which way it takes: the graphs that the engine compiled, or a hook of its routers."""
        with self._lock:
            self._usable()
            hooked = [
                SiteEntry(layer, hook.sites[0].module, hook.sites[0].num_experts, hook.sites[0].top_k, FORM, None, True)
                for layer, hook in self._hooked.items()
            ]
            return Report(self._graphs(), hooked=hooked)

    def _graphs(self) -> tuple[GraphRecord, ...]:
        """Those of the backend that `attach` knew, and of those whose graphs ran."""
        known = {id(record): record for record in (*self._given_graphs(), *self._binding.graphs)}
        return tuple(known.values())

    # ---- steps --------------------------------------------------------------------------------------------------
    def step(self, slot_mapping: Slots, segments: SegmentBatch | Iterable[Segment] | None = None) -> Step:
        """Around exactly one forward of the model. Rows are written at its end: in the middle of it slots have those from before.

        Args:
            slot_mapping: int [T], KV slot of each token in flattened order, -1 for padding; on the host, or on the model's device.
            segments: which tokens are whose, one after the other from index 0; their rows go to their requests. What follows
                them in the mapping must be -1. None: rows stay in the buffer only.

        Raises, when entered: BufferLayoutError for a mapping that cannot be, MissingRoutes for a gap, and what an earlier step
            found out too late to raise itself; RefusedConfiguration inside `paused`. When left: PartialCapture or NoRouterFound if
            a layer was not written, RefusedConfiguration if a pause is still open. ValueError for segments that are none.
        """
        return Step(self._steps, slot_mapping, batch_of(segments))

    def _usable(self) -> None:
        self._steps.usable()

    def _all_arrived(self) -> SlotBuffer:
        """The buffer, once it is known that no step so far has a fault."""
        buffer = self._store.required()
        self._delivery.collect(buffer, wait=True)
        self._delivery.arrivals.raise_failure()
        return buffer

    def hook(
        self, layer: int, weight: Callable[[], nn.Parameter], module: str, num_experts: int, top_k: int
    ) -> HookedRouter:
        """A function that an engine calls in each forward with the ids [T, top_k] of one layer that no graph shows.

        Args:
            layer: decoder layer.
            weight: returns a parameter of the layer's experts as it is now, whose name tells the layer.
            module: path of the router, for messages.
            num_experts: how many experts the ids number.
        """
        with self._lock:
            self._usable()
            self._hooked[layer] = HookedRouter(self._binding, weight, module, num_experts, top_k)
            return self._hooked[layer]

    @property
    def written(self) -> tuple[int, ...]:
        """The decoder layers that the last step's forward was seen to write, whether the step failed or not."""
        with self._lock:
            binding = self._binding
            return tuple(layer for layer, calls in zip(binding.layers, binding.calls, strict=True) if calls)

    # ---- requests -----------------------------------------------------------------------------------------------
    def prefix_hit(self, request_id: Hashable, start: int, slots: Slots) -> None:
        """Take over the rows that a prefix-cache hit skipped, from the slots that hold its KV.

        Args:
            request_id: the request.
            start: first position that was skipped; the request has all before it.
            slots: int [n], slot of each skipped position, in order.

        Raises: MissingRoutes for a gap; StaleRoutes if a row is void: here on a CPU, by `finish` elsewhere; ValueError for slots
            on the host that are none, -1 among them. The request is then as it was.
        """
        with self._lock:
            self._usable()
            length = length_of(slots)
            if length:
                buffer = self._store.required()
                batch = batch_of(SegmentBatch((request_id,), (start,), (length,)))
                without_padding(request_id, start, slots)
                self._delivery.take_over(buffer, batch, slots)

    def assign(self, slots: Slots) -> None:
        """These slots were handed to a new owner: their rows are void until they are written again."""
        with self._lock:
            self._usable()
            if self._store.buffer is not None:
                self._store.buffer.void(slots)
                if self._steps.open is not None:  # its forward may still write to them
                    self._store.buffer.settle()

    def move(self, src_slots: Slots, dst_slots: Slots) -> None:
        """KV was copied from the first to the second slots: the rows go along."""
        with self._lock:
            self._usable()
            distinct(dst_slots)
            if self._store.buffer is not None:
                self._store.buffer.move(src_slots, dst_slots)

    def extract(self, slots: Slots) -> SavedRows:
        """The rows of these slots, to travel with KV that leaves the cache. Waits for the device."""
        with self._lock:
            self._usable()
            saved = save(self._store.required(), slots, self.version)
            self._all_arrived()
            return saved

    def insert(self, slots: Slots, rows: object) -> None:
        """KV came back into these slots: its rows with it.

        Raises: RefusedConfiguration if the rows are of another layer map, top-k or weight version, or are damaged.
        """
        with self._lock:
            self._usable()
            distinct(slots)
            restore(self._store.required(), slots, rows, self.version)

    def preempt(self, request_id: Hashable, num_tokens: int) -> None:
        """The request will be forwarded again; rows of its first num_tokens - 1 positions that were exported stay what they are.

        Args:
            num_tokens: all of its tokens, those included that a forward under way makes and that will be handed out: their
                log-probabilities go with the rows that exist now. Of drafts under way it counts those that will be accepted: learn
                that first.
        """
        with self._lock:
            self._usable()
            num_tokens = token_count(request_id, num_tokens)
            if self._delivery.table is not None:
                self._delivery.table.preempt(request_id, num_tokens)

    def finish(self, request_id: Hashable, num_tokens: int, start: int = 0) -> Rows:
        """The routing of a finished request.

        Args:
            num_tokens: all of the request, the last one sampled and not forwarded; rows past it (a batch in flight) are cut.
            start: position of the first row to return, for callers that have those before it (an earlier turn's).

        Returns: int16 [num_tokens - 1 - start, num_layers, top_k], read-only. Row t is the token at position start + t.
        Raises: MissingRoutes if a row is missing or the request is unknown (nothing is lost: `abort` still returns what is there);
            StaleRoutes if a row came from a slot without an owner's row.
        """
        with self._lock:
            self._usable()
            num_tokens = token_count(request_id, num_tokens)
            start = first_position(request_id, start, num_tokens)
            rows = self._delivery.finish(self._store.buffer, request_id, num_tokens, start)
            self._steps.forget(request_id)
            return self._expand(rows)

    def abort(self, request_id: Hashable, num_tokens: int, start: int = 0) -> Rows:
        """The rows that an aborted request has, from position `start` on without a gap; it is forgotten.

        Returns: as `finish`, or fewer rows: then its length says so, and so does the log.
        """
        with self._lock:
            self._usable()
            num_tokens = token_count(request_id, num_tokens)
            start = first_position(request_id, start, num_tokens)
            self._steps.forget(request_id)
            if self._delivery.table is None:
                return np.full((0, 0, 0), -1, np.int16)
            return self._expand(self._delivery.abort(self._store.buffer, request_id, num_tokens, start))

    def _expand(self, rows: Rows) -> Rows:
        expanded = self._store.geometry.expand(rows)
        expanded.flags.writeable = False
        return expanded

    def read(self, slots: Slots) -> Rows:
        """The rows of these slots as they are now; waits for the device.

        Returns: int16 [len(slots), num_layers, top_k], -1 where nothing was captured.
        """
        with self._lock:
            self._usable()
            rows = self._store.required().gather(slots).cpu().numpy()
            geometry = self._all_arrived().geometry
            if (error := past_experts(rows, self._binding.layers, self._binding.named)) is not None:
                raise error
            return geometry.expand(rows)

    def self_test(self, *args: Any, **kwargs: Any) -> SelfTest:
        """Record one batch, and compare it with what the uncompiled model chooses for the same batch.

            print(session.self_test())                  # or session.self_test(input_ids, use_cache=False)

        For start-up: the rows of slots 0, 1, ... are overwritten and void afterwards. Where an engine compiles the forward
        by itself, its adapter has a batch and slots for it (`EngineAdapter.probe`). Of tensor-parallel ranks, every one calls
        this, also those whose session is idle: all record, and their rows must be the same.

        Args:
            args, kwargs: what the compiled model is called with; by default, token ids for a model whose config has a vocabulary.

        Raises: RefusedConfiguration if a row is wrong, naming the layers (near-ties are no errors), if ranks choose different
            experts, if requests are running, or if no batch can be made.
        """
        return self._self_test(self._adapter, args, kwargs)

    def _self_test(self, adapter: EngineAdapter | None, args: Any = (), kwargs: Any = None) -> SelfTest:
        with self._lock:
            self._usable()
            table = self._delivery.table
            if table is not None and len(table):
                raise RefusedConfiguration(
                    "self_test overwrites slots, and requests are running. Call it before the first request."
                )
        ranks = adapter.deployment if adapter is not None else Deployment()
        if adapter is None:
            return self._tested(*self._batch(args, kwargs or {}), ranks, None)
        if ranks.tensor_parallel > 1:
            check_group(ranks, adapter.group)
        if args or kwargs:
            raise RefusedConfiguration("self_test: this session's engine makes the batch: call self_test().")
        with adapter.probe() as (slots, call):
            return self._tested(slots, call, call, ranks, adapter.group)

    def _batch(self, args: Any, kwargs: Any) -> tuple[npt.NDArray[np.int64], Callable[[], Any], Callable[[], Any]]:
        """Slots, the compiled call and the eager one, of a model that is called as its users do."""
        num_slots, model = self._store.num_slots, self._binding.model
        if self._call is None or num_slots is None:
            raise RefusedConfiguration(NO_PROBE)
        if not args and not kwargs:
            args = (probe(model, num_slots, self._device),)
        return np.arange(tokens_of(args, kwargs)), lambda: self._call(*args, **kwargs), lambda: model(*args, **kwargs)

    def _tested(
        self,
        slots: npt.NDArray[np.int64],
        call: Callable[[], Any],
        eager: Callable[[], Any],
        ranks: Deployment,
        group: Any,
    ) -> SelfTest:
        recorded: Rows | R3Error
        try:
            with torch.no_grad(), self.step(slots):
                call()
            recorded = self.read(slots)
        except R3Error as error:
            if ranks.tensor_parallel == 1:
                raise
            recorded = error
        if ranks.tensor_parallel > 1:
            recorded = agree(recorded, group)
        assert not isinstance(recorded, R3Error)
        self.assign(slots)
        binding = self._binding
        return compare(binding.blocks(), binding.experts_shown(), recorded, eager)

    # ---- life cycle ---------------------------------------------------------------------------------------------
    def weights_changed(self, tag: Hashable) -> None:
        """New weights: every slot's row is void; rows that running requests have stay. `tag` names the new version."""
        with self._lock:
            self._usable()
            self._steps.none_open("weights_changed")
            self._delivery.collect(self._store.buffer, wait=True)
            if self._store.buffer is not None:
                self._store.buffer.void_all()
            self._binding.claim()
            self.version = tag
            self._delivery.new_version(tag)

    def versions(self, request_id: Hashable) -> list[tuple[int, Hashable]]:
        """Which weights made the rows of a running request: (first position, tag of `weights_changed`) of each run of them."""
        with self._lock:
            self._usable()
            return self._delivery.versions(request_id)

    def release(self) -> None:
        """The KV cache is freed: so is the buffer. Copies in flight are drained; requests that were running are dropped."""
        with self._lock:
            self._usable()
            self._steps.none_open("release")
            self._release()

    def _release(self) -> None:
        self._delivery.release()
        self._store.release()

    def wake(self, num_slots: int, max_tokens: int | None = None) -> None:
        """A KV cache of `num_slots` slots exists again, every row void; compiled graphs are bound to it without recompilation."""
        with self._lock:
            self._usable()
            self._steps.none_open("wake")
            num_slots = count("num_slots", num_slots)
            max_tokens = num_slots if max_tokens is None else count("max_tokens", max_tokens)
            self._delivery.release()
            self._store.wake(num_slots, max_tokens)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Forwards inside write nothing: dummy runs, warm-up, a drafter that shares the target's graphs."""
        with self._lock:
            self._usable()
            binding = self._binding
            binding.paused += 1
            if binding.tokens is not None and binding.captured and self._store.mapping is not None:
                self._store.mapping.close()
        try:
            yield
        finally:
            with self._lock:
                binding.paused -= 1
                goes_on = not binding.paused and binding.tokens is not None
                if goes_on and binding.captured and self._store.mapping is not None:
                    self._store.mapping.open(binding.tokens or 0)

    def detach(self) -> None:
        """Restore everything: the engine's methods, the model's weights; the compiled model runs its plain graphs again."""
        if self._adapter is not None:
            self._adapter.uninstall()
        with self._lock:
            if self._steps.detached:
                return
            self._binding.tokens = None
            self._release()
            self._binding.release_weights()
            self._steps.detached = True

    def check_integrity(self) -> None:
        """Assert every invariant of the session's parts; for tests."""
        with self._lock:
            self._store.check_integrity()
            self._delivery.check_integrity()
            assert self._steps.open is not None or self._binding.tokens is None
