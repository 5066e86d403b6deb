"""Factors of few bits: what leaves PSUM is multiplied by the scale of each row, and nothing is widened.

A factor in fp8 is ``diag(s) W8``: the tensor engine multiplies W8 as it is stored, and the instruction that moves a
result from PSUM to SBUF, which runs anyway, multiplies it by ``s``. A row of the weight is a partition of the result,
so its scale is a column [partitions, 1] of the table (:mod:`.table`), which every engine takes as an operand.

``d`` is a dialect object.
"""

from __future__ import annotations

from typing import Any

from neuronmm.kernels.nki.objects import ADD, BIAS, COLUMNS, MULTIPLY, PARTITIONS, SILU, Chunks, Factor


def load_table(d: Any, f: Factor) -> Any:
    """Load the table of a scaled factor; for any other factor return a number that nothing reads."""
    if not f.scaled:
        return 0.0
    columns = f.table.shape[1]
    table = d.sbuf((PARTITIONS, columns), d.float32)
    d.load(d.at(table, ((0, PARTITIONS), (0, columns))), f.table[0:PARTITIONS, 0:columns])
    return table


def resident(f: Factor, table: Any) -> Factor:
    """Return the factor with its table in SBUF."""
    return Factor(
        f.weights, f.rows, f.columns, f.group, f.panels, f.pieces, f.stored, f.copied, f.copies, f.scaled, table, f.at
    )


def multiply_by_norm(d: Any, strip: Any, table: Any, cut: Chunks, first: int, last: int, tokens: int) -> None:
    """Multiply chunks [first, last) of a strip by the norm's weight, the first columns of the table, in place.

    The weight cannot be packed into factors that are rounded already.
    """
    for c in d.static_range(last - first):
        deep = cut.length(first + c)
        column = table[0:deep, first + c : first + c + 1]
        scale_copy(d, d.at(strip, ((0, deep), c, (0, tokens))), strip[0:deep, c, 0:tokens], column, c)


def bias_of(d: Any, f: Factor) -> Any:
    """Return the bias of a scaled factor as a tile [partitions, chunks]; in the table it follows the scales."""
    count, first = f.columns.count, f.at + f.columns.count
    bias = d.sbuf((PARTITIONS, count), d.float32)
    d.copy(d.at(bias, ((0, PARTITIONS), (0, count))), f.table[0:PARTITIONS, first : first + count])
    return bias


def scale_copy(d: Any, dst: Any, src: Any, column: Any, turn: int) -> None:
    """Compute ``dst = src * column``; even turns use the vector engine, odd turns the scalar engine."""
    if turn % 2 == 1:
        d.scale_scalar(dst, src, column)
    else:
        d.scale(dst, src, column)


def evict_scaled(
    d: Any, kind: str, out: Any, at: int, acc: Any, slot: int, chunks: int, wide: int, t0: int, t: int, other: Any,
    column: int, turn: int, f: Factor,
) -> None:  # fmt: skip
    """Do what :func:`.matmuls.evict` does, to the result of ``f`` multiplied by its scales: a chunk per instruction."""
    for c in d.static_range(chunks):
        dst, src = d.at(out, ((0, wide), at + c, (t0, t0 + t))), acc[0:wide, slot + c, 0:t]
        k = f.at + column + c
        scale = f.table[0:wide, k : k + 1]
        if kind == SILU:
            d.scale_silu(dst, src, scale)
        elif kind == ADD:
            d.scale_add(dst, src, scale, other[0:wide, at + c, t0 : t0 + t])
        elif kind == MULTIPLY:
            d.scale_multiply(dst, src, scale, other[0:wide, at + c, t0 : t0 + t])
        elif kind == COLUMNS:
            d.scale_multiply(dst, src, scale, other[0:wide, t0 : t0 + t])
        elif kind == BIAS:
            d.scale_add_column(dst, src, scale, other[0:wide, column + c : column + c + 1])
        else:
            scale_copy(d, dst, src, scale, turn + c)
