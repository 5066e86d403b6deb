"""What a strip of tokens costs a low-rank kernel: modelled time, HBM traffic and SBUF, stage by stage.

The model counts what the kernels of :mod:`neuronmm.kernels.nki` do for a strip: the tensor engine's cycles, the DMA
time of every transfer at the efficiency of its rows, the Vector engine's additions. Each stage takes as long as its
slowest engine, or as the latency of its ring of two weight tiles; what cannot overlap (the first loads, the last store)
is added. Every buffer is counted, twice where double buffering needs two.

Source of the memory and traffic terms: arXiv 2510.25977, Eq. 10 and 11, with the buffers that those leave out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from neuronmm.kernels.hardware import DTYPE_BYTES, NeuronCore
from neuronmm.kernels.nki.blocks import Blocks
from neuronmm.kernels.nki.layout import Packing
from neuronmm.kernels.nki.objects import PARTITIONS
from neuronmm.kernels.ops import KernelError

LARGEST = 1 << 20
"""No dimension of a model is larger; the solver looks at every panel of a weight."""
LONG_ROW = 512
"""Tokens from which the kernel moves activations chunk by chunk and stores results as weights are loaded."""


@dataclass(frozen=True)
class Problem:
    """``y = B (A x)``: sizes of ``x`` [in, tokens], ``A`` [rank, in], ``B`` [out, rank]; options as the kernel's."""

    tokens: int
    inputs: int
    rank: int
    outputs: int
    dtype: str = "bfloat16"
    norm: bool = False
    residual: bool = False
    tokens_first: bool = False

    def __post_init__(self) -> None:
        _check(self, (self.tokens, self.inputs, self.rank, self.outputs))

    @property
    def multiply_adds(self) -> int:
        return self.tokens * self.rank * (self.inputs + self.outputs)

    def __str__(self) -> str:
        return f"x [{self.inputs}, {self.tokens}], A [{self.rank}, {self.inputs}], B [{self.outputs}, {self.rank}]"


@dataclass(frozen=True)
class MlpProblem:
    """``down(silu(gate(x)) * up(x))`` with ranks ``gate``, ``up`` and ``down``; ``shared``: gate and up have one A."""

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

    def __post_init__(self) -> None:
        _check(self, (self.tokens, self.hidden, self.intermediate, self.gate, self.up, self.down))

    @property
    def multiply_adds(self) -> int:
        up_rank = self.gate if self.shared else self.up
        first = self.hidden * (self.gate + up_rank * (not self.shared)) + self.intermediate * (self.gate + up_rank)
        return self.tokens * (first + self.down * (self.intermediate + self.hidden))

    def __str__(self) -> str:
        ranks = f"ranks {self.gate}, {self.up}, {self.down}" + (", one A for gate and up" if self.shared else "")
        return f"MLP of x [{self.hidden}, {self.tokens}], intermediate {self.intermediate}, {ranks}"


def _check(problem: Problem | MlpProblem, sizes: tuple[int, ...]) -> None:
    if min(sizes) < 1 or max(sizes) > LARGEST:
        raise KernelError(f"tiling: sizes must be positive and at most {LARGEST}: {problem!r}")
    if problem.dtype not in DTYPE_BYTES:
        raise KernelError(f"tiling: dtype {problem.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")


class Streamed(NamedTuple):
    """A packed weight that passes by once a strip, ``deep`` row chunks at a time in ``turns`` turns."""

    how: Packing
    deep: int
    turns: int = 1


@dataclass(frozen=True)
class Stage:
    """One stage of a strip: its time and its engines' busy times in ns, HBM bytes, SBUF bytes a partition."""

    ns: float
    tensor: float
    dma: float
    vector: float
    traffic: int
    sbuf: int


class Strip:
    """The stages of a strip of ``tokens``; ``fill`` and ``drain`` (ns) are what overlaps with nothing."""

    def __init__(self, problem: Problem | MlpProblem, blocks: Blocks, core: NeuronCore, tokens: int) -> None:
        self.problem, self.blocks, self.core, self.tokens = problem, blocks, core, tokens
        self.size = DTYPE_BYTES[problem.dtype]
        self.moving = min(blocks.moving, tokens)
        passes = core.fp32_passes if self.size == 4 else 1
        whole, rest = divmod(tokens, self.moving)
        runs = [max(t, core.matmul_min_cycles) for t in [self.moving] * whole + [rest] * (rest > 0)]
        self.product = sum(passes * t + core.matmul_overhead_cycles for t in runs) / core.tensor_ghz
        self.gathers = problem.tokens_first or tokens < LONG_ROW
        self.rows = 1 if problem.tokens <= PARTITIONS else 2  # tiles with one token a partition; two in turn
        # float32 is transposed by an identity where the tensor engine has no transpose mode
        self.identity = PARTITIONS * 4 if problem.tokens_first and self.size == 4 and core.name == "v2" else 0
        self.stages = self._linear(problem) if isinstance(problem, Problem) else self._mlp(problem)

    def _linear(self, p: Problem) -> list[Stage]:
        a, b = Packing.of(p.inputs, p.rank, self.size), Packing.of(p.rank, p.outputs, self.size)
        return [self._first([a], p.inputs), self._last(b, p.outputs, self._held(a))]

    def _mlp(self, p: MlpProblem) -> list[Stage]:
        def of(rows: int, columns: int) -> Packing:
            return Packing.of(rows, columns, self.size)

        up_rank = p.gate if p.shared else p.up
        inputs = [of(p.hidden, p.gate)] + ([] if p.shared else [of(p.hidden, p.up)])
        gate_b, up_b = of(p.gate, p.intermediate), of(up_rank, p.intermediate)
        down_a, down_b = of(p.intermediate, p.down), of(p.down, p.hidden)
        chunks = down_a.rows.count
        whole = max(gate_b.group, up_b.group)
        block = min(chunks, -(-(self.blocks.intermediate or chunks) // whole) * whole)
        turns = -(-chunks // block)
        streamed = [
            Streamed(gate_b, gate_b.rows.count), Streamed(up_b, up_b.rows.count), Streamed(down_a, block, turns),
        ]  # fmt: skip
        act = block * self.tokens * self.size  # once: the next block's products come after the last that read this one
        held = sum(self._held(f) for f in inputs) + act + self._sums(down_a, turns)
        middle = self._stage(streamed, 0, 0.0, self._additions(down_a, turns), held)
        return [self._first(inputs, p.hidden), middle, self._last(down_b, p.hidden, self._held(down_a))]

    def _first(self, factors: list[Packing], inputs: int) -> Stage:
        """``A x`` for every factor that reads the input."""
        p, size = self.problem, self.size
        deep = factors[0].rows.count
        depth = deep if p.tokens_first else min(self.blocks.depth or deep, deep)
        turns = -(-deep // depth)
        moved = self.tokens * inputs * size
        whole = self.tokens == p.tokens and self.tokens < LONG_ROW
        one = p.tokens == 1 and turns == 1  # moved as one row, by one engine, and laid over the partitions
        row = inputs * size if p.tokens_first or one else self.tokens * size * (depth if whole else 1)
        copies = 1 if turns == 1 else 2
        early = turns == 1 and self.tokens < p.tokens  # the next strip's input comes while the last stage runs
        self.next = (depth * self.tokens * size, self._dma(moved, row)) if early else (0, 0.0)
        sbuf = copies * depth * self.tokens * size + sum(self._sums(f, turns) for f in factors)
        sbuf += (p.tokens_first or one) * self.rows * deep * PARTITIONS * size
        sbuf += p.norm * (4 * self.tokens + 2 * (self.moving + PARTITIONS) * size + 8)
        vector = sum(self._additions(f, turns) for f in factors)
        first_panel = factors[0].elements * size * factors[0].group / factors[0].columns.count
        self.fill = self.core.dma_start_ns + (self._dma(moved, row) + self._dma(int(first_panel), 1 << 12)) / turns
        streamed = [Streamed(f, depth, turns) for f in factors]
        now = 0.0 if early else self._dma(moved, row)
        return self._stage(streamed, moved, now, vector, sbuf, turned=deep if p.tokens_first and not one else 0)

    def _last(self, b: Packing, outputs: int, h: int) -> Stage:
        """``B h`` and the stores."""
        p, size = self.problem, self.size
        outs = b.columns.count
        moved = self.tokens * outputs * size * (2 if p.residual else 1)
        whole = self.tokens == p.tokens and self.tokens < LONG_ROW
        row = outputs * size if p.tokens_first else self.tokens * size * (outs if whole else 1)
        gathered = outs if self.gathers else min(outs, b.group * self.blocks.panels)
        out = gathered * self.tokens * size * (1 if gathered == outs else 2) * (2 if p.residual else 1)
        out += (p.tokens_first or (p.residual and p.tokens == 1)) * self.rows * outs * PARTITIONS * size
        last = 1.0 if self.gathers else 1 / outs  # long rows leave chunk by chunk, as they are computed
        self.drain = self.core.dma_start_ns + self._dma(moved, row) * last
        held, loading = self.next
        moving = self._dma(moved, row) + loading
        streamed = [Streamed(b, b.rows.count)]
        return self._stage(streamed, moved, moving, 0.0, h + out + held, turned=p.tokens_first * outs)

    def _stage(
        self, streamed: list[Streamed], moved: int, moving_ns: float, vector: float, held: int, turned: int = 0
    ) -> Stage:
        """A stage that streams weights past the strip, and moves ``moved`` bytes of activations besides.

        ``turned``: chunks of activations that the tensor engine transposes, 128 tokens at a time.
        """
        core, size = self.core, self.size
        tensor = weights = 0.0
        tiles = tile = traffic = 0
        for how, deep, turns in streamed:
            panels = len(how.chunks_of_panels())
            row = deep * min(how.group, how.columns.count) * how.columns.width * size
            tensor += how.rows.count * how.columns.count * self.product
            weights += self._dma(how.elements * size, row)
            traffic += how.elements * size
            tiles += turns * -(-panels // self.blocks.panels)
            tile = max(tile, min(self.blocks.panels, panels) * row)
        # transpositions come before or after the products; the simulator hides about half of their evictions' time
        blocks = turned * -(-self.tokens // PARTITIONS)
        turning = blocks * (PARTITIONS + core.access_cycles) / core.vector_ghz / 2
        # two tiles in turn: each is loaded, after a start latency, once the one before the last is used up
        ring = (tiles * core.dma_start_ns + weights + tensor) / 2
        ns = max(tensor, weights + moving_ns, vector, ring) + turning
        return Stage(
            ns, tensor, weights + moving_ns, vector + turning, traffic + moved, held + self.identity + 2 * tile
        )

    def _dma(self, count: int, row: int) -> float:
        return count / (self.core.dma_rate * self.core.row_efficiency(row))

    def _held(self, a: Packing) -> int:
        """The product of a factor, in the activation's dtype."""
        return a.columns.count * self.tokens * self.size

    def _sums(self, a: Packing, turns: int) -> int:
        """A product in the making: float32 sums shrink panel by panel as the last block leaves its result."""
        if turns == 1:
            return self._held(a)
        return a.columns.count * self.tokens * 4 + a.group * self.tokens * self.size

    def _additions(self, a: Packing, turns: int) -> float:
        """The vector engine's additions of the blocks' sums."""
        banks = a.columns.count * max(1.0, self.tokens / self.core.moving_columns)
        return (turns - 1) * banks * (self.core.moving_columns + self.core.access_cycles) / self.core.vector_ghz
