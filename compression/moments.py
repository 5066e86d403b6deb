"""Measure a decoder layer's linears while the layer runs over the calibration text.

The measurements are the second moments of each linear's inputs or outputs, and the fraction of the residual stream that
attention and MLP write.

The whitened factorisation needs either the Gram matrix of the inputs or the covariance of the outputs. The smaller of
the two is accumulated: for a down projection of 14336 -> 4096 that is a twelfth of the work and memory. Linears with
one input use the same Gram matrix, separately or with a shared A.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm.compression.streaming import Rotary, advance
from neuronmm.models import processes
from neuronmm.models.families import SAME_INPUT

BETWEEN = "post_attention_layernorm"
"""The norm that reads the residual stream between attention and MLP, in every family."""

ATTENTION, MLP = "self_attn", "mlp"

_IN_CACHE = 256  # tokens whose inputs take a few MB as float64: more of them cost new pages, fewer cost barriers


class Moments:
    """Sums over the calibration tokens for one linear ``y = W x`` (without the bias).

    Dimensions: ``gram`` is ``sum x x^T`` [in, in] (``of_inputs``) or ``sum y y^T`` [out, out], symmetric; ``squares``
    is the diagonal of ``sum x x^T`` [in] in either case; ``fraction`` [] is the fraction of the residual stream that
    the linear's attention or MLP writes (:func:`weighing`). ``gradients``, if known, are the damped second
    moments of the gradients of the same side [in, in] or [out, out] (:mod:`~neuronmm.compression.fisher`). All are
    float64.

    A Gram matrix is singular if there are fewer tokens than features, dead features, or a few massive ones. Therefore
    ``damping`` times the mean of ``squares`` is added to the diagonal of the inputs' Gram matrix. The solution is then
    unique; the change is otherwise negligible.
    """

    def __init__(self, size: int, of_inputs: bool, damping: float, device: torch.device | None = None) -> None:
        self.gram = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.of_inputs = of_inputs
        self.squares = torch.zeros(1, dtype=torch.float64, device=device)
        self.fraction = torch.ones((), dtype=torch.float64, device=device)
        self.gradients: Tensor | None = None
        self._relative = damping

    def with_gradients(self, gradients: Tensor) -> Moments:
        """Return the same moments with ``gradients``, those of one linear or the sum of those that share an A.

        Raises:
            ValueError: activations or gradients hold NaN or infinity.
        """
        check_finite(gradients, "gradients")
        if self.of_inputs:
            _ = self.eigen  # computed once, for all linears with this input
        result = copy.copy(self)
        result.gradients = gradients
        return result

    @torch.no_grad()
    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Add tokens: ``inputs`` [tokens, in], ``outputs`` [tokens, out] without bias.

        Matmuls and sums are float64. A massive activation is a thousand times larger than the others, a million times
        in the square: in float32 the small directions would be lost to rounding. bf16 autocast would make the matrix
        indefinite.
        """
        with torch.autocast(inputs.device.type, enabled=False):
            x = (inputs if self.of_inputs else outputs).double()
            self.gram.addmm_(x.T, x)
            if self.of_inputs:
                self.squares = self.gram.diagonal().clone()
            else:
                parts = inputs.split(_IN_CACHE)
                self.squares = self.squares + sum(part.double().square().sum(dim=0) for part in parts)

    @property
    def damping(self) -> float:
        """lambda; 1 if all inputs are zero, which gives plain SVD.

        Raises:
            ValueError: the activations hold NaN or infinity.
        """
        return damping_of(self.gram, float(self.squares.mean()), self._relative)

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (clamped at zero, then damped) and eigenvectors of the inputs' Gram matrix, float64.

        Rounding may leave slightly negative eigenvalues in a singular matrix, with which a Cholesky factorisation
        fails.
        """
        damping = self.damping  # first, because it rejects NaN with a clearer error than eigh
        values, vectors = torch.linalg.eigh(self.gram)
        return values.clamp_(min=0).add_(damping), vectors

    def output_covariance(self, weight: Tensor) -> Tensor:
        """Return ``W (G + lambda I) W^T`` [out, out], float64, for moments of outputs; ``weight`` [out, in] float64."""
        return self.gram + self.damping * (weight @ weight.T)


def damping_of(gram: Tensor, power: float, relative: float) -> float:
    """Return lambda for a Gram matrix with the mean diagonal entry ``power``; 1 if that is zero.

    Raises:
        ValueError: the activations hold NaN or infinity.
    """
    check_finite(gram)
    return relative * power if power > 0 else 1.0


def check_finite(sums: Tensor, what: str = "activations") -> None:
    """Check that sums over the calibration tokens are finite; ``what`` was summed up.

    Raises:
        ValueError: it holds NaN or infinity.
    """
    if not torch.isfinite(sums).all():
        raise ValueError(f"the calibration {what} contain NaN or infinity")


def moments_of(
    layer: nn.Module, hidden: Tensor, rotary: Rotary, names: Sequence[str], damping: float
) -> tuple[dict[str, Moments], Tensor]:
    """Return the moments of the named linears of the layer, by name, and the layer's outputs.

    The moments are those of the rows of all processes, the outputs those of the rows of this one.
    """
    with gathering(layer, names, damping) as moments, weighing(layer) as fractions:
        outputs = advance(layer, hidden, rotary)
    distinct = {id(sums): sums for sums in moments.values()}.values()
    processes.add_up(*(tensor for sums in distinct for tensor in (sums.gram, sums.squares)))
    for name, sums in moments.items():
        sums.fraction = fractions[name.partition(".")[0]]
    return moments, outputs


@contextmanager
def gathering(layer: nn.Module, linears: Sequence[str], damping: float) -> Iterator[dict[str, Moments]]:
    """Accumulate the moments of every named linear of ``layer`` over the forward passes in the ``with`` block."""
    leaders = leaders_of(linears)
    moments: dict[str, Moments] = {}
    hooks = []
    for name in set(leaders.values()):
        linear = layer.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        size, of_inputs = side(name, linear.out_features, linear.in_features)
        moments[name] = Moments(size, of_inputs, damping, linear.weight.device)
        hooks.append(linear.register_forward_hook(_adder(moments[name])))
    try:
        yield {name: moments[leader] for name, leader in leaders.items()}
    finally:
        for hook in hooks:
            hook.remove()


def side(name: str, out_features: int, in_features: int) -> tuple[int, bool]:
    """Return the size of the Gram matrix of a linear, by its name inside the layer, and whether it is of the inputs."""
    of_inputs = out_features > in_features or any(name in group for group in SAME_INPUT)
    return in_features if of_inputs else out_features, of_inputs


def leaders_of(linears: Sequence[str]) -> dict[str, str]:
    """Map each linear, by its name inside the layer, to the first linear with the same input, whose moments it uses."""
    groups = {name: group for group in SAME_INPUT for name in group}
    return {name: next(other for other in linears if other in groups.get(name, (name,))) for name in linears}


def _adder(moments: Moments) -> Any:
    def add(linear: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        y = output if linear.bias is None else output - linear.bias
        moments.add(inputs[0].flatten(0, -2), y.flatten(0, -2))

    return add


@contextmanager
def weighing(layer: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Measure the contributions of attention and MLP over the forward passes in the ``with`` block.

    After the block, the dictionary holds for :data:`ATTENTION` and :data:`MLP` the median over the tokens of
    ``|contribution|^2 / |stream after the layer|^2`` [], float64. The mean would not do: in a few
    tokens a massive activation makes up nearly all of the stream.
    """
    fractions: dict[str, Tensor] = {}
    per_token: dict[str, list[Tensor]] = {ATTENTION: [], MLP: []}
    streams: list[Tensor] = []

    def keep_stream(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        streams.append(inputs[0])

    def weigh(_: nn.Module, inputs: tuple[Tensor, ...], outputs: Any) -> None:
        between, after = streams.pop(), outputs[0] if isinstance(outputs, tuple) else outputs
        power = after.double().square().sum(-1).clamp(min=1e-300)
        for half, written in ((ATTENTION, between - inputs[0]), (MLP, after - between)):
            per_token[half].append((written.double().square().sum(-1) / power).flatten())

    hooks = [
        layer.get_submodule(BETWEEN).register_forward_pre_hook(keep_stream),
        layer.register_forward_hook(weigh),
    ]
    try:
        yield fractions
    finally:
        for hook in hooks:
            hook.remove()
        fractions |= {half: _of_all(torch.cat(parts)).median() for half, parts in per_token.items() if parts}


def _of_all(values: Tensor) -> Tensor:
    """Return the values [n] of all processes in one tensor."""
    return torch.cat([part.to(values.device) for part in processes.of_all(values.cpu())])
