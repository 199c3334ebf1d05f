"""The tests of this folder need vLLM (`make test-vllm`); without it they are skipped.

Engines take ten to thirty seconds to start, so that those in this process are shared by a module; what has to differ in the
environment, or to run in other processes, runs as a script of its own.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """start(model, **settings): an LLM of a model of vllm_serving, with the engine core in this process."""
    import vllm
    import vllm_serving

    made: list[Any] = []

    def run(name: str, **more: Any) -> Any:
        folder = Path(vllm_serving.saved(getattr(vllm_serving, name)(), tmp_path_factory.mktemp(name)))
        made.append(vllm.LLM(str(folder), **vllm_serving.settings(**more)))
        return made[-1]

    yield run
    made.clear()
    gc.collect()
