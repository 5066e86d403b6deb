"""The cost of one instruction, from the NeuronCore's figures alone, whatever other instructions do.

Sources: the NKI architecture guides and the cost notes of the ``nki.isa`` pages, as :mod:`neuronmm.kernels.hardware`
lists them. One number is fitted instead of documented: ``NeuronCore.matmul_overhead_cycles``.
"""

from __future__ import annotations

from dataclasses import dataclass

from neuronmm.emulator.nki.trace import Buffer, Engine, Instruction, Space
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
    if instruction.op.startswith("accumulate_"):  # the engine reduces what it computes, which costs 64 cycles more
        return Cost(core.vector_min_cycles / core.clocks[instruction.engine.value])
    cycles = max(core.vector_min_cycles, _passes(instruction, buffers) * instruction.elements) + core.access_cycles
    return Cost(cycles / core.clocks[instruction.engine.value])


def _tensor_cycles(instruction: Instruction, core: NeuronCore) -> float:
    if instruction.op == "transpose":
        return max(instruction.k, min(core.matmul_min_cycles, instruction.m)) + core.matmul_overhead_cycles
    passes = core.fp32_passes if DTYPE_BYTES.get(instruction.dtype, 2) == 4 else 1
    return passes * max(instruction.n, core.matmul_min_cycles) + core.matmul_overhead_cycles


def _passes(instruction: Instruction, buffers: list[Buffer]) -> int:
    """Return cycles per element: 8 to divide but on the scalar engine, 1 or 2 otherwise.

    On the vector engine two operands of full size take 2, unless one is in SBUF and the other in PSUM, or both are in
    SBUF, contiguous, and added, subtracted or multiplied in bfloat16 only (cost note of ``nki.isa.tensor_tensor``).
    ``tensor_tensor_scan`` always takes 2. So does ``scalar_tensor_tensor`` here: its note in the first dialect says so
    but for one pair of operators, that of the second likens it to ``tensor_tensor``.
    """
    if instruction.op in ("reciprocal", "divide") and instruction.engine is not Engine.SCALAR:
        return 8
    if instruction.engine is not Engine.VECTOR or len(instruction.full) < 2:
        return 1
    if instruction.op in ("tensor_tensor_scan", "scalar_tensor_tensor"):
        return 2
    operands = [(instruction.reads[i], buffers[instruction.reads[i].buffer]) for i in instruction.full]
    if {buffer.space for _, buffer in operands} == {Space.SBUF, Space.PSUM}:
        return 1
    narrow = {buffer.dtype for _, buffer in operands} | {instruction.dtype} == {"bfloat16"}
    contiguous = all(region.high - region.low == 2 * instruction.elements for region, _ in operands)
    in_sbuf = all(buffer.space is Space.SBUF for _, buffer in operands)
    return 1 if narrow and contiguous and in_sbuf and instruction.op in ("add", "subtract", "multiply") else 2


def _dma(instruction: Instruction, core: NeuronCore) -> Cost:
    """One descriptor per row of ``row_bytes``, distributed evenly; at most one engine per descriptor."""
    row = max(1, min(instruction.row_bytes or instruction.bytes, instruction.bytes))
    descriptors = -(-instruction.bytes // row)
    engines = min(core.dma_engines, max(1, descriptors))
    rate = core.dma_rate / core.dma_engines * core.row_efficiency(row)
    return Cost(-(-descriptors // engines) * row / rate, engines)
