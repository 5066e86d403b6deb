"""The block sizes a kernel runs with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Blocks:
    """Block sizes.

    ``tokens``: tokens of a strip (the paper's B_M): what stays in SBUF while every weight passes by once.
    ``moving``: tokens of one product, at most 512.
    ``intermediate``: chunks of the intermediate dimension (128 each) the MLP keeps of its activation at a time; the
    down projection's first product accumulates in float32 over these blocks. 0: all of them, and then in PSUM alone.
    """

    tokens: int = 1024
    moving: int = 512
    intermediate: int = 8

    def __post_init__(self) -> None:
        if not (self.tokens >= 1 and 1 <= self.moving <= 512 and self.intermediate >= 0):
            raise ValueError(f"block sizes out of range: {self}")


DECODE = Blocks(tokens=128, moving=128, intermediate=0)
PREFILL = Blocks()


def default_blocks(tokens: int) -> Blocks:
    """Sizes that suit every supported model: up to 128 tokens the decode variant, else the prefill variant."""
    return DECODE if tokens <= 128 else PREFILL


def split(size: int, step: int) -> list[tuple[int, int]]:
    """``(start, length)`` of consecutive blocks of ``step``; the last is what remains."""
    return [(start, min(step, size - start)) for start in range(0, size, step)]
