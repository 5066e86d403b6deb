"""Recovery: a finished low-rank checkpoint's factors trained end to end, by LoRA or directly, and written back.

LoRA adapters go on the ``A`` and ``B`` linears (peft), are trained, and are merged: ``A <- A + Q_a P_a`` and
``B <- B + Q_b P_b`` keep rank, bytes and format as they were; changes smaller than a step of the factors' dtype are
kept on average (:mod:`neuronmm.compression.rounding`). SVD-LLM (arXiv 2403.07378) trains first the adapters of ``B``
and then those of ``A``, which keeps the gradient of one factor from being blurred by the other's changes. With ``rank``
0 the factors are trained themselves, without adapters.

The loss is that of :mod:`neuronmm.compression.distillation`: with the dense model at hand the KL divergence from its
next-token distributions, without it the cross entropy of the rows' own next tokens.

Unlike the rest of the compression this needs the whole model in memory: 4 bytes a parameter, the activations of
``PASS_TOKENS`` tokens, 16 bytes a trained parameter, and 4 bytes x hidden size a calibration token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from neuronmm.compression.distillation import Lesson, dense_states, evaluate, loss_sum
from neuronmm.compression.memory import peak_rss
from neuronmm.compression.parts import replace_tensors
from neuronmm.compression.reader import Reader
from neuronmm.compression.refine import split_rows
from neuronmm.compression.rounding import round_stochastically
from neuronmm.compression.training import Course, train
from neuronmm.models.errors import UserError
from neuronmm.models.load import load_pretrained
from neuronmm.models.lowrank import FACTORS


class Recovery(BaseModel):
    """How to train; a recipe has these names. The defaults but ``batch`` are SVD-LLM's recipe.

    ``rank`` is LoRA's, 0 trains the factors themselves. ``two_stage``: B first, then A, each for ``epochs`` passes over
    the rows; else both together. ``batch`` is rows a step. ``autocast``: products in bf16, weights and sums in fp32.
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
    progress: Callable[[str, float], None],
    *,
    dense: Path | None = None,
    device: str = "cpu",
    work: Path | None = None,
) -> dict[str, Any]:
    """Train the factors of the checkpoint in ``folder`` on ``rows`` [rows, length] and write them back.

    The weights on disk change only at the very end, when the loss on rows that were held out has fallen: an
    interruption, or training that does not help, leaves the checkpoint as it was. Each shard is replaced atomically.
    The same arguments give the same bytes on the same machine, interrupted or not.

    Args:
        folder: a compressed checkpoint, complete; its factors are replaced, everything else in it stays.
        rows: token ids; the rows that :func:`neuronmm.compression.refine.split_rows` says are held out.
        settings: how to train.
        progress: told of every step: a stage's name and the further share of it that is done.
        dense: the checkpoint it was made from, to distil from; None trains on the rows' own next tokens.
        device: where to train.
        work: a folder for each stage's state after each pass; a run that finds one there, of the same arguments, goes
            on from it. The files stay: who gives the folder removes it.

    Returns:
        Plain values for the report: losses (nats a token, on the held-out rows) before and after, as they are on disk.

    Raises:
        UserError: fewer than two rows, rows of fewer than two tokens, or a loss that is not a number.
    """
    began = time.perf_counter()
    if len(rows) < 2 or rows.shape[1] < 2:
        raise UserError(f"recovery needs two or more rows of two or more tokens, not {tuple(rows.shape)}")
    generator = torch.Generator().manual_seed(settings.seed)
    trained, held = split_rows(len(rows))
    states = None if dense is None else dense_states(dense, rows, device, progress)
    lesson = Lesson(rows, states)
    held_out, training = lesson.pick(held), lesson.pick(trained)

    model = load_pretrained(folder, torch.float32, device).requires_grad_(False)
    before = evaluate(model, held_out)
    if not math.isfinite(before):
        raise UserError(f"{folder}: the held-out loss is {before}; the checkpoint is damaged")
    stages = ("B", "A") if settings.two_stage else ("AB",)
    report = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)  # of the adapters' first values
        for stage in stages:
            advance = _share(progress, "recovering", len(stages))
            file = None if work is None else work / f"recovery-{stage}.safetensors"
            report.append(_run_stage(model, stage, training, held_out, settings, generator, advance, file))
    factors = _stored(model, folder, settings.seed)
    after = evaluate(model, held_out)
    kept = after < before
    if kept:
        replace_tensors(folder, factors)
    resumed = sum(stage["resumed_seconds"] for stage in report)
    return {
        "kind": "measured",
        **settings.model_dump(),
        "objective": "next token" if dense is None else "distillation",
        "rows": {"trained": len(training), "held_out": len(held_out), "length": rows.shape[1]},
        "loss_before": before,
        "loss_after": after if kept else before,
        "kept": kept,
        "stages": report,
        "seconds": resumed + time.perf_counter() - began,
        "resumed_seconds": resumed,
        "peak_rss_bytes": peak_rss(),
    }


def _run_stage(
    model: Any,
    stage: str,
    training: Lesson,
    held_out: Lesson,
    settings: Recovery,
    generator: torch.Generator,
    advance: Callable[[float], None],
    file: Path | None,
) -> dict[str, Any]:
    """Train the factors that ``stage`` names (their letters), leave the best state merged, and say how it went."""
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

    done = train(parameters, course, rows, settings.batch, generator, backward, validate, advance, file=file)
    if adapted is not None:
        adapted.merge_and_unload()
    model.requires_grad_(False)
    return {
        "factors": stage,
        "trained_parameters": sum(p.numel() for p in parameters),
        "losses": done.losses,
        "steps": (len(done.losses) - 1) * math.ceil(len(rows) / settings.batch),
        "seconds": done.seconds,
        "resumed_seconds": done.resumed_seconds,
    }


def _share(progress: Callable[[str, float], None], name: str, parts: int) -> Callable[[float], None]:
    return lambda share: progress(name, share / parts)


@torch.no_grad()
def _stored(model: Any, folder: Path, seed: int) -> dict[str, Tensor]:
    """The factors in the dtype the checkpoint has them in, and the model given exactly these values."""
    reader, factors, generator = Reader(folder), {}, torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(FACTORS):
            factors[name] = round_stochastically(parameter, reader[name].dtype, generator)
            parameter.copy_(factors[name])
    return factors
