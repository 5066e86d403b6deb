"""The anchored objective: compressed layers read what compressed layers before them wrote, and aim at dense outputs.

With the dense model's inputs X and, for the same tokens, those of the model compressed so far, X' (both [in, tokens]),

    ||T - W' X'||^2 + lambda ||W - W'||^2,  T = W X

is least, among W' of rank r, for the truncated SVD of ``(T X'^T + lambda W) H^-1 L`` times ``L^-1``, where
``H = X' X'^T + lambda I = L L^T`` (AA-SVD, arXiv 2604.02119; the second term, ours, draws the solution to W where the
text says nothing). With X' = X it is the whitened form. A linear that writes to the residual stream has
``T = W X + R - R'``, where R is the dense model's stream and R' the compressed one's before it is added: a target of
ours, which makes good the errors made before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from neuronmm.compression.moments import check_finite, damping_of


class Anchors:
    """Sums over the calibration tokens for linears of one input.

    Dimensions: ``gram`` is ``sum x' x'^T`` [in, in], ``cross`` ``sum x x'^T`` [in, in] or, for a linear whose target is
    not its dense output, ``sum t x'^T`` [out, in], float64; ``power`` is ``sum |t|^2`` of the targets (without bias).
    """

    def __init__(self, size: int, damping: float, out: int | None = None, device: torch.device | None = None) -> None:
        """``size`` is in; ``out`` that of a linear whose targets are added, None where dense inputs are."""
        self.gram = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.cross = torch.zeros(size if out is None else out, size, dtype=torch.float64, device=device)
        self.power = 0.0
        self._relative, self._of_inputs = damping, out is None

    @torch.no_grad()
    def add(self, wanted: Tensor, compressed: Tensor) -> None:
        """Add tokens: the dense model's inputs [tokens, in] or the targets [tokens, out]; our inputs [tokens, in]."""
        ours = compressed.double()
        self.gram.addmm_(ours.T, ours)
        self.cross.addmm_(wanted.double().T, ours)

    def of(self, power: float) -> Anchors:
        """The same sums, for a linear whose targets have this sum of squares."""
        anchors = copy.copy(self)
        anchors.power = power
        return anchors

    @cached_property
    def damping(self) -> float:
        """lambda, relative to the mean of ``gram``'s diagonal; 1 where all inputs are zero.

        Raises:
            ValueError: the activations hold NaN or infinity.
        """
        check_finite(self.cross)
        return damping_of(self.gram, float(self.gram.diagonal().mean()), self._relative)

    def energy(self, weight: Tensor) -> float:
        """The objective at ``W' = 0``; ``weight`` is all the linears' [out, in], float64."""
        return self.power + self.damping * float(weight.square().sum())

    def problem(self, weight: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """The covariance whose top eigenvectors are wanted, and how they become A and B; ``weight`` float64."""
        damping = self.damping
        identity = torch.eye(len(self.gram), dtype=torch.float64, device=self.gram.device)
        root = torch.linalg.cholesky(self.gram + damping * identity)
        target = (weight @ self.cross if self._of_inputs else self.cross) + damping * weight
        if weight.shape[0] <= weight.shape[1]:
            best = torch.cholesky_solve(target.T, root).T  # the best W' of full rank
            return best @ target.T, lambda vectors: (vectors.T @ best, vectors)
        white = torch.linalg.solve_triangular(root, target.T, upper=False).T

        def factors(vectors: Tensor) -> tuple[Tensor, Tensor]:
            return torch.linalg.solve_triangular(root.T, vectors, upper=True).T, white @ vectors

        return white.T @ white, factors
