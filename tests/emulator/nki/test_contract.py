"""The contract of a jitted kernel in both dialects: accepted arguments, protected inputs, written outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
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
def writes_its_input(x: Any) -> Any:
    xl.store(x, doubled(x))
    return x


@xnki.jit(mode="simulation")
def writes_a_mutable_input(x: xt.mutable_tensor, k: int = 1) -> Any:
    xl.store(x, doubled(x))
    return x


@xnki.trace
def traced_kernel_writes_its_input(x: Any) -> Any:
    xl.store(x, doubled(x))
    return x


@nki.jit
def second_dialect_writes_its_input(x: Any) -> Any:
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.memset(tile, 2.0)
    nisa.dma_copy(dst=x, src=tile)
    return x


def test_a_jitted_kernel_must_not_write_an_immutable_input() -> None:
    with pytest.raises(NkiError, match="may not write its parameter") as caught:
        writes_its_input(X)
    assert caught.value.rule == "immutable" and caught.value.location.startswith(__file__)
    with pytest.raises(NkiError, match="may not write its parameter"):
        run(writes_its_input, x=TensorSpec(X.shape))
    for kernel in (
        writes_a_mutable_input,
        writes_a_mutable_input[1],
        traced_kernel_writes_its_input,
        second_dialect_writes_its_input,
    ):
        x = X.copy()
        assert (kernel(x) == 2).all() and (x == 2).all()


@xnki.jit
def returns_an_unwritten_tensor(x: Any) -> Any:
    out = xl.ndarray(x.shape, dtype=x.dtype, buffer=xl.shared_hbm)
    for _ in xl.affine_range(x.shape[0] // 128):
        xl.store(out, doubled(x))
    return out


@nki.jit
def returns_an_unwritten_tensor_in_the_second_dialect(x: Any) -> Any:
    return nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)


def writes_one_of_two_outputs(x: Any, y: Any, z: Any) -> None:
    xl.store(y, doubled(x))


@pytest.mark.parametrize("x", [X, TensorSpec(X.shape)], ids=["data", "shapes"])
def test_every_output_must_be_written(x: Any) -> None:
    for kernel in (returns_an_unwritten_tensor, returns_an_unwritten_tensor_in_the_second_dialect):
        with pytest.raises(NkiError, match="never writes") as caught:
            run(kernel, x)
        assert caught.value.rule == "unwritten output" and caught.value.location.startswith(__file__)
    with pytest.raises(NkiError, match="never writes output 1") as caught:
        run(writes_one_of_two_outputs, x, outputs=[TensorSpec(X.shape)] * 2)
    assert caught.value.location == f"{__file__}:{writes_one_of_two_outputs.__code__.co_firstlineno}"


def declare_shared(x: Any) -> Any:
    return xl.ndarray(x.shape, dtype=x.dtype, buffer=xl.shared_hbm)


@xnki.jit
def shared_in_a_called_function(x: Any) -> Any:
    out = declare_shared(x)
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


def test_the_first_dialect_declares_shared_hbm_in_the_kernel_function_itself() -> None:
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
def test_an_output_of_the_second_dialect_must_be_in_shared_hbm(kernel: Callable[..., Any]) -> None:
    with pytest.raises(NkiError, match="must be in shared_hbm") as caught:
        kernel(X)
    assert caught.value.location.startswith(__file__)


@nki.jit
def copy_with_argument(x, plan):  # type: ignore[no-untyped-def]
    y = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    nisa.dma_copy(dst=y, src=tile)
    return y


@dataclass
class Sizes(nl.NKIObject):  # type: ignore[name-defined, misc]
    rows: int


@dataclass
class HostSizes:
    rows: int


class Kind(Enum):
    WHOLE = 1


@pytest.mark.parametrize(
    "plan", [None, True, 3, 0.5, "a", (1, (2.0, "b")), {"a": (1,)}, Sizes(4), Kind.WHOLE, nl.bfloat16, nl.add, len]
)
def test_accepted_arguments_of_the_second_dialect(plan: Any) -> None:
    assert np.array_equal(copy_with_argument(X, plan), X)
    assert run(copy_with_argument[1], TensorSpec(X.shape), plan).trace.instructions


@pytest.mark.parametrize("plan", [[1, 2], (1, [2]), {1: 2}, HostSizes(4), {"a": HostSizes(4)}, range(3), {1}])
def test_refused_arguments_of_the_second_dialect(plan: Any) -> None:
    for call in (copy_with_argument, copy_with_argument[1]):
        with pytest.raises(NkiError) as caught:
            call(X, plan)
        assert caught.value.rule == "argument"
    with pytest.raises(NkiError, match="argument"):  # a launch inside of another kernel
        run(lambda x: copy_with_argument[1](x, plan), X)


def test_the_first_dialect_accepts_any_argument() -> None:
    @xnki.jit
    def kernel(x: Any, plan: Any) -> Any:
        y = xl.ndarray(x.shape, dtype=x.dtype, buffer=xl.shared_hbm)
        xl.store(y, value=xl.load(x))
        return y

    assert np.array_equal(kernel(X, HostSizes(4)), X) and np.array_equal(kernel(X, [1]), X)


@pytest.mark.parametrize(
    ("cores", "grid", "fits"),
    [
        ("", (2,), True),
        ("1", (1,), True),
        ("2", (2,), True),
        ("2", (1,), False),
        ("1", (2,), False),
        ("2", (2, 1), False),
    ],
)
def test_a_launch_of_the_second_dialect_is_on_the_physical_cores_of_a_logical_one(
    cores: str, grid: tuple[int, ...], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", cores)
    run(writes_a_mutable_input[grid], TensorSpec(X.shape))  # the first dialect has no such rule
    if fits:
        run(second_dialect_writes_its_input[grid], TensorSpec(X.shape))
    else:
        with pytest.raises(NkiError, match="physical cores"):
            run(second_dialect_writes_its_input[grid], TensorSpec(X.shape))


def test_a_launch_without_a_grid_is_on_all_physical_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    one, explicit = (len(run(kernel, TensorSpec(X.shape)).trace.instructions) for kernel in (
        second_dialect_writes_its_input, second_dialect_writes_its_input[1]))  # fmt: skip
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    two = run(second_dialect_writes_its_input, TensorSpec(X.shape))
    assert len(two.trace.instructions) == 2 * one == 2 * explicit > 0
