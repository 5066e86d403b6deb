"""The block sizes a kernel runs with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Blocks:
    """Block sizes.

    ``tokens``: tokens of a strip (the paper's B_M): what stays in SBUF while every weight passes by once.
    ``moving``: tokens of one product, at most 512.
    ``depth``: chunks (of 128) of the input held at a time; the first product accumulates in float32 over these blocks.
    0: the whole input of a strip, and the product accumulates in PSUM alone.
    ``intermediate``: chunks of its activation the MLP holds at a time; as ``depth``, for the down projection.
    """

    tokens: int = 512
    moving: int = 512
    depth: int = 0
    intermediate: int = 8

    def __post_init__(self) -> None:
        if not (self.tokens >= 1 and 1 <= self.moving <= 512 and self.depth >= 0 and self.intermediate >= 0):
            raise ValueError(f"block sizes out of range: {self}")


DECODE = Blocks(tokens=128, moving=128, intermediate=0)
PREFILL = Blocks()


def default_blocks(tokens: int) -> Blocks:
    """Sizes that fit every supported model: up to 128 tokens the decode variant, else the prefill variant."""
    return DECODE if tokens <= 128 else PREFILL


def split(size: int, step: int) -> list[tuple[int, int]]:
    """``(start, length)`` of consecutive blocks of ``step`` (0: one block); the last is what remains."""
    step = step or size
    return [(start, min(step, size - start)) for start in range(0, size, step)]
