"""Serve a dozen prompts with all that an engine does to its KV cache, and prove every row of `routed_experts`.

    python examples/engine                                              # a tiny random MoE, runs anywhere
    python examples/engine --model NAME --device cuda --inner inductor  # any causal MoE of transformers
    torchrun --nproc-per-node 2 examples/engine --tensor-parallel       # on two ranks, or --expert-parallel

Prompts share their heads (prefix hits), more run than fit (preemption), a second MoE drafts tokens (speculation), and the engine
sleeps and wakes in the middle. Each request's rows are then held against one prefill of its tokens by the eager model, as its
routers return them: no cache, no graph, no r3_pass. Exits with an error unless all rows are equal.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

if __package__ != "engine":  # started as a folder, which Python then searches for modules: its parent has the package
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist
import transformers
from torch import nn

import r3_pass
from engine import Engine, ReferenceAdapter, Result
from engine.parallel import load
from engine.proof import Eager, load_whole

NUM_DRAFTS = 3


def nearly(model: nn.Module) -> nn.Module:
    """A drafter that often, not always, guesses what the model says: the same with noise on its head."""
    torch.manual_seed(7)  # ranks draft alike
    drafter: Any = copy.deepcopy(model)
    head = drafter.get_output_embeddings().weight
    head.requires_grad_(False).add_(torch.randn_like(head) * head.std() * 0.1)
    return drafter  # type: ignore[no-any-return]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python examples/engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", help="a causal MoE of transformers, in float32; by default a tiny random one, in float64"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--inner", default="aot_eager", help="compiler behind the pass, e.g. inductor")
    parser.add_argument("--new-tokens", type=int, default=24)
    split = parser.add_mutually_exclusive_group()
    split.add_argument("--tensor-parallel", action="store_true", help="slices of each layer on each rank of torchrun")
    split.add_argument("--expert-parallel", action="store_true", help="whole experts on each of them")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = False
    ranks = given.tensor_parallel or given.expert_parallel
    if ranks:
        given.device = _join(given.device)
    if not given.model:
        torch.set_num_threads(1)  # its products are too small to be shared among threads

    model, prompts = load_whole(given.model, given.device)
    eager = Eager(copy.deepcopy(model))
    drafter = nearly(model)
    if ranks:
        model = _part(model, given)

    longest = max(map(len, prompts)) + given.new_tokens + NUM_DRAFTS
    num_blocks = 2 * -(-longest // 8)  # two whole requests: the eight that run take each other's
    engine = Engine(
        model,
        r3_pass.backend(given.inner),
        drafter=drafter,
        num_drafts=NUM_DRAFTS,
        num_blocks=num_blocks,
        block_size=8,
        max_batch_tokens=64,
        max_num_seqs=8,
    )
    session = r3_pass.runtime.attach(ReferenceAdapter(engine))
    if ranks:
        print(f"{dist.get_world_size()} ranks choose alike; of the first:\n{session.self_test()}")
    print(f"serving {type(model).__name__} on {given.device} ({given.inner}), {num_blocks} blocks of 8 slots")
    engine.warm_up(max_model_len=longest)
    served = {"all": engine.generate(prompts, given.new_tokens)}
    served["asleep"] = _interrupted(engine, prompts[0])
    engine.wake(num_blocks + 8)
    engine.warm_up(max_model_len=longest)
    served["after sleep"] = engine.generate(prompts[:6], given.new_tokens)
    session.check_integrity()
    if ranks and dist.get_rank():
        session.detach()
        return  # the first rank has the rows
    layers = session.describe().layers
    session.detach()

    print(f"\n{'':12} requests  rows equal")
    wrong = 0
    for name, results in served.items():
        rows = sum(len(result.routed_experts) for result in results)
        equal = sum(eager.equal(result, layers) for result in results)
        wrong += rows - equal
        print(f"{name:12} {len(results):8}  {equal} of {rows}")
    scheduler = engine.scheduler
    print(f"\nprefix hits {scheduler.num_hits}, preemptions {scheduler.num_preempted}", end="")
    print(f", drafts accepted {engine.num_accepted}, rejected {engine.num_rejected}")
    if wrong or any(result.error for results in served.values() for result in results):
        raise SystemExit(f"{wrong} rows differ from the eager model's.")


def _join(device: str) -> str:
    """The process group that torchrun says this is in. Only its first rank prints. Returns: this rank's device."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start it by torchrun --nproc-per-node 2 examples/engine --tensor-parallel")
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    transformers.utils.logging.disable_progress_bar()
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return device


def _part(model: Any, given: argparse.Namespace) -> nn.Module:
    """This rank's part of a model that each rank has whole."""
    with tempfile.TemporaryDirectory() as mine:
        shared = [mine]
        dist.broadcast_object_list(shared)
        if not given.model:
            model.save_pretrained(shared[0])  # by the first rank
            dist.barrier()
        path = given.model or shared[0]
        part: Any = load(path, dist.get_world_size(), expert_parallel=given.expert_parallel, dtype=model.dtype)
        dist.barrier()
    part.config._experts_implementation = model.config._experts_implementation
    return part  # type: ignore[no-any-return]


def _interrupted(engine: Engine, prompt: list[int]) -> list[Result]:
    """A request that sleep ends, once it has tokens: its rows are those of what it has."""
    engine.add_request(prompt, max_tokens=16)
    while not any(len(seq.token_ids) > seq.num_prompt for seq in engine.requests.values()):
        engine.step()
    return engine.sleep()


if __name__ == "__main__":
    main()
