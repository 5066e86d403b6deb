"""Race detection: the iterations of an ``affine_range`` may run in any order, so none may depend on another.

Rules for memory allocated outside the loop: no iteration reads or overwrites an element that another iteration wrote,
and none writes an element that another read. Sums (``tile += value``) may accumulate over iterations, but not onto what
another iteration wrote; only the tensor engine's first matmul into a PSUM location may write it, and others add. Only
runs with data detect races; a shape-only run does not.

A storage's ``last_writes`` has two times the number of the instruction, plus 1 if it added.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from neuronmm.emulator.nki.machine import Loop, Machine, Storage, current
from neuronmm.emulator.nki.trace import Space

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
        storage.last_writes = np.full(prod(storage.record.shape), -1, np.int64)
    writers = tile.gather(storage.last_writes, mask)
    if not accumulating:
        _check_writes(machine, loops, storage, writers, "overwrites")
    elif tile.space is not Space.PSUM:
        _check_writes(machine, loops, storage, writers[writers % 2 == 0], "adds to")
    for loop in loops:
        for number, view, view_mask in loop.reads.get(storage, ()):
            if number < loop.iteration and _overlap(tile, mask, view, view_mask):
                _refuse(machine, loop, storage, "writes", "read")
    tile.scatter(storage.last_writes, 2 * (len(machine.trace.instructions) - 1) + accumulating, mask)


def _parallel_loops(machine: Machine, storage: Storage) -> list[Loop]:
    """Return the enclosing parallel loops that started after the allocation of ``storage``."""
    return [loop for loop in machine.loops if loop.parallel and storage.allocated_at <= loop.started]


def _check_writes(machine: Machine, loops: list[Loop], storage: Storage, writers: np.ndarray, verb: str) -> None:
    numbers = writers // 2
    for loop in loops:
        if ((numbers >= loop.started) & (numbers < loop.iteration)).any():
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
