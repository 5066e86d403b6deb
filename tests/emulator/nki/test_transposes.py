"""The result of a transpose on the tensor engine, for each generation of the NeuronCore, and on the vector engine.

Sources: "the output data of a TensorE calculation is always in FP32" (architecture guide of Trainium and Inferentia2);
16-bit output of a 16-bit transpose, and no spreading of NaN (guide of Trainium2); ``dst`` of
``nki.isa.nc_transpose`` has the dtype of ``data``; the vector engine takes up to 32 x 32, from and to SBUF or PSUM
(reference of NKI 0.3 and later).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from neuronmm.emulator.nki import NkiError, TensorSpec, nki_modules, run
from neuronmm.emulator.nki.trace import Engine
from neuronmm.kernels.hardware import TRN1, TRN2, TRN3, NeuronCore

with nki_modules():
    import neuronxcc.nki.isa as xisa
    import neuronxcc.nki.language as xl
    import nki.isa as nisa
    import nki.language as nl

X = np.arange(12, dtype=np.float32).reshape(4, 3)


def transpose_into(dtype: str) -> Any:
    def kernel(x: Any, y: Any) -> None:
        transposed = xl.ndarray((xl.par_dim(3), 4), dtype=dtype, buffer=xl.psum)
        transposed[...] = xisa.nc_transpose(xl.load(x))
        xl.store(y, value=xisa.tensor_copy(transposed, dtype=x.dtype))

    return kernel


@pytest.mark.parametrize(
    ("core", "source", "result_dtype"),
    [
        (TRN1, "bfloat16", "float32"),
        (TRN1, "float32", "float32"),
        (TRN2, "bfloat16", "bfloat16"),
        (TRN2, "float32", "float32"),
        (TRN3, "bfloat16", "bfloat16"),
    ],
)
def test_a_transpose_has_the_dtype_of_the_generation(core: NeuronCore, source: str, result_dtype: str) -> None:
    x = X.astype(ml_dtypes.bfloat16 if source == "bfloat16" else np.float32)
    out = TensorSpec((3, 4), source)
    assert np.array_equal(run(transpose_into(result_dtype), x, outputs=[out], core=core).outputs[0], x.T)
    wrong = "bfloat16" if result_dtype == "float32" else "float32"
    with pytest.raises(NkiError, match="result dtype"):
        run(transpose_into(wrong), x, outputs=[out], core=core)


@pytest.mark.parametrize("core", [TRN2, TRN3])
def test_a_transpose_of_the_second_dialect_keeps_the_dtype(core: NeuronCore) -> None:
    def kernel(x: Any, y: Any, dtype: Any) -> None:
        tile = nl.ndarray((4, 3), dtype=x.dtype, buffer=nl.sbuf)
        transposed = nl.ndarray((3, 4), dtype=dtype, buffer=nl.psum)
        out = nl.ndarray((3, 4), dtype=y.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x)
        nisa.nc_transpose(transposed, tile)
        nisa.tensor_copy(out, transposed)
        nisa.dma_copy(dst=y, src=out)

    x, out = X.astype(ml_dtypes.bfloat16), TensorSpec((3, 4), "bfloat16")
    result = run(lambda x, y: kernel(x, y, nl.bfloat16), x, outputs=[out], core=core).outputs[0]
    assert np.array_equal(result, x.T)
    with pytest.raises(NkiError, match="result dtype"):
        run(lambda x, y: kernel(x, y, nl.float32), x, outputs=[out], core=core)


def test_a_transpose_to_another_dtype_takes_one_more_copy() -> None:
    def kernel(x: Any, y: Any, dtype: Any) -> None:
        xl.store(y, value=xisa.tensor_copy(xisa.nc_transpose(xl.load(x), dtype=dtype)))

    x = X.astype(ml_dtypes.bfloat16)
    copies = []
    for dtype in (xl.float32, xl.bfloat16):
        spec = TensorSpec((3, 4), np.dtype(dtype))
        result = run(lambda x, y, dtype=dtype: kernel(x, y, dtype), x, outputs=[spec], core=TRN1)
        assert np.array_equal(result.outputs[0].astype(np.float32), X.T)
        copies.append(sum(i.op == "copy" for i in result.trace.instructions))
    assert copies == [1, 2]


def matmul_marked_is_transpose(x: Any, y: Any, scale: float = 1.0) -> None:
    identity = xl.load(xl.shared_identity_matrix(4, dtype=x.dtype))
    if scale != 1.0:
        identity = xl.multiply(identity, scale)
    transposed = xl.ndarray((xl.par_dim(3), 4), dtype=xl.float32, buffer=xl.psum)
    transposed[...] = xisa.nc_matmul(xl.load(x), identity, is_moving_onezero=True, is_transpose=True)
    xl.store(y, value=xisa.tensor_copy(transposed))


def test_a_matmul_marked_is_transpose_is_a_transpose() -> None:
    result = run(matmul_marked_is_transpose, X, outputs=[TensorSpec((3, 4))], core=TRN1)
    assert np.array_equal(result.outputs[0], X.T)
    assert [i.op for i in result.trace.instructions if i.engine is Engine.TENSOR] == ["transpose"]
    with pytest.raises(NkiError, match="identity"):
        run(lambda x, y: matmul_marked_is_transpose(x, y, 2.0), X, outputs=[TensorSpec((3, 4))], core=TRN1)


@pytest.mark.parametrize(("core", "spread"), [(TRN1, True), (TRN2, False)])
def test_nan_spreads_only_where_a_transpose_multiplies(core: NeuronCore, spread: bool) -> None:
    x = X.copy()
    x[1, 1] = np.nan
    result = run(transpose_into("float32"), x, outputs=[TensorSpec((3, 4))], core=core).outputs[0]
    assert np.isnan(result).sum() == (4 if spread else 1)


def test_get_nc_version() -> None:
    versions = []
    for core in (TRN1, TRN2, TRN3):
        run(lambda: versions.append(xisa.get_nc_version()), core=core)
    assert versions == [xisa.nc_version.gen2, xisa.nc_version.gen3, xisa.nc_version.gen4]


@pytest.mark.parametrize("core", [TRN1, TRN2, TRN3])
@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum])
def test_the_vector_engine_moves_bits_between_sbuf_and_psum(core: NeuronCore, buffer: Any) -> None:
    def kernel(x: Any, y: Any) -> None:
        tile = nl.ndarray((32, 2, 15), dtype=x.dtype, buffer=nl.sbuf)
        transposed = nl.ndarray((30, 32), dtype=x.dtype, buffer=buffer)
        back, out = (nl.ndarray(shape, dtype=x.dtype, buffer=nl.sbuf) for shape in ((32, 30), (30, 32)))
        nisa.dma_copy(dst=tile, src=x.reshape((32, 2, 15)))
        nisa.nc_transpose(transposed, tile, engine=nisa.vector_engine)
        nisa.nc_transpose(back, transposed, engine=nisa.vector_engine)
        nisa.nc_transpose(out, back)  # to SBUF only the vector engine writes
        nisa.dma_copy(dst=y, src=out)

    x = np.random.default_rng(0).normal(size=(32, 30)).astype(ml_dtypes.bfloat16)
    x[0, :3] = np.nan, np.inf, -0.0  # a product with an identity would spread the first two
    result = run(kernel, x, outputs=[TensorSpec((30, 32), "bfloat16")], core=core)
    assert np.array_equal(result.outputs[0].view(np.uint16), x.T.copy().view(np.uint16))
    assert [i.op for i in result.trace.instructions if i.engine is Engine.VECTOR] == ["transpose"] * 3


def test_a_transpose_on_the_vector_engine_of_the_first_dialect() -> None:
    def kernel(x: Any, y: Any, z: Any) -> None:
        xl.store(y, value=xisa.nc_transpose(xl.load(x), engine=xisa.vector_engine))
        xl.store(z, value=xisa.nc_transpose(xl.load(x), engine=xisa.vector_engine, dtype=z.dtype))

    outputs = [TensorSpec((3, 4)), TensorSpec((3, 4), "bfloat16")]
    for result in run(kernel, X, outputs=outputs, core=TRN1).outputs:
        assert np.array_equal(result.astype(np.float32), X.T)


@pytest.mark.parametrize(
    ("dtype", "space", "ops"),
    [
        (xl.float32, xl.sbuf, ["transpose"]),
        (xl.float32, xl.psum, ["transpose"]),
        (xl.bfloat16, xl.sbuf, ["transpose", "copy"]),
    ],
)
def test_only_a_copy_changes_the_dtype_of_a_transpose_that_is_assigned(dtype: Any, space: Any, ops: list[str]) -> None:
    def kernel(x: Any, y: Any) -> None:
        tile = xl.ndarray((xl.par_dim(3), 4), dtype=dtype, buffer=space)
        tile[...] = xisa.nc_transpose(xl.load(x), engine=xisa.vector_engine)
        xl.store(y, value=xisa.tensor_scalar(tile, np.multiply, 1.0, dtype=y.dtype))

    result = run(kernel, X, outputs=[TensorSpec((3, 4))], core=TRN2)
    assert np.array_equal(result.outputs[0], X.T)
    assert [i.op for i in result.trace.instructions if i.op in ("transpose", "copy")] == ops
