"""The kernels of scripts/reproduce_paper.py: the NKI emulator traces each on shapes, the timing model simulates it.

Import inside ``nki_modules()``. Times are predicted, in seconds; traffic is in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from neuronmm.emulator.nki import NkiError, TensorSpec, run
from neuronmm.emulator.nki.trace import Trace
from neuronmm.emulator.timing import report, simulate, spill
from neuronmm.emulator.timing.measured import SWEEP
from neuronmm.emulator.timing.published_kernels import dense_xw, fused_xuv, sequential_xuv
from neuronmm.kernels.hardware import CORES, TRN1, NeuronCore
from neuronmm.kernels.nki import baselines
from neuronmm.kernels.nki.choice import factor_plan
from neuronmm.kernels.nki.dialect_neuronxcc import Dialect
from neuronmm.kernels.nki.entry_neuronxcc import low_rank_matmul, low_rank_swiglu_mlp
from neuronmm.kernels.nki.layout import Packing
from neuronmm.kernels.nki.low_rank_mlp import weights
from neuronmm.kernels.nki.objects import factor
from neuronmm.kernels.nki.problem import Blocks, MlpProblem, Problem, Ranks
from neuronmm.kernels.nki.tiling import solve

DTYPE = "bfloat16"
SIZES = (2048, 4096, 8192, 16384, 32768)
SHAPES = [*((m, *SWEEP) for m in SIZES), (4096, 7168, 4096, 18432)]
"""Tokens, in, rank and out of the linears; the last one is DeepSeek-V3's up projection."""
LARGEST = SHAPES[len(SIZES) - 1]
BUCKETS = (32, 128, 512)
"""Bucket sizes to which a host may pad a prompt of 32 tokens."""
PREFILLS = (256, 2048)
DECODES = (1, 4, 16, 64)


class Mlp(NamedTuple):
    """An MLP and the rank of gate, up and down at ratio 0.2 (the aligned rank of the paper's Eq. 5)."""

    name: str
    hidden: int
    intermediate: int
    rank: int

    @property
    def kept(self) -> float:
        """The factors' weights over the dense MLP's."""
        return self.rank * (self.hidden + self.intermediate) / (self.hidden * self.intermediate)


MLPS = (
    Mlp("Llama-3.2-1B", 2048, 8192, 1280),
    Mlp("Llama-3.2-3B", 3072, 8192, 1792),
    Mlp("Qwen3-1.7B", 2048, 6144, 1280),
    Mlp("Qwen3-4B", 2560, 9728, 1664),
    Mlp("Llama-3.1-8B", 4096, 14336, 2560),
)

Figures = dict[str, float]
"""``latency``, ``mfu``, ``traffic`` and ``instructions`` (loops unrolled) of a kernel."""

STALLS: dict[str, tuple[NeuronCore, int]] = {
    "as modelled": (TRN1, 2),
    "16 more cycles (5.7 ns) per matmul": (replace(TRN1, matmul_overhead_cycles=TRN1.matmul_overhead_cycles + 16), 2),
    "no double buffering: one buffer per tile": (TRN1, 1),
    "transfers start after 5.2 µs instead of 1.3": (replace(TRN1, dma_start_ns=4 * TRN1.dma_start_ns), 2),
    "half the DMA rate": (replace(TRN1, dma_engine_rate=TRN1.dma_engine_rate / 2), 2),
    "Vector and Scalar at half their clocks": (replace(TRN1, vector_ghz=TRN1.vector_ghz / 2,
                                                       scalar_ghz=TRN1.scalar_ghz / 2), 2),
}  # fmt: skip
"""What may make the tensor engine wait: a core, and the most buffers of an allocation site."""


def ours(m: int, k: int, r: int, n: int) -> Figures:
    """The low-rank kernel with the block sizes of the tiling solver."""
    return figures(matmul_trace(m, k, r, n), TRN1)


def stalled(name: str, shape: tuple[int, int, int, int]) -> Figures:
    """The low-rank kernel on a core that is slower in one respect, with the block sizes of the unchanged core."""
    return figures(matmul_trace(*shape), *STALLS[name])


def paper(m: int, k: int, r: int, n: int) -> Figures:
    """The published fused kernel."""
    return figures(fused_xuv(m, k, r, n), TRN1)


def sequential(m: int, k: int, r: int, n: int) -> Figures:
    """The published XUV in two matmuls through HBM."""
    return figures(sequential_xuv(m, k, r, n), TRN1)


def dense(m: int, k: int, r: int, n: int) -> Figures:
    """The published dense matmul on the tutorial kernel."""
    return figures(dense_xw(m, k, n), TRN1)


def algorithm_1(m: int, k: int, r: int, n: int) -> Figures:
    """Naive fusion: every 1024 output columns compute ``A x`` again, with the block sizes of our kernel."""
    blocks = solve(Problem(m, k, r, n)).blocks

    def kernel(x: Any, a: Any, b: Any, y: Any) -> None:
        fa, fb = factor(a, factor_plan(k, r, x)), factor(b, factor_plan(r, n, x))
        baselines.recomputing(Dialect(), x, fa, fb, y, blocks)

    return figures(shapes(kernel, (k, m), packed(k, r), packed(r, n), out=(n, m)), TRN1)


def our_mlp(mlp: Mlp, tokens: int, device: str) -> Figures:
    """The whole MLP in one kernel."""
    core, r = CORES[device], mlp.rank
    kernel = low_rank_swiglu_mlp(Ranks(r, r, r, mlp.intermediate), mlp_tiling(mlp, tokens, core))
    up, x = (packed(mlp.hidden, r), packed(r, mlp.intermediate)), (mlp.hidden, tokens)
    return figures(
        shapes(kernel, x, *up, *up, packed(mlp.intermediate, r), packed(r, mlp.hidden), out=x, core=core), core
    )


def up_projection(mlp: Mlp, tokens: int, device: str, panels: int = 0) -> Figures:
    """The up projection alone; ``panels`` per tile, or 0 for the solver's choice."""
    core, r = CORES[device], mlp.rank
    blocks = solve(Problem(tokens, mlp.hidden, r, mlp.intermediate), core).blocks
    kernel = low_rank_matmul(r, replace(blocks, panels=panels or blocks.panels))
    a, b = packed(mlp.hidden, r), packed(r, mlp.intermediate)
    return figures(shapes(kernel, (mlp.hidden, tokens), a, b, out=(mlp.intermediate, tokens), core=core), core)


def two_kernels(mlp: Mlp, tokens: int, device: str) -> Figures:
    """The paper's split, packed and streamed like ours: gate, up and SwiGLU, then down from HBM."""
    core, r = CORES[device], mlp.rank
    up, act = (packed(mlp.hidden, r), packed(r, mlp.intermediate)), (mlp.intermediate, tokens)
    blocks = mlp_tiling(mlp, tokens, core)

    def kernel(x: Any, ga: Any, gb: Any, ua: Any, ub: Any, y: Any) -> None:
        first, second = factor_plan(mlp.hidden, r, x), factor_plan(r, mlp.intermediate, x)
        w = weights((ga, gb, ua, ub, ga, gb), (first, second, first, second, first, second), False)
        baselines.gate_up(Dialect(), x, w, y, blocks)

    first = figures(shapes(kernel, (mlp.hidden, tokens), *up, *up, out=act, core=core), core)
    second = figures(matmul_trace(tokens, mlp.intermediate, r, mlp.hidden, core), core)
    return {key: first[key] + second[key] for key in ("latency", "traffic")}


def dense_mlp(mlp: Mlp, tokens: int, device: str) -> Figures:
    """Gate, up and down uncompressed: three matmuls that stream packed weights past strips.

    Each takes the fastest of four strip lengths and of one, two, four or as many panels in flight as ours; two tiles of
    panels take at most half of SBUF.
    """
    core = CORES[device]

    def matmul(k: int, n: int) -> Figures:
        packing = Packing.of(k, n, 2)
        most = core.sbuf_usable_bytes // (4 * 2 * packing.rows.count * packing.columns.width * packing.group)
        panels = {max(1, min(most, count)) for count in (1, 2, 4, mlp_tiling(mlp, tokens, core).panels)}
        candidates = []
        for strip in sorted({min(strip, tokens) for strip in (256, 512, 1024, 2048)}):
            for count in sorted(panels):
                blocks = Blocks(strip, min(512, strip), panels=count)

                def kernel(x: Any, w: Any, y: Any, blocks: Blocks = blocks) -> None:
                    baselines.dense_strips(Dialect(), x, factor(w, factor_plan(k, n, x)), y, blocks)

                try:
                    trace = shapes(kernel, (k, tokens), packed(k, n), out=(n, tokens), core=core)
                    candidates.append(figures(trace, core))
                except NkiError:  # does not fit SBUF
                    break
        return min(candidates, key=lambda result: result["latency"])

    up, down = matmul(mlp.hidden, mlp.intermediate), matmul(mlp.intermediate, mlp.hidden)
    return {key: 2 * up[key] + down[key] for key in ("latency", "traffic")}


def mlp_tiling(mlp: Mlp, tokens: int, core: NeuronCore) -> Blocks:
    return solve(MlpProblem(tokens, mlp.hidden, mlp.intermediate, *(mlp.rank,) * 3), core).blocks


def matmul_trace(m: int, k: int, r: int, n: int, core: NeuronCore = TRN1) -> Trace:
    blocks = solve(Problem(m, k, r, n), core).blocks
    return shapes(low_rank_matmul(r, blocks), (k, m), packed(k, r), packed(r, n), out=(n, m), core=core)


def shapes(
    kernel: Callable[..., Any], *inputs: tuple[int, ...], out: tuple[int, ...], core: NeuronCore = TRN1
) -> Trace:
    """Trace a kernel on shapes alone; equal iterations of its outermost loop are recorded once."""
    specs = [TensorSpec(shape, DTYPE) for shape in inputs]
    return run(kernel, *specs, outputs=[TensorSpec(out, DTYPE)], core=core, fold=True).trace


def packed(rows: int, columns: int) -> tuple[int]:
    return (Packing.of(rows, columns, 2).elements,)


def figures(trace: Trace, core: NeuronCore, generations: int = 2) -> Figures:
    """Simulate a trace and spill what does not fit, which only the published schedules need."""
    result = report(simulate(spill(trace, core), core, generations))
    return {
        "latency": result.latency,
        "mfu": result.mfu,
        "traffic": float(result.traffic),
        "instructions": float(sum(trace.weights())),
    }


KERNELS: dict[str, Callable[..., Figures]] = {
    "ours": ours,
    "paper": paper,
    "algorithm 1": algorithm_1,
    "sequential": sequential,
    "dense": dense,
}
MLP_KERNELS: dict[str, Callable[..., Figures]] = {
    "ours": our_mlp,
    "two": two_kernels,
    "dense": dense_mlp,
}
