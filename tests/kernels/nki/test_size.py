"""The size of a kernel for its compiler: the strips are a loop of the language, the work in a strip is unrolled."""

from __future__ import annotations

from neuronmm.emulator.nki import TensorSpec, nki_modules, run
from neuronmm.emulator.nki.trace import Trace
from neuronmm.kernels.nki.layout import Packing
from neuronmm.kernels.nki.problem import Blocks

with nki_modules():
    from neuronmm.kernels.nki.entry_neuronxcc import low_rank_matmul

INPUTS, RANK, OUTPUTS = 1024, 512, 2048


def trace(tokens: int) -> Trace:
    weights = [Packing.of(*sizes, 2).elements for sizes in ((INPUTS, RANK), (RANK, OUTPUTS))]
    shapes = [(INPUTS, tokens), *((elements,) for elements in weights), (OUTPUTS, tokens)]
    *tensors, out = (TensorSpec(shape, "bfloat16") for shape in shapes)
    return run(low_rank_matmul(RANK, Blocks(1024, 512)), *tensors, outputs=[out], fold=True).trace


def test_strips_are_a_loop_that_the_compiler_sees() -> None:
    """The emulator records equal iterations of a loop of the language once, those of an unrolled loop all."""
    short, long = trace(8 * 1024), trace(32 * 1024)
    assert len(long.instructions) == len(short.instructions)
    assert [fold.times for fold in short.folds] == [6] and [fold.times for fold in long.folds] == [30]


def test_matmuls_grow_as_documented() -> None:
    recorded = trace(8192)
    counts = recorded.weights()
    matmuls = sum(n for i, n in zip(recorded.instructions, counts, strict=True) if i.op == "matmul")
    assert matmuls == 8192 * RANK * (INPUTS + OUTPUTS) // (512 * 128 * 128)
    assert matmuls < sum(counts) < 1.6 * matmuls
