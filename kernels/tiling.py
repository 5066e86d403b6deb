"""Block sizes for the low-rank kernel, by modelled time within the memory there is.

The model counts what :func:`neuronmm.kernels.nki.low_rank_matmul.low_rank_matmul` does for a strip of tokens: the
tensor engine's cycles, the DMA time of every transfer at the efficiency of its rows, the Vector engine's float32
additions. Each of the kernel's two stages takes as long as its slowest engine, or as the latency of its ring of two
weight panels; what cannot overlap (the first loads, the last store) is added. Every buffer is counted, twice where
double buffering needs two; what exceeds SBUF or PSUM is refused, because it would spill to HBM. Among choices within
1 % of the fastest the one that moves least wins.

The event-driven simulator of the emulator checks this model on the real kernel (tests/kernels/test_tiling.py).
Source of the memory and traffic terms: arXiv 2510.25977, Eq. 10 and 11, with the buffers that those leave out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from neuronmm.kernels.hardware import DTYPE_BYTES, TRN1, NeuronCore
from neuronmm.kernels.layout import PARTITIONS, Packing
from neuronmm.kernels.nki.blocks import Blocks, split
from neuronmm.kernels.ops import KernelError

LARGEST_STRIP = 4096
DEPTHS = (0, 4, 8, 16, 32)
TIE = 0.01
LONG_ROW = 512
"""Tokens from which the kernel moves activations chunk by chunk and stores results panel by panel."""


@dataclass(frozen=True)
class Problem:
    """``y = B (A x)``: sizes of ``x`` [in, tokens], ``A`` [rank, in], ``B`` [out, rank]."""

    tokens: int
    inputs: int
    rank: int
    outputs: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if min(self.tokens, self.inputs, self.rank, self.outputs) < 1:
            raise KernelError(f"tiling: sizes must be positive: {self}")
        if self.dtype not in DTYPE_BYTES:
            raise KernelError(f"tiling: dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")

    @property
    def element(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def multiply_adds(self) -> int:
        return self.tokens * self.rank * (self.inputs + self.outputs)


@dataclass(frozen=True)
class Tiling:
    """A choice of block sizes and what the model says of it.

    ``seconds`` is modelled time; ``traffic`` HBM bytes; ``sbuf`` bytes a partition, double buffers included, in the
    first and in the second stage; ``psum_banks`` of 8. ``tensor``, ``dma`` and ``vector`` are busy seconds.
    """

    problem: Problem
    device: str
    blocks: Blocks
    seconds: float
    tensor: float
    dma: float
    vector: float
    traffic: int
    sbuf: tuple[int, int]
    psum_banks: int
    mfu: float

    @property
    def bound(self) -> str:
        """The engine that is busy longest."""
        return max(("tensor", "dma", "vector"), key=lambda engine: getattr(self, engine))


@lru_cache(maxsize=4096)
def solve(problem: Problem, core: NeuronCore = TRN1) -> Tiling:
    """The best block sizes.

    Raises:
        KernelError: no block sizes fit the memory.
    """
    fitting = [tiling for tiling, refusal in consider(problem, core) if tiling is not None and refusal is None]
    if not fitting:
        raise KernelError(f"tiling: {problem} does not fit {core.device}'s SBUF with any block sizes")
    fastest = min(tiling.seconds for tiling in fitting)
    near = [tiling for tiling in fitting if tiling.seconds <= fastest * (1 + TIE)]
    return min(near, key=lambda tiling: (tiling.traffic, tiling.seconds))


def evaluate(problem: Problem, blocks: Blocks, core: NeuronCore = TRN1) -> Tiling:
    """What the model says of given block sizes.

    Raises:
        KernelError: they do not fit SBUF or PSUM: the kernel would spill.
    """
    tiling = _model(problem, blocks, core)
    refusal = _refusal(tiling, core)
    if refusal is not None:
        raise KernelError(f"tiling: {refusal}")
    return tiling


def consider(problem: Problem, core: NeuronCore) -> list[tuple[Tiling, str | None]]:
    """Every choice that is looked at, and why it is refused (None: it fits)."""
    moving = min(core.moving_columns, problem.tokens)
    strips = {min(problem.tokens, n) for n in range(128, LARGEST_STRIP + 1, 128)}
    chunks = Packing.of(problem.inputs, problem.rank, problem.element).rows.count
    depths = [depth for depth in DEPTHS if depth < chunks]
    choices = [Blocks(tokens, moving, depth) for tokens in sorted(strips) for depth in depths]
    tilings = [_model(problem, blocks, core) for blocks in choices]
    return [(tiling, _refusal(tiling, core)) for tiling in tilings]


def explain(problem: Problem, core: NeuronCore = TRN1) -> list[str]:
    """The choice and its alternatives, line by line: the best depth of each strip length, or why none fits."""
    chosen = solve(problem, core)
    lines = [
        f"x [{problem.inputs}, {problem.tokens}], A [{problem.rank}, {problem.inputs}], B [{problem.outputs}, "
        f"{problem.rank}], {problem.dtype}, one {core.device} core (NeuronCore {core.name})",
        f"strip of {chosen.blocks.tokens} tokens, {chosen.blocks.moving} a product, input "
        + (f"in blocks of {chosen.blocks.depth * PARTITIONS}" if chosen.blocks.depth else "of a strip held whole"),
        f"modelled: {chosen.seconds * 1e3:.3f} ms, {chosen.mfu:.1%} of the tensor engine's peak, "
        f"{chosen.traffic / 2**20:.1f} MiB of HBM traffic; longest busy: {chosen.bound}",
        f"SBUF {max(chosen.sbuf) / 1024:.1f} of {core.sbuf_partition_bytes // 1024} KiB a partition "
        f"(first stage {chosen.sbuf[0] / 1024:.1f}, second {chosen.sbuf[1] / 1024:.1f}), "
        f"PSUM {chosen.psum_banks} of {core.psum_banks} banks",
        "",
        "strip  depth  SBUF KiB   modelled ms    MFU  traffic MiB",
    ]
    by_strip: dict[int, list[tuple[Tiling, str | None]]] = {}
    for tiling, refusal in consider(problem, core):
        by_strip.setdefault(tiling.blocks.tokens, []).append((tiling, refusal))
    for strip, entries in by_strip.items():
        if strip & (strip - 1) and strip != chosen.blocks.tokens and strip != problem.tokens:
            continue
        fitting = [tiling for tiling, refusal in entries if refusal is None]
        if fitting:
            best = min(fitting, key=lambda t: (t != chosen, t.seconds))
            lines.append(
                f"{strip:5}  {best.blocks.depth or 'all':>5}  {max(best.sbuf) / 1024:8.1f}  {best.seconds * 1e3:12.3f}"
                f"  {best.mfu:5.1%}  {best.traffic / 2**20:11.1f}{'  <- chosen' if best == chosen else ''}"
            )
        else:
            least = min(entries, key=lambda entry: max(entry[0].sbuf))
            lines.append(f"{strip:5}  {least[0].blocks.depth or 'all':>5}  refused: {least[1]}")
    return lines


def _refusal(tiling: Tiling, core: NeuronCore) -> str | None:
    if max(tiling.sbuf) > core.sbuf_partition_bytes:
        return (
            f"strips of {tiling.blocks.tokens} tokens need {max(tiling.sbuf) / 1024:.1f} KiB a partition of SBUF, "
            f"{core.device} has {core.sbuf_partition_bytes // 1024}: it would spill"
        )
    if tiling.psum_banks > core.psum_banks:
        return f"{tiling.psum_banks} PSUM banks are needed, {core.psum_banks} are there"
    return None


def _model(problem: Problem, blocks: Blocks, core: NeuronCore) -> Tiling:
    """Time, traffic and memory of the kernel with these block sizes."""
    strips = [length for _, length in split(problem.tokens, blocks.tokens)]
    stages = {length: _Strip(problem, blocks, core, length) for length in set(strips)}
    ns = sum(stages[length].ns for length in strips) + stages[strips[0]].fill + stages[strips[-1]].drain
    first = stages[max(strips)]
    return Tiling(
        problem=problem,
        device=core.device,
        blocks=blocks,
        seconds=ns / 1e9,
        tensor=sum(sum(stages[n].tensor) for n in strips) / 1e9,
        dma=sum(sum(stages[n].dma) for n in strips) / 1e9,
        vector=sum(stages[n].vector for n in strips) / 1e9,
        traffic=sum(stages[n].traffic for n in strips),
        sbuf=first.sbuf,
        psum_banks=2 * -(-first.moving * 4 // core.psum_bank_bytes),
        mfu=2 * problem.multiply_adds / (ns / 1e9 * core.peak_flops(problem.dtype)),
    )


class _Strip:
    """The model of one strip of ``tokens``. Times in ns; pairs are for the first and the second stage."""

    def __init__(self, problem: Problem, blocks: Blocks, core: NeuronCore, tokens: int) -> None:
        size = problem.element
        a = Packing.of(problem.inputs, problem.rank, size)
        b = Packing.of(problem.rank, problem.outputs, size)
        deep, ranks, outs = a.rows.count, a.columns.count, b.columns.count
        depth = blocks.depth or deep
        turns = -(-deep // depth)
        self.moving = min(blocks.moving, tokens)

        passes = core.fp32_passes if size == 4 else 1
        product = sum(
            passes * max(t, core.matmul_min_cycles) + core.matmul_overhead_cycles for _, t in split(tokens, self.moving)
        )
        self.tensor = (deep * ranks * product / core.tensor_ghz, ranks * outs * product / core.tensor_ghz)

        # activations: one row a chunk, or all chunks of a partition in one run if the strip is the whole tensor
        whole = tokens == problem.tokens and tokens < LONG_ROW
        row_x = tokens * size * (depth if whole else 1)
        row_y = tokens * size * (outs if whole else 1)
        row_a = min(depth, deep) * a.group * a.columns.width * size
        row_b = ranks * b.group * b.columns.width * size
        bytes_x, bytes_y = tokens * problem.inputs * size, tokens * problem.outputs * size
        bytes_a, bytes_b = a.elements * size, b.elements * size

        def dma(count: int, row: int) -> float:
            return count / (core.dma_rate * core.row_efficiency(row))

        self.dma = (dma(bytes_x, row_x) + dma(bytes_a, row_a), dma(bytes_b, row_b) + dma(bytes_y, row_y))
        self.traffic = bytes_x + bytes_a + bytes_b + bytes_y

        banks = ranks * max(1.0, tokens / core.moving_columns)
        addition = (core.moving_columns + core.access_cycles) / core.vector_ghz
        self.vector = (turns - 1) * banks * addition

        def ring(panels: int, weights: float, tensor: float) -> float:
            """Two panels in turn: each is loaded, after a start latency, once the one before the last is used up."""
            return (panels * core.dma_start_ns + weights + tensor) / 2

        rings = (
            ring(turns * len(a.panels()), dma(bytes_a, row_a), self.tensor[0]),
            ring(len(b.panels()), dma(bytes_b, row_b), self.tensor[1]),
        )
        self.ns = max(self.tensor[0], self.dma[0], self.vector, rings[0]) + max(self.tensor[1], self.dma[1], rings[1])

        self.fill = core.dma_start_ns + (dma(bytes_x, row_x) + dma(bytes_a, row_a) * a.group / ranks) / turns
        gathered = outs if tokens < LONG_ROW else b.group
        self.drain = core.dma_start_ns + dma(bytes_y, row_y) * gathered / outs

        # bytes a partition; the float32 sums shrink panel by panel as the last block leaves its result
        x, panel_a = depth * tokens * size, row_a
        h = ranks * tokens * size
        sums = ranks * tokens * 4 + a.group * tokens * size if turns > 1 else h
        out, panel_b = gathered * tokens * size, row_b
        copies = 1 if turns == 1 and tokens == problem.tokens else 2  # a single block has nothing to overlap with
        self.sbuf = (copies * x + 2 * panel_a + sums, h + 2 * panel_b + (1 if gathered == outs else 2) * out)
