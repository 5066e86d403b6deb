"""Measure how much the model's predictions depend on each linear: the second moments of the gradients.

If a linear's weight changes by D, the next-token distributions change by a KL divergence of about

    1/2 tr(G D H D^T)  nats per token,  H = E[x x^T],  G = E[g g^T],

where x [in] is an input of the linear and g [out] the gradient of a next token's log-likelihood with respect to the
output. It is the second-order term of the divergence, with inputs and gradients taken as independent (K-FAC, arXiv
1503.05671). The next tokens are sampled from the model's own distribution: with those of the text, G would be the
empirical Fisher matrix, which is not the curvature of the divergence (arXiv 1905.12558).

The layers run forwards over all rows and then backwards, with the weights of one layer in memory at a time. Between the
two passes the inputs of every layer are on the disk, in bf16.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from neuronmm.compression.continuation import sampled
from neuronmm.compression.moments import Moments, side
from neuronmm.compression.ranks import Linear
from neuronmm.compression.run import Run
from neuronmm.compression.streaming import Rotary, StreamedModel, batches, run_layer
from neuronmm.kernels.widened_linears import multiplies_bf16
from neuronmm.models.families import LAYERS
from neuronmm.models.model_config import ModelConfig

_STAGE, _FORWARDS = "measuring gradients", 0.3  # the fraction of the time that the pass forwards takes
_CHUNK = 256  # positions per call of the head


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
        run.progress(_STAGE, 1.0)
        return
    inside = [
        [linear.name.removeprefix(prefix) for linear in linears if linear.name.startswith(prefix)]
        for prefix in (f"{LAYERS}.{index}." for index in range(len(model)))
    ]
    rotary = model.streams(rows, ()).rotary
    end, gradients = left[-1] + 1, run.workspace.load(_gradient(left[-1] + 1), ["gradient"])
    if gradients is not None and run.workspace.complete([_inputs(index) for index in range(end)], ["hidden"]):
        gradient = gradients["gradient"].to(model.device)
        run.progress(_STAGE, 1 - (1 - _FORWARDS) * end / len(model))
    else:
        end, gradient = len(model), _run_forwards(run, model, inside, rows)
    for index in reversed(range(end)):
        began = time.perf_counter()
        hidden = run.workspace.load(_inputs(index))
        assert hidden is not None
        with model.layer(index) as layer:
            sums, gradient = _run_backwards(layer, inside[index], hidden["hidden"].to(model.device), gradient, rotary)
        model.reader.close()  # pages of a mapped shard count as resident
        run.workspace.save(_gradient(index), {"gradient": gradient})
        run.store.keep_gradients(index, {name: total / rows.numel() for name, total in sums.items()}, began)
        run.workspace.drop(_gradient(index + 1))
        run.workspace.drop(_inputs(index))
        run.progress(_STAGE, (1 - _FORWARDS) / len(model))
    run.workspace.drop(_gradient(0))


def known_moments(run: Run, index: int, moments: dict[str, Moments]) -> Callable[[Linear], Moments]:
    """Return a function that gives the moments of a linear of layer ``index``, from those of the layer by linear.

    With the method ``fisher`` they have the gradients' second moments, which add up over linears that share an A.
    """
    gradients: dict[str, Tensor] = {}
    if run.config.method == "fisher":
        gradients = run.store.gradients(index, torch.device(run.device))

    def known(linear: Linear) -> Moments:
        names = [part.name.removeprefix(f"{LAYERS}.{index}.") for part in linear.parts]
        sums = moments[names[0]]
        return sums.with_gradients(torch.stack([gradients[name] for name in names]).sum(0)) if gradients else sums

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
    streams = model.streams(rows, ("dense",))
    for index, names in enumerate(inside):
        run.workspace.save(_inputs(index), {"hidden": streams.dense.bfloat16()})
        with model.layer(index) as layer:
            _, streams.dense = run.store.gather(index, layer, names, streams.dense, streams.rotary, run.config.damping)
        model.reader.close()  # pages of a mapped shard count as resident
        run.progress(_STAGE, _FORWARDS / len(model))
    gradient = _gradient_of_head(model, streams.dense, run.config.seed)
    run.workspace.save(_gradient(len(model)), {"gradient": gradient})
    return gradient


def _gradient_of_head(model: StreamedModel, states: Tensor, seed: int) -> Tensor:
    """Return the gradient of the log-likelihood of sampled next tokens with respect to the final ``states``.

    Dimensions: ``states`` and the result [rows, length, hidden], float32.
    """
    choose, gradient = sampled(seed), torch.empty_like(states)
    with model.head() as logits, torch.enable_grad():
        for row, target in zip(states, gradient, strict=True):
            for chunk, out in zip(row.split(_CHUNK), target.split(_CHUNK), strict=True):
                leaf = chunk.detach().requires_grad_(True)
                scores = logits(leaf)
                loss = cross_entropy(scores, choose(scores.detach()), reduction="sum")
                (out[:],) = torch.autograd.grad(loss, leaf)
    return gradient


def _run_backwards(
    layer: nn.Module, names: Sequence[str], hidden: Tensor, gradient: Tensor, rotary: Rotary
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the sums of the gradients' outer products by linear, and the gradient of the layer's inputs.

    Dimensions: ``hidden``, the layer's inputs, ``gradient``, that of its outputs, and the result are [rows, length,
    hidden]. The gradients are bf16 where the device multiplies that natively, the sums float64.
    """
    before = torch.empty_like(gradient)
    device = gradient.device
    with _adding_gradients(layer, names) as sums, torch.enable_grad():
        for inputs, outer, result in zip(batches(hidden), batches(gradient), batches(before), strict=True):
            leaf = inputs.float().requires_grad_(True)
            with torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bf16(device)):
                outputs = run_layer(layer, leaf, rotary)
            (result[:],) = torch.autograd.grad(outputs, leaf, outer)
    return sums, before


@contextmanager
def _adding_gradients(layer: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Sum up the gradients' outer products of the named linears over the passes backwards in the ``with`` block.

    The gradient is with respect to a linear's inputs or outputs, whichever :func:`~neuronmm.compression.moments.side`
    says; that of the inputs is the part that comes through this linear alone.
    """
    sums, hooks = dict[str, Tensor](), []
    for name in names:
        linear = layer.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        size, of_inputs = side(name, linear.out_features, linear.in_features)
        sums[name] = torch.zeros(size, size, dtype=torch.float64, device=linear.weight.device)

        def add(
            _: nn.Module,
            of_input: tuple[Tensor, ...],
            of_output: tuple[Tensor, ...],
            total: Tensor = sums[name],
            of_inputs: bool = of_inputs,
        ) -> None:
            g = (of_input if of_inputs else of_output)[0].flatten(0, -2).float()
            with torch.autocast(g.device.type, enabled=False):
                total += g.T @ g

        hooks.append(linear.register_full_backward_hook(add))
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
