"""Predict the paper's tables by the timing model: validation first, then these kernels against the published ones.

Writes timing.md and timing.png, the timeline of a kernel's start. Everything is predicted, for one NeuronCore, unless a
column says published. The NKI emulator traces the real kernels on shapes alone. An interrupted run resumes, as long as
the kernels and the models are unchanged.

  python scripts/reproduce_paper.py [--output docs/results] [--state out/reproduce_paper.json] [--jobs N]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from resumable_tasks import compute

from neuronmm.emulator.nki import nki_modules
from neuronmm.emulator.timing import simulate
from neuronmm.emulator.timing.timeline import write_png
from neuronmm.emulator.timing.validation import context_row, leave_kernels_out, rows
from neuronmm.kernels.hardware import CORES, TRN1

with nki_modules():
    import paper_cases as cases
    from paper_report import document

SOURCES = (
    "kernels/[hlst]*.py",
    "kernels/nki/*.py",
    "emulator/nki/*.py",
    "emulator/timing/*.py",
    "scripts/paper_cases.py",
    "scripts/reproduce_paper.py",
)
"""The files that the figures depend on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    parser.add_argument(
        "--state", type=Path, default=Path("out/reproduce_paper.json"), help="finished rows of this run"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that share the work; default 1")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    results = compute(tasks(), one, sources=SOURCES, state=args.state, jobs=args.jobs)
    write_png(simulate(cases.matmul_trace(2048, 2048, 1280, 8192), TRN1), args.output / "timing.png", (0, 300))
    (args.output / "timing.md").write_text("\n".join(document(results)) + "\n", encoding="utf-8")
    args.state.unlink()


def tasks() -> dict[str, Callable[[], Any]]:
    """Return the task of every row by its name."""
    work: dict[str, Callable[[], Any]] = {
        "validation": lambda: [asdict(row) for row in rows()],
        "fit": fitted,
        "padded": lambda: {str(tokens): context_row(padded=tokens).predicted for tokens in cases.BUCKETS},
    }
    for name in cases.STALLS:
        work[f"stall {name}"] = lambda name=name: cases.stalled(name, cases.LARGEST)  # type: ignore[misc]
    for shape in cases.SHAPES:
        for name, kernel in cases.KERNELS.items():
            work[f"prefill {shape} {name}"] = lambda kernel=kernel, shape=shape: kernel(*shape)  # type: ignore[misc]
    for mlp in cases.MLPS:
        for tokens in (*cases.PREFILLS, *cases.DECODES):
            for device in CORES if tokens in cases.DECODES else ("trn1",):
                for name, kernel in cases.MLP_KERNELS.items():
                    call = (mlp, tokens, device)
                    work[f"{mlp.name} {tokens} {device} {name}"] = lambda kernel=kernel, call=call: kernel(*call)  # type: ignore[misc]
    for mlp in cases.MLPS:
        for device in CORES:
            for panels in (0, 1):
                call = (mlp, 1, device, panels)
                work[f"{mlp.name} up {device} {panels}"] = lambda call=call: cases.up_projection(*call)  # type: ignore[misc]
    return work


def fitted() -> list[Any]:
    """Return the constant fitted to all latencies, and the fits that leave a kernel out."""
    overhead, left_out = leave_kernels_out()
    return [overhead, [asdict(fit) for fit in left_out]]


def one(name: str) -> Any:
    """Compute one task."""
    return tasks()[name]()


if __name__ == "__main__":
    main()
