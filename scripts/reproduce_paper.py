"""The paper's tables by the timing model: validation first, then these kernels against the published ones.

Writes docs/results/timing.md (and timing.png, the start of a kernel). Everything is predicted, for one NeuronCore of
trn1, unless a column says published. The kernels are the real ones, traced by the NKI emulator on shapes alone.

  python scripts/reproduce_paper.py [--output docs/results] [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from neuronmm.emulator.nki import NkiError, TensorSpec, nki_modules, run
from neuronmm.emulator.nki.trace import Trace
from neuronmm.emulator.timing import Report, measured, report, simulate, spill
from neuronmm.emulator.timing.published import dense_xw, fused_xuv, sequential_xuv
from neuronmm.emulator.timing.timeline import write_png
from neuronmm.emulator.timing.validation import leave_one_out, mean_error, rows, sweep_report
from neuronmm.kernels.hardware import TRN1
from neuronmm.kernels.layout import Packing
from neuronmm.kernels.nki.blocks import Blocks
from neuronmm.kernels.tiling import Problem, solve

GIB = float(1 << 30)
DTYPE = "bfloat16"
SWEEP = measured.SWEEP
DEEPSEEK_UP = (7168, 4096, 18432)


class Mlp(NamedTuple):
    """An MLP and the ranks of gate, up and down at ratio 0.2 (the aligned rank of the paper's Eq. 5)."""

    name: str
    hidden: int
    intermediate: int
    rank: int


MLPS = (
    Mlp("Llama-3.2-1B", 2048, 8192, 1280),
    Mlp("Llama-3.2-3B", 3072, 8192, 1792),
    Mlp("Qwen3-1.7B", 2048, 6144, 1280),
    Mlp("Qwen3-4B", 2560, 9728, 1664),
    Mlp("Llama-3.1-8B", 4096, 14336, 2560),
)

HEAD = """\
No Trainium device was used. *Predicted* is the event-driven simulation of docs/timing.md for one NeuronCore of trn1 in
bf16; *published* is arXiv 2510.25977 or its authors' repository. The NKI emulator traces the kernels."""
PREFILL = """\
*ours* has the block sizes of `neuronmm tiling`; *paper*, *sequential* and *dense* are the published schedules (the
dense one in the tutorial's blocking). Utilisation is the products' FLOPs over the tensor engine's peak; *Eq. 10* is
the paper's traffic with strips of 1024."""
MLP = """\
*ours* is one kernel; *two kernels* is the paper's split, the activation through HBM, but with this project's packing
and double buffering: the gain is the split's alone. *dense* is the tuned dense MLP, three kernels that stream packed
weights past strips (SwiGLU not counted)."""
DECODE = """\
*DMA limit* is the time the bytes that must move take at 272 GB/s, over the predicted time. *dense* is the same MLP
uncompressed, packed and streamed alike, as three kernels that do not overlap (ours is one)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    parser.add_argument("--quick", action="store_true", help="small token counts only, no refit")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    with nki_modules():
        lines = list(document(args.quick))
        picture(args.output / "timing.png")
    (args.output / "timing.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def document(quick: bool) -> Iterator[str]:
    yield "# Timing on Trainium: predicted, and checked against what is published"
    yield ""
    yield "Made by `python scripts/reproduce_paper.py" + (" --quick" if quick else "") + "`."
    yield HEAD
    yield ""
    yield from validation((8192,) if quick else (8192, 16384, 32768))
    if not quick:
        yield from fit()
    yield from prefill((2048, 8192) if quick else (2048, 8192, 16384, 32768))
    yield from mlps(2048)
    yield from decode((1, 64) if quick else (1, 4, 16, 64))


def validation(sizes: tuple[int, ...]) -> Iterator[str]:
    found = rows(sizes=sizes)
    yield "## Validation"
    yield ""
    yield "| kernel | figure | published | predicted | error | spills |"
    yield "|---|---|---:|---:|---:|---|"
    units = {"latency": "latency, ms", "traffic": "HBM traffic, GiB", "bound": "lower bound of the latency, ms"}
    for row in found:
        figures = f"{row.published:.2f} | {row.predicted:.2f} | {row.error:+.1%}"
        yield f"| {row.case} | {units[row.kind]} | {figures} | {'yes' if row.spills else ''} |"
    yield ""
    latency, traffic = mean_error(found), mean_error(found, "traffic")
    yield f"Mean absolute error of the {3 * len(sizes)} kernel latencies {latency:.1%}, of their traffic {traffic:.1%}."
    yield "The compiler's schedules are not published: its rows are bounds."
    yield ""


def fit() -> Iterator[str]:
    overhead, left_out = leave_one_out()
    yield "### The fitted constant, and leaving one out"
    yield ""
    yield f"Fitted to the nine latencies: {overhead} tensor-engine cycles a product beyond its columns, that is all;"
    yield f"the model uses {TRN1.matmul_overhead_cycles:.0f}."
    yield "Refitted without each latency in turn, that latency is predicted with this error:"
    yield ""
    yield "| left out | error |"
    yield "|---|---:|"
    for case, error in left_out.items():
        yield f"| {case} | {error:+.1%} |"
    mean = sum(map(abs, left_out.values())) / len(left_out)
    yield ""
    yield f"Mean absolute error when left out: {mean:.1%}."
    yield ""


def prefill(sizes: Iterable[int]) -> Iterator[str]:
    yield "## Prefill: y = B (A x)"
    yield ""
    yield PREFILL
    yield ""
    yield (
        "| tokens; in, rank, out | ours, ms | utilisation | traffic, GiB | Eq. 10, GiB | paper, ms | sequential, ms "
        "| dense, ms | ours against paper | sequential | dense | compiler's dense (published, ms) |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    cases = [(m, *SWEEP) for m in sizes] + [(4096, *DEEPSEEK_UP)]
    for m, k, r, n in cases:
        ours = timed(matmul_trace(m, k, r, n))
        others = published(m, k, r, n)
        eq10 = 2 * (m * k + -(-m // 1024) * (k * r + r * n) + m * n) / GIB
        gains = " | ".join(gain(other.latency / ours.latency) for other in others)
        times = " | ".join(ms(other) for other in others)
        compiler = measured.COMPILER_XW.latency.get(m) if (k, r, n) == SWEEP else None
        yield (
            f"| {m}; {k}, {r}, {n} | {ms(ours)} | {ours.mfu:.1%} | {ours.traffic / GIB:.2f} | {eq10:.2f} | {times} | "
            f"{gains} | {'' if compiler is None else f'{compiler:.1f} ({gain(compiler / ours.latency / 1e3)})'} |"
        )
    yield ""


def published(m: int, k: int, r: int, n: int) -> list[Report]:
    """The paper's kernel, the sequential and the dense one; those of the sweep are shared with the validation."""
    if (k, r, n) == SWEEP:
        return [sweep_report(s.name, m, TRN1)[0] for s in (measured.NEURONMM, measured.NKI_XUV, measured.NKI_XW)]
    return [timed(trace) for trace in (fused_xuv(m, k, r, n), sequential_xuv(m, k, r, n), dense_xw(m, k, n))]


def mlps(tokens: int) -> Iterator[str]:
    yield f"## Prefill: the whole MLP at ratio 0.2, {tokens} tokens"
    yield ""
    yield MLP
    yield ""
    yield "| model | rank | ours, ms | utilisation | traffic, MiB | two kernels, ms | dense, ms | gain | over dense |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for mlp in MLPS:
        ours = best_mlp(mlp, tokens)
        split = [best_gate_up(mlp, tokens), timed(matmul_trace(tokens, mlp.intermediate, mlp.rank, mlp.hidden))]
        pair = sum(part.latency for part in split)
        dense = dense_mlp(mlp, tokens)
        figures = f"{ms(ours)} | {ours.mfu:.1%} | {ours.traffic / 2**20:.0f} | {pair * 1e3:.2f} | {dense * 1e3:.2f}"
        gains = f"{gain(pair / ours.latency)} | {gain(dense / ours.latency)}"
        yield f"| {mlp.name} | {mlp.rank} | {figures} | {gains} |"
    yield ""


def decode(batches: Iterable[int]) -> Iterator[str]:
    yield "## Decode: the whole MLP at ratio 0.2"
    yield ""
    yield DECODE
    yield ""
    yield "| model | tokens | ours, µs | DMA limit reached | dense, µs | ours against dense | bytes left of dense |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for mlp in MLPS:
        for tokens in batches:
            ours = best_mlp(mlp, tokens)
            dense = dense_mlp(mlp, tokens)
            share = ours.traffic / TRN1.dma_rate / 1e9 / ours.latency
            ratio = mlp.rank * (mlp.hidden + mlp.intermediate) / (mlp.hidden * mlp.intermediate)
            yield (
                f"| {mlp.name} | {tokens} | {ours.latency * 1e6:.1f} | {share:.1%} | {dense * 1e6:.1f} | "
                f"{gain(dense / ours.latency)} | {ratio:.2f} |"
            )
    yield ""


def matmul_trace(m: int, k: int, r: int, n: int) -> Trace:
    """This project's kernel with the block sizes of the tiling solver."""
    from neuronmm.kernels.nki.entry_neuronxcc import low_rank_matmul

    blocks = solve(Problem(m, k, r, n)).blocks
    return shapes(low_rank_matmul(r, blocks), (k, m), packed(k, r), packed(r, n), out=(n, m))


def best_mlp(mlp: Mlp, tokens: int) -> Report:
    """The MLP kernel with the fastest of a few block sizes that fit."""
    from neuronmm.kernels.nki.entry_neuronxcc import low_rank_swiglu_mlp
    from neuronmm.kernels.nki.low_rank_mlp import Ranks

    ranks = Ranks(mlp.rank, mlp.rank, mlp.rank, mlp.intermediate)
    up, down = (packed(mlp.hidden, mlp.rank), packed(mlp.rank, mlp.intermediate)), packed(mlp.intermediate, mlp.rank)

    def trace(blocks: Blocks) -> Trace:
        kernel = low_rank_swiglu_mlp(ranks, blocks)
        x = (mlp.hidden, tokens)
        return shapes(kernel, x, *up, *up, down, packed(mlp.rank, mlp.hidden), out=x)

    return fastest(trace, tokens)


def best_gate_up(mlp: Mlp, tokens: int) -> Report:
    """The first of the paper's two kernels, with the fastest of a few block sizes that fit."""
    from neuronmm.kernels.nki import baselines
    from neuronmm.kernels.nki import dialect_neuronxcc as d
    from neuronmm.kernels.nki.low_rank_mlp import Ranks, Weights

    ranks = Ranks(mlp.rank, mlp.rank, mlp.rank, mlp.intermediate)
    up = (packed(mlp.hidden, mlp.rank), packed(mlp.rank, mlp.intermediate))

    def trace(blocks: Blocks) -> Trace:
        def kernel(x: Any, ga: Any, gb: Any, ua: Any, ub: Any, act: Any) -> None:
            baselines.gate_up(d, x, Weights(ga, gb, ua, ub, None, None), act, ranks, blocks)

        return shapes(kernel, (mlp.hidden, tokens), *up, *up, out=(mlp.intermediate, tokens))

    return fastest(trace, tokens)


def dense_mlp(mlp: Mlp, tokens: int) -> float:
    """Seconds of gate, up and down uncompressed, each a product of strips past packed weights."""
    from neuronmm.kernels.nki import baselines
    from neuronmm.kernels.nki import dialect_neuronxcc as d

    def product(k: int, n: int) -> float:
        def trace(blocks: Blocks) -> Trace:
            def kernel(x: Any, w: Any, y: Any) -> None:
                baselines.dense_strips(d, x, w, y, blocks)

            return shapes(kernel, (k, tokens), packed(k, n), out=(n, tokens))

        return fastest(trace, tokens).latency

    return 2 * product(mlp.hidden, mlp.intermediate) + product(mlp.intermediate, mlp.hidden)


def fastest(trace: Callable[[Blocks], Trace], tokens: int) -> Report:
    """The best report over block sizes; those that exceed a memory are passed over."""
    if tokens <= 128:
        return timed(trace(Blocks(tokens, tokens, 0, 0)))
    found = []
    for strip, intermediate in ((512, 8), (1024, 8), (1024, 4)):
        try:
            found.append(timed(trace(Blocks(min(strip, tokens), 512, 8, intermediate))))
        except NkiError:
            continue
    return min(found, key=lambda result: result.latency)


def shapes(kernel: Callable[..., Any], *inputs: tuple[int, ...], out: tuple[int, ...]) -> Trace:
    """Trace a kernel on shapes alone; like iterations of its outermost loop are recorded once."""
    specs = [TensorSpec(shape, DTYPE) for shape in inputs]
    return run(kernel, *specs, outputs=[TensorSpec(out, DTYPE)], fold=True).trace


def packed(rows: int, columns: int) -> tuple[int]:
    return (Packing.of(rows, columns, 2).elements,)


def timed(trace: Trace) -> Report:
    """Simulate, spilling what does not fit (only the published schedules need that)."""
    return report(simulate(spill(trace, TRN1.sbuf_partition_bytes), TRN1))


def picture(path: Path) -> None:
    """The first 300 microseconds of the kernel on Llama-3.2-1B's up projection."""
    write_png(simulate(matmul_trace(2048, 2048, 1280, 8192), TRN1), path, (0, 300))


def ms(result: Report) -> str:
    return f"{result.latency * 1e3:.2f}"


def gain(factor: float) -> str:
    return f"{factor:.2f}x"


if __name__ == "__main__":
    main()
