"""Low-rank factors of one weight: plain SVD, and SVD whitened by what the linear reads.

Whitened (SVD-LLM, arXiv 2403.07378): with inputs X [in, tokens] and G = X X^T + lambda I, the rank-r matrix BA that
minimises ``tr((W - BA) G (W - BA)^T)`` is found without ever inverting a singular G:

- from the covariance of the outputs C = W G W^T: its top eigenvectors P give ``B = P`` and ``A = P^T W``;
- from the Gram matrix of the inputs G = V L V^T, with M = W V L^1/2: the top eigenvectors Q of M^T M give ``B = M Q``
  and ``A = Q^T L^-1/2 V^T``.

Both are the truncated SVD of W S with S S^T = G, and the loss is the sum of the dropped eigenvalues (squared
singular values). Everything is computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from neuronmm.compression.moments import Moments


@dataclass(frozen=True)
class Factors:
    """``W ~ B A`` and what the truncation costs.

    Dimensions: A [rank, in], B [out, rank], float64. ``loss`` is the dropped part of the spectrum, ``energy`` the
    whole: both are squared Frobenius norms of outputs (whitened) or of weights (plain).
    """

    A: Tensor
    B: Tensor
    loss: float
    energy: float

    @property
    def relative_error(self) -> float:
        """``||(W - BA) S||_F / ||W S||_F``, 0 to 1."""
        return (self.loss / self.energy) ** 0.5 if self.energy > 0 else 0.0


def factorize(weight: Tensor, rank: int, moments: Moments | None = None) -> Factors:
    """The best rank-``rank`` factors of ``weight`` [out, in]: plain SVD, or whitened when moments are given.

    Raises:
        ValueError: the rank is not in 1..min(out, in), or weight or moments hold NaN or infinity.
    """
    if not 1 <= rank <= min(weight.shape):
        raise ValueError(f"rank {rank} is impossible for a weight of shape {tuple(weight.shape)}")
    if not torch.isfinite(weight).all():
        raise ValueError("the weight contains NaN or infinity")
    weight = weight.double()
    if moments is not None and moments.of_inputs:
        values, basis = moments.eigen
        scaled = (weight @ basis) * values.sqrt()
        vectors, loss, energy = _top(scaled.T @ scaled, rank)
        return _balanced((basis @ (vectors / values.sqrt()[:, None])).T, scaled @ vectors, loss, energy)
    if moments is None and weight.shape[0] > weight.shape[1]:
        vectors, loss, energy = _top(weight.T @ weight, rank)
        return _balanced(vectors.T, weight @ vectors, loss, energy)
    covariance = weight @ weight.T if moments is None else moments.output_covariance(weight)
    vectors, loss, energy = _top(covariance, rank)
    return _balanced(vectors.T @ weight, vectors, loss, energy)


def _top(covariance: Tensor, rank: int) -> tuple[Tensor, float, float]:
    """The leading eigenvectors [n, rank], largest first, the sum of the dropped eigenvalues, and the sum of all."""
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    values = values.clamp(min=0)
    return vectors[:, -rank:].flip(1), float(values[:-rank].sum()), float(values.sum())


def _balanced(A: Tensor, B: Tensor, loss: float, energy: float) -> Factors:
    """Give row i of A and column i of B one norm: the product is unchanged and keeps clear of the limits of fp16."""
    norm_a, norm_b = A.norm(dim=1), B.norm(dim=0)
    scale = torch.where((norm_a > 0) & (norm_b > 0), (norm_b / norm_a).sqrt(), torch.ones_like(norm_a))
    return Factors((A * scale[:, None]).contiguous(), (B / scale).contiguous(), loss, energy)
