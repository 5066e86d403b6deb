"""The training loop of refinement and recovery: AdamW, early stop on held-out rows, and the best state kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup

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


def train(
    parameters: list[nn.Parameter],
    course: Course,
    rows: Tensor,
    batch: int,
    generator: torch.Generator,
    backward: Callable[[Tensor], None],
    validate: Callable[[], float],
    advance: Callable[[float], None],
    keep: Callable[[Tensor], Tensor] = Tensor.clone,
) -> list[float]:
    """Train ``parameters`` in place; at the end they have the values of the best held-out loss, the first included.

    Args:
        parameters: what is trained.
        course: how long and how fast; the rate falls along a cosine.
        rows: the numbers of the rows that are trained on, taken in a new order each epoch.
        batch: rows a step.
        generator: of the order.
        backward: add the gradients of the loss on rows of these numbers.
        validate: the held-out loss.
        advance: called with the further share that is done; the shares add up to 1.
        keep: a copy of a parameter's value, in the form in which the best state is held.

    Returns:
        The held-out losses, before the first epoch and after each. Fewer epochs than asked were enough where the loss
        did not fall any more.

    Raises:
        ValueError: the loss is not a number before anything is trained.
    """
    losses = [validate()]
    if not math.isfinite(losses[0]):
        raise ValueError("the training's loss is not a number")
    best = [keep(parameter.detach()) for parameter in parameters]
    steps, waited = math.ceil(len(rows) / batch), 0
    total = course.epochs * steps
    optimizer = torch.optim.AdamW(parameters, lr=course.learning_rate, betas=course.betas, weight_decay=0.0)
    rate = get_cosine_schedule_with_warmup(optimizer, math.ceil(course.warm_up * total), total)
    while len(losses) <= course.epochs and waited < _PATIENCE:
        for chosen in rows[torch.randperm(len(rows), generator=generator)].split(batch):
            optimizer.zero_grad()
            backward(chosen)
            nn.utils.clip_grad_norm_(parameters, _CLIP)
            optimizer.step()
            rate.step()
            advance(1 / total)
        loss, waited = validate(), waited + 1
        if loss < min(losses):
            best, waited = [keep(parameter.detach()) for parameter in parameters], 0
        losses.append(loss)
    optimizer.zero_grad()
    advance(1 - (len(losses) - 1) / course.epochs)
    with torch.no_grad():
        for parameter, value in zip(parameters, best, strict=True):
            parameter.copy_(value)
    return losses
