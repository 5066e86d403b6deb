"""Write nki.md: the accuracy of every NKI kernel (both dialects, bfloat16 and float32) and the planted bugs.

The NKI emulator runs the kernels on arrays and computes as the hardware's documentation says. The tests apply the same
rules over drawn shapes; this document shows the figures.

  python scripts/check_kernels.py [--output docs/results]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
from neuronmm.emulator.nki import NkiError, TensorSpec, run
from neuronmm.kernels.nki.problem import Blocks
from nki_cases import Case, baselines_of, kernel_modules, to_numpy, to_torch, two_kernel_mlp
from nki_mutants import MUTANTS, battery, planted
from nki_mutants_cutting import CUTTING
from nki_mutants_pivots import PIVOTS

DIALECTS = ("neuronxcc", "nki")
DTYPES = (torch.bfloat16, torch.float32)
TOKENS = (5, 200)
LINEAR = (576, 320, 1000)
MLP = (576, (320, 200, 352), 1536)
PLANTED = [*MUTANTS, *CUTTING, *PIVOTS]
SIZES = Blocks(tokens=128, moving=128, depth=2, intermediate=4)
OPTIONS: dict[str, dict[str, bool]] = {
    "": {},
    "RMSNorm, residual": {"norm": True, "residual": True},
    "[tokens, features]": {"tokens_first": True},
}
PIVOTED: dict[str, int | str] = {"row form": 300, "column form": "columns"}

TITLE = "# The Trainium kernels under the emulator"
ACCURACY = f"""\
## Accuracy

Relative error (Frobenius norm) against float64, beside that of the same sum in plain torch in the same dtype (CPU).
Most sizes have tails. The tiling solver chooses the block sizes; the baselines have strips of {SIZES.tokens}.

| kernels | shape | ranks |
|---|---|---|
| a linear | {LINEAR[0]} -> {LINEAR[2]} | {LINEAR[1]} |
| the MLP | {MLP[0]} -> {MLP[2]} | {MLP[1]} |
"""
BUGS = """\
## Planted bugs

Each bug changes one line of the kernels. A rule of the emulator catches it, or the numbers of a few small cases do; the
tests do the same.
"""
RATIO_LIMIT = 2
"""The largest error allowed, as a multiple of plain torch's in the same dtype."""


class Line(NamedTuple):
    """One kernel on one input: relative errors against float64."""

    kernel: str
    dialect: str
    dtype: str
    tokens: int
    error: float
    plain: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    lines = list(track(accuracy(), "accuracy", total=len(DIALECTS) * len(DTYPES) * len(TOKENS) * 17))
    caught = [caught_by(mutant) for mutant in track(PLANTED, "planted bugs")]
    (args.output / "nki.md").write_text("\n".join(document(lines, caught)) + "\n", encoding="utf-8")


def accuracy() -> Iterator[Line]:
    kernels = kernel_modules()
    for dialect in DIALECTS:
        for dtype in DTYPES:
            for tokens in TOKENS:
                for kernel, got, exact, plain in results(kernels, dialect, dtype, tokens):
                    name = str(dtype).removeprefix("torch.")
                    yield Line(kernel, dialect, name, tokens, error(got, exact), error(plain, exact))


def results(
    kernels: Any, dialect: str, dtype: torch.dtype, tokens: int
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield each kernel's name, its result, the float64 result and plain torch's."""
    for what, options in {**OPTIONS, "bias": {"bias": True}}.items():
        case = Case.linear(*LINEAR, tokens, dtype, **options)
        yield f"low_rank_matmul {what}", case.run(kernels, dialect), case.exact(), case.plain()
    for what, options in OPTIONS.items():
        case = Case.mlp(MLP[0], MLP[2], MLP[1], tokens, dtype, **options)
        yield f"low_rank_swiglu_mlp {what}", case.run(kernels, dialect), case.exact(), case.plain()
    case = Case.mlp(MLP[0], MLP[2], (320, 320, 352), tokens, dtype, shared=True)
    yield "low_rank_swiglu_mlp one A", case.run(kernels, dialect), case.exact(), case.plain()
    for what, pivots in PIVOTED.items():
        case = Case.linear(*LINEAR, tokens, dtype, pivots=pivots)
        yield f"low_rank_matmul {what}", case.run(kernels, dialect), case.exact(), case.plain()
    case = Case.mlp(MLP[0], MLP[2], MLP[1], tokens, dtype, pivots=(1000, 1100, "columns"))
    yield "low_rank_swiglu_mlp pivoted", case.run(kernels, dialect), case.exact(), case.plain()
    case = Case.mlp(MLP[0], MLP[2], MLP[1], tokens, dtype, pivots=((300, 200), (400, 130), ("columns", 170)))
    yield "low_rank_swiglu_mlp pivots of a core", case.run(kernels, dialect), case.exact(), case.plain()
    case = Case.mlp(MLP[0], MLP[2], MLP[1], tokens, dtype)
    yield "the MLP in two kernels", two_kernel_mlp(case, kernels, dialect, SIZES), case.exact(), case.plain()
    case = Case.linear(*LINEAR, tokens, dtype)
    for name, body, tensors, exact, plain in baselines_of(case, kernels, dialect, SIZES):
        spec = TensorSpec(tuple(exact.shape), to_numpy(case.x).dtype)
        output = run(body, *(to_numpy(t) for t in tensors), outputs=[spec]).outputs[0]
        yield name, to_torch(output), exact, plain


def error(output: Tensor, exact: Tensor) -> float:
    return ((output.double() - exact).norm() / exact.norm()).item()


def caught_by(mutant: Any) -> str:
    """Return what catches a planted bug; "nothing" would be a gap."""
    with planted(mutant) as kernels:
        try:
            battery(kernels, Case)
        except NkiError as violation:
            return f"rule: {violation.rule}"
        except AssertionError:
            return "the numbers"
        except ValueError:
            return "a shape that does not fit"
    return "**nothing**"


def document(lines: list[Line], caught: list[str]) -> Iterator[str]:
    yield TITLE
    yield ""
    yield from summary(lines, sum("nothing" not in how for how in caught), len(caught))
    yield "# Appendix"
    yield ""
    yield ACCURACY
    yield "| kernel | tokens | dtype | neuronxcc.nki | nki | torch |"
    yield "|---|---:|---|---:|---:|---:|"
    second = {(line.kernel, line.tokens, line.dtype): line.error for line in lines if line.dialect == "nki"}
    for line in lines:
        if line.dialect == "neuronxcc":
            other = second[line.kernel, line.tokens, line.dtype]
            figures = f"{line.error:.2e} | {other:.2e} | {line.plain:.2e}"
            yield f"| {line.kernel.strip()} | {line.tokens} | {line.dtype} | {figures} |"
    yield ""
    yield BUGS
    yield "| bug | in | caught by |"
    yield "|---|---|---|"
    for mutant, how in zip(PLANTED, caught, strict=True):
        yield f"| {mutant.what} | {mutant.file}.py | {how} |"


def summary(lines: list[Line], caught: int, bugs: int) -> Iterator[str]:
    """Return the verdict, its table, the bfloat16 errors as a bar chart, and the command."""
    ratios = [line.error / line.plain for line in lines if line.dtype == "bfloat16"]
    single = max(line.error for line in lines if line.dtype == "float32")
    accurate, complete = all(line.error <= RATIO_LIMIT * line.plain for line in lines), caught == bugs
    yield f"{'Every' if accurate else '**Not every**'} kernel meets its error bound in both dialects and both dtypes."
    yield f"{'Every' if complete else '**Not every**'} planted bug is caught. No Trainium device was used:"
    yield "the emulator runs the kernels themselves, with float32 PSUM and one rounding per instruction."
    yield ""
    yield "| check | result | allowed |"
    yield "|---|---:|---:|"
    yield f"| bfloat16: error over plain torch's | {min(ratios):.2f} to {max(ratios):.2f} | {RATIO_LIMIT} |"
    yield f"| float32: largest relative error | {single:.1e} | {RATIO_LIMIT} times plain torch's |"
    yield f"| planted bugs caught | {caught} of {bugs} | {bugs} |"
    yield ""
    yield f"Largest error over plain torch's in bfloat16, per kernel; the bar's end is the limit of {RATIO_LIMIT}:"
    yield ""
    yield "```"
    worst: dict[str, float] = {}
    for line in lines:
        if line.dtype == "bfloat16":
            worst[line.kernel.strip()] = max(worst.get(line.kernel.strip(), 0), line.error / line.plain)
    for kernel, ratio in worst.items():
        yield f"{kernel:40} {'#' * round(20 * ratio):{20 * RATIO_LIMIT}}| {ratio:.2f}"
    yield "```"
    yield ""
    yield "## How to repeat it"
    yield ""
    yield "    python scripts/check_kernels.py"
    yield ""


if __name__ == "__main__":
    main()
