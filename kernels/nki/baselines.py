"""Kernels that the low-rank kernels are compared with, on the same dialect layer.

``dense_blocked`` follows the blocking of the AWS matmul tutorial. ``dense_strips`` is a dense matmul tuned like the
low-rank kernels. ``sequential`` is XUV as two tutorial matmuls with the intermediate in HBM. ``recomputing`` is the
naive fusion (Algorithm 1 of the paper). ``gate_up`` followed by ``low_rank_matmul`` is the paper's MLP in two kernels,
whose activation goes through HBM. :mod:`.baselines_torch` computes the same in torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuronmm.kernels.nki.low_rank_mlp import Weights, block_chunks, gate_up_inputs, swiglu_block
from neuronmm.kernels.nki.moves import load_rows, store_rows
from neuronmm.kernels.nki.objects import (
    PARTITIONS,
    Factor,
    NKIObject,
    Options,
    Panel,
    Sizes,
    panels_within,
    parts_of,
    split,
)
from neuronmm.kernels.nki.stages import expand_and_store, load_and_contract

COLUMNS = 512
"""Moving columns of one matmul instruction."""


@dataclass
class Tutorial(NKIObject):  # type: ignore[misc, valid-type]
    """Tiles (128 rows, 512 columns, 128 deep) per block of the tutorial's matmul; by default the tutorial's numbers."""

    rows: int = 16
    columns: int = 2
    depth: int = 8


def dense_blocked(d: Any, left: Any, right: Any, out: Any, tiles: Tutorial) -> None:
    """Compute ``out = left^T right``, accumulating results in SBUF in the output's dtype, as the tutorial does.

    Dimensions:
        K: contraction; M, N: rows and columns of the result; any size
        left: [K, M], right: [K, N], out: [M, N], none packed

    The results of all M rows of a column block stay in SBUF, so a large M does not fit (a real compiler spills; the
    emulator refuses).

    Pseudocode::

        for each block of 512 * tiles.columns columns:
            for each block of 128 * tiles.depth of K:
                DMA: right block -> SBUF
                for each block of 128 * tiles.rows rows:
                    DMA: left block -> SBUF
                    for each tile of 128 rows and 512 columns:
                        tensor: PSUM = left^T right over the block of K
                        vector: result += PSUM in the output's dtype
            vector: gather the results of each 128 rows in one tile
            DMA: tile -> HBM
    """
    depth, height = left.shape
    rows = split(d, height, PARTITIONS)
    for wide in split(d, right.shape[1], COLUMNS * tiles.columns):
        n0, n = wide
        columns = split(d, n, COLUMNS)
        results = []
        for row in rows:
            for column in columns:
                results.append(d.sbuf((row[1], column[1]), out.dtype))
        for deep in split(d, depth, PARTITIONS * tiles.depth):
            k0, chunks = deep[0], split(d, deep[1], PARTITIONS)
            moving = []
            for chunk in chunks:
                moving.append(_block(d, right, k0 + chunk[0], chunk[1], n0, n))
            for high in split(d, height, PARTITIONS * tiles.rows):
                m0, m = high
                stationary = []
                for chunk in chunks:
                    stationary.append(_block(d, left, k0 + chunk[0], chunk[1], m0, m))
                for row in split(d, m, PARTITIONS):
                    r0, r = row
                    for j in d.static_range(len(columns)):
                        c0, c = columns[j]
                        result = results[(m0 + r0) // PARTITIONS * len(columns) + j]
                        acc = d.psum((r, c))
                        for i in d.static_range(len(chunks)):
                            q = chunks[i][1]
                            left_block = stationary[i][0:q, r0 : r0 + r]
                            d.matmul(d.at(acc, ((0, r), (0, c))), left_block, moving[i][0:q, c0 : c0 + c])
                        if k0 == 0:
                            d.copy(d.at(result, ((0, r), (0, c))), acc)
                        else:
                            d.add(d.at(result, ((0, r), (0, c))), acc, result)
        for i in d.static_range(len(rows)):
            m0, m = rows[i]
            packed = d.sbuf((m, n), out.dtype)
            for j in d.static_range(len(columns)):
                c0, c = columns[j]
                d.copy(d.at(packed, ((0, m), (c0, c0 + c))), results[i * len(columns) + j])
            d.store(out[m0 : m0 + m, n0 : n0 + n], packed)


def _block(d: Any, x: Any, row: int, rows: int, column: int, columns: int) -> Any:
    tile = d.sbuf((rows, columns), x.dtype)
    d.load(d.at(tile, ((0, rows), (0, columns))), x[row : row + rows, column : column + columns])
    return tile


def dense_strips(d: Any, x: Any, f: Factor, y: Any, blocks: Sizes) -> None:
    """Compute the dense ``y = W x``, tuned: strips of tokens in SBUF, packed weights streamed past.

    Dimensions:
        in, out: features of x and of y
        x: [in, tokens], y: [out, tokens]
        f: packed weight [out, in]

    Pseudocode::

        for each strip of blocks.tokens tokens:
            DMA: x strip -> SBUF
            for each tile of blocks.panels panels of W:
                DMA: W tile -> SBUF, double-buffered
                tensor: PSUM = W x, over all of in
                vector or scalar: y = PSUM, rounded once
                DMA: y -> HBM, with short rows once per strip
    """
    cut = f.rows
    for block in split(d, x.shape[1], blocks.tokens):
        start, tokens = block
        strip = d.sbuf((cut.width, cut.count, tokens), x.dtype)
        load_rows(d, strip, x, cut, 0, cut.count, start, tokens)
        expand_and_store(d, y, parts_of(d, strip, cut.count), f, f.panels, start, tokens, blocks, Options())


def sequential(d: Any, x: Any, u: Any, v: Any, y: Any, tiles: Tutorial) -> None:
    """Compute ``y = x^T U V`` as two tutorial matmuls; the intermediate is written to HBM and read back.

    Dimensions:
        in, r, out: features of x, of the intermediate h and of y
        x: [in, tokens], u: [in, r], v: [r, out], y: [tokens, out], none packed

    Pseudocode::

        dense_blocked:                   # the tutorial's loops
            DMA, tensor, vector: h = u^T x
            DMA: h [r, tokens] -> HBM
        dense_blocked:
            DMA: h -> SBUF, once per column block of y
            DMA, tensor, vector: y = h^T v
    """
    h = d.hbm((u.shape[1], x.shape[1]), x.dtype)
    dense_blocked(d, u, x, h, tiles)
    dense_blocked(d, h, v, y, tiles)


def recomputing(d: Any, x: Any, a: Factor, b: Factor, y: Any, blocks: Sizes, columns: int = 2 * COLUMNS) -> None:
    """Compute ``y = B (A x)`` fused without a cache: every block of ``columns`` outputs computes ``A x`` again.

    Dimensions:
        in, rank, out: features of x, of A x and of y
        x: [in, tokens], y: [out, tokens]
        a, b: packed weights [rank, in] and [out, rank]

    Pseudocode::

        for each block of columns outputs, in whole panels of B:
            for each strip of blocks.tokens tokens:       # a loop of the language
                DMA: x strip -> SBUF
                tensor, vector or scalar: h = A x, streaming all of A
                for each tile of blocks.panels panels of B in the block:
                    DMA: B tile -> SBUF, double-buffered
                    tensor: PSUM = B h, over the whole rank
                    vector or scalar: y = PSUM, rounded once
                DMA: y -> HBM
    """
    cut, group = b.columns, b.group
    strips, tail = divmod(x.shape[1], blocks.tokens)
    for block in split(d, cut.count, max(1, columns // (group * cut.width)) * group):
        panels = panels_within(b, block[0], block[1])
        for i in d.loop(strips):
            _recomputed(d, x, a, b, y, panels, i * blocks.tokens, blocks.tokens, blocks)
        if tail > 0:
            _recomputed(d, x, a, b, y, panels, strips * blocks.tokens, tail, blocks)


def _recomputed(
    d: Any, x: Any, a: Factor, b: Factor, y: Any, panels: list[Panel], start: Any, tokens: int, blocks: Sizes
) -> None:
    h = load_and_contract(d, x, [a], start, tokens, blocks, Options())
    expand_and_store(d, y, h[0], b, panels, start, tokens, blocks, Options())


def gate_up(d: Any, x: Any, w: Weights, act: Any, blocks: Sizes) -> None:
    """Compute ``act = silu(gate(x)) * up(x)`` into HBM: the first of the paper's two MLP kernels.

    Dimensions:
        hidden, intermediate: features of x and of act
        x: [hidden, tokens], act: [intermediate, tokens]
        w: packed weights of gate and up, each A [rank, hidden], each B [intermediate, rank]; those of down are not read

    Pseudocode::

        for each strip of blocks.tokens tokens:
            DMA, tensor: g = A_gate x, u = A_up x     # x is read once
            for each block of blocks.intermediate chunks:
                DMA, tensor, scalar: tile = silu(B_gate g)
                DMA, tensor, vector: tile = (B_up u) * tile
                DMA: tile -> HBM
    """
    cut = w.gate_b.columns
    for strip in split(d, x.shape[1], blocks.tokens):
        start, tokens = strip
        inputs = gate_up_inputs(d, x, w, start, tokens, blocks, Options())
        for block in split(d, cut.count, block_chunks(blocks, w.gate_b, w.up_b)):
            first, count = block
            tile = swiglu_block(d, inputs[0], w.gate_b, inputs[1], w.up_b, first, count, tokens, blocks, act.dtype)
            store_rows(d, act, tile, cut, first, first + count, start, tokens)
