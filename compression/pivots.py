"""Pivoted factors: a matrix of rank r as r of its own rows and the coefficients of the other rows.

``W' = B A`` [out, in] has r (in + out - r) degrees of freedom, r^2 fewer than its two factors have parameters. The row
form stores r rows of W', the pivots, as P [r, in], and the other rows as combinations of them: ``W'[others] = C P``,
with C [out - r, r] (PIFA, Zhao et al., ICML 2025). The column form is the row form of the transposed matrix.

Pivots are chosen by LU factorisation with partial pivoting. They are then exchanged for other rows until no coefficient
exceeds :data:`BOUND`; each exchange multiplies the volume of the pivots by the coefficient (Goreinov et al. 2010, "How
to find a good submatrix"). Bounded coefficients keep the rounding errors of P and C small, even if the pivots are
ill-conditioned.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

BOUND = 1.25
"""Largest coefficient that the exchanges accept."""

SINGULAR = 1e12
"""Condition number of the pivots, in float64, from which the coefficients are computed with a pseudo-inverse."""

LEAST = 0.05
"""Smallest coefficient that :meth:`Skeleton.move` accepts: a smaller one would make the others too large."""


class Skeleton:
    """Rows of ``W' = B A`` that span all of its rows, and the coefficients of the other rows.

    Dimensions: ``pivots`` [r] and ``others`` [out - r] are row numbers, in increasing order until :meth:`move`;
    ``coefficients`` [out - r, r], float64.
    """

    def __init__(self, A: Tensor, B: Tensor, candidates: Tensor | None = None) -> None:
        """Choose pivots for ``A`` [r, in] and ``B`` [out, r] of any float dtype; r <= out, r <= in.

        The rows of W' are the rows of ``M = B R^T`` [out, r] in the orthonormal basis of ``A^T = Q R``. ``candidates``
        is a mask [out] of at least r rows that may become pivots; by default all may.
        """
        self._basis, triangle = torch.linalg.qr(A.double().T)
        self._to_basis = triangle.T
        self._rows = B.double() @ self._to_basis
        if candidates is None:
            candidates = torch.ones(len(B), dtype=torch.bool, device=B.device)
        numbers = candidates.nonzero().flatten()
        self.pivots = numbers[_lu_order(self._rows[numbers])[: len(A)]]
        is_other = torch.ones_like(candidates).index_fill_(0, self.pivots, False)
        self.others = is_other.nonzero().flatten()
        self.coefficients = self._combine(self._rows[self.others])
        anywhere = torch.ones_like(candidates)
        for _ in range(4 * len(A)):  # a limit for rounding errors; each exchange enlarges the volume
            if not self._exchange_best(candidates, anywhere, BOUND):
                break
        self.pivots, columns = self.pivots.sort()
        self.others, rows = self.others.sort()
        self.coefficients = self.coefficients[rows][:, columns]

    def move(self, count: int, enter: Tensor, leave: Tensor) -> None:
        """Replace up to ``count`` pivots in the mask ``leave`` [out] by rows in the mask ``enter`` [out]."""
        for _ in range(count):
            if not self._exchange_best(enter, leave, LEAST):
                break

    def match(self, smaller: Skeleton) -> None:
        """Exchange pivots of both skeletons, those of ``smaller`` among those of this one, until no exchange pays.

        Both have as many rows. What grows is the product of the volumes of the two sets of pivots, so that neither has
        large coefficients for the sake of the other.
        """
        places = torch.empty_like(self.mask, dtype=torch.int64)
        for _ in range(8 * len(self.pivots)):
            columns = _at(places, self.pivots, smaller.pivots)
            rows = _at(places, smaller.others, self.others)
            large, small = self.coefficients.abs(), smaller.coefficients.abs()
            gains = (
                large[:, columns] * small[rows],
                large * ~smaller.mask[self.pivots],
                small * self.mask[smaller.others][:, None],
            )
            best = [float(one.max()) if one.numel() else 0.0 for one in gains]
            kind = best.index(max(best))
            if not best[kind] > BOUND:
                break
            other, pivot = divmod(int(gains[kind].argmax()), gains[kind].shape[1])
            if kind == 0:
                self._exchange(other, int(columns[pivot]))
                smaller._exchange(int(rows[other]), pivot)
            else:
                (self, smaller)[kind - 1]._exchange(other, pivot)

    def reorder(self, position: Tensor) -> None:
        """Renumber the rows: row i becomes row ``position[i]``. Pivots and others are then in increasing order."""
        rows = torch.empty_like(self._rows)
        rows[position] = self._rows
        self._rows = rows
        self.__dict__.pop("condition", None)
        self.pivots, self.others = position[self.pivots].sort().values, position[self.others].sort().values
        self.coefficients = self._combine(rows[self.others])

    def express(self, B: Tensor) -> Tensor:
        """Return the coefficients [n, r] of the rows of ``B A``, for ``B`` [n, r] with the A of this skeleton."""
        return self._combine(B.double() @ self._to_basis)

    @property
    def mask(self) -> Tensor:
        """The pivots as a mask [out]."""
        return torch.zeros(len(self._rows), dtype=torch.bool, device=self.pivots.device).index_fill_(
            0, self.pivots, True
        )

    @property
    def rows(self) -> Tensor:
        """P [r, in]: the pivot rows of W'."""
        return self._rows[self.pivots] @ self._basis.T

    @cached_property
    def condition(self) -> float | None:
        """The condition number of P; None if its rows are dependent in float64."""
        values = torch.linalg.svdvals(self._rows[self.pivots])
        return float(values[0] / values[-1]) if values[-1] * SINGULAR > values[0] else None

    def _combine(self, rows: Tensor) -> Tensor:
        """Return the coefficients of ``rows`` [n, r], given in the basis of the skeleton."""
        pivots = self._rows[self.pivots]
        if self.condition is None:
            return rows @ torch.linalg.pinv(pivots, rtol=1 / SINGULAR)
        return torch.linalg.solve(pivots, rows, left=False)

    def _exchange_best(self, enter: Tensor, leave: Tensor, least: float) -> bool:
        """Make the row with the largest coefficient a pivot, if that coefficient exceeds ``least``.

        ``enter`` and ``leave`` are masks [out] of the rows that may become a pivot and of the pivots that may be
        replaced.
        """
        sizes = self.coefficients.abs() * enter[self.others][:, None] * leave[self.pivots]
        if not sizes.numel():
            return False
        other, pivot = divmod(int(sizes.argmax()), sizes.shape[1])
        if not sizes[other, pivot] > least:
            return False
        self._exchange(other, pivot)
        return True

    def _exchange(self, other: int, pivot: int) -> None:
        """Make the row ``others[other]`` a pivot in place of ``pivots[pivot]``, with a rank-1 update of the rest."""
        coefficients, size = self.coefficients, float(self.coefficients[other, pivot])
        change = coefficients[other].clone()
        change[pivot] -= 1
        coefficients -= torch.outer(coefficients[:, pivot], change) / size
        coefficients[other] = -change / size
        coefficients[other, pivot] += 1
        entering = int(self.others[other])
        self.__dict__.pop("condition", None)
        self.others[other], self.pivots[pivot] = self.pivots[pivot].clone(), entering


def _at(places: Tensor, rows: Tensor, wanted: Tensor) -> Tensor:
    """Return the places of ``wanted`` in ``rows``, both row numbers; ``places`` [out] is overwritten."""
    places[rows] = torch.arange(len(rows), device=rows.device)
    return places[wanted]


def _lu_order(rows: Tensor) -> Tensor:
    """Return the row numbers of ``rows`` [n, r] in the order of LU factorisation with partial pivoting."""
    _, exchanges, _ = torch.linalg.lu_factor_ex(rows)
    order = list(range(len(rows)))
    for row, other in enumerate(exchanges.tolist()):
        order[row], order[other - 1] = order[other - 1], order[row]
    return torch.tensor(order, device=rows.device)
