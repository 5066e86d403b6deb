"""How large a kernel is for its compiler: strips are a loop of the language, what is in a strip is unrolled."""

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
    """The emulator records like turns of a loop of the language once; of an unrolled one it would record them all."""
    short, long = trace(8 * 1024), trace(32 * 1024)
    assert len(long.instructions) == len(short.instructions)
    assert [fold.times for fold in short.folds] == [6] and [fold.times for fold in long.folds] == [30]


def test_products_grow_as_the_documentation_says() -> None:
    found = trace(8192)
    weights = found.weights()
    products = sum(w for i, w in zip(found.instructions, weights, strict=True) if i.op == "matmul")
    assert products == 8192 * RANK * (INPUTS + OUTPUTS) // (512 * 128 * 128)
    assert products < sum(weights) < 1.6 * products
