"""Measure how much the model's predictions depend on each linear: the second moments of the gradients.

If a linear's weight changes by D, the next-token distributions change by a KL divergence of about

    1/2 s tr(F D G D^T)  nats per token,  F = E[g g^T],  G = E[x x^T],

where x [in] is an input of the linear and g [out] the gradient of the following tokens' log-likelihood with respect to
the output at the same position. It is the second-order term of the divergence, with inputs and gradients taken as
independent (K-FAC, arXiv 1503.05671). The tokens are sampled from the model's own distributions: with those of the
text, F would be the empirical Fisher matrix, which is not the curvature of the divergence (arXiv 1905.12558).

The gradients of several positions depend on the same tokens, through the attention: most of all those of keys and
values. Then the changes at these positions add up. The factor s corrects the size of F for that: over a row of
positions t, it is the mean of ``|sum_t g_t x_t^T|^2``, over that of ``sum_t |g_t|^2 |x_t|^2``. A quarter of the rows
is enough for this one number.

The layers run forwards over all rows and then backwards, with the weights of one layer in memory at a time. Between the
two passes the inputs of every layer are on the disk, in bf16.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm.compression.continuation import Sampled
from neuronmm.compression.moments import Moments, side
from neuronmm.compression.ranks import Linear
from neuronmm.compression.run import Run
from neuronmm.compression.streaming import Rotary, StreamedModel, batches, run_layer
from neuronmm.kernels.widened_linears import multiplies_bf16
from neuronmm.models import processes
from neuronmm.models.families import LAYERS
from neuronmm.models.model_config import ModelConfig

_STAGE, _FORWARDS = "measuring gradients", 0.3  # the fraction of the time that the pass forwards takes
_CHUNK = 256  # positions per call of the head
_BLOCK = 384  # rows of a matrix product that a core multiplies fast
_QUARTER = 4  # the factor s is measured on one of so many rows

DAMPING = 1e-3
"""What is added to the second moments of the gradients of a linear's outputs, relative to their mean size."""


@torch.no_grad()
def measure_gradients(run: Run, model: StreamedModel, linears: Sequence[Linear], rows: Tensor) -> None:
    """Store the second moments of the gradients of every linear, and the moments of its inputs or outputs.

    A resumed run continues the pass backwards where it was interrupted, and repeats an interrupted pass forwards.

    Args:
        run: the run, with a store.
        model: the dense model, float32.
        linears: the targeted linears, each with its own A.
        rows: the calibration tokens [rows, length].
    """
    left = [index for index in range(len(model)) if not run.store.has_gradients(index)]
    if not left:
        for name in (_gradient(0), _gradient(1), _inputs(0)):
            run.workspace.drop(name)
        run.progress(_STAGE, 1.0)
        return
    inside = [
        [linear.name.removeprefix(prefix) for linear in linears if linear.name.startswith(prefix)]
        for prefix in (f"{LAYERS}.{index}." for index in range(len(model)))
    ]
    rotary, chosen = model.streams(rows, ()).rotary, _chosen(len(rows), run.config.seed)
    end, gradients = left[-1] + 1, run.workspace.load(_gradient(left[-1] + 1), ["gradient"])
    kept = gradients is not None and run.workspace.complete([_inputs(index) for index in range(end)], ["hidden"])
    if all(processes.of_all(kept)):
        assert gradients is not None
        gradient = gradients["gradient"].to(model.device)
        run.progress(_STAGE, 1 - (1 - _FORWARDS) * end / len(model))
    else:
        run.progress(_STAGE, 0.0)
        end, gradient = len(model), _run_forwards(run, model, inside, rows)
    for index in reversed(range(end)):
        began = time.perf_counter()
        hidden = run.workspace.load(_inputs(index))
        assert hidden is not None
        with model.layer(index) as layer:
            inputs = hidden["hidden"].to(model.device)
            sums, gradient = _run_backwards(layer, inside[index], inputs, gradient, rotary, chosen)
        model.reader.close()  # pages of a mapped shard count as resident
        run.workspace.save(_gradient(index), {"gradient": gradient})
        processes.meet()
        run.store.keep_gradients(index, {name: total / rows.numel() for name, total in sums.items()}, began)
        run.workspace.drop(_gradient(index + 1))
        run.workspace.drop(_inputs(index))
        run.progress(_STAGE, (1 - _FORWARDS) / len(model))
    run.workspace.drop(_gradient(0))


def known_moments(run: Run, index: int, layer: nn.Module, moments: dict[str, Moments]) -> Callable[[Linear], Moments]:
    """Return a function that gives the moments of a linear of ``layer``, from those of the layer by linear.

    With the method ``fisher`` they have the gradients' second moments. Those of linears that share an A add up, as
    their divergences do. To each, a fraction of its mean size is added in all directions, because no direction of the
    outputs is quite without effect.
    """
    if run.config.method != "fisher":
        return lambda linear: moments[linear.name.removeprefix(f"{LAYERS}.{index}.")]
    gradients = run.store.gradients(index, torch.device(run.device))

    @cache  # a linear counts alone and with those that share its A
    def damped(name: str) -> Tensor:
        sums, weight = gradients[name], layer.get_parameter(f"{name}.weight").detach().double()
        everywhere = weight.T @ weight if moments[name].of_inputs else torch.eye(len(sums)).to(sums)
        return sums + DAMPING * sums.trace() / everywhere.trace().clamp(min=1e-300) * everywhere

    def known(linear: Linear) -> Moments:
        names = [part.name.removeprefix(f"{LAYERS}.{index}.") for part in linear.parts]
        return moments[names[0]].with_gradients(sum(map(damped, names[1:]), damped(names[0])))

    return known


def working_bytes(tokens: int, config: ModelConfig) -> int:
    """Return the size of the files that :func:`measure_gradients` needs besides the store, for a model's config."""
    per_feature = torch.bfloat16.itemsize * config.num_hidden_layers + 2 * torch.float32.itemsize
    return tokens * config.hidden_size * per_feature


def _inputs(index: int) -> str:
    return f"inputs-{index:05d}"


def _gradient(index: int) -> str:
    return f"gradient-{index:05d}"


def _run_forwards(run: Run, model: StreamedModel, inside: list[list[str]], rows: Tensor) -> Tensor:
    """Save the inputs of every layer and return the gradient of the last one's outputs [rows, length, hidden]."""
    streams = model.streams(processes.part(rows), ("dense",))
    for index, names in enumerate(inside):
        run.workspace.save(_inputs(index), {"hidden": streams.dense.bfloat16()})
        with model.layer(index) as layer:
            _, streams.dense = run.store.gather(index, layer, names, streams.dense, streams.rotary, run.config.damping)
        model.reader.close()  # pages of a mapped shard count as resident
        run.progress(_STAGE, _FORWARDS / len(model))
    gradient = _gradient_of_head(model, streams.dense, run.config.seed, len(rows))
    run.workspace.save(_gradient(len(model)), {"gradient": gradient})
    return gradient


def _gradient_of_head(model: StreamedModel, states: Tensor, seed: int, rows: int) -> Tensor:
    """Return the gradient of the log-likelihood of sampled next tokens with respect to the final ``states``.

    The random numbers of a row do not depend on how many processes share the ``rows``.

    Dimensions: ``states`` and the result [rows of this process, length, hidden], float32.
    """
    choose, gradient = Sampled(seed), torch.empty_like(states)
    mine = zip(states, gradient, strict=True)
    with model.head() as logits, torch.enable_grad():
        for number in range(rows):
            if number % processes.size() != processes.rank():
                choose.skip(states.shape[1], _CHUNK)
                continue
            row, target = next(mine)
            for chunk, out in zip(row.split(_CHUNK), target.split(_CHUNK), strict=True):
                leaf = chunk.detach().requires_grad_(True)
                with _autocast(states.device):
                    scores = logits(leaf)
                difference = scores.detach().softmax(-1)
                chosen = choose.among(difference)
                difference[torch.arange(len(chosen), device=chosen.device), chosen] -= 1
                (out[:],) = torch.autograd.grad(scores, leaf, difference)
    return gradient


def _autocast(device: torch.device) -> torch.autocast:
    """Return a context in which matmuls run in bf16 if the device multiplies that natively."""
    return torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bf16(device))


def _chosen(rows: int, seed: int) -> list[bool]:
    """Return, for each row of this process, whether the factor s is measured on it.

    They are drawn: the kinds of text alternate from row to row, so that every fourth row may be of one kind.
    """
    drawn = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: math.ceil(rows / _QUARTER)]
    chosen = torch.zeros(rows, dtype=torch.bool)
    chosen[drawn] = True
    return processes.part(chosen).tolist()


def _run_backwards(
    layer: nn.Module,
    names: Sequence[str],
    hidden: Tensor,
    gradient: Tensor,
    rotary: Rotary,
    chosen: Sequence[bool],
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the corrected sums of the gradients' outer products by linear, and the gradient of the layer's inputs.

    Dimensions: ``hidden``, the layer's inputs, ``gradient``, that of its outputs, and the result are [rows, length,
    hidden], of the rows of this process; ``chosen`` [rows] says on which of them the factor s is measured. The
    gradients are bf16 where the device multiplies that natively, the sums float64.
    """
    before = torch.empty_like(gradient)
    with _adding_gradients(layer, names, chosen) as sums, torch.enable_grad():
        for inputs, outer, result in zip(batches(hidden), batches(gradient), batches(before), strict=True):
            leaf = inputs.float().requires_grad_(True)
            with _autocast(gradient.device):
                outputs = run_layer(layer, leaf, rotary)
            (result[:],) = torch.autograd.grad(outputs, leaf, outer)
    return {name: total.corrected() for name, total in sums.items()}, before


class _Gradients:
    """The sums of one linear over the passes backwards.

    The gradients are with respect to the linear's inputs or outputs, whichever
    :func:`~neuronmm.compression.moments.side` says; those of the inputs are the part that comes through this linear.
    """

    def __init__(self, linear: nn.Linear, name: str, chosen: Sequence[bool]) -> None:
        size, self._of_inputs = side(name, linear.out_features, linear.in_features)
        self._sums = torch.zeros(size, size, dtype=torch.float64, device=linear.weight.device)
        self._apart, self._together, self._chosen = 0.0, 0.0, iter(chosen)
        self._inputs = torch.empty(0)

    def corrected(self) -> Tensor:
        """Return the sum of the gradients' outer products over the rows of all processes, multiplied by the factor s.

        The module's docstring defines s.
        """
        upper = self._sums.triu()
        self._sums = upper + upper.triu(1).T
        processes.add_up(self._sums)
        apart, together = processes.total(self._apart), processes.total(self._together)
        return self._sums * (together / apart if apart > 0 else 1.0)

    def keep(self, _: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
        """Keep the inputs [rows, length, in] of a pass forwards."""
        self._inputs = inputs[0].detach()

    def add(self, _: nn.Module, of_input: Any, of_output: Any) -> None:
        """Add the tokens of a pass backwards."""
        g = of_output[0]
        gradients = (of_input[0] if self._of_inputs else g).flatten(0, -2).float()
        with torch.autocast(g.device.type, enabled=False):
            for start in range(0, len(self._sums), _BLOCK):  # the sums are symmetric: the upper half is enough
                block = gradients[:, start : start + _BLOCK]
                self._sums[start : start + _BLOCK, start:] += block.T @ gradients[:, start:]
            for a, x in zip(g, self._inputs, strict=True):
                if next(self._chosen):
                    b = x.to(a.dtype)
                    self._apart += float((_power(a) * _power(b)).sum())
                    self._together += float(_power(a.T @ b).sum())


def _power(x: Tensor) -> Tensor:
    """Return the squared norms [...] of vectors [..., n], float64."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).double().square()


@contextmanager
def _adding_gradients(
    layer: nn.Module, names: Sequence[str], chosen: Sequence[bool]
) -> Iterator[dict[str, _Gradients]]:
    """Add the gradients of the named linears over the passes in the ``with`` block."""
    sums, hooks = dict[str, _Gradients](), []
    for name in names:
        linear = layer.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        sums[name] = _Gradients(linear, name, chosen)
        hooks += [linear.register_forward_hook(sums[name].keep), linear.register_full_backward_hook(sums[name].add)]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
