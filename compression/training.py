"""The training loop of refinement and recovery: AdamW with early stopping on held-out rows.

The state between two epochs fits in one file, from which an interrupted training continues, on a CPU to the same bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import get_cosine_schedule_with_warmup

from neuronmm.compression.tensor_files import read_tensors, write_tensors
from neuronmm.models import processes

_PATIENCE = 2  # training ends after this many epochs in a row without a better held-out loss
_SLOWER = 0.5  # factor of the learning rate after an epoch that is undone
_CLIP = 1.0  # maximum norm of the gradient


@dataclass(frozen=True)
class Course:
    """A training schedule: epochs, peak learning rate, and the fraction of the steps for warm-up.

    The peak rate of a parameter is ``learning_rate`` times its :attr:`Objective.scales`.
    ``betas`` are AdamW's. The usual second one, 0.999, does not settle in the few steps of a refinement.
    """

    epochs: int
    learning_rate: float
    warm_up: float
    betas: tuple[float, float]


@dataclass(frozen=True)
class Objective:
    """What :func:`train` needs: the parameters, the indices of the training rows, and the loss.

    ``backward`` adds the gradients of the loss on the rows with the given indices; of several processes, each on those
    that it has. ``validate`` returns the held-out loss, the same in all. ``scales``, one per parameter, multiply the
    learning rate; without them it is the same for all. ``initial`` is the held-out loss of the untrained parameters, if
    it is known already.
    """

    parameters: list[nn.Parameter]
    rows: Tensor
    backward: Callable[[Tensor], None]
    validate: Callable[[], float]
    scales: list[float] | None = None
    initial: float | None = None


@dataclass(frozen=True)
class Trained:
    """The result of a training: held-out losses before the first epoch and after each, and its duration.

    ``seconds`` includes ``resumed_seconds``, the time that interrupted runs spent.
    """

    losses: list[float]
    seconds: float
    resumed_seconds: float


@dataclass
class State:
    """The progress of a training.

    ``losses`` are the held-out losses before the first epoch and after each. ``best`` are the parameters' values at the
    smallest of them. ``seconds`` is the time spent.
    """

    losses: list[float]
    best: list[Tensor]
    seconds: float = 0.0

    @property
    def epochs(self) -> int:
        """Number of finished epochs."""
        return len(self.losses) - 1

    @property
    def waited(self) -> int:
        """Number of epochs since the best one."""
        return self.epochs - self.losses.index(min(self.losses))

    @property
    def undone(self) -> int:
        """Number of epochs that raised the held-out loss above the best."""
        return sum(loss > min(self.losses[:epoch]) for epoch, loss in enumerate(self.losses) if epoch)


def train(
    objective: Objective,
    course: Course,
    batch: int,
    generator: torch.Generator,
    advance: Callable[[float], None],
    *,
    keep: Callable[[Tensor], Tensor] = Tensor.clone,
    file: Path | None = None,
) -> Trained:
    """Train the objective's parameters in place, and stop early when the held-out loss no longer falls.

    An epoch that raises the held-out loss above the best one is undone: the parameters get the best values, as ``keep``
    stores them, and the rate is halved from then on. AdamW's moments stay. A loss that is not finite ends the training.
    At the end the parameters have the values of the best held-out loss, the initial one included.

    Args:
        objective: the parameters, rows and loss.
        course: the schedule; the learning rate falls along a cosine.
        batch: rows per step.
        generator: the random generator that shuffles the rows in each epoch.
        advance: called with each further fraction that is done; the fractions add up to 1.
        keep: copies a parameter's value in the form in which the best values are stored.
        file: the state is written there after each epoch; if the file exists, training continues from it. Of several
            processes the first one writes, and all read it.

    Raises:
        ValueError: the initial loss is not a finite number.
        UserError: the state file cannot be written, for example because the disk is full.
    """
    parameters, rows, validate = objective.parameters, objective.rows, objective.validate
    began = time.perf_counter()
    groups = _groups(objective, course.learning_rate)
    optimizer = torch.optim.AdamW(groups, betas=course.betas, weight_decay=0.0, fused=True)
    state = None if file is None else _load(file, parameters, optimizer, generator)
    if state is None:
        initial = validate() if objective.initial is None else objective.initial
        state = State([initial], [keep(parameter.detach()) for parameter in parameters])
        if not math.isfinite(state.losses[0]):
            raise ValueError("the training's loss is not a number")
    earlier = state.seconds
    steps = math.ceil(len(rows) / batch)
    total = course.epochs * steps
    warm_up = math.ceil(course.warm_up * total)
    peaks = [group["initial_lr"] for group in optimizer.param_groups]
    advance(state.epochs / course.epochs)
    while state.epochs < course.epochs and state.waited < _PATIENCE and math.isfinite(state.losses[-1]):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["initial_lr"] = peak * _SLOWER**state.undone
        rate = get_cosine_schedule_with_warmup(optimizer, warm_up, total, last_epoch=state.epochs * steps - 1)
        for step_rows in rows[torch.randperm(len(rows), generator=generator)].split(batch):
            optimizer.zero_grad()
            objective.backward(step_rows)
            _add_up_gradients(parameters)
            nn.utils.clip_grad_norm_(parameters, _CLIP)
            optimizer.step()
            rate.step()
            advance(1 / total)
        state.losses.append(validate())
        if state.waited == 0:
            _set(state.best, parameters)
        elif state.losses[-1] > min(state.losses):
            _set(parameters, state.best)
        state.seconds = earlier + time.perf_counter() - began
        if file is not None:
            if processes.rank() == 0:
                _save(file, state, parameters, optimizer, generator)
            processes.meet()
    optimizer.zero_grad()
    advance(1 - state.epochs / course.epochs)
    _set(parameters, state.best)
    return Trained(state.losses, earlier + time.perf_counter() - began, earlier)


@torch.no_grad()
def _set(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give the tensors these values, in place, in the dtypes that the tensors have."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _groups(objective: Objective, rate: float) -> list[dict[str, Any]]:
    """Return the optimizer's groups of parameters, as few as possible: a GPU updates a group at once."""
    if objective.scales is None:
        return [{"params": objective.parameters, "lr": rate, "initial_lr": rate}]
    rates = [rate * scale for scale in objective.scales]
    return [{"params": [p], "lr": own, "initial_lr": own} for p, own in zip(objective.parameters, rates, strict=True)]


def _add_up_gradients(parameters: list[nn.Parameter]) -> None:
    """Add up the gradients of all processes; one without rows in this step has none of its own."""
    if processes.size() == 1:
        return
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        processes.add_up(parameter.grad)


def _save(
    path: Path, state: State, parameters: list[nn.Parameter], optimizer: Optimizer, generator: torch.Generator
) -> None:
    """Write atomically all that the next epochs depend on: 16 bytes per trained parameter.

    An earlier state is replaced when the new one is complete; until then both are on the disk.

    Raises:
        UserError: the disk is full or refuses the file.
    """
    tensors = {
        "losses": torch.tensor(state.losses, dtype=torch.float64),
        "seconds": torch.tensor(state.seconds, dtype=torch.float64),
        "order": generator.get_state(),
    }
    for index, (parameter, best) in enumerate(zip(parameters, state.best, strict=True)):
        values = {"value": parameter.detach(), "best": best, **optimizer.state[parameter]}
        tensors |= {f"{index}.{name}": tensor.contiguous() for name, tensor in values.items()}
    write_tensors(path, tensors)


@torch.no_grad()
def _load(path: Path, parameters: list[nn.Parameter], optimizer: Optimizer, generator: torch.Generator) -> State | None:
    """Set parameters, optimizer and generator to the state in ``path`` and return it.

    If the file is missing or damaged for any of the processes, nothing is set and the result is None.
    """
    each = ("value", "best", "step", "exp_avg", "exp_avg_sq")
    names = [f"{index}.{name}" for index in range(len(parameters)) for name in each]
    tensors = read_tensors(path, ["losses", "seconds", "order", *names])
    readable = all(processes.of_all(tensors is not None))  # all of them, or they would take different steps
    if tensors is None or not readable:
        return None
    generator.set_state(tensors["order"])
    best = []
    for index, parameter in enumerate(parameters):
        prefix = f"{index}."
        values = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        parameter.copy_(values.pop("value"))
        best.append(values.pop("best").to(parameter.device))
        optimizer.state[parameter] = {name: tensor.to(parameter.device) for name, tensor in values.items()}
    return State(tensors["losses"].tolist(), best, tensors["seconds"].item())
