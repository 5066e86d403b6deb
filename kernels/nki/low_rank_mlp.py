"""``down(silu(gate(x)) * up(x))`` with factorised linears in one kernel.

The activation [intermediate, tokens] lives in SBUF only, a few chunks at a time: gate's part is computed and put
through SiLU, up's part is computed and multiplied in, and ``A_down`` contracts the block into the down projection's
rank. That contraction accumulates in PSUM within a block and in float32 in SBUF over blocks; with one block
(``blocks.intermediate`` 0: decode) in PSUM alone. Gate and up may share one A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuronmm.kernels.nki.objects import (
    Factor,
    NKIObject,
    Options,
    Parts,
    Sizes,
    factor,
    in_one,
    panels_within,
    split,
)
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


@dataclass
class Weights(NKIObject):  # type: ignore[misc, valid-type]
    """The factors of the three linears. ``shared``: up uses ``gate_a``, and ``up_a`` is not read. ``down_b`` is not
    read where the kernel stops before it."""

    gate_a: Factor
    gate_b: Factor
    up_a: Factor
    up_b: Factor
    down_a: Factor
    down_b: Factor
    shared: bool


def weights(tensors: Any, plans: Any, shared: bool) -> Weights:
    """Six flat HBM tensors, A and B of gate, up and down, as the factors that ``plans`` describe.

    What a variant does not read is another tensor again, with its plan: ``gate_a`` for ``up_a``, ``down_a`` for
    ``down_b``.
    """
    return Weights(
        factor(tensors[0], plans[0]),
        factor(tensors[1], plans[1]),
        factor(tensors[2], plans[2]),
        factor(tensors[3], plans[3]),
        factor(tensors[4], plans[4]),
        factor(tensors[5], plans[5]),
        shared,
    )


def low_rank_swiglu_mlp(d: Any, x: Any, w: Weights, y: Any, blocks: Sizes, options: Options) -> None:
    """Body of the kernel on the dialect ``d``.

    Dimensions: ``x``, ``y`` and the residual [hidden, tokens], or the other way round as ``options`` say; each A of
    [rank, in], each B of [out, rank]. A norm's weight is packed into the A factors of gate and up. With
    ``options.partial``, ``y`` [down rank, tokens] is ``A_down`` of the activation.
    """
    if options.tokens_first:
        d.prepare_transposes(x.dtype)
    strips, rest = divmod(x.shape[0 if options.tokens_first else 1], blocks.tokens)
    for i in d.loop(strips):
        _strip(d, x, w, y, i * blocks.tokens, blocks.tokens, blocks, options)
    if rest > 0:
        _strip(d, x, w, y, strips * blocks.tokens, rest, blocks, options)


def _strip(d: Any, x: Any, w: Weights, y: Any, start: Any, tokens: int, blocks: Sizes, options: Options) -> None:
    inputs = gate_up_inputs(d, x, w, start, tokens, blocks, options)
    h = Accumulation(w.down_a, [], [])
    for block in split(d, w.down_a.rows.count, block_chunks(blocks, w.gate_b, w.up_b)):
        first, count = block
        act = swiglu_block(d, inputs[0], w.gate_b, inputs[1], w.up_b, first, count, tokens, blocks, x.dtype)
        accumulate_block(d, h, in_one(d, act, count), first, first + count, tokens, blocks, x.dtype)
    if options.partial:
        store_parts(d, y, h, start, tokens, options.tokens_first)
    else:
        second_factor(d, y, h.parts(d), w.down_b, w.down_b.panels, start, tokens, blocks, options)


def gate_up_inputs(
    d: Any, x: Any, w: Weights, start: Any, tokens: int, blocks: Sizes, options: Options
) -> tuple[Parts, Parts]:
    """``A_gate x`` and ``A_up x`` of a strip; the same tiles twice where the factor is shared."""
    if w.shared:
        made = first_factors(d, x, [w.gate_a], start, tokens, blocks, options)
        return made[0], made[0]
    made = first_factors(d, x, [w.gate_a, w.up_a], start, tokens, blocks, options)
    return made[0], made[1]


def block_chunks(blocks: Sizes, gate_b: Factor, up_b: Factor) -> int:
    """Chunks of a block: as asked, rounded up to whole panels of gate's and up's B."""
    whole = max(gate_b.group, up_b.group)
    asked = blocks.intermediate if blocks.intermediate > 0 else gate_b.columns.count
    return -(-asked // whole) * whole


def swiglu_block(
    d: Any, gate: Parts, gate_b: Factor, up: Parts, up_b: Factor, first: int, count: int, tokens: int, blocks: Sizes,
    dtype: Any,
) -> Any:  # fmt: skip
    """``silu(B_gate gate) * (B_up up)`` as a tile: ``count`` chunks of the intermediate dimension from ``first``."""
    act = d.sbuf((gate_b.columns.width, count, tokens), dtype)
    expand(d, act, first, SILU, act, gate_b, panels_within(gate_b, first, count), gate, tokens, blocks)
    expand(d, act, first, MULTIPLY, act, up_b, panels_within(up_b, first, count), up, tokens, blocks)
    return act
