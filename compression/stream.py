"""Measure how much of the residual stream the attention and the MLP of a decoder layer write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

BETWEEN = "post_attention_layernorm"
"""The norm that reads the residual stream between attention and MLP, in every family."""

ATTENTION, MLP = "self_attn", "mlp"


@contextmanager
def weighing(layer: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Measure the contributions of attention and MLP over the forward passes in the ``with`` block.

    After the block, the dictionary holds for :data:`ATTENTION` and :data:`MLP` the median over the tokens of
    ``|contribution|^2 / |stream after the layer|^2`` [], float64. It is not the mean, because a massive activation
    makes up nearly all of a few tokens' stream.
    """
    shares: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {ATTENTION: [], MLP: []}
    between: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        between.append(inputs[0])

    def weigh(_: nn.Module, inputs: tuple[Tensor, ...], outputs: Any) -> None:
        middle, after = between.pop(), outputs[0] if isinstance(outputs, tuple) else outputs
        whole = after.double().square().sum(-1).clamp(min=1e-300)
        for half, written in ((ATTENTION, middle - inputs[0]), (MLP, after - middle)):
            parts[half].append((written.double().square().sum(-1) / whole).flatten())

    hooks = [
        layer.get_submodule(BETWEEN).register_forward_pre_hook(keep),
        layer.register_forward_hook(weigh),
    ]
    try:
        yield shares
    finally:
        for hook in hooks:
            hook.remove()
        shares |= {half: torch.cat(found).median() for half, found in parts.items() if found}
