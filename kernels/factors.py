"""A factorised linear: two factors of a rank-r matrix ``W' = B A``, and the form in which they are stored.

Two plain factors have r (in + out) numbers, but a rank-r matrix has only r (in + out - r) degrees of freedom. A pivoted
form removes the difference: r rows or r columns of ``W'`` (the pivots) are one factor, and the other factor's r x r
identity block is not stored. The matrix stays the same. Source: Zhao et al., "Pivoting Factorization" (PIFA),
ICML 2025, for the row form.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from neuronmm.kernels.form import Form
from neuronmm.kernels.low_bits import Weight, dense, stored


class LowRank(NamedTuple):
    """One factorised linear ``y = W' x + bias``.

    Dimensions by form, ``bias`` [out] or None in all of them:

    - TWO: ``A`` [r, in], ``B`` [out, r]; ``y = B (A x)``.
    - ROWS: ``A`` = P [r, in], ``B`` = C [out - r, r]; ``h = P x``, ``y[pivots] = h``, ``y[others] = C h``. ``pivots``
      is the first of r consecutive outputs, or an int32 tensor [r], strictly increasing, in [0, out). The other
      outputs keep their order.
    - COLUMNS: ``A`` = D [r, in - r], ``B`` = Q [out, r]; the pivots are the last r inputs;
      ``h = x[in - r:] + D x[:in - r]``, ``y = Q h``.

    All tensors are on one device. They have one float dtype, except for ``pivots`` and for factors of few bits.
    """

    A: Weight
    B: Weight
    bias: Tensor | None = None
    form: Form = Form.TWO
    pivots: int | Tensor | None = None

    @property
    def rank(self) -> int:
        """r."""
        return self.A.shape[0]

    @property
    def in_features(self) -> int:
        """The width of the input."""
        return self.A.shape[1] + (self.rank if self.form is Form.COLUMNS else 0)

    @property
    def out_features(self) -> int:
        """The width of the result."""
        return self.B.shape[0] + (self.rank if self.form is Form.ROWS else 0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor, factors of few bits as values and scales."""
        parts = [tensor for part in self[:3] if part is not None for tensor in stored(part)]
        return (*parts, self.pivots) if isinstance(self.pivots, Tensor) else tuple(parts)

    def shares_a(self, other: LowRank) -> bool:
        """Whether both apply one A tensor in the same way, so that the rank-r intermediate is computed only once."""
        one, two = stored(self.A), stored(other.A)
        same = len(one) == len(two) and all(a is b for a, b in zip(one, two, strict=True))
        return same and (self.form is Form.COLUMNS) == (other.form is Form.COLUMNS)

    def expanded(self, dtype: torch.dtype = torch.float32) -> LowRank:
        """Return the same linear in the form TWO. A pivoted form of few bits is dequantised to ``dtype``."""
        if self.form is Form.TWO:
            return self
        A, B = dense(self.A, dtype), dense(self.B, dtype)
        return LowRank(expand_a(A, self.form), expand_b(B, self.form, self.pivots), self.bias)


def expand_a(A: Tensor, form: Form) -> Tensor:
    """Return the A [r, in] of the form TWO for the stored A of ``form``."""
    return A if form is not Form.COLUMNS else torch.cat([A, torch.eye(len(A), dtype=A.dtype, device=A.device)], dim=1)


def expand_b(B: Tensor, form: Form, pivots: int | Tensor | None) -> Tensor:
    """Return the B [out, r] of the form TWO for the stored B and the pivots of ``form``."""
    if form is not Form.ROWS:
        return B
    return place_pivots(pivots, torch.eye(B.shape[1], dtype=B.dtype, device=B.device), B, dim=0)


def place_pivots(pivots: int | Tensor | None, at_pivots: Tensor, others: Tensor, dim: int = -1) -> Tensor:
    """Return one tensor with ``at_pivots`` at the positions ``pivots`` of ``dim`` and ``others`` in order elsewhere.

    ``pivots`` is what a :class:`LowRank` in the form ROWS has.
    """
    if isinstance(pivots, int):
        before, after = others.split([pivots, others.shape[dim] - pivots], dim)
        return torch.cat([before, at_pivots, after], dim)
    assert pivots is not None
    rank = len(pivots)
    is_pivot = torch.zeros(rank + others.shape[dim], dtype=torch.bool, device=pivots.device)
    is_pivot.index_fill_(0, pivots.long(), True)
    source = torch.where(is_pivot, is_pivot.cumsum(0), rank + (~is_pivot).cumsum(0)) - 1
    return torch.cat([at_pivots, others], dim).index_select(dim, source)
