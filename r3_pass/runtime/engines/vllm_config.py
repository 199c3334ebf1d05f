"""What vLLM's configuration says of a deployment, and what of it cannot be recorded."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from r3_pass.errors import RefusedConfiguration
from r3_pass.runtime.refusals import Deployment

TESTED = ("0.32.0",)
"""Versions of vLLM that tests/vllm ran on."""

logger = logging.getLogger(__name__)


def check_version() -> None:
    """Warn about a version of vLLM that was not tested; what it lacks is refused where it is looked for."""
    version = importlib.import_module("vllm.version").__version__
    if version.split("+")[0] not in TESTED:
        logger.warning(
            "r3_pass was tested with vLLM %s, this is %s: its internals move between versions. Check the rows (README, vLLM).",
            ", ".join(TESTED), version,
        )  # fmt: skip


def deployment_of(config: Any) -> Deployment:
    """What vLLM's configuration says of the deployment."""
    parallel = config.parallel_config
    return Deployment(
        pipeline_parallel=parallel.pipeline_parallel_size,
        context_parallel=max(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size),
        tensor_parallel=parallel.tensor_parallel_size,
        gathered_tokens=parallel.data_parallel_size > 1,
        moves_kv=config.kv_transfer_config is not None,
    )


def check_config(config: Any) -> None:
    """What the table of deployments does not name.

    Raises: RefusedConfiguration with everything that cannot be recorded.
    """
    parallel, speculative = config.parallel_config, config.speculative_config
    checks = (
        (config.use_v2_model_runner, "Model Runner V2 has no forward to wrap", "Set VLLM_USE_V2_MODEL_RUNNER=0"),
        (
            config.aux_output_config.enabled,
            "enable_return_routed_experts is on: the engine's own flag and r3_pass would both fill routed_experts",
            "Switch one of them off",
        ),
        (
            parallel.tensor_parallel_size > 1,
            f"tensor_parallel_size={parallel.tensor_parallel_size} was not tested",
            "Use 1",
        ),
        (parallel.use_ubatching, "microbatches (DBO) run a layer twice in one forward", "Switch them off"),
        (
            speculative is not None and speculative.method != "ngram",
            f"speculative method {getattr(speculative, 'method', None)!r} was not tested",
            "Use 'ngram', or none",
        ),
        (
            speculative is not None and bool(config.scheduler_config.async_scheduling),
            "with speculation and async scheduling the positions of a step are not known on the host",
            "Set async_scheduling=False",
        ),
        (
            config.cache_config.kv_sharing_fast_prefill,
            "kv_sharing_fast_prefill runs some layers over a part of the tokens",
            "Switch it off",
        ),
        (
            config.model_config.runner_type != "generate",
            f"the runner is {config.model_config.runner_type!r}",
            "Generate",
        ),
        (
            config.ec_transfer_config is not None,
            "encoder outputs come from another instance",
            "Serve from one instance",
        ),
    )
    found = "".join(f"\n  {what}. {instead}." for applies, what, instead in checks if applies)
    if found:
        raise RefusedConfiguration(f"vLLM cannot be recorded as it is configured:{found}")
