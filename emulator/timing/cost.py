"""The cost of one instruction, from the NeuronCore's figures alone, whatever other instructions do.

Sources: the NKI architecture guides and the cost notes of the ``nki.isa`` pages, as :mod:`neuronmm.kernels.hardware`
lists them. One number is fitted instead of documented: ``NeuronCore.matmul_overhead_cycles``.
"""

from __future__ import annotations

from dataclasses import dataclass

from neuronmm.emulator.nki.trace import Buffer, Engine, Instruction, Region, Space
from neuronmm.kernels.hardware import DTYPE_BYTES, NeuronCore


@dataclass(frozen=True)
class Cost:
    """``busy``: ns that an instruction occupies its engine; a DMA occupies ``engines`` of the 16 for that long."""

    busy: float
    engines: int = 1


def cost(instruction: Instruction, buffers: list[Buffer], core: NeuronCore) -> Cost:
    """Return the cost of ``instruction`` on ``core`` at full clock; ``buffers`` are those of its trace."""
    if instruction.engine is Engine.DMA:
        return _dma(instruction, core)
    if instruction.engine is Engine.TENSOR:
        return Cost(_tensor_cycles(instruction, core) / core.tensor_ghz)
    cycles = max(core.vector_min_cycles, _passes(instruction, buffers) * instruction.elements) + core.access_cycles
    return Cost(cycles / core.clocks[instruction.engine.value])


def _tensor_cycles(instruction: Instruction, core: NeuronCore) -> float:
    if instruction.op == "transpose":
        return max(instruction.k, min(core.matmul_min_cycles, instruction.m)) + core.matmul_overhead_cycles
    passes = core.fp32_passes if DTYPE_BYTES.get(instruction.dtype, 2) == 4 else 1
    return passes * max(instruction.n, core.matmul_min_cycles) + core.matmul_overhead_cycles


def _passes(instruction: Instruction, buffers: list[Buffer]) -> int:
    """Return cycles per element: 8 to divide, 1 or 2 otherwise.

    Two operands of full size take 2, unless one is in SBUF and the other in PSUM, or both are in SBUF and a sum,
    difference or product of bfloat16 only. A number, or one element per partition, is not an operand of full size.
    Source: the cost note of ``nki.isa.tensor_tensor``.
    """
    if instruction.op in ("reciprocal", "divide"):
        return 8
    operands = [buffers[region.buffer] for region in instruction.reads if not _one_element(region, buffers)]
    if len(operands) < 2:
        return 1
    spaces = {operand.space for operand in operands}
    narrow = {operand.dtype for operand in operands} | {instruction.dtype} == {"bfloat16"}
    quick = narrow and spaces == {Space.SBUF} and instruction.op in ("add", "subtract", "multiply")
    return 1 if len(spaces) == 2 or quick else 2


def _one_element(region: Region, buffers: list[Buffer]) -> bool:
    return region.high - region.low <= DTYPE_BYTES.get(buffers[region.buffer].dtype, 4)


def _dma(instruction: Instruction, core: NeuronCore) -> Cost:
    """One descriptor per row of ``row_bytes``, distributed evenly; at most one engine per descriptor."""
    row = max(1, min(instruction.row_bytes or instruction.bytes, instruction.bytes))
    descriptors = -(-instruction.bytes // row)
    engines = min(core.dma_engines, max(1, descriptors))
    rate = core.dma_rate / core.dma_engines * core.row_efficiency(row)
    return Cost(-(-descriptors // engines) * row / rate, engines)
