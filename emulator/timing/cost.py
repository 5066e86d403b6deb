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
    cycles = max(core.vector_min_cycles, _passes(instruction, buffers) * instruction.elements) + core.access_cycles
    return Cost(cycles / core.clocks[instruction.engine.value])


def _tensor_cycles(instruction: Instruction, core: NeuronCore) -> float:
    if instruction.op == "transpose":
        return max(instruction.k, min(core.matmul_min_cycles, instruction.m)) + core.matmul_overhead_cycles
    passes = core.fp32_passes if DTYPE_BYTES.get(instruction.dtype, 2) == 4 else 1
    return passes * max(instruction.n, core.matmul_min_cycles) + core.matmul_overhead_cycles


def _passes(instruction: Instruction, buffers: list[Buffer]) -> int:
    """Cycles per element: 8 to divide, 2 for a tensor_tensor with operands in SBUF that are not all bf16, else 1."""
    if instruction.op in ("reciprocal", "divide"):
        return 8
    if instruction.op != "tensor_tensor":
        return 1
    operands = [buffers[region.buffer] for region in instruction.reads]
    in_sbuf = all(operand.space is Space.SBUF for operand in operands)
    narrow = all(operand.dtype == "bfloat16" for operand in operands) and instruction.dtype == "bfloat16"
    return 2 if len(operands) > 1 and in_sbuf and not narrow else 1


def _dma(instruction: Instruction, core: NeuronCore) -> Cost:
    """One descriptor per row of ``row_bytes``, distributed evenly; at most one engine per descriptor."""
    row = max(1, min(instruction.row_bytes or instruction.bytes, instruction.bytes))
    descriptors = -(-instruction.bytes // row)
    engines = min(core.dma_engines, max(1, descriptors))
    rate = core.dma_rate / core.dma_engines * core.row_efficiency(row)
    return Cost(-(-descriptors // engines) * row / rate, engines)
