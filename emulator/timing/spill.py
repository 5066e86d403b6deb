"""Spill as a compiler would: if a trace does not fit SBUF, move its longest-lived tiles to HBM.

A spilled tile is loaded before every instruction that reads it and stored after every one that writes it, through
staging tiles. The longest-lived tiles are spilled first, so the tiles that only stage operands remain.
"""

from __future__ import annotations

import dataclasses
from bisect import insort

from neuronmm.emulator.nki.trace import Buffer, Engine, Fold, Instruction, Region, Space, Trace
from neuronmm.kernels.hardware import NeuronCore

STAGES = 8
"""Staging tiles for spilled tiles in flight; the compiler is assumed to place them in the bytes it keeps for itself."""

_GOLDEN = 0.6180339887
"""Multiples of it modulo 1 are evenly spread, however many there are."""


def spill(trace: Trace, core: NeuronCore) -> Trace:
    """Spill tiles of ``trace`` until the live ones fit what ``core`` leaves them; return it as is if they do."""
    victims = _victims(trace, core)
    return _rewrite(trace, victims) if victims else trace


def _victims(trace: Trace, core: NeuronCore) -> set[int]:
    """Return the tiles to spill: where the live ones do not fit, those with the longest life."""
    if trace.peak(Space.SBUF) <= core.sbuf_usable_bytes:
        return set()
    tiles = sorted((b for b in trace.buffers if b.space is Space.SBUF), key=lambda b: b.allocated)
    stages = STAGES * max(tiles, key=lambda b: b.released - b.allocated).bytes_per_partition
    room = core.sbuf_partition_bytes - max(core.sbuf_reserved_bytes, stages)
    victims: set[int] = set()
    live: list[Buffer] = []
    for tile in tiles:
        live = [b for b in live if b.released > tile.allocated]
        insort(live, tile, key=_spill_order)
        while sum(b.bytes_per_partition for b in live) > room:
            victims.add(live.pop(0).id)
    return victims


def _spill_order(tile: Buffer) -> tuple[int, float]:
    """Sort key: longest life first; tiles whose lives are equal within a factor of 2 are spilled evenly spread."""
    return -(tile.released - tile.allocated).bit_length(), tile.id * _GOLDEN % 1


def _rewrite(trace: Trace, victims: set[int]) -> Trace:
    """Return the trace with the victims in HBM, staging tiles, and the loads and stores between."""
    result = Trace(
        trace.name,
        buffers=[_as_hbm(b) if b.id in victims else dataclasses.replace(b) for b in trace.buffers],
        spilled=True,
    )
    written: set[int] = set()
    new_index: list[int] = []  # old index -> index of the first instruction that replaces it
    for instruction in trace.instructions:
        new_index.append(len(result.instructions))
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
    new_index.append(len(result.instructions))
    for buffer in result.buffers[: len(trace.buffers)]:
        buffer.allocated, buffer.released = new_index[buffer.allocated], new_index[buffer.released]
    result.folds = [Fold(new_index[f.start], new_index[f.stop], f.times) for f in trace.folds]
    return result


def _as_hbm(tile: Buffer) -> Buffer:
    return dataclasses.replace(tile, space=Space.HBM, name=f"{tile.name} spilled")


def _staged(region: Region, stage: dict[int, int]) -> Region:
    return region._replace(buffer=stage.get(region.buffer, region.buffer))


def _move(source: Buffer, target: Buffer, here: Space, there: Space, instruction: Instruction) -> Instruction:
    """Return the DMA of a whole tile between its place in HBM and a staging tile."""
    row = source.bytes_per_partition
    return Instruction(
        Engine.DMA, "spill", (_whole(source),), (_whole(target),), instruction.location, instruction.loop,
        source.dtype, partitions=source.partitions, bytes=source.partitions * row, row_bytes=row,
        source=here, target=there,
    )  # fmt: skip


def _whole(buffer: Buffer) -> Region:
    return Region(buffer.id, 0, buffer.partitions, 0, buffer.bytes_per_partition)
