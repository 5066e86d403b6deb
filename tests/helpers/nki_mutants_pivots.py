"""Planted bugs in what the kernels do with pivots: copies, additions, and dimensions that are cut in segments."""

from __future__ import annotations

from nki_mutants import Mutant

PIVOTS = [
    Mutant(
        "no pivot is copied",
        "stages",
        "copy_pivots(d, out, first, kind, other, f, h, first, last, tokens)\n",
        "pass\n",
    ),
    Mutant("copied chunks are one late", "matmuls", "k = start - f.copied", "k = max(0, start - f.copied - 1)"),
    Mutant("every run of copied chunks is its tile's first", "matmuls", "h.slots[k], c - start", "0, c - start"),
    Mutant("a copy crosses tiles", "matmuls", "c == stop or h.slots[c - f.copied] == 0", "c == stop"),
    Mutant(
        "copied chunks are written to the first",
        "matmuls",
        "evict(d, kind, out, start - base, h",
        "evict(d, kind, out, 0, h",
    ),
    Mutant(
        "copied chunks begin at the output",
        "matmuls",
        "begin, end = max(first, f.copied)",
        "begin, end = max(first, 0)",
    ),
    Mutant("pivots of the input are contracted", "stages", "first, min(last, stored),", "first, last,"),
    Mutant(
        "pivots of the input are not added",
        "stages",
        "                  pivots)",
        "                  to.sums[p][0:wide, at : at + n, 0:tokens])",
    ),
    Mutant(
        "every block adds the first pivots",
        "stages",
        "slot = k - panel.first, x.slots[k + f.stored - first]",
        "slot = k - panel.first, 0",
    ),
    Mutant(
        "pivots are added to the first chunks",
        "stages",
        "to.sums[p][0:wide, at : at + n, 0:tokens],\n                  pivots",
        "to.sums[p][0:wide, 0:n, 0:tokens],\n                  pivots",
    ),
    Mutant(
        "a span skips a copied chunk",
        "stages",
        "split(d, f.copies, step * f.group)",
        "split(d, f.copies - 1, step * f.group)",
    ),
    Mutant(
        "no chunk after the copied ones is stored",
        "stages",
        "for part in (before, after):",
        "for part in (before, []):",
    ),
    Mutant(
        "gate's pivots have no SiLU",
        "low_rank_mlp",
        "copy_pivots(d, act, first, SILU,",
        'copy_pivots(d, act, first, "copy",',
    ),
    Mutant(
        "up's pivots ignore the gate",
        "low_rank_mlp",
        "copy_pivots(d, act, first, MULTIPLY,",
        'copy_pivots(d, act, first, "copy",',
    ),
    Mutant("up copies gate's pivots", "low_rank_mlp", "act, up_b, up, first, first", "act, up_b, gate, first, first"),
    Mutant("a panel has copied chunks", "layout", "(begin, min(end, skip))", "(begin, min(end, skip + 1))"),
    Mutant(
        "a chunk after the pivots is in no panel",
        "layout",
        "(max(begin, resume), end)",
        "(max(begin, resume + 1), end)",
    ),
    Mutant("partitions have chunks that are too narrow", "layout", "if partitions >= end]", "if partitions > 0]"),
    Mutant(
        "ranks are not cut",
        "forms",
        "for end in ends if first < end <= pivots.end",
        "for end in ends if end < 0",
    ),
    Mutant("down's pivots are one chunk late", "forms", "stored=down_copied[0] if", "stored=down_copied[0] + 1 if"),
    Mutant("a rank is not cut after its pivots", "forms", "first < end <= pivots.end", "first < end < pivots.end"),
    Mutant("all of a rank is copied", "forms", "if s.start < number)", "if s.start < size)"),
    Mutant("chunks without pivots are not computed", "stages", "max(0, complete - begin)", "max(0, end - begin)"),
    Mutant(
        "all chunks are computed without pivots", "stages", "begin = max(count, panel.first)", "begin = panel.first"
    ),
    Mutant(
        "chunks without pivots are the panel's first",
        "stages",
        "to.sums[p][0:wide, at : at + n, 0:tokens]\n",
        "to.sums[p][0:wide, 0:n, 0:tokens]\n",
    ),
    Mutant("pivots are one feature late", "forms", "return next(s.first for s in", "return next(s.first + 1 for s in"),
    Mutant(
        "every segment is loaded from the first feature",
        "moves",
        "s.start + p0 * s.count + c0, s.count",
        "p0 * s.count + c0, s.count",
    ),
    Mutant("one token: every segment is the first", "moves", "first = s.start + p0 * s.count", "first = p0 * s.count"),
    Mutant(
        "tokens first: every segment is loaded from the first",
        "moves",
        "src = d.columns(x, start + t0, t, s.start +",
        "src = d.columns(x, start + t0, t,",
    ),
    Mutant(
        "tokens first: every segment is stored to the first",
        "moves",
        "dst = d.columns(x, start + t0, t, s.start + p0",
        "dst = d.columns(x, start + t0, t, p0",
    ),
    Mutant(
        "all pieces of a panel are loaded to its first chunk",
        "moves",
        "begin, end = at + (c0 - first) * wide, at + (c1 - first) * wide",
        "begin, end = at, at + (c1 - c0) * wide",
    ),
    Mutant("a run has chunks of several widths", "objects", "if run[2] == part[2]:", "if run[1] > 0:"),
]
