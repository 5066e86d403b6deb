"""Where a factorised linear that is split by input is added up over NeuronCores: before its B, or after.

Each core has ``A x`` of its part of the input, of the factors' rank. Either the kernel goes on to apply B, and the
results [out, tokens] are added up; or the smaller [rank, tokens] are, and B is applied to their sum, by a second
kernel that has to fetch what the first one stored.
"""

from __future__ import annotations

from neuronmm.kernels.hardware import TRN1, NeuronCore


def sums_before_b(rank: int, outputs: int, tokens: int, element: int, cores: int, core: NeuronCore = TRN1) -> bool:
    """Whether adding up [rank, tokens] and running a second kernel is the cheaper way.

    A ring all-reduce moves ``2 (cores - 1) / cores`` times its bytes. No rate of it is published for a core: the DMA
    engines' is assumed, for it and for the store and the load between the kernels, which start a transfer each.
    """
    bytes_a_row = tokens * element
    saved = 2 * (cores - 1) / cores * (outputs - rank) * bytes_a_row
    paid = 2 * rank * bytes_a_row + 2 * core.dma_start_ns * core.dma_rate
    return saved > paid
