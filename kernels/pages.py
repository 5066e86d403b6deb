"""New memory for weights, on huge pages if the system grants them; Linux gets it while something else runs.

Decoding reads every weight once per token. With pages of 4 KiB the processor spends much of that time on address
translation. Linux gives huge pages to anonymous memory on request (``madvise(2)``, MADV_HUGEPAGE).

The system clears a page when it is first written to, which takes longer than to copy a weight there. A thread does it
while Python imports torch and transformers. It writes without the interpreter's lock, which a system call by Python's
``madvise`` would keep.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
from contextlib import suppress
from threading import Event, Thread

_PIECE = 1 << 26
"""Bytes that are written at once; whoever takes the memory waits for one piece at most."""


class _Ahead:
    """Memory whose pages a thread gets, in ascending order."""

    def __init__(self, size: int) -> None:
        self.memory = _map(size)
        self._taken = Event()
        self._thread = Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        start, size = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)), len(self.memory)
        for offset in range(0, size, _PIECE):
            if self._taken.is_set():
                return
            ctypes.memset(start + offset, 0, min(_PIECE, size - offset))

    def take(self) -> mmap.mmap:
        self._taken.set()
        self._thread.join()
        return self.memory


_ahead: _Ahead | None = None


def get_ahead(size: int) -> None:
    """Begin to get ``size`` bytes for the next call of :func:`allocate`, instead of those of an earlier call.

    Nothing is got if ``size`` is 0, if the system has no such memory or no further thread, under a limit of the address
    space, which may have no room for memory and mapped files at once, or if the system is not Linux.
    """
    global _ahead
    forget()
    unlimited = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    if hasattr(mmap, "MADV_HUGEPAGE") and size and unlimited:
        with suppress(OSError, OverflowError, RuntimeError):
            _ahead = _Ahead(size)


def forget() -> None:
    """Give the memory of :func:`get_ahead` back to the system."""
    global _ahead
    ahead, _ahead = _ahead, None
    if ahead is not None:
        ahead.take()


def allocate(size: int) -> mmap.mmap:
    """Return empty memory of at least ``size`` bytes: that of :func:`get_ahead` if it is large enough.

    Raises:
        OSError: the system has no such memory.
    """
    global _ahead
    if _ahead is None or len(_ahead.memory) < size:
        forget()
        return _map(size)
    memory, _ahead = _ahead.take(), None
    rest = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    if rest < len(memory):
        with suppress(OSError):  # the system keeps memory that is locked
            memory.madvise(mmap.MADV_DONTNEED, rest, len(memory) - rest)
    return memory


def _map(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no huge pages
    with suppress(OSError):  # without transparent huge pages in the kernel, small pages work, but slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
