"""Low-rank factors of one weight: plain SVD, and SVD whitened by the inputs' Gram matrix.

Whitened (SVD-LLM, arXiv 2403.07378; the paper's Eq. for U and V): with inputs X [in, tokens] and G = X X^T + lambda I,
the rank-r matrix BA that minimises ``tr((W - BA) G (W - BA)^T)`` is found without ever inverting a singular G:

- out <= in: with the top eigenvectors P of the output covariance W G W^T, ``B = P`` and ``A = P^T W``;
- out > in: with G = V L V^T and M = W V L^1/2, the top eigenvectors Q of M^T M give ``B = M Q``,
  ``A = Q^T L^-1/2 V^T``.

Both are the truncated SVD of W S with S S^T = G, and the loss is the sum of the dropped eigenvalues (squared
singular values). Everything is computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_BLOCK = 2048  # rows of a Gram matrix brought to float64 at a time; bounds memory for wide layers


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


class Whitener:
    """A Gram matrix G = X X^T of a linear's inputs, damped: ``lambda = damping * mean(diag G)``.

    Dimensions: gram [in, in], float32 or float64, symmetric. A Gram matrix of fewer tokens than features, with dead
    features or a few massive ones is singular; damping makes the solution unique there and hardly moves it elsewhere.

    Raises:
        ValueError: the Gram matrix holds NaN or infinity.
    """

    def __init__(self, gram: Tensor, damping: float) -> None:
        if not torch.isfinite(gram).all():
            raise ValueError("the calibration activations contain NaN or infinity")
        mean = float(gram.diagonal().double().mean())
        self.gram = gram
        # An input that is always zero carries no information: fall back to the identity, that is plain SVD.
        self.damping = damping * mean if mean > 0 else 1.0

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (clamped at zero, then damped) and eigenvectors of G, float64: [in], [in, in]."""
        values, vectors = torch.linalg.eigh(self.gram.double())
        return values.clamp_(min=0).add_(self.damping), vectors

    def output_covariance(self, weight: Tensor) -> Tensor:
        """``W G W^T`` [out, out] for ``weight`` [out, in] in float64, G brought to float64 block by block."""
        covariance = self.damping * (weight @ weight.T)
        for start in range(0, len(self.gram), _BLOCK):
            rows = self.gram[start : start + _BLOCK].double()
            covariance += weight[:, start : start + _BLOCK] @ (rows @ weight.T)
        return covariance


def factorize(weight: Tensor, rank: int, whitener: Whitener | None = None) -> Factors:
    """The best rank-``rank`` factors of ``weight`` [out, in]: plain SVD, or whitened when a whitener is given.

    Raises:
        ValueError: the rank is not in 1..min(out, in), or the weight holds NaN or infinity.
    """
    if not 1 <= rank <= min(weight.shape):
        raise ValueError(f"rank {rank} is impossible for a weight of shape {tuple(weight.shape)}")
    if not torch.isfinite(weight).all():
        raise ValueError("the weight contains NaN or infinity")
    weight = weight.double()
    if weight.shape[0] <= weight.shape[1]:
        covariance = weight @ weight.T if whitener is None else whitener.output_covariance(weight)
        vectors, loss, energy = _top(covariance, rank)
        return _balanced(vectors.T @ weight, vectors, loss, energy)
    if whitener is None:
        vectors, loss, energy = _top(weight.T @ weight, rank)
        return _balanced(vectors.T, weight @ vectors, loss, energy)
    values, basis = whitener.eigen
    scaled = (weight @ basis) * values.sqrt()
    vectors, loss, energy = _top(scaled.T @ scaled, rank)
    return _balanced((basis @ (vectors / values.sqrt()[:, None])).T, scaled @ vectors, loss, energy)


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
