"""The memory that a container, or another control group of Linux, leaves to this process.

The system reports the memory of the whole machine, also inside a container with a limit of its own, which ends a
process that exceeds it. Source: cgroups(7), and memory.rst of both versions in the kernel's documentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

_OWN, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES = {
    "": ("memory.max", "memory.current", ("active_file", "inactive_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}
"""Controller, as the line of a group names it -> the files with limit and use, and the statistics of the page cache.

The second version of control groups names none.
"""


def free_in_groups() -> float:
    """Return the bytes that the groups of this process leave it; infinity where none has a limit."""
    return min((_left(folder, *_FILES[controller]) for controller, folder in _groups()), default=math.inf)


def _groups() -> Iterator[tuple[str, Path]]:
    """Yield the groups of this process that may limit its memory, each with its controller."""
    try:
        lines = _OWN.read_text(encoding="utf-8").splitlines()
    except OSError:  # another system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & _FILES.keys():
            group, top = Path(path.lstrip("/")), _MOUNTED / controller
            yield from ((controller, top / part) for part in (group, *group.parents))


def _left(folder: Path, limit: str, used: str, cache: tuple[str, ...]) -> float:
    """Return what is left in one group: its limit, without what it uses, but for the page cache, which gives way."""
    try:
        most, statistics = (folder / limit).read_text(encoding="utf-8"), (folder / "memory.stat").read_text("utf-8")
        numbers = dict(line.split() for line in statistics.splitlines())
        cached = sum(int(numbers[name]) for name in cache)
        return int(most) - int((folder / used).read_text(encoding="utf-8")) + cached
    except (OSError, ValueError, KeyError):  # no such group in sight, or the limit "max"
        return math.inf
