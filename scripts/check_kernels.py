"""The NKI kernels' accuracy and the planted bugs, as a document: every kernel, both dialects, bfloat16 and float32.

Runs the kernels on arrays under the NKI emulator, which computes as the hardware's documentation says; writes nki.md.
The tests hold the same kernels to the same rules over drawn shapes; here the figures can be read.

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
from nki_cases import Case, baselines_of, kernel_modules, to_numpy, to_torch, two_kernel_mlp
from nki_mutants import MUTANTS, battery, planted
from nki_mutants_cutting import CUTTING

from neuronmm.emulator.nki import NkiError, TensorSpec, run
from neuronmm.kernels.nki.problem import Blocks

DIALECTS = ("neuronxcc", "nki")
DTYPES = (torch.bfloat16, torch.float32)
TOKENS = (5, 200)
LINEAR = (576, 320, 1000)
MLP = (576, (320, 200, 352), 1536)
PLANTED = [*MUTANTS, *CUTTING]
SIZES = Blocks(tokens=128, moving=128, depth=2, intermediate=4)
OPTIONS: dict[str, dict[str, bool]] = {
    "": {},
    "RMSNorm, residual": {"norm": True, "residual": True},
    "[tokens, features]": {"tokens_first": True},
}

HEAD = f"""\
# The Trainium kernels under the emulator

Made by `python scripts/check_kernels.py`. No Trainium device was used: the emulator runs the kernels themselves, with
float32 PSUM and one rounding an instruction.

## Accuracy

Relative error (Frobenius norm) against float64, and that of the same sum in plain torch in the same dtype (CPU). A
linear is {LINEAR[0]} -> {LINEAR[1]} -> {LINEAR[2]}, the MLP {MLP[0]} -> {MLP[2]} with ranks {MLP[1]}: most sizes have
tails. Block sizes are the tiling solver's; the baselines have strips of {SIZES.tokens}.
"""
MUTANTS_HEAD = """\
## Planted bugs

Each is a change of a line of the kernels. It is caught by a rule of the emulator, or by the numbers of a handful of
small cases; the tests do the same.
"""


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
    found = list(track(accuracy(), "accuracy", total=len(DIALECTS) * len(DTYPES) * len(TOKENS) * 13))
    caught = [caught_by(mutant) for mutant in track(PLANTED, "planted bugs")]
    (args.output / "nki.md").write_text("\n".join(document(found, caught)) + "\n", encoding="utf-8")


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
    """Kernel, its result, the exact and the plain one."""
    for what, options in {**OPTIONS, "bias": {"bias": True}}.items():
        case = Case.linear(*LINEAR, tokens, dtype, **options)
        yield f"low_rank_matmul {what}", case.run(kernels, dialect), case.exact(), case.plain()
    for what, options in OPTIONS.items():
        case = Case.mlp(MLP[0], MLP[2], MLP[1], tokens, dtype, **options)
        yield f"low_rank_swiglu_mlp {what}", case.run(kernels, dialect), case.exact(), case.plain()
    case = Case.mlp(MLP[0], MLP[2], (320, 320, 352), tokens, dtype, shared=True)
    yield "low_rank_swiglu_mlp one A", case.run(kernels, dialect), case.exact(), case.plain()
    case = Case.mlp(MLP[0], MLP[2], MLP[1], tokens, dtype)
    yield "the MLP in two kernels", two_kernel_mlp(case, kernels, dialect, SIZES), case.exact(), case.plain()
    case = Case.linear(*LINEAR, tokens, dtype)
    for name, body, tensors, exact, plain in baselines_of(case, kernels, dialect, SIZES):
        spec = TensorSpec(tuple(exact.shape), to_numpy(case.x).dtype)
        made = run(body, *(to_numpy(t) for t in tensors), outputs=[spec]).outputs[0]
        yield name, to_torch(made), exact, plain


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def caught_by(mutant: Any) -> str:
    """What catches a planted bug; "nothing" would be a gap."""
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


def document(found: list[Line], caught: list[str]) -> Iterator[str]:
    yield HEAD
    yield "| kernel | tokens | dtype | neuronxcc.nki | nki | torch |"
    yield "|---|---:|---|---:|---:|---:|"
    second = {(line.kernel, line.tokens, line.dtype): line.error for line in found if line.dialect == "nki"}
    for line in found:
        if line.dialect == "neuronxcc":
            other = second[line.kernel, line.tokens, line.dtype]
            figures = f"{line.error:.2e} | {other:.2e} | {line.plain:.2e}"
            yield f"| {line.kernel.strip()} | {line.tokens} | {line.dtype} | {figures} |"
    half = [line.error / line.plain for line in found if line.dtype == "bfloat16"]
    single = [line.error for line in found if line.dtype == "float32"]
    yield ""
    yield f"bfloat16: {min(half):.2f} to {max(half):.2f} times torch's error (2 is allowed)."
    yield f"float32: at most {max(single):.1e} (1e-5 is allowed)."
    yield ""
    yield MUTANTS_HEAD
    yield "| bug | in | caught by |"
    yield "|---|---|---|"
    for mutant, how in zip(PLANTED, caught, strict=True):
        yield f"| {mutant.what} | {mutant.file}.py | {how} |"
    yield ""
    yield f"{sum('nothing' not in how for how in caught)} of {len(caught)} are caught."


if __name__ == "__main__":
    main()
