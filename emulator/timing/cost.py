"""What one instruction costs, from the NeuronCore figures alone: everything that does not depend on other instructions.

Sources: the NKI architecture guides and the cost notes of the ``nki.isa`` pages, through :mod:`kernels.hardware`.
The one number that is fitted and not documented is ``MATMUL_OVERHEAD_CYCLES``.
"""

from __future__ import annotations

from dataclasses import dataclass

from neuronmm.emulator.nki.trace import Buffer, Engine, Instruction, Space
from neuronmm.kernels.hardware import DTYPE_BYTES, NeuronCore


@dataclass(frozen=True)
class Cost:
    """Time one instruction holds its engine, in ns; a DMA holds ``engines`` of the 16 for ``busy`` each."""

    busy: float
    engines: int = 1


def cost(instruction: Instruction, buffers: list[Buffer], core: NeuronCore) -> Cost:
    """The time ``instruction`` keeps its engine busy on ``core``, at full clock."""
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
    """Cycles an element: 2 for a tensor_tensor whose operands share the SBUF port and are not all bf16, 8 to divide."""
    if instruction.op in ("reciprocal", "divide"):
        return 8
    if instruction.op != "tensor_tensor":
        return 1
    operands = [buffers[region.buffer] for region in instruction.reads]
    in_sbuf = all(operand.space is Space.SBUF for operand in operands)
    narrow = all(operand.dtype == "bfloat16" for operand in operands) and instruction.dtype == "bfloat16"
    return 2 if len(operands) > 1 and in_sbuf and not narrow else 1


def _dma(instruction: Instruction, core: NeuronCore) -> Cost:
    """Descriptors of ``row_bytes`` are dealt out evenly to as many of the engines as there are descriptors."""
    row = max(1, min(instruction.row_bytes or instruction.bytes, instruction.bytes))
    descriptors = -(-instruction.bytes // row)
    engines = min(core.dma_engines, max(1, descriptors))
    rate = core.dma_rate / core.dma_engines * core.row_efficiency(row)
    return Cost(-(-descriptors // engines) * row / rate, engines)
