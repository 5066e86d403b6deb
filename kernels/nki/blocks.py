"""What a host chooses for a kernel: its block sizes, and the sizes of an MLP."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Blocks:
    """Block sizes; :mod:`.tiling` chooses them.

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
class Ranks:
    """Static sizes of the MLP: ranks of gate, up and down, and the intermediate dimension."""

    gate: int
    up: int
    down: int
    intermediate: int
