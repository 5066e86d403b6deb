"""A kernel's problem and its block sizes: plain numbers, known before the kernel is traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from neuronmm.kernels.hardware import DTYPE_BYTES
from neuronmm.kernels.ops import Form, KernelError

FP8 = "float8_e4m3"
"""The eight-bit float of all NeuronCores, as NKI calls it: e4m3 with infinities, hence numbers up to 240."""
FACTOR_BYTES = {**DTYPE_BYTES, FP8: 1}
"""Element sizes of the dtypes that factors may have."""
LARGEST = 1 << 20
"""Upper bound of every dimension. No model exceeds it, and the solver looks at every panel of a weight."""


@dataclass(frozen=True)
class Problem:
    """``y = B (A x)``.

    Dimensions: ``x`` [inputs, tokens], ``A`` [rank, inputs], ``B`` [outputs, rank].

    The options are those of the kernel (:class:`.objects.Options`). ``form``: that of the linear. ``pivots``: in the
    row form, the first of ``rank`` consecutive outputs. ``factors``: dtype of A and B, "": that of the activations.

    Raises:
        KernelError: a size or a dtype is out of range, or the input is normalised and has pivots.
    """

    tokens: int
    inputs: int
    rank: int
    outputs: int
    dtype: str = "bfloat16"
    norm: bool = False
    residual: bool = False
    tokens_first: bool = False
    form: Form = Form.TWO
    pivots: int = 0
    factors: str = ""

    def __post_init__(self) -> None:
        _check(self, (self.tokens, self.inputs, self.rank, self.outputs))
        if self.norm and self.form is Form.COLUMNS:
            raise KernelError("a kernel cannot normalise an input with pivots: normalise it before the kernel")

    @property
    def multiply_adds(self) -> int:
        identity = 0 if self.form is Form.TWO else self.rank
        return self.tokens * self.rank * (self.inputs + self.outputs - identity)

    def __str__(self) -> str:
        sizes = f"x [{self.inputs}, {self.tokens}], A [{self.rank}, {self.inputs}], B [{self.outputs}, {self.rank}]"
        return sizes if self.form is Form.TWO else f"{sizes}, pivoted {self.form.value}"


class Pivots(NamedTuple):
    """Consecutive features that are pivots: ``number`` of them, from ``first`` on."""

    first: int
    number: int

    @property
    def end(self) -> int:
        """The feature after the last pivot."""
        return self.first + self.number


@dataclass(frozen=True)
class MlpProblem:
    """``down(silu(gate(x)) * up(x))``.

    Dimensions: ``x`` [hidden, tokens], the activation [intermediate, tokens]; ``gate``, ``up`` and ``down`` are ranks.

    ``shared``: gate and up have one A, and ``up`` is not used. ``gate_pivots``, ``up_pivots``, ``down_pivots``: as in
    :class:`Ranks`. ``factors``: as in :class:`Problem`. The other options are those of the kernel.

    Raises:
        KernelError: a size or a dtype is out of range.
    """

    tokens: int
    hidden: int
    intermediate: int
    gate: int
    up: int
    down: int
    dtype: str = "bfloat16"
    shared: bool = False
    norm: bool = False
    residual: bool = False
    tokens_first: bool = False
    gate_pivots: Pivots | None = None
    up_pivots: Pivots | None = None
    down_pivots: int = 0
    factors: str = ""

    def __post_init__(self) -> None:
        _check(self, (self.tokens, self.hidden, self.intermediate, self.gate, self.up, self.down))

    @property
    def ranks(self) -> Ranks:
        pivots = self.gate_pivots, self.up_pivots, self.down_pivots
        return Ranks(self.gate, self.gate if self.shared else self.up, self.down, self.intermediate, *pivots)

    @property
    def multiply_adds(self) -> int:
        up_rank = self.ranks.up
        first = self.hidden * (self.gate + up_rank * (not self.shared)) + self.intermediate * (self.gate + up_rank)
        return self.tokens * (first + self.down * (self.intermediate + self.hidden) - self.ranks.identities)

    def __str__(self) -> str:
        ranks = f"ranks {self.gate}, {self.up}, {self.down}" + (", one A for gate and up" if self.shared else "")
        ranks += ", pivoted" if self.ranks.identities else ""
        return f"MLP of x [{self.hidden}, {self.tokens}], intermediate {self.intermediate}, {ranks}"


def _check(problem: Problem | MlpProblem, sizes: tuple[int, ...]) -> None:
    if min(sizes) < 1 or max(sizes) > LARGEST:
        raise KernelError(f"tiling: sizes must be positive and at most {LARGEST}: {problem!r}")
    if problem.dtype not in DTYPE_BYTES:
        raise KernelError(f"tiling: dtype {problem.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    if problem.factors not in ("", problem.dtype) and (problem.factors != FP8 or problem.dtype == "float32"):
        raise KernelError(
            f"tiling: factors in {problem.factors!r} with activations in {problem.dtype}: must be of one dtype, or "
            f"the factors {FP8} and the activations of 16 bits"
        )


def scaled(problem: Problem | MlpProblem) -> bool:
    """Return whether A and B have scales: their dtype is not that of the activations."""
    return problem.factors not in ("", problem.dtype)


def factor_bytes(problem: Problem | MlpProblem) -> int:
    """Return the bytes of an element of A and B."""
    return FACTOR_BYTES[problem.factors or problem.dtype]


@dataclass(frozen=True)
class Ranks:
    """Static sizes of an MLP: the ranks of gate, up and down, the intermediate dimension, and the pivots.

    ``gate_pivots``, ``up_pivots``: the intermediate features that are the pivots of a linear in the row form; None: the
    linear has two factors. ``down_pivots``: down has the column form, and this number of pivots, the last intermediate
    features; 0: it has two factors. A linear has ``rank`` pivots, or fewer if the MLP is one core's part of a larger
    one. Pivot ``i`` is element ``i`` of the rank-r intermediate.
    """

    gate: int
    up: int
    down: int
    intermediate: int
    gate_pivots: Pivots | None = None
    up_pivots: Pivots | None = None
    down_pivots: int = 0

    @property
    def pivots(self) -> tuple[Pivots | None, Pivots | None, Pivots | None]:
        """The pivots of gate, up and down."""
        down = Pivots(self.intermediate - self.down_pivots, self.down_pivots)
        return self.gate_pivots, self.up_pivots, down if down.number else None

    @property
    def identities(self) -> int:
        """Numbers in the identity blocks of the three linears, zeros beside the identity included."""
        sizes = zip((self.gate, self.up, self.down), self.pivots, strict=True)
        return sum(rank * pivots.number for rank, pivots in sizes if pivots)


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a kernel; :mod:`.tiling` chooses them.

    ``tokens``: tokens per strip (the paper's B_M). A strip stays in SBUF while every weight streams past once.
    ``moving``: tokens per matmul instruction, at most 512.
    ``depth``: input chunks (of 128) in SBUF at a time. ``A x`` is summed over these blocks in float32. 0: the input of
    a strip is in SBUF at once, and ``A x`` accumulates in PSUM alone.
    ``intermediate``: the same for the MLP's activation and the down projection.
    ``panels``: weight panels per tile. Two tiles are in flight, so this hides the latency of a transfer.

    Raises:
        ValueError: a size is out of range.
    """

    tokens: int = 512
    moving: int = 512
    depth: int = 0
    intermediate: int = 8
    panels: int = 1

    def __post_init__(self) -> None:
        positive = self.tokens >= 1 and 1 <= self.moving <= 512 and self.panels >= 1
        if not (positive and self.depth >= 0 and self.intermediate >= 0):
            raise ValueError(f"block sizes out of range: {self}")
