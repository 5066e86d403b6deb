"""Run one operation as a graph in the interpreter and in XLA, and compare the outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import xla_oracle as xla
from neuronmm.emulator.hlo import Program
from neuronmm.emulator.pyhlo import HloScribe
from neuronmm.emulator.pyhlo.literal import DTYPES
from neuronmm.emulator.pyhlo.messages import PrimitiveType

DTYPE_NAMES = {dtype: PrimitiveType.Name(number).lower() for number, dtype in DTYPES.items()}


@pytest.fixture(scope="session")
def like_xla() -> Callable[..., None]:
    """Return ``like_xla(build, *inputs, ulps=4, sums=False)``, which asserts that interpreter and XLA agree.

    ``build(scribe, *parameters)`` writes the graph. Floats may differ by ``ulps`` units in the last place: of each
    value or, if they are ``sums``, whose terms may cancel, of the largest one. XLA may flush what is not normal to 0.
    Integers and booleans must be equal.
    """
    pytest.importorskip("jax")

    def compare(build: Callable[..., Any], *inputs: torch.Tensor, ulps: float = 4, sums: bool = False) -> None:
        module = module_of(build, *inputs)
        expected = xla.run(module, [t.clone() for t in inputs])
        actual = [ranks[0] for ranks in Program(module, 1)([[t.clone()] for t in inputs])]
        for a, b in zip(actual, expected, strict=True):
            assert a.shape == b.shape
            if not b.dtype.is_floating_point:
                assert torch.equal(a.to(torch.int64), b.to(torch.int64)), (a, b)
                continue
            assert a.dtype == b.dtype
            finite = b.isfinite()
            assert torch.equal(a.isfinite(), finite) and torch.equal(a.isnan(), b.isnan()), (a, b)
            assert torch.equal(a[b.isinf()], b[b.isinf()])
            limits, scale = torch.finfo(b.dtype), b[finite].abs().double()
            scale = scale.max() if sums and finite.any() else scale
            error = (a[finite].double() - b[finite].double()).abs()
            assert (error <= ulps * limits.eps * scale.clamp(min=limits.tiny / limits.eps)).all(), (a, b)

    return compare


def module_of(build: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """Return the module of ``build(scribe, *parameters)``, whose result is one value or a list of outputs."""

    def graph(scribe: Any) -> Any:
        parameters = [
            getattr(scribe, DTYPE_NAMES[t.dtype])[t.shape].Parameter(parameter_number=n) for n, t in enumerate(inputs)
        ]
        result = build(scribe, *parameters)
        outputs = result if isinstance(result, list) else [result]
        return scribe.tuple(*[o.dtype[o.sizes] for o in outputs]).Tuple(*outputs)

    return HloScribe()(graph).module_proto
