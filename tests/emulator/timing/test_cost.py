"""What one instruction costs, beside the cost notes of the ``nki.isa`` pages."""

from __future__ import annotations

from typing import Any

import pytest

from neuronmm.emulator.nki import nki_modules
from neuronmm.emulator.nki.run import TensorSpec, run
from neuronmm.emulator.nki.trace import Engine, Space, Trace
from neuronmm.emulator.timing.cost import cost
from neuronmm.emulator.timing.sketch import Sketch, part
from neuronmm.kernels.hardware import TRN1

ELEMENTS = 512
SBUF, PSUM = Space.SBUF, Space.PSUM


def cycles(op: str, operands: list[tuple[Space, str, int]], result: str = "float32") -> float:
    """Return the vector engine's cycles; an operand is its memory, its dtype and its elements per partition."""
    sketch = Sketch("one")
    tiles = [sketch.tile(f"{i}", ELEMENTS, dtype, space) for i, (space, dtype, _) in enumerate(operands)]
    reads = tuple(part(tile, 0, count) for tile, (_, _, count) in zip(tiles, operands, strict=True))
    sketch.elementwise(
        Engine.VECTOR, op, part(sketch.tile("dst", ELEMENTS, result), 0, ELEMENTS), reads, ELEMENTS, result
    )
    return cost(sketch.trace.instructions[-1], sketch.trace.buffers, TRN1).busy * TRN1.vector_ghz


@pytest.mark.parametrize(
    ("op", "operands", "result", "passes"),
    [
        ("add", [(SBUF, "float32", ELEMENTS)] * 2, "float32", 2),
        ("add", [(PSUM, "float32", ELEMENTS), (SBUF, "float32", ELEMENTS)], "float32", 1),
        ("add", [(PSUM, "float32", ELEMENTS)] * 2, "float32", 2),
        ("add", [(SBUF, "bfloat16", ELEMENTS)] * 2, "bfloat16", 1),
        ("multiply", [(SBUF, "bfloat16", ELEMENTS)] * 2, "bfloat16", 1),
        ("multiply", [(SBUF, "bfloat16", ELEMENTS)] * 2, "float32", 2),
        ("add", [(SBUF, "float32", ELEMENTS), (SBUF, "bfloat16", ELEMENTS)], "bfloat16", 2),
        ("maximum", [(SBUF, "bfloat16", ELEMENTS)] * 2, "bfloat16", 2),
        ("add", [(SBUF, "float32", ELEMENTS), (SBUF, "float32", 1)], "float32", 1),
        ("copy", [(SBUF, "float32", ELEMENTS)], "float32", 1),
        ("divide", [(SBUF, "float32", ELEMENTS)] * 2, "float32", 8),
        ("scalar_tensor_tensor", [(PSUM, "float32", ELEMENTS), (SBUF, "bfloat16", ELEMENTS)], "bfloat16", 2),
        ("tensor_tensor_scan", [(PSUM, "float32", ELEMENTS), (SBUF, "float32", ELEMENTS)], "float32", 2),
    ],
)
def test_the_vector_engine_reads_one_or_two_operands_per_cycle(
    op: str, operands: list[tuple[Space, str, int]], result: str, passes: int
) -> None:
    assert cycles(op, operands, result) == pytest.approx(passes * ELEMENTS + TRN1.access_cycles)


def trace_of(kernel: Any) -> Trace:
    spec = TensorSpec((128, ELEMENTS), "float32")
    return run(kernel, spec, outputs=[spec]).trace


def test_the_instructions_that_kernels_record_have_these_costs() -> None:
    """A view that repeats an element is an operand of full size; eight searched values are not."""
    with nki_modules():
        import neuronxcc.nki.isa as nisa
        import neuronxcc.nki.language as nl
        import numpy as np

        def kernel(x: Any, y: Any) -> None:
            tile, other, column = nl.load(x), nl.load(x), nl.load(x[:, 0:1])
            added = nisa.tensor_tensor(tile, other, np.add)
            added = nisa.tensor_tensor(added, column.broadcast_to((128, ELEMENTS)), np.subtract)
            added = nisa.tensor_scalar(added, np.multiply, column)
            nisa.nc_find_index8(data=added, vals=nisa.max8(src=added))
            nl.store(y, added)

        trace = trace_of(kernel)
    passes = {"add": 2, "subtract": 2, "tensor_scalar": 1, "max8": 1, "nc_find_index8": 1}
    for op, count in passes.items():
        (instruction,) = [i for i in trace.instructions if i.op == op]
        busy = cost(instruction, trace.buffers, TRN1).busy * TRN1.vector_ghz
        assert busy == pytest.approx(count * ELEMENTS + TRN1.access_cycles), op


def test_a_reciprocal_is_slow_on_the_vector_engine_only_and_a_sum_beside_a_result_is_cheap() -> None:
    with nki_modules():
        import neuronxcc.nki.isa as nisa
        import neuronxcc.nki.language as nl

        def kernel(x: Any, y: Any) -> None:
            tile, total = nl.load(x), nl.ndarray((128, 1), dtype=nl.float32)
            nisa.reciprocal(tile)
            nisa.activation(nl.reciprocal, tile)
            nisa.tensor_reduce(nl.add, tile, axis=1)
            nl.store(y, nisa.activation_reduce(nl.exp, tile, reduce_op=nl.add, reduce_res=total))

        trace = trace_of(kernel)
    slow, fast, *summed = [
        (i.op, i.engine, cost(i, trace.buffers, TRN1).busy * TRN1.clocks[i.engine.value])
        for i in trace.instructions
        if i.engine is not Engine.DMA
    ]
    whole = ELEMENTS + TRN1.access_cycles
    assert slow == ("reciprocal", Engine.VECTOR, pytest.approx(8 * ELEMENTS + TRN1.access_cycles))
    assert fast == ("reciprocal", Engine.SCALAR, pytest.approx(whole))
    assert summed == [
        ("reduce_add", Engine.VECTOR, pytest.approx(whole)),
        ("accumulate_add", Engine.SCALAR, pytest.approx(TRN1.vector_min_cycles)),
        ("exp", Engine.SCALAR, pytest.approx(whole)),
    ]
