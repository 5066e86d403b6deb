"""``down(silu(gate(x)) * up(x))`` with factorised linears in one kernel.

The activation [intermediate, tokens] lives in SBUF only, a few chunks at a time: gate's part is computed and put
through SiLU, up's part is computed and multiplied in, and ``A_down`` contracts the block into the down projection's
rank. That contraction accumulates in PSUM within a block and in float32 in SBUF over blocks; with one block
(``blocks.intermediate`` 0: decode) in PSUM alone. Gate and up may share one A (``gate_a`` given twice).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuronmm.kernels.layout import Packing
from neuronmm.kernels.nki.blocks import Blocks, split
from neuronmm.kernels.nki.low_rank_matmul import load_strip
from neuronmm.kernels.nki.stages import contract, even, evict, first_factor, groups, load_panel, packing, second_factor


@dataclass(frozen=True)
class Ranks:
    """Static sizes of the MLP: ranks of gate, up and down, and the intermediate dimension."""

    gate: int
    up: int
    down: int
    intermediate: int


@dataclass(frozen=True)
class Weights:
    """The packed factors of the three linears; ``up_a`` None: gate and up share ``gate_a``."""

    gate_a: Any
    gate_b: Any
    up_a: Any
    up_b: Any
    down_a: Any
    down_b: Any


def low_rank_swiglu_mlp(
    d: Any, x: Any, w: Weights, y: Any, ranks: Ranks, blocks: Blocks, residual: Any = None, epsilon: float | None = None
) -> None:
    """Body of the kernel on the dialect ``d``.

    Dimensions: ``x``, ``y`` and ``residual`` [hidden, tokens]; each A packed of [rank, in], each B of [out, rank].
    With ``epsilon`` the input is RMS-normalised (its weight packed into the A factors); ``residual`` is added.
    """
    tokens = x.shape[1]
    strips, rest = divmod(tokens, blocks.tokens)
    for i in d.loop(strips):
        _strip(d, x, w, y, ranks, i * blocks.tokens, blocks.tokens, blocks, residual, epsilon)
    if rest:
        _strip(d, x, w, y, ranks, strips * blocks.tokens, rest, blocks, residual, epsilon)


def _strip(
    d: Any, x: Any, w: Weights, y: Any, ranks: Ranks, start: Any, tokens: int, blocks: Blocks, residual: Any,
    epsilon: float | None,
) -> None:  # fmt: skip
    hidden, moving, dtype = x.shape[0], blocks.moving, x.dtype
    gate, up = gate_up_inputs(d, x, w, ranks, start, tokens, blocks, epsilon)
    how_gate = packing(w.gate_b, ranks.gate, ranks.intermediate)
    how_up = packing(w.up_b, ranks.up, ranks.intermediate)
    how_down = packing(w.down_a, ranks.intermediate, ranks.down)
    cut, rank = how_down.rows, how_down.columns
    spans = split(cut.count, block_chunks(blocks, how_gate, how_up))
    h = d.sbuf((rank.width, rank.count, tokens), dtype)
    total = d.sbuf((rank.width, rank.count, tokens), d.float32) if len(spans) > 1 else None
    for first, count in spans:
        act = d.sbuf((cut.width, count, tokens), dtype)
        swiglu_block(d, act, gate, up, w, how_gate, how_up, first, first + count, tokens, moving)
        _contract_block(d, h, total, act, w.down_a, how_down, first, first + count, tokens, moving)
    second_factor(d, y, h, w.down_b, packing(w.down_b, ranks.down, hidden), start, tokens, moving, residual)


def gate_up_inputs(
    d: Any, x: Any, w: Weights, ranks: Ranks, start: Any, tokens: int, blocks: Blocks, epsilon: float | None
) -> tuple[Any, Any]:
    """``A_gate x`` and ``A_up x`` of a strip; the same tile twice where the factor is shared."""
    how = packing(w.gate_a, x.shape[0], ranks.gate)
    strip, scale = load_strip(d, x, how.rows, start, tokens, blocks, epsilon)
    gate = first_factor(d, strip, w.gate_a, how, tokens, blocks.moving, x.dtype, scale)
    if w.up_a is None:
        return gate, gate
    how = packing(w.up_a, x.shape[0], ranks.up)
    return gate, first_factor(d, strip, w.up_a, how, tokens, blocks.moving, x.dtype, scale)


def block_chunks(blocks: Blocks, how_gate: Packing, how_up: Packing) -> int:
    """Chunks of a block: as asked, rounded up to whole panels of gate's and up's B."""
    whole = max(how_gate.group, how_up.group)
    asked = blocks.intermediate or how_gate.columns.count
    return -(-asked // whole) * whole


def swiglu_block(
    d: Any, act: Any, gate: Any, up: Any, w: Weights, how_gate: Packing, how_up: Packing, first: int, last: int,
    tokens: int, moving: int,
) -> None:  # fmt: skip
    """``act = silu(B_gate gate) * (B_up up)`` for chunks [first, last) of the intermediate dimension."""
    for weights, how, h in ((w.gate_b, how_gate, gate), (w.up_b, how_up, up)):
        for panel in how.panels():
            if not first <= panel.first < last:
                continue
            tile = load_panel(d, weights, how, panel, 0, how.rows.count)
            for t0, t in split(tokens, moving):
                for j0, n in groups(panel, t):
                    acc = d.psum((how.columns.width, n, t))
                    for j in range(j0, j0 + n):
                        dst = d.at(acc, (0, how.columns.length(j)), j - j0, (0, t))
                        contract(d, dst, tile, how, panel, j, h, 0, how.rows.count, t0, t0 + t)
                    for at, m, wide in even(how.columns, j0, n):
                        dst = d.at(act, (0, wide), (at - first, at - first + m), (t0, t0 + t))
                        src = acc[0:wide, at - j0 : at - j0 + m, 0:t]
                        if weights is w.gate_b:
                            d.silu(dst, src)
                        else:
                            d.multiply(dst, src, act[0:wide, at - first : at - first + m, t0 : t0 + t])


def _contract_block(
    d: Any, h: Any, total: Any, act: Any, weights: Any, how: Packing, first: int, last: int, tokens: int, moving: int
) -> None:
    """Add ``A_down act`` of one block to ``total`` (float32; None: one block); the last block's sum goes to ``h``."""
    turn = 0
    for panel in how.panels():
        tile = load_panel(d, weights, how, panel, first, last)
        for t0, t in split(tokens, moving):
            for j0, n in groups(panel, t):
                acc = d.psum((how.columns.width, n, t))
                for j in range(j0, j0 + n):
                    dst = d.at(acc, (0, how.columns.length(j)), j - j0, (0, t))
                    contract(d, dst, tile, how, panel, j, act, first, last, t0, t0 + t)
                for at, m, wide in even(how.columns, j0, n):
                    target = h if last == how.rows.count else total
                    dst = d.at(target, (0, wide), (at, at + m), (t0, t0 + t))
                    src = acc[0:wide, at - j0 : at - j0 + m, 0:t]
                    if first == 0:
                        evict(d, dst, src, turn)
                    else:
                        d.add(dst, src, total[0:wide, at : at + m, t0 : t0 + t])
                    turn += 1
