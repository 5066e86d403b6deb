"""Gradient descent on random factors, to check the closed forms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def least(objective: Callable[[Tensor], Tensor], out: int, into: int, rank: int) -> float:
    """Return the least ``objective(B A)`` that three gradient descents reach.

    Dimensions: ``B`` [out, rank], ``A`` [rank, into], float64.
    """
    minima = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        a = torch.randn(rank, into, generator=generator, dtype=torch.float64).requires_grad_()
        b = torch.randn(out, rank, generator=generator, dtype=torch.float64).requires_grad_()
        optimizer = torch.optim.LBFGS([a, b], max_iter=800, line_search_fn="strong_wolfe")

        def closure(optimizer: torch.optim.Optimizer = optimizer, a: Tensor = a, b: Tensor = b) -> Tensor:
            optimizer.zero_grad()
            value = objective(b @ a)
            value.backward()
            return value

        optimizer.step(closure)
        minima.append(float(objective(b @ a).detach()))
    return min(minima)
