"""``down(silu(gate(x)) * up(x))`` with factorised linears in one kernel.

The activation [intermediate, tokens] exists in SBUF only, a few chunks at a time. Gate and up may share one A. Gate and
up may have the row form and down the column form (:mod:`.forms`); a pivot is then an element of the activation.
:mod:`.low_rank_mlp_torch` computes the same in torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuronmm.kernels.nki.matmuls import copy_pivots, expand
from neuronmm.kernels.nki.objects import (
    MULTIPLY,
    SILU,
    Factor,
    NKIObject,
    Options,
    Parts,
    Sizes,
    factor,
    panels_within,
    parts_of,
    split,
)
from neuronmm.kernels.nki.scaling import load_table, resident
from neuronmm.kernels.nki.stages import (
    Accumulation,
    accumulate_block,
    expand_and_store,
    load_and_contract,
    store_accumulated,
)


@dataclass
class Weights(NKIObject):  # type: ignore[misc, valid-type]
    """The factors of the three linears.

    ``shared``: up uses ``gate_a``, and ``up_a`` is not read. A kernel that stops before B of down does not read
    ``down_b``.
    """

    gate_a: Factor
    gate_b: Factor
    up_a: Factor
    up_b: Factor
    down_a: Factor
    down_b: Factor
    shared: bool


def weights(
    tensors: Any, plans: Any, shared: bool, scaled: bool = False, table: Any = 0.0, at: Any = (0, 0, 0, 0, 0, 0)
) -> Weights:
    """Describe six flat HBM tensors, A and B of gate, up and down, which are packed by ``plans``.

    A variant that does not read ``up_a`` or ``down_b`` passes ``gate_a`` or ``down_a`` in its place, with its plan.
    ``scaled``, ``table``: as in :class:`.objects.Factor`; ``at``: the first column of each factor.
    """
    return Weights(
        factor(tensors[0], plans[0], scaled, table, at[0]),
        factor(tensors[1], plans[1], scaled, table, at[1]),
        factor(tensors[2], plans[2], scaled, table, at[2]),
        factor(tensors[3], plans[3], scaled, table, at[3]),
        factor(tensors[4], plans[4], scaled, table, at[4]),
        factor(tensors[5], plans[5], scaled, table, at[5]),
        shared,
    )


def with_table(d: Any, w: Weights) -> Weights:
    """Return the weights with the table of their scales, if they have one, in SBUF."""
    table = load_table(d, w.gate_a)
    return Weights(
        resident(w.gate_a, table),
        resident(w.gate_b, table),
        resident(w.up_a, table),
        resident(w.up_b, table),
        resident(w.down_a, table),
        resident(w.down_b, table),
        w.shared,
    )


def low_rank_swiglu_mlp(d: Any, x: Any, w: Weights, y: Any, blocks: Sizes, options: Options) -> None:
    """Compute ``y = down(silu(gate(x)) * up(x))`` (+ residual) on the dialect ``d``.

    Dimensions:
        hidden, intermediate: features of x and y, and of the activation
        x, y, residual: [hidden, tokens]; [tokens, hidden] with ``options.tokens_first``
        w: packed weights, each A [rank, in], each B [out, rank]; a norm's weight is packed into A of gate and up
        y with ``options.partial``: [rank of down, tokens] or its transpose; ``A_down`` of the activation

    A factor with an identity block copies or adds chunks in place of the block's matmuls. What a factor of few bits
    gives is multiplied by its scales as it leaves PSUM (:mod:`.scaling`).

    Each weight is read once per strip. The down projection accumulates in PSUM within a block of the activation, and
    in float32 in SBUF over blocks. With one block (``blocks.intermediate`` 0: decode) it accumulates in PSUM alone.

    Pseudocode::

        for each strip of blocks.tokens tokens:                 # a loop of the language; the loops below are unrolled
            DMA, tensor: g = A_gate x, u = A_up x               # load_and_contract; x is read once
            for each block of blocks.intermediate chunks:
                for each tile of blocks.panels panels of B_gate:
                    DMA: tile -> SBUF, double-buffered;  tensor: PSUM = B_gate g
                    scalar: act = silu(PSUM)
                for each tile of blocks.panels panels of B_up:
                    DMA: tile -> SBUF, double-buffered;  tensor: PSUM = B_up u
                    vector: act = PSUM * act
                for each tile of blocks.panels panels of A_down:
                    DMA: tile -> SBUF, double-buffered;  tensor: PSUM = A_down act
                    vector or scalar: h += PSUM in float32; the last block rounds once
            DMA, tensor, vector: y = B_down h (+ residual)      # expand_and_store
    """
    if options.tokens_first:
        d.prepare_transposes(x.dtype)
    w = with_table(d, w)
    strips, tail = divmod(x.shape[0 if options.tokens_first else 1], blocks.tokens)
    for i in d.loop(strips):
        _strip(d, x, w, y, i * blocks.tokens, blocks.tokens, blocks, options)
    if tail > 0:
        _strip(d, x, w, y, strips * blocks.tokens, tail, blocks, options)


def _strip(d: Any, x: Any, w: Weights, y: Any, start: Any, tokens: int, blocks: Sizes, options: Options) -> None:
    inputs = gate_up_inputs(d, x, w, start, tokens, blocks, options)
    h = Accumulation(w.down_a, [], [])
    for block in split(d, w.down_a.rows.count, block_chunks(blocks, w.gate_b, w.up_b)):
        first, count = block
        act = swiglu_block(d, inputs[0], w.gate_b, inputs[1], w.up_b, first, count, tokens, blocks, x.dtype)
        accumulate_block(d, h, parts_of(d, act, count), first, first + count, tokens, blocks, x.dtype)
    if options.partial:
        store_accumulated(d, y, h, start, tokens, options.tokens_first)
    else:
        expand_and_store(d, y, h.parts(d), w.down_b, w.down_b.panels, start, tokens, blocks, options)


def gate_up_inputs(
    d: Any, x: Any, w: Weights, start: Any, tokens: int, blocks: Sizes, options: Options
) -> tuple[Parts, Parts]:
    """Compute ``A_gate x`` and ``A_up x`` of a strip; with a shared A both are the same tiles."""
    if w.shared:
        both = load_and_contract(d, x, [w.gate_a], start, tokens, blocks, options)
        return both[0], both[0]
    both = load_and_contract(d, x, [w.gate_a, w.up_a], start, tokens, blocks, options)
    return both[0], both[1]


def block_chunks(blocks: Sizes, gate_b: Factor, up_b: Factor) -> int:
    """Return the chunks of the activation per block: ``blocks.intermediate``, rounded up to full panels of both B."""
    group = max(gate_b.group, up_b.group)
    chunks = blocks.intermediate if blocks.intermediate > 0 else gate_b.columns.count
    return -(-chunks // group) * group


def swiglu_block(
    d: Any, gate: Parts, gate_b: Factor, up: Parts, up_b: Factor, first: int, count: int, tokens: int, blocks: Sizes,
    dtype: Any,
) -> Any:  # fmt: skip
    """Compute ``silu(B_gate gate) * (B_up up)`` for ``count`` chunks of the intermediate dimension from ``first``."""
    act = d.sbuf((gate_b.columns.width, count, tokens), dtype)
    copy_pivots(d, act, first, SILU, act, gate_b, gate, first, first + count, tokens)
    expand(d, act, first, SILU, act, gate_b, panels_within(gate_b, first, count), gate, tokens, blocks)
    copy_pivots(d, act, first, MULTIPLY, act, up_b, up, first, first + count, tokens)
    expand(d, act, first, MULTIPLY, act, up_b, panels_within(up_b, first, count), up, tokens, blocks)
    return act
