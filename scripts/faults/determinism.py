"""Run the same command twice, with one and two threads, and on two instruction sets, and compare the bytes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kills import prepare

from neuronmm.kernels.cpu.library import isa

OTHER_ISA = "avx2"
GENERATION = Path(__file__).with_name("one_generation.py")


def compressed(work: Path, name: str, threads: int, *more: str) -> dict[str, str]:
    """Return the hash of every file that a compression writes, but for the reports, which have times."""
    out = work / name
    text = ["--calibration", str(work / "text.txt"), "--recipe", str(work / "recipe.yaml")]
    _python(["-m", "neuronmm", "compress", str(work / "model"), "-o", str(out), *text, *more], threads)
    files = sorted(file for file in out.iterdir() if not file.name.startswith("compression_report"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def generated(work: Path, threads: int, isa_name: str) -> dict[str, Any]:
    """Return what a new process generates in each dtype: hashes of logits, and tokens."""
    results: dict[str, Any] = json.loads(_python([str(GENERATION), str(work / "one"), isa_name], threads))
    return results


def _python(words: list[str], threads: int) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"}
    environment["OMP_WAIT_POLICY"] = "passive"  # threads that spin stop each other on a busy machine
    done = subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def study(work: Path) -> dict[str, Any]:
    """Compare compressions and generations with a first one of one thread."""
    prepare(work)
    (work / "recipe.yaml").write_text("calibration_rows: 8\ncalibration_length: 16\nalign: 2\n")
    first = compressed(work, "one", 1)
    compression = {
        "again": compressed(work, "again", 1) == first,
        "two threads": compressed(work, "two", 2) == first,
        "planted: another seed": compressed(work, "other", 1, "--recipe", str(_other_seed(work))) == first,
    }
    best = str(isa())
    base = generated(work, 1, best)
    others = {
        "again": generated(work, 1, best),
        "two threads": generated(work, 2, best),
        OTHER_ISA: generated(work, 1, OTHER_ISA),
    }
    same = {
        dtype: {
            name: {what: value == other[dtype][what] for what, value in results.items()}
            for name, other in others.items()
        }
        for dtype, results in base.items()
    }
    findings = [
        f"{dtype}: {what} differ in a repetition"
        for dtype in same
        for what, equal in same[dtype]["again"].items()
        if not equal
    ]
    if not compression["again"]:
        findings.append("a repeated compression has other bytes")
    if compression["planted: another seed"]:
        findings.append("another seed gives the same bytes")
    return {"isa": best, "other_isa": OTHER_ISA, "compress": compression, "generate": same, "findings": findings}


def _other_seed(work: Path) -> Path:
    recipe = work / "other.yaml"
    recipe.write_text((work / "recipe.yaml").read_text() + "seed: 1\n")
    return recipe
