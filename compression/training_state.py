"""The state of a training between two passes, in one file: an interrupted run goes on from it to the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from neuronmm.compression.parts import place_tensors, read_tensors


@dataclass
class State:
    """How far a training is.

    ``losses`` are the held-out ones, before the first pass and after each; ``best`` the parameters' values at the least
    of them; ``seconds`` what was spent on it.
    """

    losses: list[float]
    best: list[Tensor]
    seconds: float = 0.0

    @property
    def passes(self) -> int:
        """How many are done."""
        return len(self.losses) - 1

    @property
    def waited(self) -> int:
        """How many passes there have been since the best one."""
        return self.passes - self.losses.index(min(self.losses))


def save(
    path: Path, state: State, parameters: list[nn.Parameter], optimizer: Optimizer, generator: torch.Generator
) -> None:
    """Write all that the passes to come depend on: 16 bytes a trained parameter, complete or not at all.

    A state that is there already is replaced once the new one is complete: until then both are on the disk.

    Raises:
        UserError: the disk is full or refuses the file.
    """
    tensors = {
        "losses": torch.tensor(state.losses, dtype=torch.float64),
        "seconds": torch.tensor(state.seconds, dtype=torch.float64),
        "order": generator.get_state(),
    }
    for index, (parameter, best) in enumerate(zip(parameters, state.best, strict=True)):
        held = {"value": parameter.detach(), "best": best, **optimizer.state[parameter]}
        tensors |= {f"{index}.{name}": tensor.contiguous() for name, tensor in held.items()}
    place_tensors(path, tensors)


@torch.no_grad()
def load(path: Path, parameters: list[nn.Parameter], optimizer: Optimizer, generator: torch.Generator) -> State | None:
    """Set parameters, optimizer and generator to what ``path`` holds; None, and nothing is set, if it is not whole."""
    each = ("value", "best", "step", "exp_avg", "exp_avg_sq")
    names = [f"{index}.{name}" for index in range(len(parameters)) for name in each]
    tensors = read_tensors(path, ["losses", "seconds", "order", *names])
    if tensors is None:
        return None
    generator.set_state(tensors["order"])
    best = []
    for index, parameter in enumerate(parameters):
        own = f"{index}."
        held = {name.removeprefix(own): tensor for name, tensor in tensors.items() if name.startswith(own)}
        parameter.copy_(held.pop("value"))
        best.append(held.pop("best").to(parameter.device))
        # AdamW counts its steps on the CPU wherever the parameter is.
        optimizer.state[parameter] = {n: t if n == "step" else t.to(parameter.device) for n, t in held.items()}
    return State(tensors["losses"].tolist(), best, tensors["seconds"].item())
