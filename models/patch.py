"""Two verbs on a model: ``patch`` gives it the shape of a compressed checkpoint, ``fuse`` selects the fast kernels."""

from __future__ import annotations

import torch
from torch import nn

from neuronmm.kernels import Form
from neuronmm.kernels.plain import stack
from neuronmm.models.errors import UserError
from neuronmm.models.families import TARGETS
from neuronmm.models.fp8 import Fp8Linear
from neuronmm.models.low_bits import Int4Linear, Int8Linear, LowBitsModule, shape_weights
from neuronmm.models.lowrank import FactorKind, LowRankLinear, LowRankSwiGLU
from neuronmm.models.spec import CompressionSpec

_KINDS: dict[str, FactorKind] = {"model": nn.Linear, "int8": Int8Linear, "int4": Int4Linear, "fp8": Fp8Linear}
_MLP = tuple(name.removeprefix("mlp.") for name in TARGETS["mlp"])


def patch(model: nn.Module, spec: CompressionSpec) -> nn.Module:
    """Replace every linear in ``spec.ranks`` by a :class:`LowRankLinear`, in place.

    The factors have the linear's device and dtype but no meaningful values; the checkpoint fills them. A SwiGLU MLP
    whose three linears are all low-rank becomes one :class:`LowRankSwiGLU`; parameter names do not change. A linear in
    ``spec.shared`` uses the A of its leader. ``spec.factors`` selects the class of the factors, ``spec.weights``
    that of all other linears, of the embedding and of the head.

    Raises:
        UserError: a name is not a linear of this model, or a rank or a leader does not fit; the model is unchanged.

    Examples:
        >>> import neuronmm
        >>> from transformers import AutoModelForCausalLM
        >>> low = AutoModelForCausalLM.from_pretrained("llama-low")
        >>> model = AutoModelForCausalLM.from_pretrained("llama")
        >>> model = neuronmm.patch(model, low.config.quantization_config.spec)
        >>> model.load_state_dict(low.state_dict())
        <All keys matched successfully>
    """
    sharing = {*spec.shared, *spec.shared.values()}
    linears = {
        name: _linear(model, name, rank, name in sharing and name not in spec.forms)
        for name, rank in spec.ranks.items()
    }
    for name, leader in spec.shared.items():
        if linears[name].in_features != linears[leader].in_features:
            widths = f"{linears[name].in_features} and {linears[leader].in_features}"
            raise UserError(f"{name!r} cannot use the A of {leader!r}: their inputs have {widths} features")
    for name in spec.forms:
        spec.check_first_pivot(name, linears[name].out_features)
    low_rank: dict[str, LowRankLinear] = {}
    for name in sorted(linears, key=lambda name: name in spec.shared):  # leaders first
        linear, entry = linears[name], spec.forms.get(name)
        low_rank[name] = LowRankLinear(
            linear.in_features,
            linear.out_features,
            spec.ranks[name],
            linear.bias is not None,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
            leader=low_rank[spec.shared[name]] if name in spec.shared else None,
            kind=_KINDS[spec.factors],
            form=spec.form_of(name),
            first_pivot=None if entry is None else entry.first,
        )
        model.set_submodule(name, low_rank[name].train(linear.training))
    if spec.weights != "model":
        shape_weights(model, spec.weights)
    if getattr(getattr(model, "config", None), "hidden_act", "silu") != "silu":
        return model  # other activations: the MLP keeps its module around the low-rank linears
    for name, module in list(model.named_modules()):
        parts = [
            linear for linear in (getattr(module, part, None) for part in _MLP) if isinstance(linear, LowRankLinear)
        ]
        if len(parts) == len(_MLP) and not isinstance(module, LowRankSwiGLU):
            model.set_submodule(name, LowRankSwiGLU(*parts).train(module.training))
    return model


def _linear(model: nn.Module, name: str, rank: int, sharing: bool) -> nn.Linear:
    """Return the dense linear ``name`` after a check of ``rank``. A shared A may have more rows than the linear."""
    try:
        linear = model.get_submodule(name)
    except AttributeError:
        kind = type(model).__name__
        raise UserError(
            f"the compressed linear {name!r} is not in this {kind}; load the model as AutoModelForCausalLM, "
            "or correct config.json"
        ) from None
    if not isinstance(linear, nn.Linear):
        raise UserError(f"{name!r} is a {type(linear).__name__}, not a dense linear; config.json is wrong")
    if not 0 < rank <= (linear.in_features if sharing else min(linear.in_features, linear.out_features)):
        shape = f"{linear.in_features} -> {linear.out_features}"
        raise UserError(f"{name!r} ({shape}) cannot have rank {rank}; config.json is wrong")
    return linear


def fuse(model: nn.Module, impl: str = "auto") -> nn.Module:
    """Make every low-rank module of ``model`` call the kernel ``impl``, in place, for inference only.

    Separate A factors of gate and up are moved next to each other in memory unless they have few bits (no second copy
    remains), so that a kernel can read them as one matrix. The kernels read the weights directly and bypass hooks and
    adapters on the inner linears.

    Raises:
        UserError: a factor has an adapter or offloaded weights; the model is unchanged.

    Examples:
        >>> import neuronmm
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("llama-low").eval()
        >>> neuronmm.fuse(model).model.layers[0].mlp.impl
        'auto'
    """
    for name, module in model.named_modules():
        if isinstance(module, LowRankLinear):
            for factor in (module.A, module.B):
                if type(factor) not in _KINDS.values():
                    raise UserError(f"{name} carries an adapter, which fusing would bypass; merge it first")
                if factor.weight.is_meta:
                    raise UserError(f"{name} has no weights in memory (offloaded?); fuse a fully loaded model")
    for module in model.modules():
        if isinstance(module, LowRankSwiGLU):
            gate, up = module.gate_proj.A, module.up_proj.A
            unequal = Form.COLUMNS in (module.gate_proj.form, module.up_proj.form)  # their A have other widths
            if gate is not up and not unequal and not any(isinstance(factor, LowBitsModule) for factor in (gate, up)):
                with torch.no_grad():
                    gate.weight.data, up.weight.data = stack(gate.weight, up.weight)
        if isinstance(module, (LowRankLinear, LowRankSwiGLU)):
            module.impl = impl
    return model
