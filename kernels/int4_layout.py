"""The sizes of a matrix in int4, without torch: a checkpoint's headers are checked before torch is imported."""

from __future__ import annotations

GROUP, TILE = 32, 16
"""Columns of a group of :class:`~neuronmm.kernels.low_bits.Int4`, and rows that are stored together."""

GROUP_BYTES = TILE * (GROUP // 2 + 2)
"""Bytes of a group in a tile: half a byte per element, and two bytes per row."""


def int4_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape [tiles, bytes] of the values of a matrix [rows, columns]."""
    return -(-rows // TILE), GROUP_BYTES * -(-columns // GROUP)
