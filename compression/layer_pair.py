"""A decoder layer twice: dense, and compressed with low-rank modules in place of some linears."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from neuronmm.compression.factorize import Factors
from neuronmm.compression.ranks import Linear
from neuronmm.compression.reader import Reader
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

    def inside(self, linear: Linear) -> str:
        """Return the name of ``linear`` inside the layer."""
        return linear.name.removeprefix(self.prefix)

    def weight(self, linear: Linear) -> Tensor:
        """Return the dense weight of ``linear``, as :func:`weight_of` does."""
        return weight_of(self.dense, linear, self.prefix)

    def replace(self, linear: Linear, factors: Factors, dtype: torch.dtype) -> None:
        """Replace the parts of ``linear`` by low-rank modules, with float32 values rounded to ``dtype``."""
        leader: LowRankLinear | None = None
        row = 0
        for part, scale in linear.scaled_parts:
            name = self.inside(part)
            dense = self.compressed.get_submodule(name)
            assert isinstance(dense, nn.Linear)
            module = LowRankLinear(
                part.in_features,
                part.out_features,
                factors.rank,
                dense.bias is not None,
                device=torch.device("meta"),
                leader=leader,
            )
            if leader is None:
                module.A.weight = _parameter(factors.A, dtype)
                leader = module
            module.B.weight = _parameter(factors.B[row : row + part.out_features] / scale, dtype)
            module.B.bias = dense.bias
            row += part.out_features
            self.compressed.set_submodule(name, module)

    def tensors(self, reader: Reader) -> dict[str, Tensor]:
        """Return the compressed layer's tensors by full name, in the dtype of what they replace.

        Tensors that compression does not change are those of the checkpoint that ``reader`` reads.
        """
        names = [name for name in reader.under(self.prefix) if not name.endswith("rotary_emb.inv_freq")]
        dense = {name: reader[name] for name in names}
        tensors: dict[str, Tensor] = {}
        for name, value in self.compressed.state_dict(prefix=self.prefix).items():
            if name in dense:
                tensors[name] = value.to(dense[name].dtype) if "norm" in name else dense[name]
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


def _parameter(factor: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(factor.to(dtype).float(), requires_grad=False)
