"""New memory for weights, on huge pages if the system grants them, and got while something else runs.

Decoding reads every weight once per token. With pages of 4 KiB the processor spends much of that time on address
translation. Linux gives huge pages to anonymous memory on request (``madvise(2)``, MADV_HUGEPAGE).

The system clears a page when it is first written to, which takes longer than to copy a weight there. A thread does it
while Python imports torch and transformers. The writes are plain ones: a system call that populates all pages would
lock out the imports, which map libraries.
"""

from __future__ import annotations

import ctypes
import mmap
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
            ctypes.memset(start + offset, 0, min(_PIECE, size - offset))  # releases the interpreter's lock

    def take(self) -> mmap.mmap:
        self._taken.set()
        self._thread.join()
        return self.memory


_ahead: _Ahead | None = None


def get_ahead(size: int) -> None:
    """Begin to get ``size`` bytes for the next call of :func:`allocate`; without the memory nothing happens."""
    global _ahead
    with suppress(OSError, ValueError):  # too large, or empty
        _ahead = _Ahead(size)


def allocate(size: int) -> mmap.mmap:
    """Return memory of ``size`` bytes or a little more: that of :func:`get_ahead` if it is large enough.

    Raises:
        OSError: the system has no such memory.
    """
    global _ahead
    ahead, _ahead = _ahead, None
    memory = ahead.take() if ahead is not None else None
    if memory is None or len(memory) < size:
        return _map(size)
    rest = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    if rest < len(memory) and hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED, rest, len(memory) - rest)
    return memory


def _map(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no huge pages
    with suppress(OSError):  # without transparent huge pages in the kernel, small pages work, but slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
