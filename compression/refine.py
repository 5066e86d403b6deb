"""Block refinement: the factors and norms of one decoder layer, trained until its outputs are the dense layer's.

The layer reads what the compressed layers before it wrote and aims at what the dense model has there, so that it makes
good their errors as well as its own (AA-SVD, arXiv 2604.02119). Ranks, bytes and format stay as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm.compression.block import Rotary, batches
from neuronmm.compression.streaming import run_layer
from neuronmm.compression.training import Course, train
from neuronmm.kernels.widened_linears import multiplies_bf16
from neuronmm.models.lowrank import LowRankLinear

COURSES = {"fast": Course(3, 1e-3, 0.05, (0.9, 0.95)), "full": Course(8, 1e-3, 0.05, (0.9, 0.95))}

STEP_TOKENS = 512
"""Calibration tokens a step. A fast course is short of steps rather than of tokens."""


@torch.enable_grad()
def refine(
    layer: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    rotary: Rotary,
    course: Course,
    seed: int,
    dtype: torch.dtype,
    advance: Callable[[float], None],
) -> dict[str, Any]:
    """Train ``layer`` in place; keep the state of the best held-out loss, the untrained one included.

    The loss is the mean over tokens of ``|y' - y|^2 / |y|^2``: the next layer's norm makes all tokens equally large,
    the few massive ones too. Products in bf16 where the device multiplies it natively, weights and sums in float32. The
    same arguments give the same result on the same machine.

    Args:
        layer: a compressed decoder layer, float32.
        inputs: what it reads [rows, length, hidden], float32; the rows that :func:`split_rows` says are held out.
        targets: what the dense layer makes of the dense model's inputs, of that shape.
        rotary: RoPE's cos and sin.
        course: how long and how fast.
        seed: of the order of the rows.
        dtype: what the factors will be written in; the best state is kept in it.
        advance: called with the further share that is done; the shares add up to 1.

    Returns:
        Plain values for the report: the held-out loss before and after, and the passes made.

    Raises:
        ValueError: the loss is not a number.
    """
    trained = list(_trained(layer))
    for parameter in trained:
        parameter.requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    training, held_out = split_rows(len(inputs))
    a_step = max(1, STEP_TOKENS // inputs.shape[1])

    in_bf16 = multiplies_bf16(inputs.device)

    def loss_of(rows: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=in_bf16):
            outputs = run_layer(layer, inputs[rows], rotary).float()
        wanted = targets[rows]
        return ((outputs - wanted).square().sum(-1) / wanted.square().sum(-1).clamp(min=1e-12)).mean()

    @torch.no_grad()
    def validate() -> float:
        together = len(batches(inputs)[0])
        return sum(float(loss_of(rows)) * len(rows) for rows in held_out.split(together)) / len(held_out)

    def keep(parameter: Tensor) -> Tensor:
        return parameter.to(dtype if parameter.dim() == 2 else parameter.dtype, copy=True)

    def backward(rows: Tensor) -> None:
        loss_of(rows).backward()

    losses = train(trained, course, training, a_step, generator, backward, validate, advance, keep=keep).losses
    for parameter in trained:
        parameter.requires_grad_(False)
    return {"loss_before": losses[0], "loss_after": min(losses), "epochs": len(losses) - 1}


def split_rows(count: int) -> tuple[Tensor, Tensor]:
    """The numbers of the calibration rows that are trained on, and of those held out: the last eighth, at least one.

    All training of a run holds out the same rows: what one stage has trained on says nothing about the next one's gain.
    A single row is both.
    """
    rows, held_out = torch.arange(count), math.ceil(count / 8)
    return rows[:-held_out] if count > held_out else rows, rows[-held_out:]


def _trained(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Factors and norms; biases and the linears that stayed dense are left alone."""
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            yield parameter
    for module in layer.modules():
        if isinstance(module, LowRankLinear):
            yield from (factor.get_parameter("weight") for factor in module.children())
