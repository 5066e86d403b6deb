"""Train the factors of a finished low-rank checkpoint end to end, with LoRA or directly, and write them back.

LoRA adapters (peft) are added to the ``A`` and ``B`` linears, trained and merged: ``A <- A + Q_a P_a`` and
``B <- B + Q_b P_b`` keep rank, bytes and format. SVD-LLM (arXiv 2403.07378) trains the adapters of ``B`` first and then
those of ``A``, so that the gradient of one factor does not depend on simultaneous changes of the other. With ``rank`` 0
the factors themselves are trained, without adapters.

The loss is that of :mod:`neuronmm.compression.distillation`: the KL divergence from the dense model's next-token
distributions.

The factors of a bf16 checkpoint are bf16 values. Training changes most of them by less than half a bf16 step, so that
rounding to nearest would undo the change. Stochastic rounding keeps it on average.

Unlike the rest of the compression this needs the whole model in memory: 4 bytes per parameter, 16 bytes per trained
parameter, and what :func:`neuronmm.compression.distillation.working_memory` counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from neuronmm.compression.distillation import Lesson, dense_states, evaluate, loss_sum
from neuronmm.compression.memory import peak_rss
from neuronmm.compression.reader import Reader
from neuronmm.compression.refine import split_rows
from neuronmm.compression.tensor_files import replace_tensors
from neuronmm.compression.training import Course, Objective, train
from neuronmm.models import processes
from neuronmm.models.errors import UserError
from neuronmm.models.load import load_pretrained
from neuronmm.models.lowrank import FACTORS
from neuronmm.models.progress import Progress


class Recovery(BaseModel):
    """The settings of a recovery. The defaults are SVD-LLM's, except for ``batch``.

    ``rank`` is LoRA's; 0 trains the factors themselves. ``two_stage`` trains B first and then A, each for ``epochs``
    epochs, instead of both together. ``batch`` is rows per step. ``autocast`` runs matmuls in bf16, with weights and
    sums in float32.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(8, ge=0)
    alpha: int = Field(16, gt=0)
    two_stage: bool = True
    learning_rate: float = Field(1e-4, gt=0)
    epochs: int = Field(3, ge=1)
    batch: int = Field(8, ge=1)
    autocast: bool = False
    seed: int = 0


def train_factors(
    folder: Path,
    rows: Tensor,
    settings: Recovery,
    progress: Progress,
    *,
    dense: Path,
    device: str = "cpu",
    work: Path | None = None,
) -> dict[str, Any]:
    """Train the factors of the checkpoint in ``folder`` on ``rows`` [rows, length] and write them back.

    The weights on disk change only at the end, and only if the held-out loss has fallen. An interruption, or training
    that does not help, leaves the checkpoint as it was. Each shard is replaced atomically. On a CPU the same
    arguments give the same bytes on the same machine, interrupted or not. Several processes share the rows of each
    step, with the whole model in each, and take the same steps; the first one writes.

    Args:
        folder: a complete compressed checkpoint; only its factors are replaced.
        rows: token ids; :func:`neuronmm.compression.refine.split_rows` defines the held-out rows.
        settings: the settings of the training.
        progress: called whenever a fraction of a stage is done.
        dense: the dense checkpoint to distil from.
        device: where to train.
        work: a folder for the state of each stage after each epoch. If it holds a state of the same arguments, training
            continues from there. The caller removes the files.

    Returns:
        Plain values for the report: held-out losses (nats per token) of the factors on disk, before and after.

    Raises:
        UserError: fewer than two rows, rows of fewer than two tokens, or a loss that is not a number.
    """
    began = time.perf_counter()
    if len(rows) < 2 or rows.shape[1] < 2:
        raise UserError(f"recovery needs two or more rows of two or more tokens, not {tuple(rows.shape)}")
    generator = torch.Generator().manual_seed(settings.seed)
    training_rows, held_out_rows = split_rows(len(rows))
    states = dense_states(dense, rows, device, progress)
    training, held_out = (Lesson(rows, states).pick(part) for part in (training_rows, held_out_rows))
    del states  # both have copies

    model = load_pretrained(folder, torch.float32, device).requires_grad_(False)
    before = evaluate(model, held_out)
    if not math.isfinite(before):
        raise UserError(f"{folder}: the held-out loss is {before}; the checkpoint is damaged")
    stages = ("B", "A") if settings.two_stage else ("AB",)
    reports = []
    with torch.random.fork_rng(devices=[]), recomputed_layers(model):
        torch.manual_seed(settings.seed)  # for the initial values of the adapters
        initial: float | None = before
        for stage in stages:
            file = None if work is None else work / f"recovery-{stage}.safetensors"
            advance = _advance(progress, "recovering", len(stages))
            lessons = training, held_out
            reports.append(_train_stage(model, stage, lessons, settings, generator, advance, file, initial))
            initial = None  # merging the adapters rounds
    factors = _round_factors(model, folder, settings.seed)
    after = evaluate(model, held_out)
    improved = after < before
    if improved and processes.rank() == 0:
        replace_tensors(folder, factors)
    resumed = sum(stage["resumed_seconds"] for stage in reports)
    return {
        "kind": "measured",
        **settings.model_dump(),
        "objective": "distillation",
        "rows": {"trained": len(training), "held_out": len(held_out), "length": rows.shape[1]},
        "loss_before": before,
        "loss_after": after if improved else before,
        "kept": improved,
        "stages": reports,
        "seconds": resumed + time.perf_counter() - began,
        "resumed_seconds": resumed,
        "peak_rss_bytes": peak_rss(),
    }


@contextmanager
def recomputed_layers(model: Any) -> Iterator[None]:
    """Compute each layer's activations again in the pass backwards, instead of keeping them, during the ``with`` block.

    The gradients are the same, and a step takes longer by one pass forwards at most. Otherwise the activations of 1024
    tokens take nearly as much memory as the weights in float32. The switch of transformers for this works in train mode
    only.
    """
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer in model.model.layers:
            del layer.forward


def _train_stage(
    model: Any,
    stage: str,
    lessons: tuple[Lesson, Lesson],
    settings: Recovery,
    generator: torch.Generator,
    advance: Callable[[float], None],
    file: Path | None,
    initial: float | None,
) -> dict[str, Any]:
    """Train the factors named by the letters of ``stage``, merge the best state, and return facts for the report.

    ``lessons`` are the training rows and the held-out rows. ``initial`` is the held-out loss before the stage, if it is
    known. A loss that is not finite, which ends a stage, is None in the report: JSON has no such number.
    """
    training, held_out = lessons
    adapted: Any = None
    if settings.rank:
        shape = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=list(stage))
        adapted = get_peft_model(model, shape)
        parameters = [p for p in adapted.parameters() if p.requires_grad]
    else:
        parameters = [p for name, p in model.named_parameters() if name.endswith(tuple(f".{f}.weight" for f in stage))]
        for parameter in parameters:
            parameter.requires_grad_()
    course = Course(settings.epochs, settings.learning_rate, 0.1, (0.9, 0.999))

    def backward(rows: Tensor) -> None:
        batch = training.pick(rows)
        for part in batch.passes():
            loss_sum(model, part, 1 / batch.predictions, settings.autocast)

    rows = torch.arange(len(training))

    def validate() -> float:
        return evaluate(model, held_out)

    objective = Objective(parameters, rows, backward, validate, initial=initial)
    done = train(objective, course, settings.batch, generator, advance, file=file)
    if adapted is not None:
        adapted.merge_and_unload()
    model.requires_grad_(False)
    return {
        "factors": stage,
        "trained_parameters": sum(p.numel() for p in parameters),
        "losses": [loss if math.isfinite(loss) else None for loss in done.losses],
        "steps": (len(done.losses) - 1) * math.ceil(len(rows) / settings.batch),
        "seconds": done.seconds,
        "resumed_seconds": done.resumed_seconds,
    }


def _advance(progress: Progress, stage: str, count: int) -> Callable[[float], None]:
    """Return the progress function of one of ``count`` equal parts of ``stage``."""
    return lambda fraction: progress(stage, fraction / count)


@torch.no_grad()
def _round_factors(model: Any, folder: Path, seed: int) -> dict[str, Tensor]:
    """Round the model's factors to the dtype that the checkpoint in ``folder`` stores them in, and return them."""
    reader, factors, generator = Reader(folder), {}, torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(FACTORS):
            factors[name] = round_stochastically(parameter, reader[name].dtype, generator)
            parameter.copy_(factors[name])
    return factors


def round_stochastically(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round each value to one of its two neighbours in ``dtype``, with probabilities that preserve the mean.

    Args:
        values: float32, of any shape and on any device.
        dtype: a floating dtype; values that it represents exactly do not change.
        generator: a CPU generator, from which one number per value is drawn.

    Returns:
        A tensor of the same shape, of ``dtype``, on the CPU.
    """
    values = values.detach().cpu()
    near = values.to(dtype, copy=True)
    rounded = near.to(values.dtype)
    error = values - rounded
    other = torch.nextafter(near, torch.where(error > 0, math.inf, -math.inf).to(dtype))
    step = other.to(values.dtype) - rounded
    return torch.where(torch.rand(values.shape, generator=generator) * step.abs() < error.abs(), other, near)
