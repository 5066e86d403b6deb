"""What a compiler does with a schedule that does not fit the SBUF: move the longest-lived tiles to HBM.

A spilled tile is loaded before every instruction that reads it and stored after every one that writes it, through
staging tiles. Victims are taken longest life first, so the tiles that only stage operands stay.
"""

from __future__ import annotations

import dataclasses
from bisect import insort

from neuronmm.emulator.nki.trace import Buffer, Engine, Fold, Instruction, Region, Space, Trace

STAGES = 8
"""Staging tiles the compiler is assumed to keep for spilled tiles in flight."""

_GOLDEN = 0.6180339887
"""Multiples of it, modulo 1, are spread evenly however many are taken."""


def spill(trace: Trace, capacity: int) -> Trace:
    """``trace`` with tiles spilled until the live ones fit ``capacity`` bytes a partition; itself if they do."""
    victims = _victims(trace, capacity)
    return _rewrite(trace, victims) if victims else trace


def _victims(trace: Trace, capacity: int) -> set[int]:
    """The tiles to spill: wherever the live ones do not fit, the one with the longest life has to leave."""
    if trace.peak(Space.SBUF) <= capacity:
        return set()
    tiles = sorted((b for b in trace.buffers if b.space is Space.SBUF), key=lambda b: b.allocated)
    room = capacity - STAGES * max(tiles, key=lambda b: b.released - b.allocated).bytes_per_partition
    victims: set[int] = set()
    live: list[Buffer] = []
    for tile in tiles:
        live = [b for b in live if b.released > tile.allocated]
        insort(live, tile, key=_staying_power)
        while sum(b.bytes_per_partition for b in live) > room:
            victims.add(live.pop(0).id)
    return victims


def _staying_power(tile: Buffer) -> tuple[int, float]:
    """First to leave first: long lives, and evenly spread over tiles whose lives are equal within a factor of 2."""
    return -(tile.released - tile.allocated).bit_length(), tile.id * _GOLDEN % 1


def _rewrite(trace: Trace, victims: set[int]) -> Trace:
    """The same instructions on staging tiles, with the loads and stores between."""
    result = Trace(
        trace.name, buffers=[_as_hbm(b) if b.id in victims else dataclasses.replace(b) for b in trace.buffers]
    )
    written: set[int] = set()
    place: list[int] = []  # the new index of every old instruction's first step
    for instruction in trace.instructions:
        place.append(len(result.instructions))
        reads = {r.buffer for r in instruction.reads} & victims
        writes = {r.buffer for r in instruction.writes} & victims
        stage: dict[int, int] = {}
        for victim in sorted(reads | writes):
            home = result.buffers[victim]
            tile = dataclasses.replace(
                trace.buffers[victim], id=len(result.buffers), name="spill stage",
                location=f"spill stage {len(result.buffers) % (STAGES // 2)}",
                loop=instruction.loop, allocated=len(result.instructions),
            )  # fmt: skip
            result.buffers.append(tile)
            stage[victim] = tile.id
            if victim in reads and victim in written:
                result.instructions.append(_move(home, tile, Space.HBM, Space.SBUF, instruction))
        result.instructions.append(
            dataclasses.replace(
                instruction,
                reads=tuple(_staged(r, stage) for r in instruction.reads),
                writes=tuple(_staged(r, stage) for r in instruction.writes),
            )
        )
        for victim, tile_id in stage.items():
            if victim in writes:
                move = _move(result.buffers[tile_id], result.buffers[victim], Space.SBUF, Space.HBM, instruction)
                result.instructions.append(move)
                written.add(victim)
            result.buffers[tile_id].released = len(result.instructions)
    place.append(len(result.instructions))
    for buffer in result.buffers[: len(trace.buffers)]:
        buffer.allocated, buffer.released = place[buffer.allocated], place[buffer.released]
    result.folds = [Fold(place[f.start], place[f.stop], f.times) for f in trace.folds]
    return result


def _as_hbm(tile: Buffer) -> Buffer:
    return dataclasses.replace(tile, space=Space.HBM, name=f"{tile.name} spilled")


def _staged(region: Region, stage: dict[int, int]) -> Region:
    return region._replace(buffer=stage.get(region.buffer, region.buffer))


def _move(source: Buffer, target: Buffer, here: Space, there: Space, instruction: Instruction) -> Instruction:
    """A whole tile between its home in HBM and a staging tile."""
    row = source.bytes_per_partition
    return Instruction(
        Engine.DMA, "spill", (_whole(source),), (_whole(target),), instruction.location, instruction.loop,
        source.dtype, partitions=source.partitions, bytes=source.partitions * row, row_bytes=row,
        source=here, target=there,
    )  # fmt: skip


def _whole(buffer: Buffer) -> Region:
    return Region(buffer.id, 0, buffer.partitions, 0, buffer.bytes_per_partition)
