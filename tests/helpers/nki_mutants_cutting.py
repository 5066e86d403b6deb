"""Planted bugs in how the kernels cut their work: strips, blocks of depth, panels, ragged chunks, layouts."""

from __future__ import annotations

from nki_mutants import Mutant

CUTTING = [
    Mutant(
        "all chunks get the residual of the first chunks",
        "matmuls",
        "d.add(dst, src, other[0:wide, at : at + chunks,",
        "d.add(dst, src, other[0:wide, 0:chunks,",
    ),
    Mutant(
        "every scaled chunk is the first",
        "matmuls",
        "d.multiply(one, acc[0:wide, slot + c, 0:t]",
        "d.multiply(one, acc[0:wide, slot, 0:t]",
    ),
    Mutant("all scaled chunks are written to the first", "matmuls", "at + c, (t0, t0 + t)", "at, (t0, t0 + t)"),
    Mutant("the bias of a span starts at the first feature", "matmuls", "other, j, turn)", "other, j - base, turn)"),
    Mutant(
        "every tile of A loads the first panels",
        "stages",
        "load_panels(d, to.f, panels[p0 : p0 + count]",
        "load_panels(d, to.f, panels[0:count]",
    ),
    Mutant(
        "every panel adds to the sums of the first",
        "stages",
        "other = scale if begins else to.sums[p]",
        "other = scale if begins else to.sums[0]",
    ),
    Mutant(
        "all panels write their sums to the first",
        "stages",
        "not scaled) else to.sums[p]",
        "not scaled) else to.sums[0]",
    ),
    Mutant(
        "every panel's result is the scaled sum of the first",
        "stages",
        "to.result[p], to.sums[p]",
        "to.result[p], to.sums[0]",
    ),
    Mutant(
        "gathered: every run of chunks is the first",
        "stages",
        "h.result[p][0:wide, at : at + n",
        "h.result[p][0:wide, 0:n",
    ),
    Mutant(
        "stored in parts: every part is the first",
        "stages",
        "store_rows(d, y, h.result[p], cut",
        "store_rows(d, y, h.result[0], cut",
    ),
    Mutant(
        "tokens first: the input in blocks", "stages", "0 if options.tokens_first else blocks.depth", "blocks.depth"
    ),
    Mutant(
        "the scale is kept in the activation's dtype",
        "stages",
        "d.sbuf((PARTITIONS, tokens), d.float32) if scaled",
        "d.sbuf((PARTITIONS, tokens), x.dtype) if scaled",
    ),
    Mutant("squares of a block use the chunk lengths of the first", "stages", "cut.length(first + c)", "cut.length(c)"),
    Mutant(
        "tokens first: stored panel by panel", "stages", "tokens >= LONG_ROW and not tokens_first", "tokens >= LONG_ROW"
    ),
    Mutant(
        "the residual of a span starts at the first feature",
        "stages",
        "options.residual, cut, first, last,",
        "options.residual, cut, 0, last - first,",
    ),
    Mutant("a span with a bias adds the residual at the wrong feature", "stages", "at = j - first\n", "at = j\n"),
    Mutant(
        "long rows: a ragged chunk is stored as a full one",
        "moves",
        "(0, s.width if c < s.full else s.width - 1, c",
        "(0, s.width, c",
    ),
    Mutant(
        "tokens first: a strip is stored at the first tokens",
        "moves",
        "dst = d.columns(x, start + t0,",
        "dst = d.columns(x, t0,",
    ),
    Mutant(
        "tokens first: a strip's input is the first tokens",
        "moves",
        "src = d.columns(x, start + t0,",
        "src = d.columns(x, t0,",
    ),
    Mutant("blocks of the MLP are whole panels of one of the two", "low_rank_mlp", "group = max(", "group = min("),
    Mutant("MLP: every strip is the first", "low_rank_mlp", "i * blocks.tokens, blocks.tokens", "0, blocks.tokens"),
    Mutant("packed: every strip is the first", "low_rank_matmul", "i * step", "0 * step"),
    Mutant("packed: the last strip is the first", "low_rank_matmul", "strips * step", "0 * step"),
    Mutant(
        "packed: the last strip is dropped",
        "low_rank_matmul",
        "    if tail > 0:\n        _packed",
        "    if tail > 1000:\n        _packed",
    ),
    Mutant(
        "packed: held in the wrong order",
        "low_rank_matmul",
        "cut.count, start, tokens, options",
        "cut.count, 0, tokens, options",
    ),
    Mutant(
        "one token: a second bank's chunks are looked for beyond it",
        "moves",
        "acc[0:wide, c - c0 : c - c0 + n, 0:1]",
        "acc[0:wide, c : c + n, 0:1]",
    ),
]
