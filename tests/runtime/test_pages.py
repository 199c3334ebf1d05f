"""Memory of the row log: there at once, given back by the page."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from r3_pass.runtime.pages import Pages

STATM = Path("/proc/self/statm")


@pytest.mark.parametrize("num_bytes", [2, 4096, 5000, 2**21 - 2, 2**21, 3 * 2**21 + 10, 4_193_872])
def test_what_is_kept_stays_and_the_rest_is_zeros(num_bytes: int) -> None:
    pages = Pages(num_bytes)
    assert pages.array.shape == (num_bytes,) and pages.array.dtype == np.uint8 and not pages.array.any()
    pages.array[:] = 7
    for kept in (num_bytes, num_bytes // 2, num_bytes // 3, 0):
        pages.keep(kept)
        last = -(-kept // mmap.PAGESIZE) * mmap.PAGESIZE
        assert (pages.array[:kept] == 7).all() and not pages.array[last:].any()
    pages.array[:] = 9
    assert (pages.array == 9).all()


@pytest.mark.skipif(not STATM.exists(), reason="the system does not tell what is resident")
def test_pages_are_there_at_once_and_go_when_they_are_given_back() -> None:
    def resident() -> int:
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE

    size, slack = 64 * 2**20, 4 * 2**20
    before = resident()
    pages = Pages(size)
    assert size - slack < resident() - before < size + slack
    pages.keep(size // 4)
    assert size // 4 - slack < resident() - before < size // 4 + slack
    del pages
    assert resident() - before < slack
