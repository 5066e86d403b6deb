"""How much of the residual stream each half of a decoder layer writes, for the tokens that run through it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

BETWEEN = "post_attention_layernorm"
"""It reads the residual stream between attention and MLP, in every family."""

ATTENTION, MLP = "self_attn", "mlp"


@contextmanager
def weighing(layer: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Weigh the halves of ``layer`` over the forward passes in this block.

    The dictionary has, when the block is left, for :data:`ATTENTION` and :data:`MLP` the median over the tokens of
    ``|what the half writes|^2 / |the stream after the layer|^2`` [], float64. Not the mean: where a layer writes a
    massive activation, that is all of a few tokens' stream.
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
