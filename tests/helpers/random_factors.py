"""Random factorised linears in every form."""

from __future__ import annotations

import torch
from torch import Tensor

from neuronmm.kernels import Form, Int8, LowRank, quantise

LAYOUTS = ("two", "rows", "index", "columns")
"""The forms; "index" is the row form whose pivots are a tensor, "rows" the one whose pivots are a range."""


def make_factors(
    out: int, inner: int, rank: int, bias: bool, dtype: torch.dtype, layout: str = "two", pivots: int | None = None
) -> LowRank:
    """Factors that keep the scale of their input. A pivoted form lowers ``rank`` to full rank if it is above.

    ``pivots`` is the first pivot of the layout "rows", drawn if None.
    """
    form = Form.ROWS if layout == "index" else Form(layout)
    rank = min(rank, {Form.TWO: rank, Form.ROWS: out, Form.COLUMNS: inner}[form])
    first = inner - rank if form is Form.COLUMNS else inner
    last = out - rank if form is Form.ROWS else out
    a, b = torch.randn(rank, first) / inner**0.5, torch.randn(last, rank) / rank**0.5
    where: int | Tensor | None = None
    if layout == "rows":
        where = int(torch.randint(out - rank + 1, ())) if pivots is None else pivots
    elif layout == "index":
        where = torch.randperm(out)[:rank].sort().values.int()
    return LowRank(a.to(dtype), b.to(dtype), torch.randn(out).to(dtype) if bias else None, form, where)


def quantised(*linears: LowRank) -> list[LowRank]:
    """The linears with factors in int8; a shared factor stays shared."""
    int8 = {id(t): quantise(t) for linear in linears for t in (linear.A, linear.B)}
    return [linear._replace(A=int8[id(linear.A)], B=int8[id(linear.B)]) for linear in linears]


def doubled(factors: LowRank) -> LowRank:
    """The linear in float64, exactly."""
    bias = None if factors.bias is None else factors.bias.double()
    return factors._replace(A=_double(factors.A), B=_double(factors.B), bias=bias)


def _double(weight: Tensor | Int8) -> Tensor:
    if isinstance(weight, Int8):
        return weight.values.double() * weight.scales.double()[:, None]
    return weight.double()
