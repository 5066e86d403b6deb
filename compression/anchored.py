"""The anchored objective: a compressed layer gets the outputs of compressed layers and fits the dense model's outputs.

Let X be the dense model's inputs and X' those of the model compressed so far, for the same tokens (both [in, tokens]).
The objective

    ||T - W' X'||^2 + lambda ||W - W'||^2,  T = W X

has its minimum over W' of rank r at the truncated SVD of ``(T X'^T + lambda W) H^-1 L`` times ``L^-1``, where
``H = X' X'^T + lambda I = L L^T`` (AA-SVD, arXiv 2604.02119). The second term is our addition: it draws the solution
towards W in directions without calibration data. With X' = X this is the whitened form. A linear that writes to the
residual stream has the target ``T = W X + R - R'``, where R is the dense model's stream and R' the compressed model's
stream before the addition. This target, ours too, corrects the errors of earlier layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from neuronmm.compression.moments import check_finite, damping_of

_STRIPE = 1024  # rows of the Gram matrix that are added at once: narrower stripes compute less above the diagonal


class Anchors:
    """Sums over the calibration tokens for linears with one input.

    Dimensions: ``gram`` is ``sum x' x'^T`` [in, in]; only its lower triangle is complete, which is half of the work.
    ``cross`` is ``sum x x'^T`` [in, in] or, for a linear whose target is not its dense output, ``sum t x'^T``
    [out, in]. Both are float64. ``power`` is ``sum |t|^2`` of the targets (without bias).
    """

    def __init__(self, size: int, damping: float, out: int | None = None, device: torch.device | None = None) -> None:
        """``size`` is in. ``out`` is given if targets are added, and None if dense inputs are added."""
        self.gram = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.cross = torch.zeros(size if out is None else out, size, dtype=torch.float64, device=device)
        self.power = 0.0
        self._relative, self._of_inputs = damping, out is None

    @torch.no_grad()
    def add(self, targets: Tensor, compressed: Tensor) -> None:
        """Add tokens: dense inputs [tokens, in] or targets [tokens, out], and compressed inputs [tokens, in]."""
        inputs = compressed.double()
        for begin in range(0, len(self.gram), _STRIPE):
            end = begin + _STRIPE
            self.gram[begin:end, :end].addmm_(inputs[:, begin:end].T, inputs[:, :end])
        self.cross.addmm_(targets.double().T, inputs)

    def of(self, power: float) -> Anchors:
        """Return the same sums for a linear whose targets have the sum of squares ``power``."""
        anchors = copy.copy(self)
        anchors.power = power
        return anchors

    @cached_property
    def damping(self) -> float:
        """lambda, relative to the mean of ``gram``'s diagonal; 1 if all inputs are zero.

        Raises:
            ValueError: the activations hold NaN or infinity.
        """
        check_finite(self.cross)
        return damping_of(self.gram, float(self.gram.diagonal().mean()), self._relative)

    def energy(self, weight: Tensor) -> float:
        """Return the objective at ``W' = 0``; ``weight`` [out, in] float64 is that of all the linears."""
        return self.power + self.damping * float(weight.square().sum())

    def problem(self, weight: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """Return the covariance whose top eigenvectors are needed, and the function that turns them into A and B."""
        damping = self.damping
        damped = self.gram.clone()
        damped.diagonal().add_(damping)
        root = torch.linalg.cholesky(damped)  # reads the lower triangle
        target = (weight @ self.cross if self._of_inputs else self.cross) + damping * weight
        if weight.shape[0] <= weight.shape[1]:
            best = torch.cholesky_solve(target.T, root).T  # the optimal W' of full rank
            return best @ target.T, lambda vectors: (vectors.T @ best, vectors)
        white = torch.linalg.solve_triangular(root, target.T, upper=False).T

        def factors(vectors: Tensor) -> tuple[Tensor, Tensor]:
            return torch.linalg.solve_triangular(root.T, vectors, upper=True).T, white @ vectors

        return white.T @ white, factors
