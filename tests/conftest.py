"""Shared by all tests: hardware markers, and the same random numbers in every run."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

# Helpers that tests import by name. Collected for doctests they would be imported a second time, and the custom operators that they
# define with them: the first definition's operator is then gone, and a call to it reads freed memory.
collect_ignore = ["lib", "benchmarks"]

# No deadline: a first example may compile. Derandomized: a failure is there again in the next run.
settings.register_profile("r3_pass", deadline=None, derandomize=True)
settings.load_profile("r3_pass")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Seed each test by itself, so that its numbers do not depend on which tests ran before, or in which worker."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No compiled code, and no recompilation count, of one test in the next."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
