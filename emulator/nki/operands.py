"""Checks of the operands of one instruction: type, memory, reachable addresses, repeated and overlapping elements.

Every check raises NkiError at the kernel's line. Source of the address rules: NKI architecture guide, "Accessing
SBUF/PSUM tensors".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from neuronmm.emulator.nki.index import Affine
from neuronmm.emulator.nki.machine import Machine
from neuronmm.emulator.nki.tile import Mask, Tile
from neuronmm.emulator.nki.trace import Region, Space

_REACHABLE_PARTITIONS = {0: 128, 32: 32, 64: 64, 96: 32}
"""Start partition -> number of partitions that an engine can reach from there."""
_MAX_STRIDE = 2**15 - 1
"""Largest stride of a free axis in elements: an instruction stores it in 16 bits, signed."""


def check_operand(machine: Machine, tile: Any, role: str, spaces: tuple[Space, ...], mask: Mask = None) -> Region:
    """Check one on-chip operand of a compute engine and return its region; ``role`` names it in errors."""
    if not isinstance(tile, Tile):
        machine.fail("operand", f"{role} must be a tile, not {type(tile).__name__}")
    if tile.space not in spaces:
        allowed = " or ".join(s.value for s in spaces)
        machine.fail("operand space", f"{role} must be in {allowed}", allowed, tile.space.value)
    machine.check_scope(tile.storage)
    if tile.overrun is not None:
        tile.check_bounds(mask)
    region = bounding_region(tile)
    _check_addresses(machine, tile, region, role)
    return region


def bounding_region(tile: Tile) -> Region:
    """Return the region of the view; the whole buffer if the view leaves its tensor (under a mask)."""
    if tile.overrun is None:
        return tile.region()
    record = tile.storage.record
    return Region(record.id, 0, record.partitions, 0, record.bytes_per_partition)


def _check_addresses(machine: Machine, tile: Tile, region: Region, role: str) -> None:
    """Check that an engine can address the view: start partition, partition step and strides."""
    reachable = _REACHABLE_PARTITIONS.get(region.first)
    if reachable is None:
        machine.fail(
            "start partition", f"{role} starts at a partition engines cannot start at", (0, 32, 64, 96), region.first
        )
    if region.last - region.first > reachable:
        machine.fail(
            "start partition",
            f"{role} starts at partition {region.first} and has too many partitions",
            reachable,
            region.last - region.first,
        )
    step = tile.strides[0] / tile.storage.free_size
    if tile.shape[0] > 1 and step not in (0, 1):
        machine.fail("partition stride", f"the partitions of {role} are not consecutive", 1, step)
    stride = max([abs(s) for s, _ in _merged_axes(tile.shape[1:], tile.strides[1:])], default=0)
    if stride > _MAX_STRIDE:
        machine.fail("stride", f"the elements of {role} are too far apart", _MAX_STRIDE, stride)


def _merged_axes(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return ``(stride, length)`` of the axes longer than 1, innermost first, with contiguous neighbours merged."""
    axes: list[tuple[int, int]] = []
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if axes and stride == axes[-1][0] * axes[-1][1]:
            axes[-1] = axes[-1][0], axes[-1][1] * n
        else:
            axes.append((stride, n))
    return axes


def check_distinct_elements(machine: Machine, dst: Tile, mask: Mask = None) -> None:
    """Refuse a destination view that contains an element twice."""
    if dst.repeats_elements(mask):
        machine.fail("overlapping write", f"the destination view {dst.shape} contains an element twice")


def check_no_overlap(machine: Machine, dst: Tile, dst_region: Region, src: Tile, src_region: Region) -> None:
    """Refuse a destination that overlaps a source, unless both are the same view."""
    same_view = (dst.offset, dst.shape, dst.strides) == (src.offset, src.shape, src.strides)
    if not dst_region.overlaps(src_region) or same_view:
        return
    dst_elements, src_elements = (Affine(t.shape, t.strides, t.offset).values() for t in (dst, src))
    if np.intersect1d(dst_elements, src_elements).size:
        machine.fail("overlapping write", "the destination overlaps a source and is not the same view")
