"""The memory of a run."""

from __future__ import annotations

import platform
import resource

import psutil
import pytest
import torch

from neuronmm.compression.memory import freed_memory_kept

SIZE = 1 << 28  # bytes: far above the 32 MB that glibc may keep by itself


def page_faults() -> int:
    """Return how many pages the system hands out for four tensors, one after the other."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(SIZE // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
def test_freed_memory_is_reused_in_the_block_and_returned_behind_it() -> None:
    usual, before = page_faults(), psutil.Process().memory_info().rss
    with freed_memory_kept():
        torch.ones(SIZE // 4)
        assert page_faults() < 0.1 * usual
        assert psutil.Process().memory_info().rss > before + 0.9 * SIZE
    assert psutil.Process().memory_info().rss < before + 0.1 * SIZE
    assert page_faults() > 0.5 * usual
