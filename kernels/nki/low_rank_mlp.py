"""``down(silu(gate(x)) * up(x))`` with factorised linears in one kernel.

The activation [intermediate, tokens] lives in SBUF only, a few chunks at a time: gate's part is computed and put
through SiLU, up's part is computed and multiplied in, and ``A_down`` contracts the block into the down projection's
rank. That contraction accumulates in PSUM within a block and in float32 in SBUF over blocks; with one block
(``blocks.intermediate`` 0: decode) in PSUM alone. Gate and up may share one A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuronmm.kernels.nki.blocks import PLAIN, Blocks, Options, split
from neuronmm.kernels.nki.moves import Factor, Parts, factor, in_one
from neuronmm.kernels.nki.stages import (
    MULTIPLY,
    SILU,
    Accumulation,
    accumulate_block,
    expand,
    first_factors,
    second_factor,
    store_parts,
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
    d: Any, x: Any, w: Weights, y: Any, ranks: Ranks, blocks: Blocks, options: Options = PLAIN
) -> None:
    """Body of the kernel on the dialect ``d``.

    Dimensions: ``x``, ``y`` and the residual [hidden, tokens], or the other way round as ``options`` say; each A packed
    of [rank, in], each B of [out, rank]. A norm's weight is packed into the A factors of gate and up. With
    ``options.partial``, ``y`` [down rank, tokens] is ``A_down`` of the activation, and ``w.down_b`` is not read.
    """
    tokens = x.shape[0] if options.tokens_first else x.shape[1]
    strips, rest = divmod(tokens, blocks.tokens)
    for i in d.loop(strips):
        _strip(d, x, w, y, ranks, i * blocks.tokens, blocks.tokens, blocks, options)
    if rest:
        _strip(d, x, w, y, ranks, strips * blocks.tokens, rest, blocks, options)


def _strip(
    d: Any, x: Any, w: Weights, y: Any, ranks: Ranks, start: Any, tokens: int, blocks: Blocks, options: Options
) -> None:
    gate_b, up_b = gate_up_factors(w, ranks)
    down_a = factor(w.down_a, ranks.intermediate, ranks.down)
    gate, up = gate_up_inputs(d, x, w, ranks, start, tokens, blocks, options)
    cut = down_a.how.rows
    h = Accumulation(down_a, [], [])
    for first, count in split(cut.count, block_chunks(blocks, gate_b, up_b)):
        act = swiglu_block(d, gate, gate_b, up, up_b, first, count, tokens, blocks, x.dtype)
        accumulate_block(d, h, in_one(act, count), first, first + count, tokens, blocks, x.dtype)
    if options.partial:
        store_parts(d, y, h, start, tokens, options.tokens_first)
    else:
        down_b = factor(w.down_b, ranks.down, y.shape[1] if options.tokens_first else y.shape[0])
        second_factor(d, y, h.parts(), down_b, down_b.how.panels(), start, tokens, blocks, options)


def gate_up_factors(w: Weights, ranks: Ranks) -> tuple[Factor, Factor]:
    """The B factors of gate and up."""
    up_rank = ranks.gate if w.shared else ranks.up
    return factor(w.gate_b, ranks.gate, ranks.intermediate), factor(w.up_b, up_rank, ranks.intermediate)


def gate_up_inputs(
    d: Any, x: Any, w: Weights, ranks: Ranks, start: Any, tokens: int, blocks: Blocks, options: Options
) -> tuple[Parts, Parts]:
    """``A_gate x`` and ``A_up x`` of a strip; the same tiles twice where the factor is shared."""
    hidden = x.shape[1] if options.tokens_first else x.shape[0]
    factors = [factor(w.gate_a, hidden, ranks.gate)]
    if not w.shared:
        factors.append(factor(w.up_a, hidden, ranks.up))
    made = first_factors(d, x, factors, start, tokens, blocks, options)
    return made[0], made[-1]


def block_chunks(blocks: Blocks, gate_b: Factor, up_b: Factor) -> int:
    """Chunks of a block: as asked, rounded up to whole panels of gate's and up's B."""
    whole = max(gate_b.how.group, up_b.how.group)
    asked = blocks.intermediate or gate_b.how.columns.count
    return -(-asked // whole) * whole


def swiglu_block(
    d: Any, gate: Parts, gate_b: Factor, up: Parts, up_b: Factor, first: int, count: int, tokens: int, blocks: Blocks,
    dtype: Any,
) -> Any:  # fmt: skip
    """``silu(B_gate gate) * (B_up up)`` as a tile: ``count`` chunks of the intermediate dimension from ``first``."""
    act = d.sbuf((gate_b.how.columns.width, count, tokens), dtype)
    for f, h, kind in ((gate_b, gate, SILU), (up_b, up, MULTIPLY)):
        panels = [panel for panel in f.how.panels() if first <= panel.first < first + count]
        expand(d, act, first, kind, act, f, panels, h, tokens, blocks)
    return act
