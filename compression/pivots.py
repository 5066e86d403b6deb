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
            free = (~smaller.mask[self.pivots]).nonzero().flatten()
            held = self.mask[smaller.others].nonzero().flatten()
            both = _largest(self.coefficients[:, columns] * smaller.coefficients[rows])
            own, theirs = _largest(self.coefficients[:, free]), _largest(smaller.coefficients[held])
            best = max(both, own, theirs, key=lambda largest: largest[0])
            size, other, pivot = best
            if not size > BOUND:
                break
            if best is both:
                self._exchange(other, int(columns[pivot]))
                smaller._exchange(int(rows[other]), pivot)
            elif best is own:
                self._exchange(other, int(free[pivot]))
            else:
                smaller._exchange(int(held[other]), pivot)

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
        rows, columns = enter[self.others], leave[self.pivots]
        everywhere = bool(rows.all() and columns.all())
        size, other, pivot = _largest(self.coefficients if everywhere else self.coefficients[rows][:, columns])
        if not size > least:
            return False
        if not everywhere:
            other, pivot = int(rows.nonzero()[other]), int(columns.nonzero()[pivot])
        self._exchange(other, pivot)
        return True

    def _exchange(self, other: int, pivot: int) -> None:
        """Make the row ``others[other]`` a pivot in place of ``pivots[pivot]``, with a rank-1 update of the rest."""
        coefficients, size = self.coefficients, float(self.coefficients[other, pivot])
        change = coefficients[other].clone()
        change[pivot] -= 1
        coefficients.addr_(coefficients[:, pivot].clone(), change, alpha=-1 / size)
        coefficients[other] = -change / size
        coefficients[other, pivot] += 1
        entering = int(self.others[other])
        self.__dict__.pop("condition", None)
        self.others[other], self.pivots[pivot] = self.pivots[pivot].clone(), entering


def _largest(block: Tensor) -> tuple[float, int, int]:
    """Return the largest absolute value in ``block`` [m, n], 0 if it is empty, and its row and column.

    It reads the block twice and writes nothing: a block of a large model is 80 MB, and there are many exchanges.
    """
    if not block.numel():
        return 0.0, 0, 0
    low, high = torch.aminmax(block)
    place = block.argmax() if high >= -low else block.argmin()
    return max(float(high), -float(low)), *divmod(int(place), block.shape[1])


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
