"""Write fp8.md: predicted times with factors in bfloat16, in fp8, and in int8 that the other engines widen.

The NKI emulator traces the MLP kernels on shapes, the timing model simulates them; whole models, and int8, for which
there is no kernel, are sketched as streams (emulator/timing/decode.py). Nothing is measured on a device.

An interrupted run resumes as long as kernels and models are unchanged.

  python scripts/fp8_timing.py [--output docs/results] [--state out/fp8_timing.json] [--jobs N]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from resumable_tasks import compute

from neuronmm.emulator.nki import TensorSpec, nki_modules, run
from neuronmm.emulator.timing.inference import Decoder, predict
from neuronmm.kernels.hardware import CORES
from neuronmm.kernels.nki.forms import mlp_packings
from neuronmm.kernels.nki.problem import FP8, MlpProblem, Ranks
from neuronmm.kernels.nki.tiling import solve

with nki_modules():
    import paper_cases as cases

    from neuronmm.kernels.nki.entry_neuronxcc import low_rank_swiglu_mlp

SOURCES = (
    *("kernels/hardware.py", "kernels/nki/*.py", "emulator/nki/*.py", "emulator/timing/*.py"),
    *("scripts/paper_cases.py", "scripts/fp8_timing.py"),
)
"""The files that the figures depend on."""
RATIO, ALIGN, PROMPT = 0.2, 128, 512
DECODES, PREFILL = {"trn1": (1, 64), "trn2": (1,), "trn3": (1,)}, 2048
DTYPES = ("bfloat16", FP8, "int8")
WIDTH = 20
"""Characters of a bar of the picture per factor of 1."""
DECODERS = {
    "Llama-3.2-1B": Decoder(2048, 8192, 16, 32, 8, 64, 128256),
    "Llama-3.2-3B": Decoder(3072, 8192, 28, 24, 8, 128, 128256),
    "Qwen3-1.7B": Decoder(2048, 6144, 28, 16, 8, 128, 151936),
    "Qwen3-4B": Decoder(2560, 9728, 36, 32, 8, 128, 151936),
    "Llama-3.1-8B": Decoder(4096, 14336, 32, 32, 8, 128, 128256),
}
"""The dimensions in the models' config.json."""
TARGETS = {"MLP": ("gate", "up", "down"), "all linears": ("q", "k", "v", "o", "gate", "up", "down")}
GOALS = [(device, what) for device in CORES for what in ("kernel", *TARGETS)]
"""What the goal of 1.5 is judged for: the smallest gain of the five models with the MLP kernel, and as whole models."""
APPENDIX = """\
## How to repeat it

    python scripts/fp8_timing.py

Nothing in it is random.

# Appendix

No Trainium device was used. The kernel is the whole MLP of [timing.md](timing.md) at ratio 0.2 in two factors, on one
core. *fp8* has one scale per row of a factor, applied as results leave PSUM; its table of scales counts as traffic. The
whole models have the ranks of the kernels, attention has the ranks of the same ratio, and embedding, head and what is
not factorised stay in bfloat16; their prompt has 512 tokens.

*int8* is the best that a schedule could do, not a kernel: the stream of [the model](../timing.md) in which Vector and
Scalar, and from trn2 on GpSimd, widen each chunk of weights ahead of its matmuls, and nothing of the evictions waits
for that.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    parser.add_argument("--state", type=Path, default=Path("out/fp8_timing.json"), help="finished rows of this run")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that share the work; default 1")
    args = parser.parse_args()
    RESULTS.update(compute(tasks(), one, sources=SOURCES, state=args.state, jobs=args.jobs))
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "fp8.md").write_text("\n".join(document()) + "\n", encoding="utf-8")
    args.state.unlink()


def document() -> Iterator[str]:
    yield "# Factors in fp8 on Trainium, predicted"
    yield ""
    yield from verdict()
    yield from models()
    yield from picture()
    yield APPENDIX
    for device in CORES:
        yield from kernels(device)
    yield from prefill()


def verdict() -> Iterator[str]:
    one = {device: [gain(mlp, 1, device) for mlp in cases.MLPS] for device in CORES}
    met = sum(value >= 1.5 for value in goals())
    yield "With factors in fp8 the MLP kernel is predicted to decode a token"
    yield f"{span(one['trn1'] + one['trn2'])} as fast as in bfloat16 on trn1 and trn2, but only"
    yield f"{span(one['trn3'])} on trn3, where the matmuls become the bound. A whole model, whose other"
    yield "weights stay in bfloat16, reaches the goal of 1.5 on trn1 and trn2 only with all linears"
    yield f"factorised: **{met} of {len(GOALS)} goals are met**. int8, widened by other engines, is at best as"
    yield "fast as fp8, and it rounds more accurately: [what fp8 costs](low_bits.md#factors-in-fp8)."
    longest = [gain(mlp, PREFILL, "trn1") for mlp in cases.MLPS]
    yield f"A prefill of {PREFILL} tokens has {span(longest)} the speed on trn1."
    yield ""
    yield "| goal: at least 1.5 at one token, in every model | trn1 | trn2 | trn3 |"
    yield "|---|---:|---:|---:|"
    reached = dict(zip(GOALS, goals(), strict=True))
    for what in ("kernel", *TARGETS):
        cells = [f"{reached[device, what]:.2f}{'' if reached[device, what] >= 1.5 else ', **no**'}" for device in CORES]
        label = "the MLP kernel" if what == "kernel" else f"whole model, {what} factorised"
        yield f"| {label} | {' | '.join(cells)} |"
    yield ""


def goals() -> Iterator[float]:
    """Yield the gains that have the goal of 1.5."""
    for device, targets in GOALS:
        if targets == "kernel":
            yield min(gain(mlp, 1, device) for mlp in cases.MLPS)
        else:
            yield min(model_gain(mlp.name, targets, device) for mlp in cases.MLPS)


def models() -> Iterator[str]:
    yield "Tokens/s of a whole model on one core, one token at a time; factors in bfloat16, fp8 and int8, and in"
    yield "brackets the gain over bfloat16:"
    yield ""
    yield "| model | factorised | " + " | ".join(f"{d}: bf16 | fp8 | int8" for d in CORES) + " |"
    yield "|---|---|" + "---:|---:|---:|" * len(CORES)
    for mlp in cases.MLPS:
        for targets in TARGETS:
            cells = []
            for device in CORES:
                base = speed(mlp.name, targets, device, "bfloat16")
                cells += [f"{base:.1f}", against(speed(mlp.name, targets, device, FP8), base)]
                cells += [against(speed(mlp.name, targets, device, "int8"), base) if targets == "MLP" else ""]
            yield f"| {mlp.name} | {targets} | {' | '.join(cells)} |"
    yield ""


def against(other: float, base: float) -> str:
    return f"{other:.1f} ({other / base:.2f}x)"


def picture() -> Iterator[str]:
    yield "The gain of fp8 over bfloat16 on trn1, one token; `|` marks none:"
    yield ""
    yield "```"
    for mlp in cases.MLPS:
        for label, value in (
            ("MLP kernel", gain(mlp, 1, "trn1")),
            ("all linears", model_gain(mlp.name, "all linears", "trn1")),
            ("model, MLP", model_gain(mlp.name, "MLP", "trn1")),
        ):
            yield f"{mlp.name:<13} {label:<12} {'#' * WIDTH}|{'#' * round(WIDTH * (value - 1)):<{WIDTH}} {value:.2f}"
    yield "```"
    yield ""


def kernels(device: str) -> Iterator[str]:
    yield f"## Decode on {device}: the whole MLP at ratio 0.2"
    yield ""
    yield "| model | tokens | bf16, µs | fp8, µs | gain | traffic, MiB | DMA limit reached |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for mlp in cases.MLPS:
        for tokens in DECODES[device]:
            two, eight = kernel(mlp, tokens, device, ""), kernel(mlp, tokens, device, FP8)
            limit = eight["traffic"] / CORES[device].dma_rate / 1e9 / eight["latency"]
            figures = f"{two['latency'] * 1e6:.1f} | {eight['latency'] * 1e6:.1f} | {gain(mlp, tokens, device):.2f}x"
            yield f"| {mlp.name} | {tokens} | {figures} | {eight['traffic'] / 2**20:.1f} | {limit:.1%} |"
    yield ""


def prefill() -> Iterator[str]:
    yield f"## Prefill on trn1: the whole MLP at ratio 0.2, {PREFILL} tokens"
    yield ""
    yield "| model | bf16, ms | fp8, ms | gain | utilisation, fp8 |"
    yield "|---|---:|---:|---:|---:|"
    for mlp in cases.MLPS:
        two, eight = kernel(mlp, PREFILL, "trn1", ""), kernel(mlp, PREFILL, "trn1", FP8)
        figures = f"{two['latency'] * 1e3:.2f} | {eight['latency'] * 1e3:.2f} | {gain(mlp, PREFILL, 'trn1'):.2f}x"
        yield f"| {mlp.name} | {figures} | {eight['mfu']:.1%} |"


def gain(mlp: cases.Mlp, tokens: int, device: str) -> float:
    """Return how many times faster the kernel is with fp8."""
    return kernel(mlp, tokens, device, "")["latency"] / kernel(mlp, tokens, device, FP8)["latency"]


def model_gain(name: str, targets: str, device: str) -> float:
    """Return how many times as many tokens/s a whole model decodes with fp8."""
    return speed(name, targets, device, FP8) / speed(name, targets, device, "bfloat16")


def kernel(mlp: cases.Mlp, tokens: int, device: str, factors: str) -> cases.Figures:
    """Return the figures of the MLP kernel; factors "": bfloat16."""
    figures: cases.Figures = RESULTS[f"kernel {mlp.name} {tokens} {device} {factors}"]
    return figures


def speed(name: str, targets: str, device: str, factors: str) -> float:
    """Return the predicted tokens/s of a whole model, one token at a time."""
    return float(RESULTS[f"model {name} {targets} {device} {factors}"])


RESULTS: dict[str, Any] = {}
"""Finished tasks by name."""


def tasks() -> dict[str, tuple[Any, ...]]:
    """Return the arguments of :func:`run_kernel` or :func:`run_model` by the task's name."""
    work: dict[str, tuple[Any, ...]] = {}
    for device in CORES:
        for mlp in cases.MLPS:
            for tokens in DECODES[device]:
                for factors in ("", FP8):
                    work[f"kernel {mlp.name} {tokens} {device} {factors}"] = (mlp, tokens, device, factors)
            for targets in TARGETS:
                for factors in DTYPES if targets == "MLP" else DTYPES[:2]:
                    work[f"model {mlp.name} {targets} {device} {factors}"] = (mlp, targets, device, factors)
    for mlp in cases.MLPS:
        for factors in ("", FP8):
            work[f"kernel {mlp.name} {PREFILL} trn1 {factors}"] = (mlp, PREFILL, "trn1", factors)
    return work


def one(name: str) -> Any:
    """Compute one task."""
    return (run_kernel if name.startswith("kernel") else run_model)(*tasks()[name])


def run_kernel(mlp: cases.Mlp, tokens: int, device: str, factors: str) -> cases.Figures:
    """Trace and simulate the MLP kernel with the block sizes of the tiling solver."""
    core, ranks = CORES[device], Ranks(mlp.rank, mlp.rank, mlp.rank, mlp.intermediate)
    packings = mlp_packings(mlp.hidden, ranks, False, 1 if factors else 2)
    problem = MlpProblem(tokens, mlp.hidden, mlp.intermediate, *(mlp.rank,) * 3, factors=factors)
    entry = low_rank_swiglu_mlp(ranks, solve(problem, core).blocks, scaled=bool(factors))
    tensors = [TensorSpec((packing.elements,), factors or cases.DTYPE) for packing in packings]
    tensors += [TensorSpec((128, sum(p.columns.count for p in packings)))] if factors else []
    x = TensorSpec((mlp.hidden, tokens), cases.DTYPE)
    return cases.figures(run(entry, x, *tensors, outputs=[x], core=core, fold=True).trace, core)


def run_model(mlp: cases.Mlp, targets: str, device: str, factors: str) -> float:
    """Simulate a decode step of a whole model."""
    model = DECODERS[mlp.name]
    sizes = model.linears()
    ranks = {linear: mlp.rank if linear in TARGETS["MLP"] else aligned(*sizes[linear]) for linear in TARGETS[targets]}
    low = replace(model, ranks=(tuple(ranks.items()),) * model.layers, factors=factors)
    return predict(low, CORES[device], prompt=PROMPT).tokens_per_second


def aligned(rows: int, columns: int) -> int:
    """Return the rank of an attention linear at the ratio, aligned as the MLP's ranks are (the paper's Eq. 5)."""
    return max(ALIGN, int((1 - RATIO) * rows * columns / (rows + columns)) // ALIGN * ALIGN)


def span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f} times"


if __name__ == "__main__":
    main()
