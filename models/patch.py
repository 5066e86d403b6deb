"""The two verbs on a model: ``patch`` gives it the shape of a compressed checkpoint, ``fuse`` makes it fast."""

from __future__ import annotations

import torch
from torch import nn

from neuronmm.kernels.plain import stack
from neuronmm.models.errors import UserError
from neuronmm.models.families import TARGETS
from neuronmm.models.lowrank import LowRankLinear, LowRankSwiGLU
from neuronmm.models.spec import CompressionSpec

_MLP = tuple(name.removeprefix("mlp.") for name in TARGETS["mlp"])


def patch(model: nn.Module, spec: CompressionSpec) -> nn.Module:
    """Swap every linear that ``spec.ranks`` names for a :class:`LowRankLinear`, in place.

    The factors are left uninitialised (on the linear's device, in its dtype): the checkpoint fills them. An MLP whose
    three linears are all low-rank becomes one :class:`LowRankSwiGLU`; parameter names do not change.

    Raises:
        UserError: a name is no linear of this model, or a rank does not fit its shape.
    """
    for name, rank in spec.ranks.items():
        parent_name, _, child = name.rpartition(".")
        try:
            parent = model.get_submodule(parent_name)
            linear = getattr(parent, child)
        except AttributeError:
            raise UserError(f"the compressed linear {name!r} is not in this model; config.json is wrong") from None
        if not isinstance(linear, nn.Linear) or not 0 < rank <= min(linear.in_features, linear.out_features):
            raise UserError(f"{name!r} ({linear}) cannot have rank {rank}; config.json is wrong")
        where = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        sizes = (linear.in_features, linear.out_features, rank, linear.bias is not None)
        setattr(parent, child, LowRankLinear(*sizes, **where))
    for name, module in list(model.named_modules()):
        parts = [getattr(module, part, None) for part in _MLP]
        if all(isinstance(part, LowRankLinear) for part in parts):
            parent_name, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent_name), child, LowRankSwiGLU(*parts).train(module.training))
    return model


def fuse(model: nn.Module, impl: str = "auto") -> nn.Module:
    """Make every low-rank module of ``model`` call the kernel ``impl``, in place, for inference only.

    The A factors of gate and up are laid out back to back (no second copy stays), which lets a kernel read them as
    one matrix. Hooks and adapters on the inner linears are bypassed: merge adapters first.
    """
    for module in model.modules():
        if isinstance(module, LowRankSwiGLU):
            gate, up = module.gate_proj.A, module.up_proj.A
            with torch.no_grad():
                gate.weight.data, up.weight.data = stack(gate.weight, up.weight)
        if isinstance(module, (LowRankLinear, LowRankSwiGLU)):
            module.impl = impl
    return model
