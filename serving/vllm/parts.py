"""One linear of the checkpoint inside a linear of vLLM: its tensors as stored, and what a tensor-parallel rank keeps.

A column-parallel layer splits the outputs: rows of B; a row-parallel one splits the inputs: columns of A. The other
factor is on every rank. Two forms cannot be split that way, because the pivots of a rank's outputs or inputs are no
range of their own: ROWS by outputs and COLUMNS by inputs. With several ranks those become two plain factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuronmm.kernels import Form, Fp8, Int4, Int8, LowRank
from neuronmm.kernels.low_bits import Weight
from neuronmm.models import CompressionSpec, UserError
from neuronmm.models.tensors import check_pivots, linear_tensors


@dataclass(frozen=True)
class Split:
    """What this rank computes of a linear: number ``rank`` of ``count`` equal parts of its outputs or ``inputs``."""

    rank: int
    count: int
    inputs: bool

    def of_outputs(self, tensor: Tensor) -> Tensor:
        """Return this rank's elements of a tensor whose first dimension is the outputs."""
        return tensor if self.inputs else tensor.chunk(self.count)[self.rank]

    def of_dense(self, weight: Tensor) -> Tensor:
        """Return this rank's part of a weight [out, in]."""
        return weight.chunk(self.count, dim=1)[self.rank] if self.inputs else self.of_outputs(weight)

    def of_factors(self, factors: LowRank, dtype: torch.dtype) -> LowRank:
        """Return this rank's part of a linear; int8 factors of a form that cannot be split get ``dtype``."""
        if self.count == 1:
            return factors
        if factors.form is (Form.COLUMNS if self.inputs else Form.ROWS):
            factors = factors.expanded(dtype)
        A, B = factors.A, factors.B
        assert not isinstance(A, (Int4, Fp8)) and not isinstance(B, (Int4, Fp8))  # no served checkpoint has them
        if self.inputs:
            columns = Int8(self.of_dense(A.values), A.scales) if isinstance(A, Int8) else self.of_dense(A)
            return factors._replace(A=columns)
        return factors._replace(B=Int8(*map(self.of_outputs, B)) if isinstance(B, Int8) else self.of_outputs(B))


class Matrix(nn.Module):
    """A weight as parameters: ``values``, and ``scales`` if it is int8."""

    def __init__(self, weight: Weight, device: torch.device) -> None:
        super().__init__()
        assert not isinstance(weight, (Int4, Fp8))  # no served checkpoint has it
        values, scales = weight if isinstance(weight, Int8) else (weight, None)
        self.values = _parameter(values, device)
        self.scales = None if scales is None else _parameter(scales, device)

    @property
    def weight(self) -> Weight:
        """The weight as the kernels take it."""
        return self.values if self.scales is None else Int8(self.values, self.scales)


def _parameter(tensor: Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(tensor.to(device).contiguous(), requires_grad=False)


class Part(nn.Module):
    """The linear ``name`` of the checkpoint, of ``in_features`` and ``out_features``. Its bias is the vLLM linear's.

    ``take`` collects the tensors of the checkpoint. ``build`` makes this rank's parameters from them: ``A`` and ``B``,
    or ``A`` alone if the linear is dense.
    """

    def __init__(self, name: str, spec: CompressionSpec, in_features: int, out_features: int, split: Split) -> None:
        super().__init__()
        self.name, self.out_features, self.split = name, out_features, split
        self.low_rank, self.form = name in spec.ranks, spec.form_of(name)
        self.pivots: int | Tensor | None = spec.forms[name].first if name in spec.forms else None
        self.B: Matrix | None = None
        promises = linear_tensors(name, out_features, in_features, spec)
        self._promises = {full.removeprefix(f"{name}."): promise for full, promise in promises}
        self._taken: dict[str, Tensor] = {}

    def take(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor of the checkpoint until ``build``.

        Raises:
            UserError: the linear has no such tensor, or it has another shape or holds no pivots.
        """
        promise = self._promises.get(name)
        if promise is None:
            raise UserError(f"{self.name}.{name} belongs to no part of the model; compress the model again")
        if tensor.shape != promise.shape:
            shapes = f"{list(tensor.shape)}, not {list(promise.shape)}"
            raise UserError(f"{self.name}.{name} has shape {shapes}; compress the model again")
        if name == "pivots":
            check_pivots(f"{self.name}.pivots", tensor, self.out_features, "the checkpoint")
        self._taken[name] = tensor

    @property
    def complete(self) -> bool:
        """Whether all tensors have arrived that have to."""
        return all(name in self._taken for name, promise in self._promises.items() if promise.required)

    def build(self, leader: Part | None, device: torch.device, dtype: torch.dtype) -> None:
        """Make this rank's parameters on ``device``, floats in ``dtype``; a follower uses the A of its ``leader``."""
        taken, self._taken = self._taken, {}

        def stored(factor: str) -> Weight:
            values, scales = taken[f"{factor}.weight"], taken.get(f"{factor}.weight_scale")
            return values.to(dtype) if scales is None else Int8(values, scales)

        if not self.low_rank:
            self.A = Matrix(self.split.of_dense(taken["weight"]).to(dtype), device)
            return
        A = stored("A") if leader is None else leader.A.weight
        whole = LowRank(A, stored("B"), None, self.form, taken.get("pivots", self.pivots))
        local = self.split.of_factors(whole, dtype)
        self.A = Matrix(local.A, device) if leader is None else leader.A
        self.B, self.form, self.pivots = Matrix(local.B, device), local.form, local.pivots
        if isinstance(local.pivots, Tensor):
            self.pivots = _parameter(local.pivots, device)

    @property
    def factors(self) -> LowRank | None:
        """The low-rank linear that this rank computes; None if it is dense, with the weight ``A``."""
        return None if self.B is None else LowRank(self.A.weight, self.B.weight, None, self.form, self.pivots)
