"""What each choice of targets and ratio removes from a model, before anything is compressed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neuronmm.compression.ranks import Linear, balance, realised
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS, TARGETS

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True)
class Worth:
    """What compressing ``targets`` at the asked ``ratio`` removes, with uniform ranks in the pivoted form.

    ``realised`` is the fraction of the targeted weights and ``of_model`` the fraction of all parameters that is
    removed. ``ranks`` are the lowest and the highest rank.
    """

    targets: str
    ratio: float
    realised: float
    ranks: tuple[int, int]
    removed_parameters: int
    removed_bytes: int
    of_model: float


def worths(shapes: Mapping[str, tuple[int, ...]], layers: int, parameters: int, bytes_per_weight: int) -> list[Worth]:
    """Return what every choice of targets is worth at each of :data:`RATIOS`.

    Args:
        shapes: the weights' shapes [out, in] by the full names of their linears.
        layers: the number of decoder layers.
        parameters: the parameters of the whole model.
        bytes_per_weight: the size of a weight of a targeted linear.
    """
    rows = []
    for targets in ("mlp", "attention", "all"):
        names = [f"{LAYERS}.{index}.{linear}" for index in range(layers) for linear in TARGETS[targets]]
        linears = [Linear(name, shapes[name][0], shapes[name][1], pivoted=True) for name in names]
        for ratio in RATIOS:
            try:
                ranks = balance(linears, ratio, "auto")
            except UserError:  # the matrices are too small for any rank
                continue
            factorised = [rank for rank in ranks.values() if rank is not None]
            share, weights = realised(linears, ranks), sum(linear.dense for linear in linears)
            removed = round(share * weights)
            rows.append(
                Worth(
                    targets,
                    ratio,
                    share,
                    (min(factorised), max(factorised)),
                    removed,
                    removed * bytes_per_weight,
                    removed / parameters,
                )
            )
    return rows
