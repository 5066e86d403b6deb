"""One operation as a graph, run by the interpreter and by XLA."""

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

NAMES = {dtype: PrimitiveType.Name(number).lower() for number, dtype in DTYPES.items()}


@pytest.fixture(scope="session")
def like_xla() -> Callable[..., None]:
    """``like_xla(build, *inputs)``: the interpreter's outputs of ``build(scribe, *parameters)`` are those of XLA.

    ``ulps`` are units in the last place of the largest value, for floats; integers and booleans are equal.
    """
    pytest.importorskip("jax")

    def compare(build: Callable[..., Any], *inputs: torch.Tensor, ulps: float = 4) -> None:
        module = module_of(build, *inputs)
        want = xla.runs(module, [t.clone() for t in inputs])
        got = [ranks[0] for ranks in Program(module, 1)([[t.clone()] for t in inputs])]
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape
            if not b.dtype.is_floating_point:
                assert torch.equal(a.to(torch.int64), b.to(torch.int64)), (a, b)
                continue
            assert a.dtype == b.dtype
            finite = b.isfinite()
            assert torch.equal(a.isfinite(), finite) and torch.equal(a.isnan(), b.isnan()), (a, b)
            assert torch.equal(a[b.isinf()], b[b.isinf()])
            scale = b[finite].abs().max().double() if finite.any() else torch.tensor(0.0)
            error = (a[finite].double() - b[finite].double()).abs()
            assert (error <= ulps * torch.finfo(b.dtype).eps * scale.clamp(min=1e-30)).all(), (a, b)

    return compare


def module_of(build: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """The module of ``build(scribe, *parameters)``; a list of values becomes a tuple."""

    def graph(scribe: Any) -> Any:
        parameters = [
            getattr(scribe, NAMES[t.dtype])[t.shape].Parameter(parameter_number=n) for n, t in enumerate(inputs)
        ]
        result = build(scribe, *parameters)
        outputs = result if isinstance(result, list) else [result]
        return scribe.tuple(*[o.dtype[o.sizes] for o in outputs]).Tuple(*outputs)

    return HloScribe()(graph).module_proto
