"""Dtypes that depend on the core, and values that become integers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuronmm.emulator.nki import NkiError, TensorSpec, nki_modules, run
from neuronmm.emulator.nki.dtypes import stored
from neuronmm.emulator.nki.trace import Engine
from neuronmm.kernels.hardware import TRN1, TRN2, TRN3, NeuronCore

with nki_modules():
    import nki.isa as nisa
    import nki.language as nl

E4M3, E4M3FN, BF16, F32 = ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float32


def matmul(stationary: Any, moving: Any, result: Any) -> Any:
    def kernel(x: Any) -> None:
        a, b = (nl.ndarray((128, 8), dtype=dtype, buffer=nl.sbuf) for dtype in (stationary, moving))
        nisa.nc_matmul(nl.ndarray((8, 8), dtype=result, buffer=nl.psum), a, b)

    return kernel


@pytest.mark.parametrize(
    ("stationary", "moving", "result", "cores"),
    [
        (BF16, BF16, F32, (TRN1, TRN2, TRN3)),
        (BF16, BF16, BF16, (TRN3,)),
        (E4M3, BF16, F32, (TRN1, TRN2, TRN3)),
        (E4M3, ml_dtypes.float8_e5m2, F32, (TRN1, TRN2, TRN3)),
        (E4M3FN, BF16, F32, (TRN3,)),
        (E4M3FN, E4M3, F32, ()),
        (E4M3, E4M3FN, F32, ()),
        (np.int8, np.int8, F32, ()),
        (F32, BF16, F32, ()),
    ],
)
@pytest.mark.parametrize("core", [TRN1, TRN2, TRN3], ids=lambda core: core.device)
def test_the_inputs_and_results_of_a_matmul(
    stationary: Any, moving: Any, result: Any, cores: tuple[NeuronCore, ...], core: NeuronCore
) -> None:
    kernel = matmul(stationary, moving, result)
    if core in cores:
        run(kernel, TensorSpec((1, 1)), core=core)
    else:
        with pytest.raises(NkiError, match="dtype"):
            run(kernel, TensorSpec((1, 1)), core=core)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32])
def test_a_transpose_moves_integers(dtype: Any) -> None:
    def kernel(x: Any) -> Any:
        result = nl.ndarray((12, 8), dtype=dtype, buffer=nl.psum)
        nisa.nc_transpose(result, nl.load(x))
        out = nl.ndarray((12, 8), dtype=dtype, buffer=nl.shared_hbm)
        nl.store(out, result)
        return out

    x = np.arange(96, dtype=dtype).reshape(8, 12)
    np.testing.assert_array_equal(run(kernel, x, core=TRN2).outputs[0], x.T)


def added(space: Any, dtype: Any, engine: Any = None) -> Any:
    def kernel(x: Any) -> Any:
        a, total = nl.load(x), nl.ndarray(x.shape, dtype=dtype, buffer=space)
        nisa.tensor_tensor(total, a, a, nl.add, engine=engine)
        out = nl.ndarray(x.shape, dtype=dtype, buffer=nl.shared_hbm)
        nl.store(out, total)
        return out

    return kernel


def test_32_bit_integers_are_added_exactly_on_gpsimd_alone() -> None:
    x = np.full((4, 8), 2**24 + 1, np.int32)  # which float32 does not have
    exact = run(added(nl.sbuf, np.int32), x)
    np.testing.assert_array_equal(exact.outputs[0], 2 * x)
    vector = run(added(nl.sbuf, np.int32, nisa.engine.vector), x)
    psum = run(added(nl.psum, np.int32), x)  # GpSimd has no access to PSUM
    for rounded in (vector, psum):
        np.testing.assert_array_equal(rounded.outputs[0], 2**25)
    engines = [next(i.engine for i in r.trace.instructions if i.op == "add") for r in (exact, vector, psum)]
    assert engines == [Engine.GPSIMD, Engine.VECTOR, Engine.VECTOR]


def test_narrow_integers_are_added_in_float32() -> None:
    x = np.full((4, 8), 100, np.int8)
    result = run(added(nl.sbuf, np.int8), x)
    np.testing.assert_array_equal(result.outputs[0], 127)  # saturated
    assert Engine.GPSIMD not in {i.engine for i in result.trace.instructions}


@given(st.lists(st.floats(width=32), min_size=1, max_size=20), st.sampled_from(["int8", "uint8", "int16", "int32"]))
def test_a_float_becomes_the_nearest_integer_within_the_range(values: list[float], name: str) -> None:
    dtype = np.dtype(name)
    limits = np.iinfo(dtype)
    expected = [
        limits.min if np.isnan(v) else limits.max if v > limits.max else limits.min if v < limits.min else round(v)
        for v in values
    ]
    assert stored(np.array(values, F32), dtype).tolist() == expected


def test_ties_become_even_and_other_dtypes_are_cast() -> None:
    assert stored(np.array([0.5, 1.5, 2.5, -0.5, -1.5], F32), np.dtype(np.int8)).tolist() == [0, 2, 2, 0, -2]
    assert stored(np.array([1.0 + 2**-9], F32), np.dtype(BF16)) == BF16(1.0)


def test_a_dma_to_another_dtype_goes_through_float32() -> None:
    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, dtype=np.uint8, buffer=nl.shared_hbm)
        tile = nl.ndarray(x.shape, dtype=np.uint8, buffer=nl.sbuf)
        nisa.dma_copy(tile, x)
        nisa.dma_copy(out, tile)
        return out

    x = np.array([[-1, 0, 255, 300]], np.int32)
    np.testing.assert_array_equal(run(kernel, x).outputs[0], [[0, 0, 255, 255]])
