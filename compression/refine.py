"""Block refinement: train the factors and norms of one decoder layer to reproduce the dense layer's outputs.

The inputs are the outputs of the compressed layers before it, the targets those of the dense model, so that the layer
also corrects the errors of earlier layers (AA-SVD, arXiv 2604.02119). Ranks, bytes and format do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.streaming import Streams, batches, run_layer
from neuronmm.compression.training import Course, Objective, train
from neuronmm.kernels.widened_linears import multiplies_bf16
from neuronmm.models import processes
from neuronmm.models.lowrank import LowRankLinear

_EPOCHS = {"fast": 3, "full": 8}

_LEARNING_RATE = 0.015
"""A parameter's peak rate is this number times its root mean square times the root of the initial held-out loss.

AdamW moves each weight by about its rate in each step, so the rate has to follow the size of the weights (Adafactor,
arXiv 1804.04235): norms and factors of one model differ by a factor of 100, factors of two models by ten. What a step
adds to the relative error of the block's output is of the order of its relative size; that error is the root of the
loss, and where it is small, steps have to be small. A parameter of zeros stays as it is.
"""

STEP_TOKENS = 512
"""Calibration tokens per step. The number of steps limits a fast course more than the number of tokens."""


def course_of(config: CompressionConfig) -> Course:
    """Return the schedule of the refinement that ``config`` asks for."""
    return Course(_EPOCHS[config.refine], _LEARNING_RATE, 0.05, (0.9, 0.95))


@torch.enable_grad()
def refine(
    layer: nn.Module,
    streams: Streams,
    targets: Tensor,
    course: Course,
    seed: int,
    dtype: torch.dtype,
    advance: Callable[[float], None],
) -> dict[str, Any]:
    """Train ``layer`` in place and keep the state with the best held-out loss, the untrained state included.

    The loss is the mean over tokens of ``|y' - y|^2 / |y|^2``, because the next layer's norm scales all tokens to one
    size, massive ones too. Matmuls run in bf16 if the device supports it natively; weights and sums are float32. On a
    CPU the same arguments give the same result on the same machine. Of several processes each runs the rows that it
    has, and all take the same steps.

    Args:
        layer: a compressed decoder layer, float32.
        streams: the layer's inputs, float32; :func:`split_rows` defines the held-out rows.
        targets: the dense layer's outputs for the dense model's inputs [rows, length, hidden].
        course: the training schedule.
        seed: the seed of the shuffling of the rows.
        dtype: the dtype in which the best state is kept: the checkpoint's, or float32 if the form changes afterwards.
        advance: called with each further fraction that is done; the fractions add up to 1.

    Returns:
        Plain values for the report: the held-out loss before and after, and the number of epochs.

    Raises:
        ValueError: the loss is not a finite number.
    """
    inputs, rotary = streams.compressed, streams.rotary
    trained = list(_trained(layer))
    for parameter in trained:
        parameter.requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    here, count = processes.rank(), processes.size()
    training, held_out = split_rows(int(processes.total(len(inputs))))
    rows_per_step = max(1, STEP_TOKENS // inputs.shape[1])
    in_bf16 = multiplies_bf16(inputs.device)

    def loss_of(rows: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=in_bf16):
            outputs = run_layer(layer, inputs[rows], rotary).float()
        dense = targets[rows]
        return ((outputs - dense).square().sum(-1) / dense.square().sum(-1).clamp(min=1e-12)).mean()

    def of_this_process(rows: Tensor) -> Tensor:
        return rows[rows % count == here] // count

    @torch.no_grad()
    def validate() -> float:
        parts = of_this_process(held_out).split(len(batches(inputs)[0]))
        return processes.total(sum(float(loss_of(rows)) * len(rows) for rows in parts if len(rows))) / len(held_out)

    def keep(parameter: Tensor) -> Tensor:
        return parameter.to(dtype if parameter.dim() == 2 else parameter.dtype, copy=True)

    def backward(rows: Tensor) -> None:
        mine = of_this_process(rows)
        if len(mine):
            (loss_of(mine) * (len(mine) / len(rows))).backward()

    initial = validate()
    error = min(1.0, math.sqrt(initial))
    scales = [error * float(parameter.detach().square().mean().sqrt()) for parameter in trained]
    objective = Objective(trained, training, backward, validate, scales, initial)
    losses = train(objective, course, rows_per_step, generator, advance, keep=keep).losses
    for parameter in trained:
        parameter.requires_grad_(False)
    return {"loss_before": losses[0], "loss_after": min(losses), "epochs": len(losses) - 1}


def split_rows(count: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the training rows and of the held-out rows: the last eighth, at least one.

    All stages of a run hold out the same rows, because rows that one stage was trained on cannot measure the gain of
    the next. A single row is both.
    """
    rows, held_out = torch.arange(count), math.ceil(count / 8)
    return rows[:-held_out] if count > held_out else rows, rows[-held_out:]


def _trained(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the factors and norms; biases and dense linears are not trained."""
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            yield parameter
    for module in layer.modules():
        if isinstance(module, LowRankLinear):
            yield from (factor.get_parameter("weight") for factor in module.children())
