"""What a jitted kernel owes its caller, by dialect: inputs left alone, outputs written, in the HBM asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from neuronmm.emulator.nki import NkiError, TensorSpec, nki_modules, run

with nki_modules():
    import neuronxcc.nki as xnki
    import neuronxcc.nki.language as xl
    import neuronxcc.nki.typing as xt
    import nki
    import nki.isa as nisa
    import nki.language as nl

F32 = np.float32
X = np.ones((4, 8), F32)


def doubled(x: Any) -> Any:
    return xl.multiply(xl.load(x), 2.0)


@xnki.jit
def stores_into_its_input(x: Any) -> Any:
    xl.store(x, doubled(x))
    return x


@xnki.jit(mode="simulation")
def stores_into_a_mutable_input(x: xt.mutable_tensor, k: int = 1) -> Any:
    xl.store(x, doubled(x))
    return x


@xnki.trace
def traced_kernel_writes_its_parameter(x: Any) -> Any:
    xl.store(x, doubled(x))
    return x


@nki.jit
def second_dialect_writes_its_input(x: Any) -> Any:
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.memset(tile, 2.0)
    nisa.dma_copy(dst=x, src=tile)
    return x


def test_an_input_of_a_jitted_kernel_is_not_written() -> None:
    with pytest.raises(NkiError, match="may not write its parameter") as caught:
        stores_into_its_input(X)
    assert caught.value.rule == "immutable" and caught.value.location.startswith(__file__)
    with pytest.raises(NkiError, match="may not write its parameter"):
        run(stores_into_its_input, x=TensorSpec(X.shape))
    for kernel in (
        stores_into_a_mutable_input,
        stores_into_a_mutable_input[1],
        traced_kernel_writes_its_parameter,
        second_dialect_writes_its_input,
    ):
        given = X.copy()
        assert (kernel(given) == 2).all() and (given == 2).all()


@xnki.jit
def returns_what_it_never_wrote(x: Any) -> Any:
    out = xl.ndarray(x.shape, dtype=x.dtype, buffer=xl.shared_hbm)
    for _ in xl.affine_range(x.shape[0] // 128):
        xl.store(out, doubled(x))
    return out


@nki.jit
def returns_what_it_never_wrote_in_the_second_dialect(x: Any) -> Any:
    return nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)


def fills_one_of_two(x: Any, y: Any, z: Any) -> None:
    xl.store(y, doubled(x))


@pytest.mark.parametrize("x", [X, TensorSpec(X.shape)], ids=["data", "shapes"])
def test_an_output_is_written(x: Any) -> None:
    for kernel in (returns_what_it_never_wrote, returns_what_it_never_wrote_in_the_second_dialect):
        with pytest.raises(NkiError, match="never writes") as caught:
            run(kernel, x)
        assert caught.value.rule == "unwritten output" and caught.value.location.startswith(__file__)
    with pytest.raises(NkiError, match="never writes output 1") as caught:
        run(fills_one_of_two, x, outputs=[TensorSpec(X.shape)] * 2)
    assert caught.value.location == f"{__file__}:{fills_one_of_two.__code__.co_firstlineno}"


def declares(x: Any) -> Any:
    return xl.ndarray(x.shape, dtype=x.dtype, buffer=xl.shared_hbm)


@xnki.jit
def shared_in_a_called_function(x: Any) -> Any:
    out = declares(x)
    xl.store(out, doubled(x))
    return out


@xnki.jit
def shared_in_a_loop(x: Any) -> Any:
    for _ in xl.affine_range(1):
        out = xl.ndarray(x.shape, dtype=x.dtype, buffer=xl.shared_hbm)
        xl.store(out, doubled(x))
    return out


def filled(x: Any, buffer: Any) -> Any:
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=buffer)
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.memset(tile, 2.0)
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit
def shared_in_a_called_function_of_the_second_dialect(x: Any) -> Any:
    return filled(x, nl.shared_hbm)


def test_shared_hbm_is_declared_at_the_top_level_of_the_first_dialect() -> None:
    for kernel in (shared_in_a_called_function, shared_in_a_loop):
        with pytest.raises(NkiError, match="declared in the kernel function itself") as caught:
            kernel(X)
        assert caught.value.location.startswith(__file__)
    assert (shared_in_a_called_function_of_the_second_dialect(X) == 2).all()


@nki.jit
def output_in_plain_hbm(x: Any) -> Any:
    return filled(x, nl.hbm)


@nki.jit
def output_on_chip(x: Any) -> Any:
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.memset(tile, 2.0)
    return tile


@pytest.mark.parametrize("kernel", [output_in_plain_hbm, output_on_chip])
def test_an_output_of_the_second_dialect_is_in_shared_hbm(kernel: Callable[..., Any]) -> None:
    with pytest.raises(NkiError, match="must be in shared_hbm") as caught:
        kernel(X)
    assert caught.value.location.startswith(__file__)
