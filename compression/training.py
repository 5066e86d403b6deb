"""The training loop of refinement and recovery: AdamW with early stopping on held-out rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup

from neuronmm.compression import training_state
from neuronmm.compression.training_state import State

_PATIENCE = 2  # training ends after this many epochs in a row without a better held-out loss
_CLIP = 1.0  # maximum norm of the gradient


@dataclass(frozen=True)
class Course:
    """A training schedule: epochs, peak learning rate, and the fraction of the steps for warm-up.

    ``betas`` are AdamW's. The usual second one, 0.999, does not settle in the few steps of a refinement.
    """

    epochs: int
    learning_rate: float
    warm_up: float
    betas: tuple[float, float]


@dataclass(frozen=True)
class Trained:
    """The result of a training: held-out losses before the first epoch and after each, and its duration.

    ``seconds`` includes ``resumed_seconds``, the time that interrupted runs spent.
    """

    losses: list[float]
    seconds: float
    resumed_seconds: float


def train(
    parameters: list[nn.Parameter],
    course: Course,
    rows: Tensor,
    batch: int,
    generator: torch.Generator,
    backward: Callable[[Tensor], None],
    validate: Callable[[], float],
    advance: Callable[[float], None],
    *,
    keep: Callable[[Tensor], Tensor] = Tensor.clone,
    file: Path | None = None,
) -> Trained:
    """Train ``parameters`` in place. At the end they have the values of the best held-out loss, the initial one
    included.

    Training stops early when the held-out loss no longer falls.

    Args:
        parameters: the parameters to train.
        course: the schedule; the learning rate falls along a cosine.
        rows: the indices of the training rows, shuffled for each epoch.
        batch: rows per step.
        generator: the random generator of the shuffling.
        backward: adds the gradients of the loss on the rows with the given indices.
        validate: returns the held-out loss.
        advance: called with each further fraction that is done; the fractions add up to 1.
        keep: copies a parameter's value into the form in which the best values are kept.
        file: the state is written there after each epoch; if the file exists, training continues from it.

    Raises:
        ValueError: the initial loss is not a finite number.
        UserError: the state file cannot be written, for example because the disk is full.
    """
    began = time.perf_counter()
    optimizer = torch.optim.AdamW(
        [{"params": parameters, "initial_lr": course.learning_rate}],
        lr=course.learning_rate,
        betas=course.betas,
        weight_decay=0.0,
    )
    state = None if file is None else training_state.load(file, parameters, optimizer, generator)
    if state is None:
        state = State([validate()], [keep(parameter.detach()) for parameter in parameters])
        if not math.isfinite(state.losses[0]):
            raise ValueError("the training's loss is not a number")
    earlier = state.seconds
    steps = math.ceil(len(rows) / batch)
    total = course.epochs * steps
    warm_up = math.ceil(course.warm_up * total)
    rate = get_cosine_schedule_with_warmup(optimizer, warm_up, total, last_epoch=state.passes * steps - 1)
    advance(state.passes / course.epochs)
    while state.passes < course.epochs and state.waited < _PATIENCE:
        for chosen in rows[torch.randperm(len(rows), generator=generator)].split(batch):
            optimizer.zero_grad()
            backward(chosen)
            nn.utils.clip_grad_norm_(parameters, _CLIP)
            optimizer.step()
            rate.step()
            advance(1 / total)
        state.losses.append(validate())
        if state.waited == 0:
            state.best = [keep(parameter.detach()) for parameter in parameters]
        state.seconds = earlier + time.perf_counter() - began
        if file is not None:
            training_state.save(file, state, parameters, optimizer, generator)
    optimizer.zero_grad()
    advance(1 - state.passes / course.epochs)
    with torch.no_grad():
        for parameter, value in zip(parameters, state.best, strict=True):
            parameter.copy_(value)
    return Trained(state.losses, earlier + time.perf_counter() - began, earlier)
