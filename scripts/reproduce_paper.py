"""The paper's tables by the timing model: validation first, then these kernels against the published ones.

Writes timing.md, and timing.png, the start of a kernel. Everything is predicted, for one NeuronCore, unless a column
says published. The kernels are the real ones, traced by the NKI emulator on shapes alone. A run that was interrupted
goes on where it was, as long as the kernels and the models are unchanged.

  python scripts/reproduce_paper.py [--output docs/results] [--state out/reproduce_paper.json] [--jobs N]
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from neuronmm.emulator.nki import nki_modules
from neuronmm.emulator.timing import measured, simulate
from neuronmm.emulator.timing.timeline import write_png
from neuronmm.emulator.timing.validation import Row, leave_one_out, mean_error, rows
from neuronmm.kernels.hardware import CORES, TRN1

with nki_modules():
    import paper_cases as cases

ROOT = Path(__file__).parent.parent
SOURCES = (
    "kernels/[hlst]*.py",
    "kernels/nki/*.py",
    "emulator/nki/*.py",
    "emulator/timing/*.py",
    "scripts/paper_cases.py",
)
"""What the figures depend on."""
GIB = float(1 << 30)
SIZES = (2048, 4096, 8192, 16384, 32768)
SHAPES = [*((m, *measured.SWEEP) for m in SIZES), (4096, 7168, 4096, 18432)]
"""Tokens, in, rank and out of the linears; the last one is DeepSeek-V3's up projection."""
KERNELS: dict[str, Callable[..., cases.Figures]] = {
    "ours": cases.ours,
    "paper": cases.paper,
    "algorithm 1": cases.algorithm_1,
    "sequential": cases.sequential,
    "dense": cases.dense,
}
MLP_KERNELS: dict[str, Callable[..., cases.Figures]] = {
    "ours": cases.our_mlp,
    "two": cases.two_kernels,
    "dense": cases.dense_mlp,
}
PREFILLS = (256, 2048)
DECODES = (1, 4, 16, 64)

HEAD = """\
No Trainium device was used. *Predicted* is the event-driven simulation of docs/timing.md for one NeuronCore in bf16,
*published* is arXiv 2510.25977 or its authors' repository. The NKI emulator traces the kernels, and the tiling solver
chooses their block sizes."""
PREFILL = """\
One core of trn1. *paper*, *sequential* and *dense* are the published schedules (the dense one in the tutorial's
blocking), *Algorithm 1* is naive fusion: every 1024 columns of the output compute A x again. Utilisation is the
products' FLOPs over the tensor engine's peak; *Eq. 10* is the paper's traffic with strips of 1024."""
MLP = """\
One core of trn1. *ours* is one kernel; *two kernels* is the paper's split, the activation through HBM, but with this
project's packing, buffering and block sizes: the gain is the split's alone. *dense* is the tuned dense MLP, three
kernels that stream packed weights past strips (SwiGLU not counted)."""
DECODE = """\
*DMA limit* is the time the bytes that must move take at the core's DMA rate, over the predicted time. *dense* is the
same MLP uncompressed, packed and streamed alike, as three kernels that do not overlap (ours is one)."""

LINEAR = """\
A kernel this short shows what overlaps with nothing: the first load's start, and the store's. *One panel*: each of the
two tiles in flight has one panel of weights; else the solver chooses how many."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    parser.add_argument(
        "--state", type=Path, default=Path("out/reproduce_paper.json"), help="finished rows of this run"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that share the work; default 1")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results = compute(args.state, args.jobs)
    write_png(simulate(cases.matmul_trace(2048, 2048, 1280, 8192), TRN1), args.output / "timing.png", (0, 300))
    (args.output / "timing.md").write_text("\n".join(document(results)) + "\n", encoding="utf-8")
    args.state.unlink()


def tasks() -> dict[str, Callable[[], Any]]:
    """Every row's work by its name."""
    found: dict[str, Callable[[], Any]] = {
        "validation": lambda: [asdict(row) for row in rows()],
        "fit": leave_one_out,
    }
    for shape in SHAPES:
        for name, kernel in KERNELS.items():
            found[f"prefill {shape} {name}"] = lambda kernel=kernel, shape=shape: kernel(*shape)  # type: ignore[misc]
    for mlp in cases.MLPS:
        for tokens in (*PREFILLS, *DECODES):
            for device in CORES if tokens in DECODES else ("trn1",):
                for name, kernel in MLP_KERNELS.items():
                    call = (mlp, tokens, device)
                    found[f"{mlp.name} {tokens} {device} {name}"] = lambda kernel=kernel, call=call: kernel(*call)  # type: ignore[misc]
    for mlp in cases.MLPS:
        for device in CORES:
            for panels in (0, 1):
                call = (mlp, 1, device, panels)
                found[f"{mlp.name} up {device} {panels}"] = lambda call=call: cases.up_projection(*call)  # type: ignore[misc]
    return found


def one(name: str) -> Any:
    """The result of one task."""
    return tasks()[name]()


def compute(state: Path, jobs: int) -> dict[str, Any]:
    """All results by name, by ``jobs`` processes; each is written to ``state`` when it is there."""
    digest = hashlib.sha256(b"".join(p.read_bytes() for g in SOURCES for p in sorted(ROOT.glob(g)))).hexdigest()
    results: dict[str, Any] = {}
    if state.is_file():
        kept = json.loads(state.read_text(encoding="utf-8"))
        results = kept["results"] if kept["sources"] == digest else {}
    state.parent.mkdir(parents=True, exist_ok=True)
    todo = [name for name in tasks() if name not in results]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress, ProcessPoolExecutor(jobs) as pool:
        bar = progress.add_task("", total=len(todo) + len(results), completed=len(results))
        running = {pool.submit(one, name): name for name in todo}
        for future in as_completed(running):
            results[running[future]] = future.result()
            state.write_text(json.dumps({"sources": digest, "results": results}), encoding="utf-8")
            progress.update(bar, advance=1, description=running[future])
    return results


def document(results: dict[str, Any]) -> Iterator[str]:
    yield "# Timing on Trainium: predicted, and checked against what is published"
    yield ""
    yield "Made by `python scripts/reproduce_paper.py`; nothing in it is random."
    yield HEAD
    yield ""
    yield from goals(results)
    yield from validation([Row(**row) for row in results["validation"]])
    yield from fit(*results["fit"])
    yield from prefill(results)
    for tokens in PREFILLS:
        yield from mlps(results, tokens)
    for device in CORES:
        yield from decode(results, device)
    yield from decode_linears(results)


def goals(results: dict[str, Any]) -> Iterator[str]:
    """What was aimed at and what came out, from the rows below."""
    linears = [(shape, results[f"prefill {shape} ours"]) for shape in SHAPES]
    whole = [results[f"{mlp.name} 2048 trn1 ours"] for mlp in cases.MLPS]
    shares = {device: [share for *_, share in decode_rows(results, device)] for device in CORES}
    gains = [dense["latency"] / own["latency"] for dev in CORES for _, _, own, _, dense, _ in decode_rows(results, dev)]
    use = [f["mfu"] for _, f in linears]
    over = [f["traffic"] / eq10(shape) - 1 for shape, f in linears]
    mlp_use = [f["mfu"] for f in whole]
    mlp_over = [f["traffic"] / two_eq10(mlp, 2048) - 1 for mlp, f in zip(cases.MLPS, whole, strict=True)]
    yield "## Goals"
    yield ""
    yield "| goal | predicted | met |"
    yield "|---|---|---|"
    aim = "linears, prefill, trn1: utilisation at least 90 % (published kernel: 85.2 %)"
    yield f"| {aim} | {span(use)} | {met(min(use) >= 0.9)} |"
    yield f"| their HBM traffic at most Eq. 10's | {max(over):+.1%} at most | {met(max(over) < 1e-3)} |"
    yield f"| whole MLPs, 2048 tokens, trn1: utilisation at least 90 % | {span(mlp_use)} | {met(min(mlp_use) >= 0.9)} |"
    saved = f"{min(mlp_over):+.0%} to {max(mlp_over):+.0%}"
    yield f"| their HBM traffic at most Eq. 10's for the paper's two kernels | {saved} | {met(max(mlp_over) < 1e-3)} |"
    for device, found in shares.items():
        yield f"| decode, {device}: at least 90 % of the DMA limit | {span(found)} | {met(min(found) >= 0.9)} |"
    for device in CORES:
        alone = [limit(results[f"{mlp.name} up {device} 0"], device) for mlp in cases.MLPS]
        yield f"| the up projection alone, one token, {device}: 90 % | {span(alone)} | {met(min(alone) >= 0.9)} |"
    yield f"| decode: never slower than dense | {min(gains):.2f}x to {max(gains):.2f}x | {met(min(gains) >= 1)} |"
    yield ""


def validation(found: list[Row]) -> Iterator[str]:
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
    yield f"Mean absolute error of the nine kernel latencies {latency:.1%}, of their traffic {traffic:.1%}."
    yield "The compiler's schedules are not published: its rows are bounds."
    yield ""


def fit(overhead: int, left_out: dict[str, float]) -> Iterator[str]:
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


def prefill(results: dict[str, Any]) -> Iterator[str]:
    yield "## Prefill: y = B (A x)"
    yield ""
    yield PREFILL
    yield ""
    yield "| tokens; in, rank, out | ours, ms | utilisation | traffic, GiB | Eq. 10, GiB | paper's utilisation |"
    yield "|---|---:|---:|---:|---:|---:|"
    for shape in SHAPES:
        own, paper = (results[f"prefill {shape} {name}"] for name in ("ours", "paper"))
        figures = f"{own['traffic'] / GIB:.2f} | {eq10(shape) / GIB:.2f} | {paper['mfu']:.1%}"
        yield f"| {label(shape)} | {ms(own)} | {own['mfu']:.1%} | {figures} |"
    yield ""
    others = [name for name in KERNELS if name != "ours"]
    yield "Milliseconds, and how many times faster ours is; the compiler's are published:"
    yield ""
    yield f"| tokens; in, rank, out | {' | '.join(others)} | compiler's XUV | compiler's dense |"
    yield "|---|" + "---:|" * (len(others) + 2)
    for shape in SHAPES:
        own = results[f"prefill {shape} ours"]["latency"]
        cells = [against(results[f"prefill {shape} {name}"]["latency"], own) for name in others]
        for sweep in (measured.COMPILER_XUV, measured.COMPILER_XW):
            published = sweep.latency.get(shape[0]) if shape[1:] == measured.SWEEP else None
            cells.append("" if published is None else against(published / 1e3, own))
        yield f"| {label(shape)} | {' | '.join(cells)} |"
    yield ""


def mlps(results: dict[str, Any], tokens: int) -> Iterator[str]:
    yield f"## Prefill: the whole MLP at ratio 0.2, {tokens} tokens"
    yield ""
    if tokens == PREFILLS[0]:
        yield MLP
        yield ""
    yield "| model | rank | ours, ms | utilisation | traffic, MiB | two kernels, ms | MiB | dense, ms |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for mlp in cases.MLPS:
        own, two, dense = (results[f"{mlp.name} {tokens} trn1 {name}"] for name in MLP_KERNELS)
        figures = f"{ms(own)} | {own['mfu']:.1%} | {own['traffic'] / 2**20:.0f}"
        split = f"{against(two['latency'], own['latency'])} | {two['traffic'] / 2**20:.0f}"
        yield f"| {mlp.name} | {mlp.rank} | {figures} | {split} | {against(dense['latency'], own['latency'])} |"
    yield ""


def decode_rows(results: dict[str, Any], device: str) -> Iterator[tuple[cases.Mlp, int, Any, Any, Any, float]]:
    """MLP, tokens, the three kernels' figures, and the share of the DMA limit that ours reaches."""
    for mlp in cases.MLPS:
        for tokens in DECODES:
            own, two, dense = (results[f"{mlp.name} {tokens} {device} {name}"] for name in MLP_KERNELS)
            yield mlp, tokens, own, two, dense, limit(own, device)


def decode(results: dict[str, Any], device: str) -> Iterator[str]:
    yield f"## Decode on {device}: the whole MLP at ratio 0.2"
    yield ""
    if device == "trn1":
        yield DECODE
        yield ""
    yield "| model | bytes left of dense | tokens | ours, µs | DMA limit reached | two kernels, µs | dense, µs |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for mlp, tokens, own, two, dense, share in decode_rows(results, device):
        others = " | ".join(against(other["latency"], own["latency"], 1e6, 1) for other in (two, dense))
        yield f"| {mlp.name} | {mlp.kept:.2f} | {tokens} | {own['latency'] * 1e6:.1f} | {share:.1%} | {others} |"
    yield ""


def decode_linears(results: dict[str, Any]) -> Iterator[str]:
    yield "## Decode of one linear: the up projection at ratio 0.2, one token"
    yield ""
    yield LINEAR
    yield ""
    yield "| model | core | ours, µs | DMA limit reached | one panel, µs | DMA limit reached |"
    yield "|---|---|---:|---:|---:|---:|"
    for mlp in cases.MLPS:
        for device in CORES:
            own, single = (results[f"{mlp.name} up {device} {panels}"] for panels in (0, 1))
            cells = [f"{f['latency'] * 1e6:.1f} | {limit(f, device):.1%}" for f in (own, single)]
            yield f"| {mlp.name} | {device} | {' | '.join(cells)} |"
    yield ""


def limit(figures: cases.Figures, device: str) -> float:
    """The share of the DMA limit that a kernel reaches."""
    return figures["traffic"] / CORES[device].dma_rate / 1e9 / figures["latency"]


def eq10(shape: tuple[int, ...]) -> float:
    m, k, r, n = shape
    return 2.0 * (m * k + -(-m // 1024) * (k * r + r * n) + m * n)


def two_eq10(mlp: cases.Mlp, tokens: int) -> float:
    """Gate and up share their input, and the activation is written and read."""
    h, i, r = mlp.hidden, mlp.intermediate, mlp.rank
    return 2.0 * (tokens * (h + i) + -(-tokens // 1024) * 2 * r * (h + i)) + eq10((tokens, i, r, h))


def label(shape: tuple[int, ...]) -> str:
    return f"{shape[0]}; {shape[1]}, {shape[2]}, {shape[3]}"


def ms(figures: cases.Figures) -> str:
    return f"{figures['latency'] * 1e3:.2f}"


def against(other: float, own: float, unit: float = 1e3, digits: int = 2) -> str:
    return f"{other * unit:.{digits}f} ({other / own:.2f}x)"


def span(values: list[float]) -> str:
    return f"{min(values):.1%} to {max(values):.1%}"


def met(yes: bool) -> str:
    return "yes" if yes else "**no**"


if __name__ == "__main__":
    main()
