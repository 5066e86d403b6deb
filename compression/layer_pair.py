"""A decoder layer twice: dense, and compressed with low-rank modules in place of some linears."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm.compression.pivoting import DOWN, GATE, UP, LayerFactors, forms_of, in_order, to_pivoted
from neuronmm.compression.ranks import Linear
from neuronmm.compression.reader import Reader
from neuronmm.kernels import LowRank
from neuronmm.kernels.low_bits import dense
from neuronmm.models.lowrank import LowRankLinear


class LayerPair:
    """The dense decoder layer ``dense`` and ``compressed``, a copy whose linears are replaced by low-rank modules.

    The copy has its own norms, which may be trained. It uses the weights of the dense layer until they are replaced.
    ``prefix`` is the layer's name with a dot, the prefix of its linears' names.
    """

    def __init__(self, dense: nn.Module, prefix: str) -> None:
        self.dense, self.prefix = dense, prefix
        weights = [parameter for name, parameter in dense.named_parameters() if "norm" not in name]
        self.compressed = copy.deepcopy(dense, {id(parameter): parameter for parameter in weights})
        self._reordered: set[str] = set()

    def inside(self, linear: Linear) -> str:
        """Return the name of ``linear`` inside the layer."""
        return linear.name.removeprefix(self.prefix)

    def weight(self, linear: Linear) -> Tensor:
        """Return the dense weight of ``linear``, as :func:`weight_of` does."""
        return weight_of(self.dense, linear, self.prefix)

    def replace(self, linear: Linear, A: Tensor, B: Tensor, dtype: torch.dtype) -> None:
        """Replace the parts of ``linear`` by low-rank modules, with float32 values rounded to ``dtype``.

        A [rank, in] and B [out, rank] are the factors of its weight.
        """
        leader: LowRankLinear | None = None
        row = 0
        for part, scale in linear.scaled_parts:
            name = self.inside(part)
            dense = self.compressed.get_submodule(name)
            assert isinstance(dense, nn.Linear)
            own = _rounded(B[row : row + part.out_features] / scale, dtype)
            shared = _rounded(A, dtype) if leader is None else leader.A.weight
            module = LowRankLinear.of(LowRank(shared, own, dense.bias), leader)
            leader = leader or module
            row += part.out_features
            self.compressed.set_submodule(name, module)

    @torch.no_grad()
    def pivot(self, dtype: torch.dtype) -> dict[str, float | None]:
        """Change the low-rank linears to pivoted forms, with float32 values rounded to ``dtype``, and reorder the MLP.

        Returns:
            The condition numbers of the pivots, by the full name of the linear.
        """
        modules = self._low_rank()
        names = {id(module.A): name for name, module in reversed(modules.items())}
        leaders = {name: names[id(module.A)] for name, module in modules.items()}
        shared = {name: leader for name, leader in leaders.items() if name != leader}
        layer = to_pivoted(LayerFactors({name: module.factors for name, module in modules.items()}, shared))
        pivoted: dict[str, LowRankLinear] = {}
        for name, factors in layer.low_rank.items():
            A, B = (_rounded(dense(factor, torch.float64), dtype) for factor in (factors.A, factors.B))
            leader = pivoted.get(shared.get(name, ""))
            pivoted[name] = LowRankLinear.of(factors._replace(A=A, B=B), leader)
            self.compressed.set_submodule(name, pivoted[name])
        if layer.order is not None:
            self._reorder_dense(layer.order)
        return {self.prefix + name: condition for name, condition in layer.conditions.items()}

    def forms(self) -> dict[str, dict[str, Any]]:
        """Return the entries of ``forms`` in ``quantization_config``, by the full names of the linears."""
        return forms_of({name: module.factors for name, module in self._low_rank().items()}, self.prefix)

    def _low_rank(self) -> dict[str, LowRankLinear]:
        """Return the low-rank linears by their names inside the layer."""
        return {name: one for name, one in self.compressed.named_modules() if isinstance(one, LowRankLinear)}

    def _reorder_dense(self, order: Tensor) -> None:
        """Put the intermediate dimension of the MLP's dense linears in the order of the pivoted ones."""
        for name in (GATE, UP, DOWN):
            linear = self.compressed.get_submodule(name)
            for kind, value in dict(linear.named_parameters()).items() if isinstance(linear, nn.Linear) else ():
                ordered = in_order(f"{name}.{kind}", value, order).contiguous()
                setattr(linear, kind, nn.Parameter(ordered, requires_grad=False))
        self._reordered = {f"{name}.weight" for name in (GATE, UP, DOWN)} | {f"{name}.bias" for name in (GATE, UP)}

    def tensors(self, reader: Reader) -> dict[str, Tensor]:
        """Return the compressed layer's tensors by full name, in the dtype of what they replace.

        Tensors that compression does not change are those of the checkpoint that ``reader`` reads.
        """
        names = [name for name in reader.under(self.prefix) if not name.endswith("rotary_emb.inv_freq")]
        dense = {name: reader[name] for name in names}
        tensors: dict[str, Tensor] = {}
        for name, value in self.compressed.state_dict(prefix=self.prefix).items():
            if name in dense:
                inside = name.removeprefix(self.prefix)
                changed = "norm" in name or inside in self._reordered
                tensors[name] = value.to(dense[name].dtype) if changed else dense[name]
            elif name.endswith(".pivots"):
                tensors[name] = value
            else:  # LINEAR.A.weight, LINEAR.B.weight or LINEAR.B.bias
                module, _, kind = name.rpartition(".")
                tensors[name] = value.to(dense[f"{module.rpartition('.')[0]}.{kind}"].dtype)
        return tensors

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load ``tensors`` into the compressed layer, so that later layers get inputs with their rounding."""
        for name, parameter in self.compressed.named_parameters():
            parameter.copy_(tensors[self.prefix + name])


def weight_of(layer: nn.Module, linear: Linear, prefix: str) -> Tensor:
    """Return the weight of ``linear`` [out, in] in ``layer``; the scaled weights of several parts are concatenated."""
    parts = ((part.name.removeprefix(prefix), scale) for part, scale in linear.scaled_parts)
    return torch.cat([scale * layer.get_parameter(f"{name}.weight") for name, scale in parts])


def _rounded(factor: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(factor.to(dtype).float().contiguous(), requires_grad=False)
