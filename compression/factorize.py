"""Closed-form low-rank factors of one weight, optimal for the weight, for its outputs, or for the dense outputs.

- Plain SVD minimises ``||W - BA||_F``.
- ASVD (arXiv 2312.05821) is the plain SVD of ``W S`` with a diagonal S that is larger for features with larger
  activations.
- Whitened (SVD-LLM, arXiv 2403.07378) minimises ``tr((W - BA) G (W - BA)^T)``, with inputs X [in, tokens] and G = X X^T
  + lambda I. Two ways avoid the inverse of a singular G. The top eigenvectors P of the covariance of the outputs,
  C = W G W^T, give ``B = P`` and ``A = P^T W``. Or, with G = V L V^T and M = W V L^1/2, the top eigenvectors Q of M^T M
  give ``B = M Q`` and ``A = Q^T L^-1/2 V^T``. Both equal the truncated SVD of W S with S S^T = G.
- Fisher minimises ``tr(F (W - BA) G (W - BA)^T)`` with the second moments F of the gradients of the outputs, that is
  about the KL divergence of the model's predictions (:mod:`neuronmm.compression.fisher`; both sides are whitened as in
  IO-SVD, arXiv 2605.15626). The same two ways are open: the top eigenvectors P of ``F^1/2 C F^1/2`` give ``B = F^-1/2
  P`` and ``A = P^T F^1/2 W``; or the top eigenvectors Q of ``L^1/2 V^T (W^T F W) V L^1/2`` give A and B as above, where
  ``W^T F W`` are the second moments of the gradients of the inputs, so that F [out, out] itself is not needed.
- Anchored (AA-SVD, arXiv 2604.02119): see :mod:`neuronmm.compression.anchored`.

The loss is the sum of the dropped eigenvalues (squared singular values). All computations are in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from neuronmm.compression.anchored import Anchors
from neuronmm.compression.moments import Moments

SPECTRUM_POINTS = 16
"""A spectrum is kept as the errors at the ends of this many equal steps of the rank, without that at the full rank."""

ASVD_EXPONENT = 0.5
"""ASVD's alpha: the scale of a feature is its root mean square to this power."""

Problem = tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]
"""A covariance whose top eigenvectors [n, rank] are needed, and the function that turns them into A and B."""


@dataclass(frozen=True)
class Factors:
    """The factors of ``W ~ B A`` and the cost of the truncation.

    Dimensions: A [rank, in], B [out, rank], float64. ``loss`` is the sum of the dropped part of the spectrum,
    ``energy`` the sum of all of it. Both are squared Frobenius norms of outputs (whitened, anchored), costs (fisher) or
    squared norms of (scaled) weights. ``spectrum`` has the relative errors of the optimal factors at 1/16, 2/16, ...,
    15/16 of the full rank.
    """

    A: Tensor
    B: Tensor
    loss: float
    energy: float
    spectrum: tuple[float, ...]

    @property
    def rank(self) -> int:
        """The number of rows of A."""
        return len(self.A)

    @property
    def relative_error(self) -> float:
        """The root of the lost fraction of the energy, ``||(W - BA) S||_F / ||W S||_F``, 0 to 1."""
        return (self.loss / self.energy) ** 0.5 if self.energy > 0 else 0.0


def factorize(weight: Tensor, rank: int, known: Moments | Anchors | None = None, *, scaled: bool = False) -> Factors:
    """Return the optimal factors of rank ``rank`` of ``weight`` [out, in].

    The factors of a lower rank are the first rows of A and the first columns of B.

    Args:
        weight: a matrix of any dtype.
        rank: 1..min(out, in).
        known: None for plain SVD, moments for the whitened form, moments with gradients for fisher's, anchors for the
            anchored form.
        scaled: use only the sizes of the features from the moments, as ASVD does.

    Raises:
        ValueError: the rank is impossible, or weight or moments hold NaN or infinity.
    """
    if not 1 <= rank <= min(weight.shape):
        raise ValueError(f"rank {rank} is impossible for a weight of shape {tuple(weight.shape)}")
    weight = _checked(weight)
    covariance, factors_of = _problem(weight, known, scaled)
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    values = values.clamp(min=0)
    energy, loss = float(values.sum()), float(values[:-rank].sum())
    unreachable = 0.0
    if isinstance(known, Anchors):  # the loss includes what no matrix of any rank can reach
        reachable, energy = energy, known.energy(weight)
        unreachable = energy - reachable
        loss = max(energy - (reachable - loss), 0.0)
    A, B = factors_of(vectors[:, -rank:].flip(1))
    return Factors(*_balanced(A, B), loss, energy, _errors(values, min(weight.shape), unreachable, energy))


def _errors(values: Tensor, full: int, unreachable: float, energy: float) -> tuple[float, ...]:
    """Return the relative error at each step of the rank, to four digits.

    Args:
        values: the eigenvalues, smallest first; there may be more of them than the ``full`` rank.
        full: the rank at which nothing but ``unreachable`` is lost.
        unreachable: the loss at the full rank.
        energy: what a loss is relative to.
    """
    dropped = values.cumsum(0)  # [k]: the sum of the k + 1 smallest
    ranks = (full * step // SPECTRUM_POINTS for step in range(1, SPECTRUM_POINTS))
    losses = (max(float(dropped[len(values) - rank - 1]) + unreachable, 0.0) for rank in ranks)
    return tuple(float(f"{(loss / energy) ** 0.5 if energy > 0 else 0.0:.4g}") for loss in losses)


def spectrum(weight: Tensor, moments: Moments) -> Tensor:
    """Return the whitened eigenvalues [min(out, in)] of ``weight``, largest first: the loss reduction of each rank.

    Raises:
        ValueError: weight or moments hold NaN or infinity.
    """
    covariance, _ = _problem(_checked(weight), moments, scaled=False)
    values = torch.linalg.eigvalsh((covariance + covariance.T) / 2).clamp(min=0)
    return values.flip(0)[: min(weight.shape)]


def _checked(weight: Tensor) -> Tensor:
    if not torch.isfinite(weight).all():
        raise ValueError("the weight contains NaN or infinity")
    return weight.double()


def _problem(weight: Tensor, known: Moments | Anchors | None, scaled: bool) -> Problem:
    if isinstance(known, Anchors):
        return known.problem(weight)
    if known is not None and scaled:
        size = known.squares + known.damping
        scale = (size / size.mean()) ** (ASVD_EXPONENT / 2)
        covariance, factors_of = _problem(weight * scale, None, scaled=False)

        def unscaled(vectors: Tensor) -> tuple[Tensor, Tensor]:
            A, B = factors_of(vectors)
            return A / scale, B

        return covariance, unscaled
    if known is not None and known.gradients is not None and not known.of_inputs:
        values, basis = torch.linalg.eigh(known.gradients)
        root = values.clamp(min=0).sqrt()
        inverse = torch.where(root > 0, 1 / root, torch.zeros_like(root))
        covariance = root[:, None] * (basis.T @ known.output_covariance(weight) @ basis) * root
        return covariance, lambda vectors: (
            (basis @ (root[:, None] * vectors)).T @ weight,
            basis @ (inverse[:, None] * vectors),
        )
    if known is not None and known.of_inputs:
        values, basis = known.eigen
        root = values.sqrt()
        white = (weight @ basis) * root
        covariance = white.T @ white
        if known.gradients is not None:
            covariance = root[:, None] * (basis.T @ known.gradients @ basis) * root
        return covariance, lambda vectors: ((basis @ (vectors / root[:, None])).T, white @ vectors)
    if known is None and weight.shape[0] > weight.shape[1]:
        return weight.T @ weight, lambda vectors: (vectors.T, weight @ vectors)
    covariance = weight @ weight.T if known is None else known.output_covariance(weight)
    return covariance, lambda vectors: (vectors.T @ weight, vectors)


def _balanced(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Scale row i of A and column i of B to equal norms: B A stays the same and fp16 does not overflow."""
    norm_a, norm_b = A.norm(dim=1), B.norm(dim=0)
    scale = torch.where((norm_a > 0) & (norm_b > 0), (norm_b / norm_a).sqrt(), torch.ones_like(norm_a))
    return (A * scale[:, None]).contiguous(), (B / scale).contiguous()
