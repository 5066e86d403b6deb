"""What the tensor engine writes when it transposes, for each generation of the NeuronCore.

Sources: "the output data of a TensorE calculation is always in FP32" (architecture guide of Trainium and Inferentia2);
16-bit output of a 16-bit transposition, and no spreading of NaN (guide of Trainium2); ``dst`` of
``nki.isa.nc_transpose`` has the dtype of ``data`` (reference of NKI 0.3 and later).
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


def written_to(dtype: str) -> Any:
    def kernel(x: Any, y: Any) -> None:
        turned = xl.ndarray((xl.par_dim(3), 4), dtype=dtype, buffer=xl.psum)
        turned[...] = xisa.nc_transpose(xl.load(x))
        xl.store(y, value=xisa.tensor_copy(turned, dtype=x.dtype))

    return kernel


@pytest.mark.parametrize(
    ("core", "source", "right"),
    [
        (TRN1, "bfloat16", "float32"),
        (TRN1, "float32", "float32"),
        (TRN2, "bfloat16", "bfloat16"),
        (TRN2, "float32", "float32"),
        (TRN3, "bfloat16", "bfloat16"),
    ],
)
def test_a_transposition_leaves_in_the_generations_dtype(core: NeuronCore, source: str, right: str) -> None:
    x = X.astype(ml_dtypes.bfloat16 if source == "bfloat16" else np.float32)
    out = TensorSpec((3, 4), source)
    assert np.array_equal(run(written_to(right), x, outputs=[out], core=core).outputs[0], x.T)
    wrong = "bfloat16" if right == "float32" else "float32"
    with pytest.raises(NkiError, match="result dtype"):
        run(written_to(wrong), x, outputs=[out], core=core)


@pytest.mark.parametrize(("core", "right"), [(TRN2, True), (TRN3, True)])
def test_the_second_dialect_keeps_the_dtype(core: NeuronCore, right: bool) -> None:
    def kernel(x: Any, y: Any, dtype: Any) -> None:
        tile = nl.ndarray((4, 3), dtype=x.dtype, buffer=nl.sbuf)
        turned = nl.ndarray((3, 4), dtype=dtype, buffer=nl.psum)
        out = nl.ndarray((3, 4), dtype=y.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x)
        nisa.nc_transpose(turned, tile)
        nisa.tensor_copy(out, turned)
        nisa.dma_copy(dst=y, src=out)

    x, out = X.astype(ml_dtypes.bfloat16), TensorSpec((3, 4), "bfloat16")
    made = run(lambda x, y: kernel(x, y, nl.bfloat16), x, outputs=[out], core=core).outputs[0]
    assert np.array_equal(made, x.T)
    with pytest.raises(NkiError, match="result dtype"):
        run(lambda x, y: kernel(x, y, nl.float32), x, outputs=[out], core=core)


def test_another_dtype_takes_one_more_copy() -> None:
    def kernel(x: Any, y: Any, dtype: Any) -> None:
        xl.store(y, value=xisa.tensor_copy(xisa.nc_transpose(xl.load(x), dtype=dtype)))

    x = X.astype(ml_dtypes.bfloat16)
    copies = []
    for dtype in (xl.float32, xl.bfloat16):
        spec = TensorSpec((3, 4), np.dtype(dtype))
        made = run(lambda x, y, dtype=dtype: kernel(x, y, dtype), x, outputs=[spec], core=TRN1)
        assert np.array_equal(made.outputs[0].astype(np.float32), X.T)
        copies.append(sum(i.op == "copy" for i in made.trace.instructions))
    assert copies == [1, 2]


def marked(x: Any, y: Any, scale: float = 1.0) -> None:
    identity = xl.load(xl.shared_identity_matrix(4, dtype=x.dtype))
    if scale != 1.0:
        identity = xl.multiply(identity, scale)
    turned = xl.ndarray((xl.par_dim(3), 4), dtype=xl.float32, buffer=xl.psum)
    turned[...] = xisa.nc_matmul(xl.load(x), identity, is_moving_onezero=True, is_transpose=True)
    xl.store(y, value=xisa.tensor_copy(turned))


def test_a_product_marked_as_a_transposition_is_one() -> None:
    made = run(marked, X, outputs=[TensorSpec((3, 4))], core=TRN1)
    assert np.array_equal(made.outputs[0], X.T)
    assert [i.op for i in made.trace.instructions if i.engine is Engine.TENSOR] == ["transpose"]
    with pytest.raises(NkiError, match="identity"):
        run(lambda x, y: marked(x, y, 2.0), X, outputs=[TensorSpec((3, 4))], core=TRN1)


@pytest.mark.parametrize(("core", "spread"), [(TRN1, True), (TRN2, False)])
def test_nan_spreads_only_where_a_transposition_multiplies(core: NeuronCore, spread: bool) -> None:
    x = X.copy()
    x[1, 1] = np.nan
    made = run(written_to("float32"), x, outputs=[TensorSpec((3, 4))], core=core).outputs[0]
    assert np.isnan(made).sum() == (4 if spread else 1)


def test_a_kernel_may_ask_for_the_generation() -> None:
    found = []
    for core in (TRN1, TRN2, TRN3):
        run(lambda: found.append(xisa.get_nc_version()), core=core)
    assert found == [xisa.nc_version.gen2, xisa.nc_version.gen3, xisa.nc_version.gen4]
