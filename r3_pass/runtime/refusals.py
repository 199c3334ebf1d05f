"""Deployments that cannot be recorded: one table of where, what, why and what to do instead.

An adapter states the facts of its engine as a `Deployment`; `attach` refuses by this table before anything is changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from r3_pass.errors import RefusedConfiguration


@dataclasses.dataclass(frozen=True)
class Deployment:
    """How an engine runs the model, as far as routing depends on it. The default: one process, whose KV stays where it is.

    Attributes:
        pipeline_parallel: stages among which the decoder layers are split ...
        pipeline_rank: ... which of them this is ...
        stage_layers: ... and which decoder layers it runs. Then `finish` and `abort` return `StageRows`, and the adapter merges
            those of all stages (`merge_stages`) where a request's output is built.
        context_parallel: ranks among which the tokens of one sequence are split, in prefill or decode.
        tensor_parallel: ranks that hold slices of each layer and route every token alike ...
        tensor_parallel_rank: ... and which of them this is. Only rank 0 records; the sessions of the others are idle.
        expert_parallel: ranks among which the experts of a layer are split ...
        global_expert_ids: ... and the ids in each rank's graph are those of the whole model all the same.
        layer_devices: where decoder layers lie, as far as the engine places them: "cuda:0", "cpu", "disk".
        gathered_tokens: MoE layers run over tokens of other ranks too (data-parallel attention) ...
        maps_gathered_tokens: ... and the adapter gives `step` a slot mapping of all of them, -1 for those of other ranks.
        moves_kv: KV leaves the cache or comes from elsewhere (offload, transfer between instances) ...
        carries_rows: ... and the adapter sends its rows along (`extract`, `insert`).
        splits_decode: prefill and decode run in different engines. Rows have to come along too (`carries_rows`).
        token_slots: each token of a forward has a slot of its own in the KV cache.
        opaque_routers: names of operators or modules that choose experts inside, where no graph shows the ids.
    """

    pipeline_parallel: int = 1
    pipeline_rank: int = 0
    stage_layers: tuple[int, ...] = ()
    context_parallel: int = 1
    tensor_parallel: int = 1
    tensor_parallel_rank: int = 0
    expert_parallel: int = 1
    global_expert_ids: bool = False
    layer_devices: tuple[str, ...] = ()
    gathered_tokens: bool = False
    maps_gathered_tokens: bool = False
    moves_kv: bool = False
    carries_rows: bool = False
    splits_decode: bool = False
    token_slots: bool = True
    opaque_routers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises: ValueError for a rank that there is not."""
        if not 0 <= self.tensor_parallel_rank < self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel_rank={self.tensor_parallel_rank} is none of tensor_parallel={self.tensor_parallel} ranks."
            )
        if not 0 <= self.pipeline_rank < self.pipeline_parallel:
            raise ValueError(
                f"pipeline_rank={self.pipeline_rank} is none of pipeline_parallel={self.pipeline_parallel} stages."
            )
        if list(self.stage_layers) != sorted(set(self.stage_layers)) or (
            self.stage_layers and self.stage_layers[0] < 0
        ):
            raise ValueError(f"stage_layers are decoder layers, ascending, got {self.stage_layers}.")

    @property
    def exports(self) -> bool:
        """Whether this rank records and hands out rows."""
        return self.tensor_parallel_rank == 0

    @property
    def is_stage(self) -> bool:
        """Whether it hands out the rows of some layers only."""
        return self.pipeline_parallel > 1


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A row of the table.

    Attributes:
        what: the deployment, in the words of the README.
        why: what would be wrong with the rows.
        instead: what to do.
        applies: whether a deployment is one of these.
        found: the fact, as the message names it.
    """

    what: str
    why: str
    instead: str
    applies: Callable[[Deployment], bool]
    found: Callable[[Deployment], str]


REFUSALS = (
    Refusal(
        "pipeline parallel",
        "each stage has only its own layers of a row",
        "Run with pipeline_parallel=1, or let the adapter of each stage say which layers it runs (pipeline_rank, stage_layers) and "
        "merge the stages' rows with r3_pass.runtime.merge_stages where a request's output is built.",
        lambda d: d.is_stage and not d.stage_layers,
        lambda d: f"pipeline_parallel={d.pipeline_parallel}, stage_layers=()",
    ),
    Refusal(
        "context parallel",
        "each rank routes only its own shard of a sequence's tokens",
        "Run with context_parallel=1.",
        lambda d: d.context_parallel != 1,
        lambda d: f"context_parallel={d.context_parallel}",
    ),
    Refusal(
        "expert parallel",
        "ids in a rank's graph may number its own experts only",
        "Run with expert_parallel=1, or let the adapter make sure that routers choose among all experts in every rank's graph; "
        "then say global_expert_ids=True.",
        lambda d: d.expert_parallel != 1 and not d.global_expert_ids,
        lambda d: f"expert_parallel={d.expert_parallel}, global_expert_ids=False",
    ),
    Refusal(
        "layers on several devices, or offloaded",
        "the slot buffer lies on one device, and graphs of layers elsewhere could not write to it",
        "Load the model onto one device: no device_map over several, and no offload to cpu or disk.",
        lambda d: len(set(d.layer_devices)) > 1 or "disk" in d.layer_devices,
        lambda d: f"layer_devices={d.layer_devices}",
    ),
    Refusal(
        "data-parallel attention with gathered tokens",
        "MoE layers see tokens of other ranks, and rows would go to the wrong slots",
        "Turn it off, or let the adapter map the gathered tokens: a slot for each own one, -1 for the others, in the "
        "gathered order; then say maps_gathered_tokens=True.",
        lambda d: d.gathered_tokens and not d.maps_gathered_tokens,
        lambda d: "gathered_tokens=True, maps_gathered_tokens=False",
    ),
    Refusal(
        "KV transfer or offload without its rows",
        "a slot whose KV came from elsewhere still has the row of its previous owner",
        "Turn it off, or let the adapter send rows along: session.extract(slots) when KV leaves, session.insert(slots, rows) "
        "when it comes back; then say carries_rows=True.",
        lambda d: d.moves_kv and not d.carries_rows,
        lambda d: "moves_kv=True, carries_rows=False",
    ),
    Refusal(
        "prefill and decode in different engines",
        "the engine that finishes a request never forwarded its prompt",
        "Serve both from one engine, or send the prompt's rows with its KV (session.extract, session.insert); then say "
        "carries_rows=True.",
        lambda d: d.splits_decode and not d.carries_rows,
        lambda d: "splits_decode=True, carries_rows=False",
    ),
    Refusal(
        "no KV slot for each token",
        "a row is indexed by its token's slot; there is no place for it",
        "Use an attention backend whose forward has a slot mapping, one slot a token.",
        lambda d: not d.token_slots,
        lambda d: "token_slots=False",
    ),
    Refusal(
        "a fused router without ids in the graph",
        "the ids stay inside a kernel, and the slots keep their old rows",
        "Turn the fused path off for these, so that the model's own router runs.",
        lambda d: bool(d.opaque_routers),
        lambda d: f"opaque_routers={d.opaque_routers}",
    ),
)


def check_deployment(deployment: Deployment) -> None:
    """Raises: RefusedConfiguration with every row of the table that applies."""
    found = [r for r in REFUSALS if r.applies(deployment)]
    if found:
        lines = "".join(f"\n  {r.what} ({r.found(deployment)}): {r.why}. {r.instead}" for r in found)
        raise RefusedConfiguration(f"routes of this deployment would be incomplete or wrong:{lines}")
