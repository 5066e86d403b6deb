"""The training loop of refinement and recovery: AdamW, early stop on held-out rows, and the best values kept."""

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

_PATIENCE = 2  # epochs in a row without a better held-out loss end the training
_CLIP = 1.0  # norm of the gradient


@dataclass(frozen=True)
class Course:
    """Passes over the rows, the learning rate at its height, and the share of the steps in which it rises to it.

    ``betas`` are AdamW's: over the few steps of a refinement the usual second one, 0.999, would not settle.
    """

    epochs: int
    learning_rate: float
    warm_up: float
    betas: tuple[float, float]


@dataclass(frozen=True)
class Trained:
    """How a training went: held-out losses, before the first pass and after each, and how long it took.

    Of ``seconds`` a run that was interrupted spent ``resumed_seconds``.
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
    """Train ``parameters`` in place; at the end they have the values of the best held-out loss, the first included.

    Fewer passes than asked are enough where the loss does not fall any more.

    Args:
        parameters: what is trained.
        course: how long and how fast; the rate falls along a cosine.
        rows: the numbers of the rows that are trained on, taken in a new order each pass.
        batch: rows a step.
        generator: of the order.
        backward: add the gradients of the loss on rows of these numbers.
        validate: the held-out loss.
        advance: called with the further share that is done; the shares add up to 1.
        keep: a copy of a parameter's value, in the form in which the best values are held.
        file: where the state is written after each pass; if it is there, the training goes on from it.

    Raises:
        ValueError: the loss is not a number before anything is trained.
        UserError: the disk is full or refuses the file.
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
