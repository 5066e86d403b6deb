"""What the low-rank kernels are compared with, as kernels on the same dialect layer.

``dense_blocked`` follows the blocking of the AWS matmul tutorial; ``dense_strips`` is the same product tuned as the
low-rank kernels are; ``sequential`` is XUV as two tutorial products with the intermediate in HBM; ``recomputing`` is
the naive fusion (Algorithm 1 of the paper: every output block computes ``A x`` again); ``gate_up`` followed by
``low_rank_matmul`` is the paper's MLP in two kernels, whose activation goes through HBM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuronmm.kernels.layout import PARTITIONS, Panel
from neuronmm.kernels.nki.blocks import PLAIN, Blocks, split
from neuronmm.kernels.nki.low_rank_mlp import (
    Ranks,
    Weights,
    block_chunks,
    gate_up_factors,
    gate_up_inputs,
    swiglu_block,
)
from neuronmm.kernels.nki.moves import Factor, factor, in_one, load_rows, store_rows
from neuronmm.kernels.nki.stages import first_factors, second_factor

COLUMNS = 512


@dataclass(frozen=True)
class Tutorial:
    """Tiles (128 rows, 512 columns, 128 deep) a block of the tutorial's product; its own numbers by default."""

    rows: int = 16
    columns: int = 2
    depth: int = 8


def dense_blocked(d: Any, left: Any, right: Any, out: Any, tiles: Tutorial) -> None:
    """``out = left^T right`` with results accumulated in SBUF in the output's dtype, as the tutorial does.

    Dimensions: ``left`` [K, M], ``right`` [K, N], ``out`` [M, N], none packed, any size. The result of all M rows of
    a column block stays in SBUF, so a large M does not fit (a real compiler spills; the emulator refuses).
    """
    depth, height = left.shape
    for n0, n in split(right.shape[1], COLUMNS * tiles.columns):
        results = [
            [(c0, c, d.sbuf((m, c), out.dtype)) for c0, c in split(n, COLUMNS)] for _, m in split(height, PARTITIONS)
        ]
        for k0, k in split(depth, PARTITIONS * tiles.depth):
            deep = split(k, PARTITIONS)
            moving = [_block(d, right, k0 + q0, q, n0, n) for q0, q in deep]
            for m0, m in split(height, PARTITIONS * tiles.rows):
                stationary = [_block(d, left, k0 + q0, q, m0, m) for q0, q in deep]
                for r0, r in split(m, PARTITIONS):
                    for c0, c, result in results[(m0 + r0) // PARTITIONS]:
                        acc = d.psum((r, c))
                        for (_, q), s, v in zip(deep, stationary, moving, strict=True):
                            d.matmul(d.at(acc, (0, r), (0, c)), s[0:q, r0 : r0 + r], v[0:q, c0 : c0 + c])
                        if k0 == 0:
                            d.copy(d.at(result, (0, r), (0, c)), acc)
                        else:
                            d.add(d.at(result, (0, r), (0, c)), acc, result)
        for (m0, m), row in zip(split(height, PARTITIONS), results, strict=True):
            packed = d.sbuf((m, n), out.dtype)
            for c0, c, result in row:
                d.copy(d.at(packed, (0, m), (c0, c0 + c)), result)
            d.store(out[m0 : m0 + m, n0 : n0 + n], packed)


def _block(d: Any, x: Any, row: int, rows: int, column: int, columns: int) -> Any:
    tile = d.sbuf((rows, columns), x.dtype)
    d.load(d.at(tile, (0, rows), (0, columns)), x[row : row + rows, column : column + columns])
    return tile


def dense_strips(d: Any, x: Any, w: Any, y: Any, blocks: Blocks) -> None:
    """``y = W x`` with strips of tokens in SBUF and packed weights streamed past: dense, tuned.

    Dimensions: ``x`` [in, tokens], ``w`` packed of [out, in], ``y`` [out, tokens].
    """
    f = factor(w, x.shape[0], y.shape[0])
    cut = f.how.rows
    for start, tokens in split(x.shape[1], blocks.tokens):
        strip = d.sbuf((cut.width, cut.count, tokens), x.dtype)
        load_rows(d, strip, x, cut, 0, cut.count, start, tokens)
        second_factor(d, y, in_one(strip, cut.count), f, f.how.panels(), start, tokens, blocks, PLAIN)


def sequential(d: Any, x: Any, u: Any, v: Any, y: Any, tiles: Tutorial) -> None:
    """``y = x^T U V`` as two tutorial products; the intermediate [r, tokens] is written to HBM and read back.

    Dimensions: ``x`` [in, tokens], ``u`` [in, r], ``v`` [r, out], ``y`` [tokens, out], none packed.
    """
    h = d.hbm((u.shape[1], x.shape[1]), x.dtype)
    dense_blocked(d, u, x, h, tiles)
    dense_blocked(d, h, v, y, tiles)


def recomputing(d: Any, x: Any, a: Any, b: Any, y: Any, rank: int, blocks: Blocks, columns: int = 2 * COLUMNS) -> None:
    """``y = B (A x)`` fused without a cache: every block of ``columns`` outputs computes ``A x`` anew.

    Dimensions: as :func:`neuronmm.kernels.nki.low_rank_matmul.low_rank_matmul`; whole strips of tokens and a rest.
    """
    fa, fb = factor(a, x.shape[0], rank), factor(b, rank, y.shape[0])
    cut, group = fb.how.columns, fb.how.group
    strips, rest = divmod(x.shape[1], blocks.tokens)
    for first, count in split(cut.count, max(1, columns // (group * cut.width)) * group):
        some = [panel for panel in fb.how.panels() if first <= panel.first < first + count]
        for i in d.loop(strips):
            _recomputed(d, x, fa, fb, y, some, i * blocks.tokens, blocks.tokens, blocks)
        if rest:
            _recomputed(d, x, fa, fb, y, some, strips * blocks.tokens, rest, blocks)


def _recomputed(
    d: Any, x: Any, a: Factor, b: Factor, y: Any, panels: list[Panel], start: Any, tokens: int, blocks: Blocks
) -> None:
    h = first_factors(d, x, [a], start, tokens, blocks, PLAIN)[0]
    second_factor(d, y, h, b, panels, start, tokens, blocks, PLAIN)


def gate_up(d: Any, x: Any, w: Weights, act: Any, ranks: Ranks, blocks: Blocks) -> None:
    """``act = silu(gate(x)) * up(x)`` to HBM: the first of the paper's two MLP kernels (``w.down_*`` unused).

    Dimensions: ``x`` [hidden, tokens], ``act`` [intermediate, tokens].
    """
    gate_b, up_b = gate_up_factors(w, ranks)
    cut = gate_b.how.columns
    for start, tokens in split(x.shape[1], blocks.tokens):
        gate, up = gate_up_inputs(d, x, w, ranks, start, tokens, blocks, PLAIN)
        for first, count in split(cut.count, block_chunks(blocks, gate_b, up_b)):
            tile = swiglu_block(d, gate, gate_b, up, up_b, first, count, tokens, blocks, act.dtype)
            store_rows(d, act, tile, cut, first, first + count, start, tokens)
