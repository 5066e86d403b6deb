"""Memory that a thread gets ahead."""

from __future__ import annotations

import ctypes
import mmap
import resource
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import examples
from neuronmm.kernels import pages

MB = 1 << 20
pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="nothing is got ahead")
PAGES = st.integers(1, 5 * mmap.PAGESIZE)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def get(size: int) -> int:
    """Get memory ahead, wait until all its pages are there, and return what was resident before."""
    before = resident()
    pages.get_ahead(size)
    assert pages._ahead is not None
    pages._ahead._thread.join()
    return before


@examples(40)
@given(ahead=st.none() | PAGES, sizes=st.lists(PAGES, min_size=1, max_size=3))
def test_memory_is_large_enough_and_empty_and_nobody_elses(ahead: int | None, sizes: list[int]) -> None:
    if ahead is not None:
        pages.get_ahead(ahead)
    taken = [pages.allocate(size) for size in sizes]
    for index, (memory, size) in enumerate(zip(taken, sizes, strict=True)):
        assert len(memory) >= size and not any(memory[:])
        memory[:size] = bytes([index + 1]) * size
    assert all(set(memory[:size]) == {index + 1} for index, (memory, size) in enumerate(zip(taken, sizes, strict=True)))


def test_the_pages_are_there_before_they_are_asked_for() -> None:
    before = get(128 * MB)
    got = resident() - before
    memory = pages.allocate(128 * MB)
    assert got > 120 * MB
    assert abs(resident() - before - got) < 8 * MB
    del memory


def test_what_is_not_asked_for_goes_back() -> None:
    before = get(128 * MB)
    memory = pages.allocate(32 * MB)
    assert resident() - before < 48 * MB
    del memory


def test_too_little_memory_goes_back() -> None:
    before = get(128 * MB)
    memory = pages.allocate(129 * MB)
    assert len(memory) == 129 * MB and resident() - before < 16 * MB


def test_who_takes_the_memory_waits_for_one_piece_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the caller gets the other pages itself, with more threads."""
    written, taken = list[int](), Event()

    def memset(start: int, value: int, size: int) -> None:
        taken.wait()
        written.append(size)

    monkeypatch.setattr(ctypes, "memset", memset)
    monkeypatch.setattr(pages, "Event", lambda: taken)
    monkeypatch.setattr(pages, "_PIECE", MB)
    pages.get_ahead(8 * MB)
    assert len(pages.allocate(8 * MB)) == 8 * MB
    assert written in ([MB], [])


def test_a_limit_of_the_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under it, memory may leave too little room to map the files of the weights."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 40, 1 << 40))
    pages.get_ahead(MB)
    assert pages._ahead is None


@pytest.mark.parametrize("size", [0, 1 << 62])
def test_memory_that_cannot_be_had_ahead_is_asked_for_later(size: int) -> None:
    pages.get_ahead(size)
    assert pages._ahead is None


def test_memory_that_is_forgotten_goes_back() -> None:
    before = get(128 * MB)
    get(64 * MB)
    assert resident() - before < 80 * MB
    pages.forget()
    assert resident() - before < 16 * MB


def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pages.Thread, "start", start)
    pages.get_ahead(MB)
    assert len(pages.allocate(MB)) == MB
