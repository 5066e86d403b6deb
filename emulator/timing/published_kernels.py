"""The kernels behind the published measurements, written as traces from their descriptions.

``tutorial_matmul`` is the blocked matmul of the NKI tutorial, the paper's dense baseline. Two of them, with the rank-r
intermediate in HBM, are the paper's sequential XUV. ``fused_xuv`` is the paper's strip-caching kernel.
Source: arXiv 2510.25977, section 4.2 and algorithm 1; the NKI matrix-multiplication tutorial.

Block sizes that the text leaves open:

- ``fused_xuv`` has the defaults of the authors' public kernel: 512 of the contraction, 1024 ranks, 1024 output columns,
  strips of 1024 rows.
- The tutorial kernel's column block is 512. With it, s [K N + ceil(N / B_N) K M + M N] is within 3 % of the published
  traffic of both baselines where nothing spills; with the tutorial's own 1024 it is 40 % below.
- The tutorial kernel's result tiles are float32. In bfloat16 the result block of 16384 rows would fit SBUF, but the
  published traffic shows spills there.

Notation of the paper: Y [M, N] = X [M, K] U [K, r] V [r, N].
"""

from __future__ import annotations

from neuronmm.emulator.nki.trace import Buffer, Engine, Space, Trace
from neuronmm.emulator.timing.sketch import Sketch, part

TILE, COLUMNS = 128, 512


def dense_xw(m: int, k: int, n: int) -> Trace:
    """Return the paper's NKI XW: X [M, K] W [K, N] with the tutorial kernel."""
    sketch = Sketch("NKI XW")
    tutorial_matmul(sketch, sketch.tensor("x", k, m), sketch.tensor("w", k, n), sketch.tensor("y", m, n))
    return sketch.trace


def sequential_xuv(m: int, k: int, r: int, n: int) -> Trace:
    """Return the paper's NKI XUV: two tutorial kernels, with X U in HBM in between.

    The kernel takes its left operand transposed, so the first matmul computes (X U)^T = U^T X^T: the only order of
    operands that needs no transposition in between.
    """
    sketch = Sketch("NKI XUV")
    x, u, xu = sketch.tensor("x", k, m), sketch.tensor("u", k, r), sketch.tensor("xu", r, m)
    tutorial_matmul(sketch, u, x, xu)
    tutorial_matmul(sketch, xu, sketch.tensor("v", r, n), sketch.tensor("y", m, n))
    return sketch.trace


def tutorial_matmul(
    sketch: Sketch, left: Buffer, right: Buffer, result: Buffer, rows: int = 2048, depth: int = 1024
) -> None:
    """Write result [M, N] = left [K, M]^T right [K, N], by column block, accumulated in SBUF over blocks of K.

    ``rows`` and ``depth`` are the tutorial's block sizes of M and K.
    """
    (k, m), (_, n) = left.shape, right.shape
    sketch.open_fold()
    results = [sketch.tile("result", COLUMNS, "float32") for _ in range(m // TILE)]
    for k0 in range(0, k, depth):
        b = _load_block(sketch, "right block", right, depth, COLUMNS, k0)
        for m0 in range(0, m, rows):
            a = _load_block(sketch, "left block", left, depth, rows, k0, m0)
            for m1 in range(0, rows, TILE):
                psum = sketch.tile("psum", COLUMNS, "float32", Space.PSUM)
                for t in range(depth // TILE):
                    stationary = part(a, t * rows + m1, TILE)
                    sketch.matmul(psum, stationary, part(b, t * COLUMNS, COLUMNS), COLUMNS, "bfloat16", t > 0)
                _accumulate(sketch, results[(m0 + m1) // TILE], 0, psum, COLUMNS, first=k0 == 0)
            sketch.free(a)
        sketch.free(b)
    for i, tile in enumerate(results):
        packed = sketch.tile("packed", COLUMNS)
        source, target = part(tile, 0, COLUMNS), part(packed, 0, COLUMNS)
        sketch.elementwise(Engine.SCALAR, "copy", target, (source,), COLUMNS, "bfloat16")
        sketch.store(result, packed, 0, COLUMNS, i * TILE)
        sketch.free(packed, tile)
    sketch.close_fold(n // COLUMNS)


def fused_xuv(
    m: int, k: int, r: int, n: int, strip: int = 1024, depth: int = 512, ranks: int = 1024, columns: int = 1024
) -> Trace:
    """Return the paper's NeuronMM kernel: (X U)^T of a strip of rows stays in SBUF for every column block."""
    sketch = Sketch("NeuronMM")
    x, u = sketch.tensor("x", k, m), sketch.tensor("u", k, r)
    v, y = sketch.tensor("v", r, n), sketch.tensor("y", m, n)
    sketch.open_fold()
    xu = sketch.tile("strip", r // TILE * strip)
    for k0 in range(0, k, depth):
        a = _load_block(sketch, "x block", x, depth, strip, k0)
        for r0 in range(0, r, ranks):
            b = _load_block(sketch, "u block", u, depth, ranks, k0, r0)
            for m0 in range(0, strip, TILE):
                for r1 in range(0, ranks, TILE):
                    psum = sketch.tile("psum", TILE, "float32", Space.PSUM)
                    for t in range(depth // TILE):
                        moving = part(a, t * strip + m0, TILE)
                        sketch.matmul(psum, part(b, t * ranks + r1, TILE), moving, TILE, "bfloat16", t > 0)
                    _accumulate(sketch, xu, (r0 + r1) // TILE * strip + m0, psum, TILE, first=k0 == 0)
            sketch.free(b)
        sketch.free(a)
    for n0 in range(0, n, columns):
        out = [sketch.tile("out", columns) for _ in range(strip // TILE)]
        for r0 in range(0, r, ranks):
            b = _load_block(sketch, "v block", v, ranks, columns, r0, n0)
            for m0 in range(0, strip, TILE):
                for n1 in range(0, columns, COLUMNS):
                    psum = sketch.tile("psum", COLUMNS, "float32", Space.PSUM)
                    for t in range(ranks // TILE):
                        stationary = part(xu, (r0 // TILE + t) * strip + m0, TILE)
                        moving = part(b, t * columns + n1, COLUMNS)
                        sketch.matmul(psum, stationary, moving, COLUMNS, "bfloat16", t > 0)
                    _accumulate(sketch, out[m0 // TILE], n1, psum, COLUMNS, first=r0 == 0)
            sketch.free(b)
        for i, tile in enumerate(out):
            sketch.store(y, tile, 0, columns, i * TILE, n0)
        sketch.free(*out)
    sketch.free(xu)
    sketch.close_fold(m // strip)
    return sketch.trace


def _load_block(
    sketch: Sketch, name: str, tensor: Buffer, rows: int, columns: int, row: int, column: int = 0
) -> Buffer:
    """Load [rows, columns] of ``tensor`` from (row, column) to one tile, 128 rows beside the next 128."""
    block = sketch.tile(name, rows // TILE * columns)
    for t in range(rows // TILE):
        sketch.load(block, t * columns, columns, tensor, row + t * TILE, column)
    return block


def _accumulate(sketch: Sketch, tile: Buffer, column: int, psum: Buffer, elements: int, first: bool) -> None:
    """Copy (``first``) or add psum to tile[:, column : column + elements] on the Vector engine; free psum."""
    target, source = part(tile, column, elements), part(psum, 0, elements)
    if first:
        sketch.elementwise(Engine.VECTOR, "copy", target, (source,), elements, tile.dtype)
    else:
        sketch.elementwise(Engine.VECTOR, "add", target, (target, source), elements, tile.dtype)
    sketch.free(psum)
