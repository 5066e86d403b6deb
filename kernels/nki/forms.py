"""How the dimensions of pivoted linears are cut: a range of pivots is a segment, and both its sides are cut alike.

A pivoted linear (:class:`neuronmm.kernels.factors.LowRank`) has an identity block instead of r x r numbers. The kernels
do not multiply by it and nothing is gathered:

- Row form, ``y = [C h before; h; C h after]``: the stage that expands B copies ``h`` to the chunks of the pivots.
- Column form, ``h = x[in - r:] + D x[:in - r]``: the contraction adds the last chunks of ``x`` to its sums.

An engine reads and writes the same partitions. So a range of pivots in a dimension, and the rank that it is copied to
or from, have the same chunks: the dimension is cut at both ends of the range (:class:`.objects.Chunks`). In an MLP the
three ranges are ranges of the intermediate dimension, which is cut at all of their ends; each rank is cut where the
ends of the other ranges lie in its own. No dimension but a linear's input or output is in HBM. Every cut may leave a
chunk of fewer than 128 partitions, hence more matmuls. Ranges that begin and end at multiples of 128 cost none.

On one of several cores a linear of an MLP has fewer pivots than its rank (:class:`.problem.Ranks`): the block is then
the identity in the first rows or columns of the rank, which is cut after them, and zero in the others.

Pivots that are not consecutive would be a gather, which the kernels do not have: the caller expands such a linear.
"""

from __future__ import annotations

from functools import lru_cache

from neuronmm.kernels.nki.layout import Packing
from neuronmm.kernels.nki.objects import Chunks
from neuronmm.kernels.nki.problem import Pivots, Ranks
from neuronmm.kernels.ops import Form, KernelError


@lru_cache(maxsize=64)  # the tiling solver asks again for every choice of block sizes
def linear_packings(
    inputs: int, rank: int, outputs: int, element_bytes: int, form: Form = Form.TWO, pivots: int = 0
) -> tuple[Packing, Packing]:
    """Return how A and B of a linear are packed; ``pivots``: in the row form, the first of ``rank`` outputs.

    Raises:
        KernelError: the pivots are not consecutive, do not fit, or are all features.
    """
    if not isinstance(pivots, int):
        raise KernelError("pivots are an index: the NKI kernels take consecutive pivots; expand the linear")
    x, h, y = Chunks(inputs), Chunks(rank), Chunks(outputs)
    stored, copied = None, (0, 0)
    if form is Form.COLUMNS:
        x, stored = _identity(inputs, inputs - rank, rank)
    elif form is Form.ROWS:
        y, first = _identity(outputs, pivots, rank)
        copied = first, h.count
    return Packing.cut(x, h, element_bytes, stored), Packing.cut(h, y, element_bytes, copied=copied)


@lru_cache(maxsize=64)
def mlp_packings(hidden: int, ranks: Ranks, shared: bool, element_bytes: int) -> tuple[Packing, ...]:
    """Return how A and B of gate, up and down are packed; with a shared A, up's A is gate's.

    Raises:
        KernelError: the pivots do not fit, are more than the rank, or are all features of a linear.
    """
    middle = ranks.intermediate
    if shared and ranks.up_pivots:
        raise KernelError("up has pivots and gate's A: with a shared A only gate has pivots")
    ends = sorted({end for pivots in ranks.pivots if pivots for end in (pivots.first, pivots.end)})
    act = Chunks(middle, tuple(end for end in ends if 0 < end < middle))

    def rank(size: int, pivots: Pivots | None) -> tuple[Chunks, tuple[int, int]]:
        """Cut a rank; return it with the first and the number of the chunks of its pivots."""
        if pivots is None:
            return Chunks(size), (0, 0)
        first, number = pivots
        if number > size:
            raise KernelError(f"{number} pivots: must be at most the rank, {size}")
        inside = (end - first for end in ends if first < end <= pivots.end)
        cut = Chunks(size, tuple(end for end in inside if end < size))
        return cut, (_chunk(act, first, number), sum(s.count for s in cut.segments if s.start < number))

    sizes = ranks.gate, ranks.gate if shared else ranks.up, ranks.down
    linears = zip(sizes, ranks.pivots, strict=True)
    (gate, gate_copied), (up, up_copied), (down, down_copied) = (rank(*linear) for linear in linears)
    up = gate if shared else up
    x, size = Chunks(hidden), element_bytes
    gate_a = Packing.cut(x, gate, size)
    return (
        gate_a,
        Packing.cut(gate, act, size, copied=gate_copied),
        gate_a if shared else Packing.cut(x, up, size),
        Packing.cut(up, act, size, copied=up_copied),
        Packing.cut(act, down, size, stored=down_copied[0] if ranks.down_pivots else None),
        Packing.cut(down, x, size),
    )


def _identity(size: int, first: int, rank: int) -> tuple[Chunks, int]:
    """Cut a dimension at both ends of a range; return it with the first chunk of the range."""
    cut = Chunks(size, tuple(end for end in (first, first + rank) if 0 < end < size))
    return cut, _chunk(cut, first, rank)


def _chunk(cut: Chunks, first: int, count: int) -> int:
    if first < 0 or first + count > cut.size or count == cut.size:
        raise KernelError(f"pivots [{first}, {first + count}): must be some, but not all, of {cut.size} features")
    return next(s.first for s in cut.segments if s.start == first)
