"""Modules whose weights have few bits, and the verb that gives a model such modules.

They compute in the dtype of their input. Their weights take no gradient, and their scales stay float32 when a module is
converted to another dtype.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from neuronmm.kernels import Fp8, Int4, Int8, quantise, quantise_int4
from neuronmm.kernels.int4_layout import int4_shape
from neuronmm.kernels.low_bits import Weight
from neuronmm.models.errors import UserError
from neuronmm.models.tensors import EMBEDDING, HEAD

WeightDtype = Literal["int8", "int4"]
"""What the dense weights of a model are rounded to."""

Module = TypeVar("Module", bound="LowBitsModule")
Linear = TypeVar("Linear", bound="LowBitsLinear")


class LowBitsModule(nn.Module):
    """A module with the matrix ``weight`` and ``weight_scale`` float32 [out]."""

    def __init__(self, matrix: Int8 | Int4 | Fp8) -> None:
        super().__init__()
        self.weight, self.weight_scale = frozen(matrix.values), frozen(matrix.scales)

    @property
    @abstractmethod
    def matrix(self) -> Int8 | Int4 | Fp8:
        """The weight in the form that the kernels take."""

    def _apply(self: Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
        scale = self.weight_scale.data
        super()._apply(fn, recurse)
        if self.weight_scale.dtype != torch.float32:
            self.weight_scale.data = scale.to(self.weight_scale.device)
        return self


class LowBitsLinear(LowBitsModule):
    """``y = W x + bias`` with a W of few bits; ``precision`` names its dtype.

    Dimensions: x [..., in_features] -> [..., out_features].
    """

    precision: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            self._zeros(out_features, in_features, torch.zeros(out_features, dtype=torch.float32, device=device))
        )
        self.in_features, self.out_features = in_features, out_features
        zeros = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self.bias = None if zeros is None else nn.Parameter(zeros)

    @staticmethod
    @abstractmethod
    def _zeros(out_features: int, in_features: int, scales: Tensor) -> Int8 | Int4 | Fp8:
        """Return a W of zeros [out, in] with these scales, on their device."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.matrix.dequantise(x.dtype), self.bias)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {self.precision}"


class Int8Linear(LowBitsLinear):
    """``W[i, j] = weight[i, j] * weight_scale[i]``; weight int8 [out, in]."""

    precision = "int8"

    @staticmethod
    def _zeros(out_features: int, in_features: int, scales: Tensor) -> Int8:
        return Int8(torch.zeros(out_features, in_features, dtype=torch.int8, device=scales.device), scales)

    @property
    def matrix(self) -> Int8:
        return Int8(self.weight, self.weight_scale)


class Int4Linear(LowBitsLinear):
    """W is a :class:`Int4`; weight uint8, its ``values``."""

    precision = "int4"

    @staticmethod
    def _zeros(out_features: int, in_features: int, scales: Tensor) -> Int4:
        shape = int4_shape(out_features, in_features)
        return Int4(torch.zeros(shape, dtype=torch.uint8, device=scales.device), scales, in_features)

    @property
    def matrix(self) -> Int4:
        return Int4(self.weight, self.weight_scale, self.in_features)


class Int8Embedding(LowBitsModule):
    """A table of int8 rows, each with a scale.

    Dimensions: ids [...] -> [..., width] in ``dtype``, which follows conversions; weight int8 [vocabulary, width].
    """

    def __init__(self, matrix: Int8, dtype: torch.dtype) -> None:
        super().__init__(matrix)
        self.dtype = dtype

    @property
    def matrix(self) -> Int8:
        return Int8(self.weight, self.weight_scale)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.weight[ids] * self.weight_scale[ids][..., None]).to(self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Embedding:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)


def matrix_of(module: Any) -> Weight:
    """Return the weight of a linear or an embedding in the form that the kernels take."""
    return module.matrix if isinstance(module, LowBitsModule) else module.weight


def weight_dtype_of(model: Any) -> WeightDtype | None:
    """Return what the dense weights of a transformers model are rounded to; None if they are floats."""
    if not isinstance(model.get_input_embeddings(), LowBitsModule):
        return None
    return "int4" if any(isinstance(module, Int4Linear) for module in model.modules()) else "int8"


def check_rounding(dtype: str, stored: str) -> None:
    """Check that the weights of a checkpoint, which has them in ``stored``, can be rounded to ``dtype``.

    Raises:
        UserError: there is no such dtype, or the weights have few bits already.
    """
    if dtype not in get_args(WeightDtype):
        raise UserError(f"unknown weight dtype {dtype!r}; there are: {', '.join(get_args(WeightDtype))}")
    if stored != "model":
        raise UserError("the weights of this model have few bits already; round those of the dense model instead")


def quantise_weights(model: Any, dtype: WeightDtype) -> None:
    """Round the dense weights of a transformers model to ``dtype``, in place.

    Embedding and head become int8 even if ``dtype`` is int4: they lose more than all other linears together
    (docs/results/low_bits.md). A tied head stays tied. Factors keep the precision that they are stored in: only
    ``compress --factor-dtype`` fits the factors of a linear to each other's rounding.

    Raises:
        UserError: there is no such dtype, or the weights have few bits already.
    """
    check_rounding(dtype, weight_dtype_of(model) or "model")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    _replace_weights(model, dtype, lambda weight, rounded: rounded(weight), tied)


def shape_weights(model: Any, dtype: WeightDtype) -> None:
    """Give an empty transformers model the modules that :func:`quantise_weights` gives it, with zeros as their values.

    A head that config.json ties shares both tensors with the embedding.
    """

    def zeros(weight: Tensor, rounded: Callable[[Tensor], Int8 | Int4]) -> Int8 | Int4:
        shapes = rounded(weight.to("meta"))
        values, scales = (torch.zeros_like(tensor, device=weight.device) for tensor in shapes[:2])
        return shapes._replace(values=values, scales=scales)

    tied = bool(model.config.tie_word_embeddings)
    _replace_weights(model, dtype, zeros, tied)
    if tied and hasattr(model, "all_tied_weights_keys"):  # transformers 5 ties by name; the bridge does it for 4.x
        model.all_tied_weights_keys[f"{HEAD}_scale"] = f"{EMBEDDING}_scale"


def tie_head(model: Any) -> None:
    """Let a tied head of few bits use both tensors of the embedding."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(table, Int8Embedding) and model.config.tie_word_embeddings:
        head.weight, head.weight_scale = table.weight, table.weight_scale


def _replace_weights(
    model: Any,
    dtype: WeightDtype,
    low_bits_of: Callable[[Tensor, Callable[[Tensor], Int8 | Int4]], Any],
    tied: bool,
) -> None:
    """Replace the dense linears, the embedding and the head; ``low_bits_of(weight, rounding)`` gives their matrices."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head and not name.endswith((".A", ".B")):
            if dtype == "int4":
                low: Int8Linear | Int4Linear = _with(Int4Linear, module, low_bits_of(module.weight, quantise_int4))
            else:
                low = _with(Int8Linear, module, low_bits_of(module.weight, quantise))
            model.set_submodule(name, low)
    rounded = Int8Embedding(low_bits_of(table.weight, quantise), table.weight.dtype)
    model.set_input_embeddings(rounded)
    matrix = rounded.matrix if tied else low_bits_of(head.weight, quantise)
    model.set_output_embeddings(_with(Int8Linear, head, matrix))


def _with(kind: type[Linear], module: nn.Linear, matrix: Int8 | Int4) -> Linear:
    """Return ``module`` with the weight ``matrix``, as a ``kind``."""
    low = kind(module.in_features, module.out_features, False, torch.device("meta"))
    low.weight, low.weight_scale, low.bias = frozen(matrix.values), frozen(matrix.scales), module.bias
    return low


def frozen(tensor: Any) -> nn.Parameter:
    """Return a parameter as it is, and a tensor as a parameter without gradient."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
