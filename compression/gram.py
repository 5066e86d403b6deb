"""Gram matrices of the inputs of one decoder layer's linears, gathered while the layer runs over calibration text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

INPUT_OF = {
    "self_attn.k_proj": "self_attn.q_proj",
    "self_attn.v_proj": "self_attn.q_proj",
    "mlp.up_proj": "mlp.gate_proj",
}
"""Linears that read the same input as an earlier one share its Gram matrix."""


def leader(linear: str) -> str:
    """The linear under whose name the Gram matrix of ``linear``'s input is kept."""
    return INPUT_OF.get(linear, linear)


@contextmanager
def gathering(layer: nn.Module, linears: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Accumulate ``G = sum x x^T`` [in, in] of every named linear's input over the forward passes in this block.

    Products and sums are float32 with autocast off: under bf16 autocast a Gram matrix can lose so much that it has
    large negative eigenvalues.
    """
    grams: dict[str, Tensor] = {}
    hooks = []
    for name in dict.fromkeys(leader(linear) for linear in linears):
        linear = layer.get_submodule(name)

        def add(module: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
            x = inputs[0].detach().flatten(0, -2).float()
            if name not in grams:
                grams[name] = torch.zeros(x.shape[1], x.shape[1])
            with torch.autocast(x.device.type, enabled=False):
                grams[name].addmm_(x.T, x)

        hooks.append(linear.register_forward_pre_hook(add))
    try:
        yield grams
    finally:
        for hook in hooks:
            hook.remove()
