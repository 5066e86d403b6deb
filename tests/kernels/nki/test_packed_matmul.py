"""The matmul with one packed weight: both layouts, random sizes, held to the rule of ``error_rule``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draws import examples
from error_rule import assert_twice_plain, draws_to_pool
from neuronmm.emulator.nki import TensorSpec, run
from neuronmm.kernels.nki.layout import pack

SIZES = st.sampled_from([1, 7, 64, 127, 128, 129, 200, 300])
TOKENS = st.sampled_from([1, 3, 65, 128, 513, 1100])


def apply(kernels: Any, arrays: Any, w: Tensor, x: Tensor, layout: str) -> Tensor:
    """Compute ``x @ w.T`` with the kernel. Dimensions: w [out, in], x [tokens, in] -> [tokens, out]."""
    activation = x if layout == "BSH" else x.T
    shape = (len(x), len(w)) if layout == "BSH" else (len(w), len(x))
    inputs = [arrays.to_numpy(tensor) for tensor in (activation, pack(w))]
    kernel = kernels.entry_neuronxcc.packed_matmul(layout)
    y = arrays.to_torch(run(kernel, *inputs, outputs=[TensorSpec(shape, inputs[0].dtype)]).outputs[0])
    return y if layout == "BSH" else y.T


@pytest.mark.parametrize("layout", ["HSB", "BSH"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@examples(15)
@given(inputs=SIZES, out=SIZES, tokens=TOKENS)
def test_packed_matmul(
    kernels: Any, arrays: Any, dtype: torch.dtype, layout: str, inputs: int, out: int, tokens: int
) -> None:
    count = draws_to_pool(tokens * min(inputs, out))
    cases = [(torch.randn(out, inputs).to(dtype), torch.randn(tokens, inputs).to(dtype)) for _ in range(count)]

    def kernel(case: tuple[Tensor, Tensor]) -> Tensor:
        return apply(kernels, arrays, *case, layout)

    def exact(case: tuple[Tensor, Tensor]) -> Tensor:
        return case[1].double() @ case[0].double().T

    if dtype is torch.float32:  # one product, whose error is that of NumPy's matmul in the emulator
        actual, expected = (torch.cat([f(case).flatten().double() for case in cases]) for f in (kernel, exact))
        assert (actual - expected).norm() <= 1e-5 * expected.norm()
    else:
        assert_twice_plain(cases, kernel, lambda case: case[1] @ case[0].T, exact)
