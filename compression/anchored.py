"""The anchored objective: compressed layers read what compressed layers before them wrote, and aim at dense outputs.

With the dense model's inputs X and, for the same tokens, those of the model compressed so far, X' (both [in, tokens]),

    ||W X - W' X'||^2 + lambda ||W - W'||^2

is least, among W' of rank r, for the truncated SVD of ``W (C + lambda I) H^-1 L`` times ``L^-1``, where ``C = X X'^T``
and ``H = X' X'^T + lambda I = L L^T`` (AA-SVD, arXiv 2604.02119; the second term, ours, draws the solution to W where
the text says nothing). With X' = X it is the whitened form.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from neuronmm.compression.moments import damping_of


class Anchors:
    """Sums over the calibration tokens for linears of one input.

    Dimensions: ``gram`` is ``sum x' x'^T`` and ``cross`` is ``sum x x'^T`` [in, in], float64; ``outputs`` is ``sum |W
    x|^2`` of the dense outputs (without bias).
    """

    def __init__(self, size: int, damping: float, device: torch.device | None = None) -> None:
        self.gram = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.cross = torch.zeros_like(self.gram)
        self.outputs = 0.0
        self._relative = damping

    @torch.no_grad()
    def add(self, dense: Tensor, compressed: Tensor) -> None:
        """Add tokens: the inputs of both models [tokens, in]."""
        x, ours = dense.double(), compressed.double()
        self.gram.addmm_(ours.T, ours)
        self.cross.addmm_(x.T, ours)

    def of(self, outputs: float) -> Anchors:
        """The same sums, for a linear whose dense outputs have this sum of squares."""
        anchors = copy.copy(self)
        anchors.outputs = outputs
        return anchors

    @cached_property
    def damping(self) -> float:
        """lambda, relative to the mean of ``gram``'s diagonal; 1 where all inputs are zero.

        Raises:
            ValueError: the activations hold NaN or infinity.
        """
        return damping_of(self.gram + self.cross, float(self.gram.diagonal().mean()), self._relative)

    def energy(self, weight: Tensor) -> float:
        """The objective at ``W' = 0``; ``weight`` is all the linears' [out, in], float64."""
        return self.outputs + self.damping * float(weight.square().sum())

    def problem(self, weight: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """The covariance whose top eigenvectors are wanted, and how they become A and B; ``weight`` float64."""
        damping = self.damping
        root = torch.linalg.cholesky(_raised(self.gram, damping))
        target = weight @ _raised(self.cross, damping)
        if weight.shape[0] <= weight.shape[1]:
            best = torch.cholesky_solve(target.T, root).T  # the best W' of full rank
            return best @ target.T, lambda vectors: (vectors.T @ best, vectors)
        white = torch.linalg.solve_triangular(root, target.T, upper=False).T

        def factors(vectors: Tensor) -> tuple[Tensor, Tensor]:
            return torch.linalg.solve_triangular(root.T, vectors, upper=True).T, white @ vectors

        return white.T @ white, factors


def _raised(matrix: Tensor, damping: float) -> Tensor:
    return matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


class _Reached(Exception):
    """The linears that were waited for have run: the rest of the layer is of no interest."""


def inputs_of(layer: nn.Module, names: Sequence[str], run: Callable[[], object]) -> tuple[Tensor, list[Tensor]]:
    """Run a layer up to the linears ``names``, which read one input; return it [tokens, in], and their outputs.

    The outputs [tokens, out] are without bias. ``run`` calls the layer.
    """
    seen: list[Tensor] = []
    outputs: list[Tensor] = []

    def keep(linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(linear, nn.Linear)
        bias = linear.bias
        seen.append(inputs[0].flatten(0, -2))
        outputs.append((output if bias is None else output - bias).flatten(0, -2))
        if len(outputs) == len(names):
            raise _Reached

    hooks = [layer.get_submodule(name).register_forward_hook(keep) for name in names]
    try:
        run()
    except _Reached:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return seen[0], outputs
