"""Which earlier instructions an instruction must wait for.

Through tiles: a read waits for the writes of what it reads; a write waits for the reads and writes of what it replaces
(RAW, WAR, WAW), by overlap of rectangles.

Through memory: a tile that every iteration of a loop allocates anew takes the place of a released one, so its first
write waits for that tile's last use. The model's allocator gives every allocation site up to ``generations`` places (2:
double buffering) while all places fit SBUF (or the PSUM banks). It ignores alignment and fragmentation.

Through ports: on NeuronCore-v2 PSUM serves either the Vector or the Scalar engine, and SBUF either Vector or GpSimd.
The compiler serialises such accesses with semaphores in an order that it fixes before the kernel runs; the model takes
program order. On v3 two engines still cannot access one PSUM bank at a time, which is not modelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from neuronmm.emulator.nki.trace import Buffer, Engine, Region, Space


class CapacityError(RuntimeError):
    """The live buffers do not fit the memory, so the kernel would have to spill."""


class _Slot:
    """One rectangle of a tile: the instruction that wrote it last, and those that have read it since."""

    __slots__ = ("dma_readers", "engine_readers", "neighbours", "region", "writer")

    def __init__(self, region: Region) -> None:
        self.region = region
        self.writer = -1
        self.engine_readers: dict[Engine, int] = {}
        self.dma_readers: list[int] = []
        self.neighbours: list[tuple[_Slot, bool]] = []


class Tiles:
    """Dependencies through the contents of tiles. Add instructions in program order."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[Region, _Slot]] = {}

    def add(
        self, index: int, engine: Engine, reads: Iterable[tuple[int, Region]], writes: Iterable[tuple[int, Region]]
    ) -> tuple[set[int], list[int]]:
        """Add instruction ``index``; return the instructions it must wait for and the tiles it is the first to write.

        ``reads`` and ``writes`` are (key, rectangle). A buffer that is allocated again gets a new key.
        """
        before: set[int] = set()
        fresh: list[int] = []
        for key, region in reads:
            slot = self._slot(key, region)
            for other, _ in slot.neighbours:
                before.add(other.writer)
            if engine is Engine.DMA:
                slot.dma_readers.append(index)
            else:
                slot.engine_readers[engine] = index
        for key, region in writes:
            slot = self._slot(key, region)
            first = True
            for other, covered in slot.neighbours:
                first = first and other.writer < 0
                before.add(other.writer)
                before.update(other.engine_readers.values())
                before.update(other.dma_readers)
                if covered:
                    other.writer = index
                    other.engine_readers = {}
                    other.dma_readers = []
            if first:
                fresh.append(key)
        before.discard(-1)
        before.discard(index)
        return before, fresh

    def last_uses(self, key: int) -> set[int]:
        """Forget a tile and return the instructions that used it last."""
        uses: set[int] = set()
        for slot in self._slots.pop(key, {}).values():
            uses.add(slot.writer)
            uses.update(slot.engine_readers.values())
            uses.update(slot.dma_readers)
        uses.discard(-1)
        return uses

    def _slot(self, key: int, region: Region) -> _Slot:
        slots = self._slots.setdefault(key, {})
        slot = slots.get(region)
        if slot is None:
            slot = _Slot(region)
            for other in slots.values():
                if region.overlaps(other.region):
                    slot.neighbours.append((other, _covers(region, other.region)))
                    other.neighbours.append((slot, _covers(other.region, region)))
            slot.neighbours.append((slot, True))
            slots[region] = slot
        return slot


class Ports:
    """Dependencies through memories that serve one of two engines at a time. Add instructions in program order."""

    def __init__(self, exclusive: Iterable[tuple[str, str, str]]) -> None:
        self._others: dict[tuple[Space, Engine], Engine] = {}
        for memory, a, b in exclusive:
            self._others[Space(memory), Engine(a)] = Engine(b)
            self._others[Space(memory), Engine(b)] = Engine(a)
        self._last: dict[tuple[Space, Engine], int] = {}

    def add(self, index: int, engine: Engine, spaces: Iterable[Space]) -> set[int]:
        """Add instruction ``index``, which accesses ``spaces``; return the instructions it must wait for."""
        shared = [space for space in spaces if (space, engine) in self._others]
        before = {self._last.get((space, self._others[space, engine]), -1) for space in shared}
        self._last.update(((space, engine), index) for space in shared)
        return before - {-1}


def _covers(outer: Region, inner: Region) -> bool:
    return (
        outer.first <= inner.first and inner.last <= outer.last and outer.low <= inner.low and inner.high <= outer.high
    )


class Memory:
    """The allocator of one on-chip memory. Allocate and release buffers in program order."""

    def __init__(self, space: Space, capacity: int, granule: int, generations: int) -> None:
        self._space = space
        self._capacity = capacity
        self._granule = granule
        self._generations = generations
        self._allocated: dict[int, tuple[int, str]] = {}  # key -> (bytes, site)
        self._occupied = 0
        self._by_site: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._released: deque[int] = deque()
        self._released_by_site: dict[str, deque[int]] = {}

    def learn(self, steps: Iterable[tuple[bool, Buffer]]) -> None:
        """Record the peak size of each allocation site, from (is allocation, buffer) in program order."""
        live: dict[str, int] = {}
        for allocation, buffer in steps:
            site = buffer.location
            live[site] = live.get(site, 0) + (self.size(buffer) if allocation else -self.size(buffer))
            self._peak[site] = max(live[site], self._peak.get(site, 0))

    def size(self, buffer: Buffer) -> int:
        """Return a buffer's bytes per partition, rounded up to granules (PSUM: banks)."""
        return -(-buffer.bytes_per_partition // self._granule) * self._granule

    def allocate(self, key: int, buffer: Buffer) -> list[int]:
        """Allocate ``buffer`` and return the keys of the released buffers whose places it takes.

        Raises:
            CapacityError: the live buffers and ``buffer`` do not fit together.
        """
        size, site = self.size(buffer), buffer.location
        replaced: list[int] = []
        of_site = self._released_by_site.setdefault(site, deque())
        while self._by_site.get(site, 0) + size > self._generations * self._peak[site] and of_site:
            self._free(of_site.popleft(), replaced)
        while self._occupied + size > self._capacity and self._released:
            self._free(self._released.popleft(), replaced)
        if self._occupied + size > self._capacity:
            raise CapacityError(
                f"{self._space.value}: {self._occupied + size} bytes per partition are live when {buffer.name} is "
                f"allocated ({site}); there are {self._capacity}"
            )
        self._allocated[key] = (size, site)
        self._occupied += size
        self._by_site[site] = self._by_site.get(site, 0) + size
        return replaced

    def release(self, key: int) -> None:
        """Release a buffer; another one may take its place."""
        self._released.append(key)
        self._released_by_site[self._allocated[key][1]].append(key)

    def _free(self, key: int, replaced: list[int]) -> None:
        allocation = self._allocated.pop(key, None)
        if allocation is None:  # already freed through the other queue
            return
        size, site = allocation
        self._occupied -= size
        self._by_site[site] -= size
        replaced.append(key)
