"""Races: the iterations of an ``affine_range`` may run in any order, so none may depend on another.

Rules for memory from outside the loop: no iteration reads or overwrites an element that another wrote, and none
writes an element that another read. Sums (``tile += value``) may cross iterations, in any order. Races are found
where a run has data; a run on shapes alone checks none.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from neuronmm.emulator.nki.machine import Loop, Machine, Storage, current

if TYPE_CHECKING:
    from neuronmm.emulator.nki.tile import Mask, Tile


def note_read(tile: Tile, chosen: Mask) -> None:
    """Check and note that the last instruction reads ``tile`` (under ``chosen``); not for the read of a sum."""
    machine, storage = current(), tile.storage
    loops = _loops(machine, storage)
    if loops and storage.stamps is not None:
        _refuse_written(machine, loops, storage, tile.picked(storage.stamps, chosen), "reads")
    for loop in loops:
        loop.reads.setdefault(storage, []).append((len(machine.trace.instructions) - 1, tile, chosen))


def note_write(tile: Tile, chosen: Mask, adds: bool) -> None:
    """Check and note that the last instruction writes ``tile`` (under ``chosen``), or ``adds`` to it."""
    machine, storage = current(), tile.storage
    loops = _loops(machine, storage)
    if not loops:
        return
    if storage.stamps is None:  # made when first asked for: most tiles live and die within one iteration
        storage.stamps = np.full(prod(storage.record.shape), -1, np.int64)
    if not adds:
        _refuse_written(machine, loops, storage, tile.picked(storage.stamps, chosen), "overwrites")
    for loop in loops:
        for number, other, its in loop.reads.get(storage, ()):
            if number < loop.iteration and _overlap(tile, chosen, other, its):
                _refuse(machine, loop, storage, "writes", "read")
    tile.put(storage.stamps, len(machine.trace.instructions) - 1, chosen)


def _loops(machine: Machine, storage: Storage) -> list[Loop]:
    """The parallel loops around that the storage is from outside of."""
    return [loop for loop in machine.loops if loop.parallel and storage.born <= loop.started]


def _refuse_written(machine: Machine, loops: list[Loop], storage: Storage, stamps: np.ndarray, verb: str) -> None:
    for loop in loops:
        if ((stamps >= loop.started) & (stamps < loop.iteration)).any():
            _refuse(machine, loop, storage, verb, "wrote")


def _refuse(machine: Machine, loop: Loop, storage: Storage, verb: str, other: str) -> NoReturn:
    machine.fail(
        "race",
        f"iteration {loop.index} of the affine_range at {loop.location} {verb} elements of "
        f"{storage.record.name or 'the buffer allocated at ' + storage.record.location} "
        f"that another iteration {other}",
    )


def _overlap(a: Tile, chosen_a: Mask, b: Tile, chosen_b: Mask) -> bool:
    """Whether two views of one storage share an element."""
    if a.beyond is None and b.beyond is None and not a.region().overlaps(b.region()):
        return False
    return bool(np.intersect1d(a.numbers(chosen_a), b.numbers(chosen_b)).size)
