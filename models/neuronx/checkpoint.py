"""Read a checkpoint folder tensor by tensor: which linears are factorised, and the weights that the caller asks for."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from neuronmm.kernels import Form
from neuronmm.kernels.factors import expand_a, expand_b
from neuronmm.kernels.fp8 import Fp8
from neuronmm.kernels.low_bits import Int8
from neuronmm.models.contents import inspect
from neuronmm.models.errors import UserError
from neuronmm.models.families import LAYERS
from neuronmm.models.neuronx.architecture import Architecture
from neuronmm.models.spec import PivotedForm, bias_name
from neuronmm.models.tensors import EMBEDDING, HEAD, NORM, check_finite, check_pivots


class Checkpoint:
    """A dense or compressed checkpoint. The constructor reads only config.json and the headers of the shards.

    ``ranks``: the rank of each factorised linear by name. ``shared``: linear -> the linear whose A it uses. ``forms``:
    the linears that are not stored as two factors.

    Raises:
        UserError: a shard is corrupt or missing, config.json disagrees with the weights, or the Neuron hosts cannot
            run the model.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        content = inspect(folder)
        low = None if content.spec is None else content.spec.few_bits
        if low is not None:
            raise UserError(f"{folder}: {low}, which the Neuron hosts cannot run; compress the dense model without")
        self.folder, self.dtype = folder, dtype
        self.architecture = Architecture.of(content.settings, str(folder / "config.json"))
        self.ranks: dict[str, int] = dict(content.spec.ranks) if content.spec else {}
        self.shared: dict[str, str] = dict(content.spec.shared) if content.spec else {}
        self.forms: dict[str, PivotedForm] = dict(content.spec.forms) if content.spec else {}
        self._spec, self._files = content.spec, content.files

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of that name."""
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        """Read one tensor in the dtype of the build; factors of few bits are dequantised and rounded once to that.

        Raises:
            UserError: the checkpoint has no such tensor, or the tensor contains NaN or infinity.
        """
        if name not in self._files:
            raise UserError(f"{self.folder}: config.json and weights disagree: {name} is in no shard")
        tensor = self._read(name)
        if tensor.dtype in (torch.int8, torch.float8_e4m3fn):
            scales = self._read(f"{name}_scale").float()
            low = Int8(tensor, scales) if tensor.dtype is torch.int8 else Fp8(tensor, scales)
            return low.dequantise(self.dtype)
        return tensor.to(self.dtype)

    def factor(self, linear: str, factor: str) -> Tensor:
        """Read ``factor`` A [r, in] or B [out, r] of a factorised linear, with the rows or columns of its pivots.

        Raises:
            UserError: as :meth:`tensor`, or the pivots are invalid.
        """
        stored, form = self.tensor(f"{linear}.{factor}.weight"), self._form(linear)
        if factor == "A":
            return expand_a(stored, form)
        pivots: int | Tensor | None = self.forms[linear].first if form is Form.ROWS else None
        if form is Form.ROWS and pivots is None:
            name = f"{linear}.pivots"
            pivots = self._read(name)
            check_pivots(name, pivots, self.ranks[linear] + len(stored), self.folder)
        return expand_b(stored, form, pivots)

    def weight(self, linear: str) -> Tensor:
        """Read the weight [out, in] of a linear; that of a factorised one is multiplied out in float32.

        Raises:
            UserError: as :meth:`factor`.
        """
        if linear not in self.ranks:
            return self.tensor(f"{linear}.weight")
        A, B = self.factor(self.shared.get(linear, linear), "A"), self.factor(linear, "B")
        return (B.float() @ A.float()).to(self.dtype)

    def bias(self, linear: str) -> str:
        """Return the name that the bias of a linear has if it has one."""
        return bias_name(linear, self._form(linear)) if linear in self.ranks else f"{linear}.bias"

    def _form(self, linear: str) -> Form:
        return self._spec.form_of(linear) if self._spec else Form.TWO

    def _read(self, name: str) -> Tensor:
        """Read one tensor as it is stored, and check that its numbers are finite."""
        with safe_open(self._files[name], framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        check_finite(name, tensor, self.folder)
        return tensor

    def embedding(self) -> Tensor:
        """Read the token embedding. Dimensions: [vocabulary, hidden]."""
        return self.tensor(EMBEDDING)

    def final_norm(self) -> Tensor:
        """Read the weight of the final norm. Dimensions: [hidden]."""
        return self.tensor(NORM)

    def output(self) -> Tensor:
        """Read the language model head, or the embedding if the two are tied. Dimensions: [vocabulary, hidden]."""
        return self.tensor(HEAD if self.has(HEAD) else EMBEDDING)


def layer_name(index: int, part: str) -> str:
    """Return the full name of a part of a decoder layer."""
    return f"{LAYERS}.{index}.{part}"
