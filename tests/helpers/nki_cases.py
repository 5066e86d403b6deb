"""Random calls of the NKI kernels: run under the emulator, in torch in the same dtype, and in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from error_rule import assert_twice_plain
from neuronmm.emulator.nki import Run, TensorSpec, nki_modules, run
from neuronmm.kernels.factors import Form
from neuronmm.kernels.fp8 import Fp8, quantise_fp8
from neuronmm.kernels.hardware import TRN1, TRN2
from neuronmm.kernels.nki.choice import factor_plan, linear_blocks, linear_plans, mlp_blocks, mlp_plans
from neuronmm.kernels.nki.forms import linear_packings, mlp_packings
from neuronmm.kernels.nki.layout import Packing, pack
from neuronmm.kernels.nki.problem import Blocks, Pivots, Ranks
from neuronmm.kernels.nki.table import starts, table

CORES = {"neuronxcc": TRN1, "nki": TRN2}
"""The first Trainium generation that each dialect supports."""


Pivoted = int | str | tuple[int | str, int] | None
"""The pivots of one linear of a :class:`Case`."""


def judge(cases: Sequence[Case], execute: Callable[[Case], Tensor]) -> None:
    """Assert the rule of kernels: at most twice the error of plain torch in the cases' dtype."""
    assert_twice_plain(cases, execute, Case.plain, Case.exact)


def to_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype is torch.float8_e4m3fn:  # up to 240 the bits are those of the device's e4m3
        return tensor.contiguous().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3)
    return tensor.contiguous().numpy()


def to_torch(array: np.ndarray) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    if array.dtype == ml_dtypes.float8_e4m3:
        return torch.from_numpy(array.view(np.uint8).copy()).view(torch.float8_e4m3fn)
    return torch.from_numpy(array.copy())


def normalised(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the features (axis 0), as transformers computes it."""
    y = x.float() if x.dtype is not torch.float64 else x
    return weight[:, None] * (y * torch.rsqrt(y.square().mean(0, keepdim=True) + epsilon)).to(x.dtype)


@dataclass
class Case:
    """One call of the linear's or the MLP's kernel.

    Dimensions: activations [features, tokens] whatever the layout, weights [out, in], ``norm`` [in], ``bias`` [out].

    ``weights``: (A, B) of a linear, or (A, B) of gate, up and down; a shared A is the same tensor twice.

    ``pivots`` of each linear: None with two factors, the first of the pivots in the row form, or "columns". The weights
    are those that the form stores. A linear of an MLP may have fewer pivots than its rank: (first or "columns", count).
    """

    x: Tensor
    weights: tuple[Tensor, ...]
    norm: Tensor | None = None
    residual: Tensor | None = None
    bias: Tensor | None = None
    tokens_first: bool = False
    epsilon: float = field(default=0.0)
    pivots: tuple[Pivoted, ...] = (None, None, None)
    fp8: tuple[Fp8, ...] = ()

    @classmethod
    def linear(
        cls, inputs: int, rank: int, out: int, tokens: int, dtype: torch.dtype, pivots: Pivoted = None,
        **options: Any,
    ) -> Case:  # fmt: skip
        return cls._make(tokens, inputs, out, stored(inputs, rank, out, pivots), dtype, pivots=(pivots,), **options)

    @classmethod
    def mlp(
        cls, hidden: int, middle: int, ranks: tuple[int, int, int], tokens: int, dtype: torch.dtype, **options: Any
    ) -> Case:
        sizes = (hidden, ranks[0], middle), (hidden, ranks[1], middle), (middle, ranks[2], hidden)
        pivots = options.get("pivots", (None, None, None))
        shapes = [shape for size, first in zip(sizes, pivots, strict=True) for shape in stored(*size, first)]
        return cls._make(tokens, hidden, hidden, shapes, dtype, **options)

    @classmethod
    def _make(
        cls, tokens: int, inputs: int, out: int, shapes: list[tuple[int, int]], dtype: torch.dtype, seed: int = 0,
        norm: bool = False, residual: bool = False, shared: bool = False, bias: bool = False,
        tokens_first: bool = False, pivots: tuple[Pivoted, ...] = (None, None, None), fp8: bool = False,
    ) -> Case:  # fmt: skip
        random = torch.Generator().manual_seed(seed)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=random) * scale).to(dtype)

        weights = [draw(*shape, scale=shape[1] ** -0.5) for shape in shapes]
        if shared:
            weights[2] = weights[0]
        rounded = tuple(quantise_fp8(w) for w in weights) if fp8 else ()
        if fp8:
            weights = [w.dequantise(torch.float32) for w in rounded]
            weights[2:3] = weights[:1] if shared else weights[2:3]
        x, extra = draw(inputs, tokens), draw(out, tokens)
        gain, column = 1 + draw(inputs, scale=0.2), draw(out)
        return cls(
            x, tuple(weights), gain if norm else None, extra if residual else None, column if bias else None,
            tokens_first, 0.03 if norm else 0.0, pivots, rounded,
        )  # fmt: skip

    @property
    def shared(self) -> bool:
        return self.is_mlp and self.weights[0] is self.weights[2]

    def plain(self) -> Tensor:
        """Return the result in torch, in the case's own dtype."""
        return self._result(lambda t: t.to(self.x.dtype))

    def exact(self) -> Tensor:
        """Return the result in torch, in float64."""
        return self._result(lambda t: t.double())

    def _result(self, cast: Any) -> Tensor:
        x, w = cast(self.x), [cast(t) for t in self.weights]
        if self.norm is not None:
            x = normalised(x, cast(self.norm), self.epsilon)
        y = pivoted(w[0], w[1], x, self.pivots[0])
        if len(w) == 6:
            y = pivoted(w[4], w[5], silu(y) * pivoted(w[2], w[3], x, self.pivots[1]), self.pivots[2])
        if self.bias is not None:
            y = y + cast(self.bias)[:, None]
        return y if self.residual is None else y + cast(self.residual)

    def packings(self) -> tuple[Packing, ...]:
        """How the factors are packed."""
        inputs, size = self.x.shape[0], 1 if self.fp8 else self.x.itemsize
        if self.is_mlp:
            return mlp_packings(inputs, self.ranks(), self.shared, size)
        return linear_packings(inputs, len(self.weights[0]), self.outputs, size, *self.form)

    def packed(self) -> list[np.ndarray]:
        """Return the packed factors; those that read the input include the norm's weight. In fp8, a table is last."""
        readers, packings = (0,) if len(self.weights) == 2 else (0, 2), self.packings()
        if self.fp8:
            own = [i for i in range(len(packings)) if i != 2 or not self.shared]
            numbers = table([self.fp8[i].scales for i in own], [packings[i] for i in own], self.norm, self.bias)
            factors = [pack(w.values, None, packing) for w, packing in zip(self.fp8, packings, strict=True)]
            return [to_numpy(t) for t in (*factors, numbers)]
        parts = enumerate(zip(self.weights, packings, strict=True))
        return [to_numpy(pack(t, self.norm if i in readers else None, packing)) for i, (t, packing) in parts]

    @property
    def is_mlp(self) -> bool:
        return len(self.weights) == 6

    @property
    def form(self) -> tuple[Form, int]:
        """Form and pivots of a linear."""
        first = self.pivots[0]
        return (Form.ROWS, first) if isinstance(first, int) else (Form.COLUMNS if first else Form.TWO, 0)

    @property
    def outputs(self) -> int:
        last = self.pivots[-1 if self.is_mlp else 0]
        return len(self.weights[-1]) + (len(self.weights[-2]) if isinstance(last, int) else 0)

    def ranks(self) -> Ranks:
        gate, up, down = (len(self.weights[i]) for i in (0, 2, 4))
        counted = [first_and_count(*one) for one in zip(self.pivots, (gate, up, down), strict=True)]
        rows = (Pivots(first, count) if isinstance(first, int) else None for first, count in counted[:2])
        return Ranks(gate, up, down, len(self.weights[1]) + counted[0][1], *rows, counted[2][1])

    def arguments(self) -> list[np.ndarray]:
        """Return the kernel's input tensors in the entries' order, in the case's layout."""
        extras = [] if self.bias is None or self.fp8 else [to_numpy(self.bias)]
        extras += [] if self.residual is None else [to_numpy(self._laid(self.residual))]
        return [to_numpy(self._laid(self.x)), *self.packed(), *extras]

    def output(self) -> TensorSpec:
        shape = (self.outputs, self.x.shape[1])
        return TensorSpec(shape[::-1] if self.tokens_first else shape, to_numpy(self.x).dtype)

    def result(self, array: np.ndarray) -> Tensor:
        """Return an output of the kernel as [features, tokens]."""
        return self._laid(to_torch(array))

    def run(self, kernels: Any, dialect: str, sizes: Blocks | None = None) -> Tensor:
        """Run the kernel of ``kernels`` on a dialect under the emulator and return its result."""
        return self.result(self.trace(kernels, dialect, sizes).outputs[0])

    def trace(self, kernels: Any, dialect: str, sizes: Blocks | None = None, shapes: bool = False) -> Run:
        """Run the kernel under the emulator; ``sizes`` None: the tiling solver chooses. ``shapes``: without values."""
        core = CORES[dialect]

        def body(x: Any, *tensors: Any) -> None:
            *inputs, y = tensors
            norm_residual_layout = self.norm is not None, self.residual is not None, self.tokens_first
            if len(self.weights) == 2:
                rank = len(self.weights[0])
                chosen = sizes or linear_blocks(
                    x, tensors[0], rank, self.outputs, core, *norm_residual_layout, *self.form
                )
                kernel = kernels.low_rank_matmul.low_rank_matmul
            else:
                chosen = sizes or mlp_blocks(x, tensors[0], self.ranks(), self.shared, core, *norm_residual_layout)
                kernel = kernels.low_rank_mlp.low_rank_swiglu_mlp
            d = getattr(kernels, f"dialect_{dialect}").Dialect()
            kernel(d=d, y=y, blocks=chosen, **self.named(kernels, x, *inputs))

        arguments: list[Any] = list(self.arguments())
        if shapes:
            arguments = [TensorSpec(a.shape, a.dtype) for a in arguments]
        return run(body, *arguments, outputs=[self.output()], core=core)

    def named(self, kernels: Any, x: Any, *tensors: Any, partial: bool = False) -> dict[str, Any]:
        """Return the common arguments of kernel body and torch reference, from tensors in the entries' order."""
        inputs = list(tensors)
        residual = inputs.pop() if self.residual is not None else 0.0
        bias = inputs.pop() if self.bias is not None and not self.fp8 else 0.0
        options = kernels.objects.Options(
            self.epsilon, self.bias is not None, bias, self.residual is not None, residual, self.tokens_first, partial
        )
        if len(self.weights) == 6:
            return {"x": x, "w": self.factors(kernels, inputs), "options": options}
        plans = linear_plans(self.x.shape[0], len(self.weights[0]), self.outputs, inputs[0], *self.form)
        scales = (True, inputs.pop()) if self.fp8 else (False, 0.0)
        at = starts(plans, self.norm is not None)
        a, b = (kernels.objects.factor(*each[:2], *scales, each[2]) for each in zip(inputs, plans, at, strict=True))
        return {"x": x, "a": a, "b": b, "options": options}

    def factors(self, kernels: Any, tensors: list[Any]) -> Any:
        """The MLP's weights as its kernel takes them."""
        plans = mlp_plans(self.x.shape[0], self.ranks(), tensors[0], self.shared)
        scales = (True, tensors[6], starts(plans, self.norm is not None, self.shared)) if self.fp8 else ()
        return kernels.low_rank_mlp.weights(tensors[:6], plans, self.shared, *scales)

    def _laid(self, activation: Tensor) -> Tensor:
        return activation.T if self.tokens_first else activation


def first_and_count(pivots: Pivoted, rank: int) -> tuple[int | str | None, int]:
    """Split the pivots of a linear into their first, or "columns", and their number; ``rank`` if it is not given."""
    if isinstance(pivots, tuple):
        return pivots
    return pivots, 0 if pivots is None else rank


def stored(inputs: int, rank: int, out: int, pivots: Pivoted) -> list[tuple[int, int]]:
    """The shapes of A and B in their form."""
    first, count = first_and_count(pivots, rank)
    columns = first == "columns"
    return [(rank, inputs - count * columns), (out - count * (not columns), rank)]


def pivoted(a: Tensor, b: Tensor, x: Tensor, pivots: Pivoted) -> Tensor:
    """``B (A x)`` with the factors of a form, for x [in, tokens], in their dtype."""
    first, count = first_and_count(pivots, len(a))
    if first == "columns":
        h = a @ x[:-count]
        return b @ torch.cat([h[:count] + x[-count:], h[count:]])
    h = a @ x
    y = b @ h
    return torch.cat([y[:first], h[:count], y[first:]]) if isinstance(first, int) else y


Baseline = tuple[str, Callable[..., None], list[Tensor], Tensor, Tensor]


def baselines_of(case: Case, kernels: Any, dialect: str, sizes: Blocks) -> Iterator[Baseline]:
    """Yield (name, body, tensors, exact, plain) of the baselines of a linear's case."""
    new_dialect, b = getattr(kernels, f"dialect_{dialect}").Dialect, kernels.baselines
    x, (A, B), rank = case.x, case.weights, len(case.weights[0])
    exact, plain = case.exact(), case.plain()

    def packed(w: Any, rows: int, columns: int, x: Any) -> Any:
        return kernels.objects.factor(w, factor_plan(rows, columns, x))

    def recomputing(x: Any, a: Any, v: Any, y: Any) -> None:
        fa, fb = packed(a, x.shape[0], rank, x), packed(v, rank, y.shape[0], x)
        b.recomputing(new_dialect(), x, fa, fb, y, sizes, columns=128)

    def sequential(x: Any, u: Any, v: Any, y: Any) -> None:
        b.sequential(new_dialect(), x, u, v, y, b.Tutorial(rows=1, columns=1))

    def blocked(w: Any, x: Any, y: Any) -> None:
        b.dense_blocked(new_dialect(), w, x, y, b.Tutorial())

    def strips(x: Any, w: Any, y: Any) -> None:
        b.dense_strips(new_dialect(), x, packed(w, x.shape[0], y.shape[0], x), y, sizes)

    one_matmul = A.double() @ x.double(), A @ x
    yield "naive fusion (Algorithm 1)", recomputing, [x, pack(A), pack(B)], exact, plain
    yield "sequential XUV", sequential, [x, A.T, B.T], exact.T, plain.T
    yield "dense, tutorial blocking", blocked, [A.T, x], *one_matmul
    yield "dense, strips", strips, [x, pack(A)], *one_matmul


def two_kernel_mlp(case: Case, kernels: Any, dialect: str, sizes: Blocks) -> Tensor:
    """Run the paper's split of an MLP into two kernels, with the activation in HBM between them."""

    def body(x: Any, *tensors: Any) -> None:
        d = getattr(kernels, f"dialect_{dialect}").Dialect()
        *factors, y = tensors
        w = case.factors(kernels, factors)
        act = d.hbm((case.ranks().intermediate, x.shape[1]), x.dtype)
        kernels.baselines.gate_up(d, x, w, act, sizes)
        kernels.low_rank_matmul.low_rank_matmul(d, act, w.down_a, w.down_b, y, sizes, kernels.objects.Options())

    return case.result(run(body, *case.arguments(), outputs=[case.output()], core=CORES[dialect]).outputs[0])


def kernel_modules() -> SimpleNamespace:
    """Return the kernel modules of the project, on both emulated dialects."""
    with nki_modules():
        from neuronmm.kernels.nki import (
            baselines,
            dialect_neuronxcc,
            dialect_nki,
            entry_neuronxcc,
            entry_nki,
            low_rank_matmul,
            low_rank_mlp,
            objects,
            problem,
        )
    return SimpleNamespace(
        baselines=baselines, problem=problem, objects=objects, low_rank_matmul=low_rank_matmul,
        low_rank_mlp=low_rank_mlp, dialect_neuronxcc=dialect_neuronxcc, dialect_nki=dialect_nki,
        entry_neuronxcc=entry_neuronxcc, entry_nki=entry_nki,
    )  # fmt: skip
