"""Triton's interpreter, for kernels on a machine without a GPU. It has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

outside = pytest.mark.skipif(INTERPRETED, reason="not about the kernel: runs outside of Triton's interpreter")
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter, inside of test_in_the_interpreter")


def run_in_the_interpreter(file: str) -> None:
    """All tests of a file that are not marked `outside`, in a process of their own."""
    pytest.importorskip("triton", reason="Triton is on Linux only")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
