"""One adapter for each engine; `base.EngineAdapter` is the contract for your own."""

from r3_pass.runtime.engines.base import EngineAdapter
from r3_pass.runtime.engines.transformers import TransformersAdapter
from r3_pass.runtime.engines.vllm import VllmAdapter
from r3_pass.runtime.refusals import Deployment

ADAPTERS: tuple[type[EngineAdapter], ...] = (TransformersAdapter, VllmAdapter)

__all__ = ["ADAPTERS", "Deployment", "EngineAdapter", "TransformersAdapter", "VllmAdapter"]
