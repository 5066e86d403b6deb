"""Loops of the first dialect: allocations end with the loop body; ``affine_range`` iterations are independent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from neuronmm.emulator.nki import NkiError, TensorSpec, nki_modules, run
from nki_violations import assert_breaks

with nki_modules():
    import neuronxcc.nki.isa as xisa
    import neuronxcc.nki.language as xl
    import nki.isa as nisa
    import nki.language as nl

F32 = np.float32


def tile_used_after_its_loop(x: Any) -> None:
    for _ in xl.affine_range(2):
        t = xl.load(x)
    xl.exp(t)  # broken: scope


def tile_stored_after_its_loop(x: Any) -> None:
    for _ in xl.sequential_range(2):
        t = xl.load(x)
    xl.store(x, t)  # broken: scope


def result_assigned_after_its_loop(x: Any) -> None:
    out = xl.ndarray((64, 128), dtype=F32)
    for _ in xl.affine_range(2):
        t = xl.load(x)
    out[...] = t  # broken: scope


def tile_of_another_iteration(x: Any) -> None:
    tiles = []
    for _ in xl.sequential_range(2):
        tiles.append(xl.load(x))
        xl.exp(tiles[0])  # broken: scope


@pytest.mark.parametrize("x", [np.zeros((64, 128), F32), TensorSpec((64, 128))], ids=["data", "shapes"])
@pytest.mark.parametrize(
    "kernel",
    [
        tile_used_after_its_loop,
        tile_stored_after_its_loop,
        result_assigned_after_its_loop,
        tile_of_another_iteration,
    ],
)
def test_an_allocation_of_a_loop_body_ends_with_it(kernel: Callable[..., None], x: Any) -> None:
    assert_breaks(kernel, x)


def used_after_static_range(x: Any) -> None:
    tiles = [xl.load(x) for _ in xl.static_range(2)]
    xl.exp(tiles[0])


def used_after_a_loop_of_the_second_dialect(x: Any) -> None:
    for _ in nl.affine_range(2):
        t = nl.ndarray((8, 4), dtype=F32, buffer=nl.sbuf)
        nisa.memset(t, 0.0)
    nisa.tensor_copy(nl.ndarray((8, 4), dtype=F32, buffer=nl.sbuf), t)


@pytest.mark.parametrize("kernel", [used_after_static_range, used_after_a_loop_of_the_second_dialect])
def test_an_unrolled_loop_has_no_scope(kernel: Callable[..., None]) -> None:
    run(kernel, TensorSpec((64, 128)))


def carries_a_value(x: Any, out: Any) -> None:
    t = xl.ndarray((64, 1), dtype=F32)
    t[...] = xl.load(x[0:64, 0:1])
    for _ in xl.affine_range(4):
        t[...] = xisa.tensor_scalar(t, op0=xl.multiply, operand0=2.0)
    xl.store(out[0:64, 0:1], t)


def overwrites_an_output(x: Any, out: Any) -> None:
    for i in xl.affine_range(4):
        xl.store(out[0:64, 0:1], xl.load(x[0:64, i : i + 1]))


def overwrites_what_another_read(x: Any, out: Any) -> None:
    t = xl.ndarray((64, 5), dtype=F32)
    t[...] = xl.load(x[0:64, 0:5])
    for i in xl.affine_range(4):
        xl.store(out[0:64, i : i + 1], t[0:64, i + 1 : i + 2])
        t[0:64, i : i + 1] = xl.load(x[0:64, i : i + 1])


def reads_a_partial_sum(x: Any, out: Any) -> None:
    total = xl.zeros((64, 1), dtype=F32)
    for i in xl.affine_range(4):
        total += xl.load(x[0:64, i : i + 1])
        xl.store(out[0:64, i : i + 1], total)


def adds_to_what_another_wrote(x: Any, out: Any) -> None:
    t = xl.zeros((64, 5), dtype=F32)
    for i in xl.affine_range(4):
        t[0:64, i + 1 : i + 2] = xl.load(x[0:64, i : i + 1])
        t[0:64, i : i + 1] += xl.load(x[0:64, i : i + 1])
    xl.store(out[0:64, 0:5], t)


def adds_after_its_own_sum(x: Any, out: Any) -> None:
    t = xl.zeros((64, 5), dtype=F32)
    for i in xl.affine_range(4):
        t[0:64, i + 1 : i + 2] = xl.load(x[0:64, i : i + 1])
        t[0:64, i + 1 : i + 2] += xl.load(x[0:64, i : i + 1])
        t[0:64, i : i + 1] += xl.load(x[0:64, i : i + 1])
    xl.store(out[0:64, 0:5], t)


def adds_in_psum_to_what_another_wrote(x: Any, out: Any) -> None:
    t = xl.zeros((64, 5), dtype=F32, buffer=xl.psum)
    for i in xl.affine_range(4):
        t[0:64, i + 1 : i + 2] = xisa.tensor_copy(xl.load(x[0:64, i : i + 1]))
        t[0:64, i : i + 1] += xl.load(x[0:64, i : i + 1])
    xl.store(out[0:64, 0:5], xisa.tensor_copy(t))


def independent(x: Any, out: Any) -> None:
    total = xl.zeros((64, 1), dtype=F32)
    columns = xl.zeros((64, 8), dtype=F32)
    for i in xl.affine_range(4):
        columns[0:64, i::4] = xl.load(x[0:64, i : i + 2])
        columns[0:64, i::4] = columns[0:64, i::4] + 1.0
        t = xl.load(x[0:64, i : i + 1])
        total += t
        xl.store(out[0:64, i + 1 : i + 2], t)
    xl.store(out[0:64, 0:1], total)


@pytest.mark.parametrize(
    "kernel",
    [
        carries_a_value,
        overwrites_an_output,
        overwrites_what_another_read,
        reads_a_partial_sum,
        adds_to_what_another_wrote,
        adds_after_its_own_sum,
        adds_in_psum_to_what_another_wrote,
    ],
)
@pytest.mark.parametrize("shuffle", [None, 3])
def test_a_race_in_affine_range_is_refused(kernel: Callable[..., None], shuffle: int | None) -> None:
    with pytest.raises(NkiError, match="affine_range") as caught:
        run(kernel, np.zeros((64, 128), F32), outputs=[TensorSpec((64, 8))], shuffle=shuffle)
    assert caught.value.rule == "race" and caught.value.location.startswith(__file__)


def test_independent_iterations_run_in_any_order() -> None:
    x = np.random.default_rng(0).integers(-9, 9, (64, 128)).astype(F32)
    plain = run(independent, x, outputs=[TensorSpec((64, 5))]).outputs[0]
    for seed in range(3):
        np.testing.assert_array_equal(
            plain, run(independent, x, outputs=[TensorSpec((64, 5))], shuffle=seed).outputs[0]
        )
    np.testing.assert_array_equal(plain[:, 0], x[:, :4].sum(1))
