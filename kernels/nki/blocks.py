"""What a kernel runs with: its block sizes, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Blocks:
    """Block sizes; :mod:`neuronmm.kernels.tiling` chooses them.

    ``tokens``: tokens of a strip (the paper's B_M): what stays in SBUF while every weight passes by once.
    ``moving``: tokens of one product, at most 512.
    ``depth``: chunks (of 128) of the input held at a time; the first product accumulates in float32 over these blocks.
    0: the whole input of a strip, and the product accumulates in PSUM alone.
    ``intermediate``: chunks of its activation the MLP holds at a time; as ``depth``, for the down projection.
    ``panels``: panels of a weight in one tile. Two tiles are in flight, so this is what hides a transfer's latency.
    """

    tokens: int = 512
    moving: int = 512
    depth: int = 0
    intermediate: int = 8
    panels: int = 1

    def __post_init__(self) -> None:
        sizes_hold = self.tokens >= 1 and 1 <= self.moving <= 512 and self.panels >= 1
        if not (sizes_hold and self.depth >= 0 and self.intermediate >= 0):
            raise ValueError(f"block sizes out of range: {self}")


@dataclass(frozen=True)
class Options:
    """What a kernel does besides its products.

    ``epsilon``: the input is RMS-normalised first (the norm's weight is packed into the factors that read it); 0: not.
    ``biased`` and ``adds``: ``bias`` [out] and ``residual`` (like the output) are added to the result.
    ``tokens_first``: activations in HBM are [tokens, features] and not [features, tokens].
    ``partial``: the MLP's output is what B of down is applied to, the down projection's rank: a tensor-parallel host
    sums that over the cores, which is less than the hidden size, and applies B itself.
    """

    epsilon: float = 0.0
    biased: bool = False
    bias: Any = 0.0
    adds: bool = False
    residual: Any = 0.0
    tokens_first: bool = False
    partial: bool = False


PLAIN = Options()


def split(size: int, step: int) -> list[tuple[int, int]]:
    """``(start, length)`` of consecutive blocks of ``step`` (0: one block); the last is what remains."""
    step = step or size
    return [(start, min(step, size - start)) for start in range(0, size, step)]
