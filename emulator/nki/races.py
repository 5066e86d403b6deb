"""Race detection: the iterations of an ``affine_range`` may run in any order, so none may depend on another.

Rules for memory allocated outside the loop: no iteration reads or overwrites an element that another iteration wrote,
and none writes an element that another read. Sums (``tile += value``) may accumulate over iterations, but not onto what
another iteration set; the tensor engine's matmuls are exempt, of which the first sets a PSUM location and others add.
Only runs with data detect races; a shape-only run does not.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from neuronmm.emulator.nki.machine import Loop, Machine, Storage, current
from neuronmm.emulator.nki.trace import Engine

if TYPE_CHECKING:
    from neuronmm.emulator.nki.tile import Mask, Tile


def note_read(tile: Tile, mask: Mask) -> None:
    """Record that the last instruction reads ``tile`` (under ``mask``); raise NkiError on a race. Not for sums."""
    machine, storage = current(), tile.storage
    loops = _parallel_loops(machine, storage)
    if loops and storage.last_writes is not None:
        _check_writes(machine, loops, storage, tile.gather(storage.last_writes, mask), "reads")
    for loop in loops:
        loop.reads.setdefault(storage, []).append((len(machine.trace.instructions) - 1, tile, mask))


def note_write(tile: Tile, mask: Mask, accumulating: bool) -> None:
    """Record that the last instruction writes ``tile`` (under ``mask``) or adds to it; raise NkiError on a race."""
    machine, storage = current(), tile.storage
    loops = _parallel_loops(machine, storage)
    if not loops:
        return
    if storage.last_writes is None:  # allocated on first use: most tiles live within one iteration
        storage.last_writes, storage.last_sets = np.full((2, prod(storage.record.shape)), -1, np.int64)
    assert storage.last_sets is not None
    if accumulating:
        _check_writes(machine, loops, storage, tile.gather(storage.last_sets, mask), "adds to")
    else:
        _check_writes(machine, loops, storage, tile.gather(storage.last_writes, mask), "overwrites")
    for loop in loops:
        for number, view, view_mask in loop.reads.get(storage, ()):
            if number < loop.iteration and _overlap(tile, mask, view, view_mask):
                _refuse(machine, loop, storage, "writes", "read")
    tile.scatter(storage.last_writes, len(machine.trace.instructions) - 1, mask)
    if not accumulating and machine.trace.instructions[-1].engine is not Engine.TENSOR:
        tile.scatter(storage.last_sets, len(machine.trace.instructions) - 1, mask)


def _parallel_loops(machine: Machine, storage: Storage) -> list[Loop]:
    """Return the enclosing parallel loops that started after the allocation of ``storage``."""
    return [loop for loop in machine.loops if loop.parallel and storage.allocated_at <= loop.started]


def _check_writes(machine: Machine, loops: list[Loop], storage: Storage, writers: np.ndarray, verb: str) -> None:
    for loop in loops:
        if ((writers >= loop.started) & (writers < loop.iteration)).any():
            _refuse(machine, loop, storage, verb, "wrote")


def _refuse(machine: Machine, loop: Loop, storage: Storage, verb: str, other_verb: str) -> NoReturn:
    machine.fail(
        "race",
        f"iteration {loop.index} of the affine_range at {loop.location} {verb} elements of "
        f"{storage.record.name or 'the buffer allocated at ' + storage.record.location} "
        f"that another iteration {other_verb}",
    )


def _overlap(a: Tile, mask_a: Mask, b: Tile, mask_b: Mask) -> bool:
    """Return whether two views of one storage share an element."""
    if a.overrun is None and b.overrun is None and not a.region().overlaps(b.region()):
        return False
    return bool(np.intersect1d(a.element_numbers(mask_a), b.element_numbers(mask_b)).size)
