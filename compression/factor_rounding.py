"""Round the two factors of linears that share an A to int4, each for the inputs that it has.

An error of row i of A costs the more, the larger column i of B is, and the other way round. Factors that are whitened
for their inputs have large rows in A for directions in which the inputs are small, where plain rounding destroys them.
So the matrix ``B A`` is first written in another basis: the balanced factors of its plain SVD, rotated so that all rows
of A, and all columns of B, have about the same size. The product of their sizes is then as small as in any basis. Then

1. A is rounded with feedback on the Gram matrix G of the inputs,
2. B is fitted to the rounded A4, ``B = W' G A4^T (A4 G A4^T)^-1`` with ``W' = B A``,
3. B is rounded with feedback on ``A4 G A4^T``, the Gram matrix of its own inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from neuronmm.compression.error_feedback import ErrorFeedback
from neuronmm.kernels import Int4

_RIDGE = 1e-6
"""Weight of the change of B in the fit, relative to the mean diagonal entry of its inputs' Gram matrix."""


@torch.no_grad()
def round_two(feedback: ErrorFeedback, A: Tensor, parts: Sequence[Tensor]) -> tuple[Int4, list[Int4]]:
    """Round the factors of one or more linears with one A.

    Args:
        feedback: knows the Gram matrix of the inputs [in, in].
        A: [r, in], of any float dtype.
        parts: the B [out, r] of each linear.

    Returns:
        A and every B. The rows of A are others than before; the products ``B A`` change by the rounding only.
    """
    B = torch.cat([part.double() for part in parts])
    basis = _basis(A.double(), B)
    low = feedback.int4(basis[0])
    rounded = low.dequantise(torch.float64)
    seen = rounded @ feedback.gram
    inner, cross = seen @ rounded.T, seen @ A.double().T
    power = float(inner.diagonal().mean())
    ridge = _RIDGE * power if power > 0 else 1.0
    # min ||B' A4 - B A||^2 in the metric G, and ridge times the change from the B of the new basis
    damped = inner + ridge * torch.eye(len(inner)).to(inner)
    fitted = torch.linalg.solve(damped, (B @ cross.T + ridge * basis[1]).T).T
    outer = ErrorFeedback(inner)
    return low, [outer.int4(part) for part in fitted.split([len(part) for part in parts])]


def _basis(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors of ``B A`` whose rows and columns have about the same size, float64."""
    (right, upper), (left, other) = torch.linalg.qr(A.T), torch.linalg.qr(B)
    u, sizes, v = torch.linalg.svd(other @ upper.T)
    root = sizes.sqrt()
    u, v = u[:, : len(root)], v[: len(root)]
    rotation = _cosines(len(root)).to(A)
    return rotation.T @ (root[:, None] * (v @ right.T)), (left @ u * root) @ rotation


def _cosines(size: int) -> Tensor:
    """Return the orthogonal matrix [size, size] of the discrete cosine transform, float64, all entries small."""
    at = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (at[:, None] + 0.5) * at) * math.sqrt(2 / size)
    matrix[:, 0] /= math.sqrt(2)
    return matrix
