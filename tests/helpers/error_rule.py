"""The accuracy rule of every kernel test: at most twice the error of plain torch in the same precision.

The rule is scale-free: no tolerance is chosen by hand. Errors are Frobenius norms over the whole result. Plain torch
may be right by luck on a few numbers, so small results are pooled over several draws of the inputs, and its error
counts for no less than one rounding of the exact result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

POOL = 512
"""The rule compares at least this many numbers, from one draw or several."""
MOST_DRAWS = 32


def draws_to_pool(numbers: int, most: int = MOST_DRAWS) -> int:
    """Return how many draws of a result with ``numbers`` independent numbers to pool: at most ``most``."""
    return max(1, min(most, POOL // max(numbers, 1)))


def assert_twice_plain(
    cases: Iterable[Any],
    run: Callable[[Any], Tensor],
    plain: Callable[[Any], Tensor],
    exact: Callable[[Any], Tensor],
) -> None:
    """Assert ``|run - exact| <= 2 |plain - exact|`` over all ``cases`` together.

    ``run`` is the kernel, ``plain`` the same sum in plain torch in the same precision, ``exact`` the reference in a
    higher one. Each takes a case and returns a tensor of one shape; ``run`` and ``plain`` of one dtype.
    """
    error = plain_error = rounding = 0.0
    for case in cases:
        actual, baseline, expected = run(case), plain(case), exact(case)
        assert actual.shape == baseline.shape == expected.shape and actual.dtype == baseline.dtype
        assert torch.isfinite(actual).all()
        error += (actual.double() - expected.double()).square().sum().item()
        plain_error += (baseline.double() - expected.double()).square().sum().item()
        rounding += (torch.finfo(actual.dtype).eps / 2 * expected.double()).square().sum().item()
    allowed = max(plain_error, rounding)
    assert error <= 4 * allowed, f"error is {(error / allowed) ** 0.5:.3g} times plain torch's; 2 is allowed"
