"""Write traces by hand, for schedules without a kernel to run: published kernels, a decode step, a whole graph."""

from __future__ import annotations

from neuronmm.emulator.nki.trace import Buffer, Engine, Fold, Instruction, Region, Space, Trace
from neuronmm.kernels.hardware import DTYPE_BYTES

ELEMENT_BYTES = {**DTYPE_BYTES, "float8_e4m3": 1, "int8": 1}
"""Element sizes of the dtypes that a trace may have."""


class Sketch:
    """A trace under construction. Tiles have 128 partitions; offsets and widths inside a partition are in elements."""

    def __init__(self, name: str) -> None:
        self.trace = Trace(name)
        self._loop: tuple[int, ...] = ()
        self._fold_start = 0

    def tensor(self, name: str, rows: int, columns: int, dtype: str = "bfloat16") -> Buffer:
        """Add a tensor [rows, columns] in HBM."""
        return self._buffer(name, Space.HBM, rows, columns, dtype)

    def tile(self, name: str, columns: int, dtype: str = "bfloat16", space: Space = Space.SBUF) -> Buffer:
        """Allocate a tile [128, columns] on chip; its name is also the allocation site."""
        return self._buffer(name, space, 128, columns, dtype)

    def free(self, *tiles: Buffer) -> None:
        """Release tiles; they are not used after this point."""
        for tile in tiles:
            tile.released = len(self.trace.instructions)

    def open_fold(self) -> None:
        """Begin one iteration of an outermost loop; it ends at ``close_fold``."""
        self._fold_start = len(self.trace.instructions)
        self._loop = (0,)

    def close_fold(self, times: int) -> None:
        """End the iteration that ``open_fold`` began; the loop has ``times`` of them."""
        self.trace.folds.append(Fold(self._fold_start, len(self.trace.instructions), times))
        self._loop = ()

    def load(self, tile: Buffer, offset: int, columns: int, tensor: Buffer, row: int = 0, column: int = 0) -> None:
        """Load 128 rows of ``tensor`` from (row, column) to ``tile[:, offset : offset + columns]``; 128 descriptors."""
        source = part(tensor, column, columns, row)
        self._dma("load", (source,), (part(tile, offset, columns),), tile, columns, Space.HBM, Space.SBUF)

    def store(self, tensor: Buffer, tile: Buffer, offset: int, columns: int, row: int = 0, column: int = 0) -> None:
        """Store ``tile[:, offset : offset + columns]`` to 128 rows of ``tensor`` from (row, column)."""
        target = part(tensor, column, columns, row)
        self._dma("store", (part(tile, offset, columns),), (target,), tile, columns, Space.SBUF, Space.HBM)

    def matmul(self, psum: Buffer, stationary: Region, moving: Region, n: int, dtype: str, accumulate: bool) -> None:
        """Compute psum[128, n] (+)= stationary[128, 128]^T moving[128, n]."""
        target = part(psum, 0, n)
        self._add(
            Instruction(
                Engine.TENSOR, "matmul", (stationary, moving), (target,), "", self._loop, dtype,
                k=128, m=128, n=n, accumulate=accumulate,
            )
        )  # fmt: skip

    def elementwise(
        self, engine: Engine, op: str, target: Region, operands: tuple[Region, ...], elements: int, dtype: str
    ) -> None:
        """Compute target = op(*operands) over ``elements`` columns; an operand of fewer bytes has one per partition."""
        largest = max((region.high - region.low for region in operands), default=0)
        full = tuple(i for i, region in enumerate(operands) if 2 * (region.high - region.low) >= largest)
        self._add(
            Instruction(
                engine, op, operands, (target,), "", self._loop, dtype, partitions=128, elements=elements, full=full
            )
        )

    def _dma(
        self,
        op: str,
        reads: tuple[Region, ...],
        writes: tuple[Region, ...],
        tile: Buffer,
        columns: int,
        source: Space,
        target: Space,
    ) -> None:
        row = columns * ELEMENT_BYTES[tile.dtype]
        self._add(
            Instruction(
                Engine.DMA, op, reads, writes, "", self._loop, tile.dtype,
                partitions=128, bytes=128 * row, row_bytes=row, source=source, target=target,
            )
        )  # fmt: skip

    def _add(self, instruction: Instruction) -> None:
        self.trace.instructions.append(instruction)

    def _buffer(self, name: str, space: Space, rows: int, columns: int, dtype: str) -> Buffer:
        here = len(self.trace.instructions)
        buffer = Buffer(
            len(self.trace.buffers), name, space, (rows, columns), dtype, rows, columns * ELEMENT_BYTES[dtype],
            here, here, name, self._loop, space is Space.HBM,
        )  # fmt: skip
        self.trace.buffers.append(buffer)
        return buffer


def part(buffer: Buffer, column: int, columns: int, row: int = 0) -> Region:
    """Return the region of 128 rows and ``columns`` columns of ``buffer`` from (row, column)."""
    size = ELEMENT_BYTES[buffer.dtype]
    return Region(buffer.id, row, row + 128, column * size, (column + columns) * size)
