"""What one operand of a compute engine can address (architecture guide, "Accessing SBUF/PSUM tensors")."""

from __future__ import annotations

from neuronmm.emulator.nki.machine import Machine
from neuronmm.emulator.nki.tile import Tile
from neuronmm.emulator.nki.trace import Region

_MOST_PARTITIONS = {0: 128, 32: 32, 64: 64, 96: 32}
"""Start partition -> partitions an engine can then reach."""
_MOST_STRIDE = 2**15 - 1
"""Elements from one index of a free axis to the next: an instruction has 16 bits for it, with the sign."""


def check_access(machine: Machine, tile: Tile, region: Region, role: str) -> None:
    """Raise if no engine can address the view ``tile``, whose hull is ``region``, as ``role`` of an instruction."""
    reach = _MOST_PARTITIONS.get(region.first)
    if reach is None:
        machine.fail(
            "start partition", f"{role} starts at a partition engines cannot start at", (0, 32, 64, 96), region.first
        )
    if region.last - region.first > reach:
        machine.fail("start partition", f"{role} starts at partition {region.first}", reach, region.last - region.first)
    step = tile.strides[0] / tile.storage.free
    if tile.shape[0] > 1 and step not in (0, 1):
        machine.fail("partition stride", f"{role} does not lie on consecutive partitions", 1, step)
    stride = max([abs(s) for s, _ in _merged(tile.shape[1:], tile.strides[1:])], default=0)
    if stride > _MOST_STRIDE:
        machine.fail("stride", f"the elements of {role} lie too far apart", _MOST_STRIDE, stride)


def _merged(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """``(stride, length)`` of the axes longer than 1, innermost first; neighbours that lie as one axis count as one."""
    axes: list[tuple[int, int]] = []
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if axes and stride == axes[-1][0] * axes[-1][1]:
            axes[-1] = axes[-1][0], axes[-1][1] * n
        else:
            axes.append((stride, n))
    return axes
