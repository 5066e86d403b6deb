"""The cost of a strip of tokens in a low-rank kernel: modelled time, HBM traffic and SBUF, stage by stage.

The model counts what the kernels of this package do per strip: the tensor engine's cycles, the DMA time of every
transfer at the efficiency of its rows, and the vector engine's additions. A stage takes as long as its slowest engine,
or as the latency of its ring of two weight tiles. What overlaps with nothing (the first loads, the last store) is
added. Every buffer is counted, twice where it is double-buffered.

Source of the memory and traffic terms: arXiv 2510.25977, Eq. 10 and 11, plus the buffers that they leave out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from neuronmm.kernels.hardware import DTYPE_BYTES, NeuronCore
from neuronmm.kernels.nki.forms import linear_packings, mlp_packings
from neuronmm.kernels.nki.layout import Packing
from neuronmm.kernels.nki.objects import LONG_ROW, PARTITIONS
from neuronmm.kernels.nki.problem import Blocks, MlpProblem, Problem, factor_bytes, scaled


class Streamed(NamedTuple):
    """A packed weight that is read once per strip, in ``turns`` blocks of at most ``deep`` row chunks."""

    packing: Packing
    deep: int
    turns: int = 1


@dataclass(frozen=True)
class Stage:
    """One stage of a strip: its time and the busy time of each engine in ns, HBM bytes, SBUF bytes per partition."""

    ns: float
    tensor: float
    dma: float
    vector: float
    traffic: int
    sbuf: int


class Strip:
    """The stages of a strip of ``tokens``; ``fill`` and ``drain`` are the times in ns that overlap with nothing.

    ``table_bytes``, ``table_ns``: bytes of the table of scaled factors (:mod:`.table`), which is loaded once, and the
    time that takes the DMA engines.
    """

    def __init__(self, problem: Problem | MlpProblem, blocks: Blocks, core: NeuronCore, tokens: int) -> None:
        self.problem, self.blocks, self.core, self.tokens = problem, blocks, core, tokens
        self.size, self.weight = DTYPE_BYTES[problem.dtype], factor_bytes(problem)
        self.moving = min(blocks.moving, tokens)
        passes = core.fp32_passes if self.size == 4 else 1
        full, tail = divmod(tokens, self.moving)
        runs = [max(t, core.matmul_min_cycles) for t in [self.moving] * full + [tail] * (tail > 0)]
        self.matmul_ns = sum(passes * t + core.matmul_overhead_cycles for t in runs) / core.tensor_ghz
        self.gathers = problem.tokens_first or tokens < LONG_ROW
        self.token_tiles = 1 if problem.tokens <= PARTITIONS else 2  # one token per partition; double-buffered
        # without a transpose mode the tensor engine multiplies float32 by an identity
        self.identity = PARTITIONS * 4 if problem.tokens_first and self.size == 4 and core.name == "v2" else 0
        self.stages = self._linear(problem) if isinstance(problem, Problem) else self._mlp(problem)

    def _linear(self, p: Problem) -> list[Stage]:
        a, b = linear_packings(p.inputs, p.rank, p.outputs, self.weight, p.form, p.pivots)
        self._count_table([a, b])
        return [self._first([a], p.inputs), self._last(b, p.outputs, self._result_bytes(a))]

    def _mlp(self, p: MlpProblem) -> list[Stage]:
        gate_a, gate_b, up_a, up_b, down_a, down_b = mlp_packings(p.hidden, p.ranks, p.shared, self.weight)
        inputs = [gate_a] + ([] if p.shared else [up_a])
        self._count_table([*inputs, gate_b, up_b, down_a, down_b])
        chunks = down_a.rows.count
        group = max(gate_b.group, up_b.group)
        block = min(chunks, -(-(self.blocks.intermediate or chunks) // group) * group)
        turns = -(-chunks // block)
        streamed = [
            Streamed(gate_b, gate_b.rows.count), Streamed(up_b, up_b.rows.count), Streamed(down_a, block, turns),
        ]  # fmt: skip
        # one buffer: the next block starts after the last matmul that reads this one
        act = block * self.tokens * self.size
        sbuf = sum(self._result_bytes(f) for f in inputs) + act + self._sum_bytes(down_a, turns)
        middle = self._stage(streamed, 0, 0.0, self._addition_ns(down_a, block), sbuf)
        return [self._first(inputs, p.hidden), middle, self._last(down_b, p.hidden, self._result_bytes(down_a))]

    def _count_table(self, factors: list[Packing]) -> None:
        columns = sum(f.columns.count for f in factors) + self.problem.norm * factors[0].rows.count
        row = columns * 4 * scaled(self.problem)
        self.table_bytes, self.table_row = row * PARTITIONS, row
        self.table_ns = self._dma(self.table_bytes, row) if row else 0.0

    def _first(self, factors: list[Packing], inputs: int) -> Stage:
        """Return the stage that loads the input and computes ``A x`` for every factor that reads it."""
        p, size = self.problem, self.size
        deep = factors[0].rows.count
        depth = deep if p.tokens_first else min(self.blocks.depth or deep, deep)
        turns = -(-deep // depth)
        moved = self.tokens * inputs * size
        one_strip = self.tokens == p.tokens and self.tokens < LONG_ROW
        one_token = (
            p.tokens == 1 and turns == 1
        )  # one engine moves it as one row; matmuls spread it over the partitions
        row = inputs * size if p.tokens_first or one_token else self.tokens * size * (depth if one_strip else 1)
        copies = 1 if turns == 1 else 2
        early = turns == 1 and self.tokens < p.tokens  # the next strip's input loads during the last stage
        self.prefetch = (depth * self.tokens * size, self._dma(moved, row)) if early else (0, 0.0)
        sbuf = copies * depth * self.tokens * size + sum(self._sum_bytes(f, turns) for f in factors)
        sbuf += (p.tokens_first or one_token) * self.token_tiles * deep * PARTITIONS * size
        sbuf += p.norm * (4 * self.tokens + 2 * (self.moving + PARTITIONS) * size + 8)
        scaled_late = p.norm and turns > 1  # the sum of several blocks is multiplied by 1 / rms in SBUF
        vector = sum(self._addition_ns(f, depth) + self._vector_ns(0, f.columns.count * scaled_late) for f in factors)
        first_panel = factors[0].elements * self.weight * factors[0].group / factors[0].columns.count
        self.fill = self.core.dma_start_ns + (self._dma(moved, row) + self._dma(int(first_panel), 1 << 12)) / turns
        streamed = [Streamed(f, depth, turns) for f in factors]
        moving_ns = 0.0 if early else self._dma(moved, row)
        transposed = deep if p.tokens_first and not one_token else 0
        return self._stage(streamed, moved, moving_ns, vector, sbuf, transposed)

    def _last(self, b: Packing, outputs: int, h: int) -> Stage:
        """Return the stage that computes ``B h`` and stores it."""
        p, size = self.problem, self.size
        outs = b.columns.count
        moved = self.tokens * outputs * size * (2 if p.residual else 1)
        one_strip = self.tokens == p.tokens and self.tokens < LONG_ROW
        row = outputs * size if p.tokens_first else self.tokens * size * (outs if one_strip else 1)
        gathered = outs if self.gathers else min(outs, b.group * self.blocks.panels)
        out = gathered * self.tokens * size * (1 if gathered == outs else 2) * (2 if p.residual else 1)
        out += (p.tokens_first or (p.residual and p.tokens == 1)) * self.token_tiles * outs * PARTITIONS * size
        last = 1.0 if self.gathers else 1 / outs  # long rows are stored chunk by chunk, as they are computed
        self.drain = self.core.dma_start_ns + self._dma(moved, row) * last
        prefetched, loading_ns = self.prefetch
        moving_ns = self._dma(moved, row) + loading_ns
        streamed = [Streamed(b, b.rows.count)]
        return self._stage(streamed, moved, moving_ns, 0.0, h + out + prefetched, p.tokens_first * outs)

    def _stage(
        self, streamed: list[Streamed], moved: int, moving_ns: float, vector: float, sbuf: int, transposed: int = 0
    ) -> Stage:
        """Return a stage that streams weights past the strip and moves ``moved`` bytes of activations.

        ``vector``: ns of additions. ``sbuf``: bytes per partition besides the weight tiles. ``transposed``: activation
        chunks that the tensor engine transposes, 128 tokens at a time.
        """
        core, size = self.core, self.weight
        tensor = weights = 0.0
        tiles = tile = traffic = 0
        for packing, deep, turns in streamed:
            panels = len(packing.panels)
            row = min(deep, packing.stored) * min(packing.group, packing.columns.count) * packing.columns.width * size
            tensor += packing.stored * packing.computed * self.matmul_ns
            weights += self._dma(packing.elements * size, row)
            traffic += packing.elements * size
            tiles += turns * -(-panels // self.blocks.panels)
            tile = max(tile, min(self.blocks.panels, panels) * row)
        # transposes run before or after the matmuls; in the simulator about half of their eviction time overlaps
        blocks = transposed * -(-self.tokens // PARTITIONS)
        transposing = blocks * (PARTITIONS + core.access_cycles) / core.vector_ghz / 2
        # a ring of two tiles: a load starts, after a latency, when the tile before the last is no longer needed
        ring = (tiles * core.dma_start_ns + weights + tensor) / 2
        ns = max(tensor, weights + moving_ns, vector, ring) + transposing
        sbuf += self.identity + self.table_row + 2 * tile
        return Stage(ns, tensor, weights + moving_ns, vector + transposing, traffic + moved, sbuf)

    def _dma(self, count: int, row: int) -> float:
        """Nanoseconds to move ``count`` bytes in rows of ``row`` bytes."""
        return count / (self.core.dma_rate * self.core.row_efficiency(row))

    def _result_bytes(self, a: Packing) -> int:
        """SBUF bytes per partition of ``A x`` in the activation's dtype."""
        return a.columns.count * self.tokens * self.size

    def _sum_bytes(self, a: Packing, turns: int) -> int:
        """SBUF bytes per partition of ``A x`` while it is summed over ``turns`` blocks.

        The last block, or the addition of the pivots, replaces the float32 sums panel by panel with its result.
        """
        if turns == 1 and a.stored == a.rows.count:
            return self._result_bytes(a)
        return a.columns.count * self.tokens * 4 + a.group * self.tokens * self.size

    def _addition_ns(self, a: Packing, depth: int) -> float:
        """Nanoseconds in which the vector engine adds up the sums of blocks of ``depth`` row chunks, and the pivots.

        It reads a block's sum from PSUM, but the pivots and the float32 sum they are added to both from SBUF.
        """
        pivots = a.rows.count - a.stored
        plain = a.columns.count * max(0, -(-a.stored // depth) - 1)
        return self._vector_ns(plain + (a.columns.count - pivots if pivots else 0), pivots)

    def _vector_ns(self, plain: int, slow: int) -> float:
        """Nanoseconds for ``plain`` and ``slow`` result chunks of all tokens, at one and two cycles per element.

        Two operands in SBUF that are not both in bfloat16 are slow (``nki.isa.tensor_tensor``).
        """
        core = self.core
        cycles = (plain + 2 * slow) * core.moving_columns + (plain + slow) * core.access_cycles
        return max(1.0, self.tokens / core.moving_columns) * cycles / core.vector_ghz
