"""The arguments of a kernel of the second dialect: plain values, tuples, and objects of classes made for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest

from neuronmm.emulator.nki import NkiError, TensorSpec, nki_modules, run

with nki_modules():
    import neuronxcc.nki as xnki
    import neuronxcc.nki.language as xl
    import nki
    import nki.isa as nisa
    import nki.language as nl

X = np.arange(32, dtype=np.float32).reshape(4, 8)


@nki.jit
def copied(x, plan):  # type: ignore[no-untyped-def]
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
def test_what_the_language_has(plan: Any) -> None:
    assert np.array_equal(copied(X, plan), X)
    assert run(copied[1], TensorSpec((4, 8)), plan).trace.instructions


@pytest.mark.parametrize("plan", [[1, 2], (1, [2]), {1: 2}, HostSizes(4), {"a": HostSizes(4)}, range(3), {1}])
def test_what_it_has_not(plan: Any) -> None:
    for call in (copied, copied[1]):
        with pytest.raises(NkiError) as caught:
            call(X, plan)
        assert caught.value.rule == "argument"
    with pytest.raises(NkiError, match="argument"):  # launched by a function that is itself run
        run(lambda x: copied[1](x, plan), X)


def test_the_first_dialect_takes_any_object() -> None:
    @xnki.jit
    def kernel(x: Any, plan: Any) -> Any:
        y = xl.ndarray(x.shape, dtype=x.dtype, buffer=xl.shared_hbm)
        xl.store(y, value=xl.load(x))
        return y

    assert np.array_equal(kernel(X, HostSizes(4)), X) and np.array_equal(kernel(X, [1]), X)
