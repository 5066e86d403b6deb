"""``down(silu(gate(x)) * up(x))`` with factorised linears in one kernel.

The activation [intermediate, tokens] lives in SBUF only, a few chunks at a time: gate's part is computed and put
through SiLU, up's part is computed and multiplied in, and ``A_down`` contracts the block into the down projection's
rank. That contraction accumulates in PSUM within a block and in float32 in SBUF over blocks; with one block
(``blocks.intermediate`` 0: decode) in PSUM alone. Gate and up may share one A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuronmm.kernels.nki.blocks import Blocks, split
from neuronmm.kernels.nki.stages import (
    Accumulation,
    Factor,
    Parts,
    accumulate_block,
    contract,
    even,
    factor,
    first_factors,
    groups,
    load_panel,
    second_factor,
)


@dataclass(frozen=True)
class Ranks:
    """Static sizes of the MLP: ranks of gate, up and down, and the intermediate dimension."""

    gate: int
    up: int
    down: int
    intermediate: int


@dataclass(frozen=True)
class Weights:
    """The packed factors of the three linears. ``shared``: up uses ``gate_a``, and ``up_a`` is not read."""

    gate_a: Any
    gate_b: Any
    up_a: Any
    up_b: Any
    down_a: Any
    down_b: Any
    shared: bool = False


def low_rank_swiglu_mlp(
    d: Any, x: Any, w: Weights, y: Any, ranks: Ranks, blocks: Blocks, epsilon: float = 0.0, adds: bool = False,
    residual: Any = None,
) -> None:  # fmt: skip
    """Body of the kernel on the dialect ``d``.

    Dimensions: ``x``, ``y`` and ``residual`` [hidden, tokens]; each A packed of [rank, in], each B of [out, rank].
    With ``epsilon`` the input is RMS-normalised (its weight packed into the A factors). ``adds``: plus ``residual``.
    """
    tokens = x.shape[1]
    strips, rest = divmod(tokens, blocks.tokens)
    for i in d.loop(strips):
        _strip(d, x, w, y, ranks, i * blocks.tokens, blocks.tokens, blocks, epsilon, adds, residual)
    if rest:
        _strip(d, x, w, y, ranks, strips * blocks.tokens, rest, blocks, epsilon, adds, residual)


def _strip(
    d: Any, x: Any, w: Weights, y: Any, ranks: Ranks, start: Any, tokens: int, blocks: Blocks, epsilon: float,
    adds: bool, residual: Any,
) -> None:  # fmt: skip
    up_rank = ranks.gate if w.shared else ranks.up
    gate_b, up_b = factor(w.gate_b, ranks.gate, ranks.intermediate), factor(w.up_b, up_rank, ranks.intermediate)
    down_a, down_b = factor(w.down_a, ranks.intermediate, ranks.down), factor(w.down_b, ranks.down, y.shape[0])
    gate, up = gate_up_inputs(d, x, w, ranks, start, tokens, blocks, epsilon)
    cut = down_a.how.rows
    h = Accumulation(down_a, [], [])
    for first, count in split(cut.count, block_chunks(blocks, gate_b, up_b)):
        act = d.sbuf((cut.width, count, tokens), x.dtype)
        swiglu_block(d, act, gate, gate_b, up, up_b, first, first + count, tokens, blocks.moving)
        held = Parts([act], count)
        accumulate_block(d, h, held, first, first + count, tokens, blocks.moving, x.dtype)
    second_factor(d, y, h.parts(), down_b, down_b.how.panels(), start, tokens, blocks.moving, adds, residual)


def gate_up_inputs(
    d: Any, x: Any, w: Weights, ranks: Ranks, start: Any, tokens: int, blocks: Blocks, epsilon: float
) -> tuple[Parts, Parts]:
    """``A_gate x`` and ``A_up x`` of a strip; the same tiles twice where the factor is shared."""
    factors = [factor(w.gate_a, x.shape[0], ranks.gate)]
    if not w.shared:
        factors.append(factor(w.up_a, x.shape[0], ranks.up))
    made = first_factors(d, x, factors, start, tokens, blocks, epsilon)
    return made[0], made[-1]


def block_chunks(blocks: Blocks, gate_b: Factor, up_b: Factor) -> int:
    """Chunks of a block: as asked, rounded up to whole panels of gate's and up's B."""
    whole = max(gate_b.how.group, up_b.how.group)
    asked = blocks.intermediate or gate_b.how.columns.count
    return -(-asked // whole) * whole


def swiglu_block(
    d: Any,
    act: Any,
    gate: Parts,
    gate_b: Factor,
    up: Parts,
    up_b: Factor,
    first: int,
    last: int,
    tokens: int,
    moving: int,
) -> None:
    """``act = silu(B_gate gate) * (B_up up)`` for chunks [first, last) of the intermediate dimension."""
    for f, h, gates in ((gate_b, gate, True), (up_b, up, False)):
        cut, rows = f.how.columns, f.how.rows
        for panel in f.how.panels():
            if panel.first < first or panel.first >= last:
                continue
            tile = load_panel(d, f, panel, 0, rows.count)
            for t0, t in split(tokens, moving):
                for j0, n in groups(panel, t):
                    acc = d.psum((cut.width, n, t))
                    for j in range(j0, j0 + n):
                        contract(d, acc, j - j0, tile, f.how, panel, j, h, 0, rows.count, t0, t)
                    for at, m, wide in even(cut, j0, n):
                        src = acc[0:wide, at - j0 : at - j0 + m, 0:t]
                        at = at - first
                        dst = d.at(act, (0, wide), (at, at + m), (t0, t0 + t))
                        if gates:
                            d.silu(dst, src)
                        else:
                            d.multiply(dst, src, act[0:wide, at : at + m, t0 : t0 + t])
