"""The script that runs a model in transformers-neuronx: a tiny one where that is importable, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.pipeline import compress

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
SCRIPT = SCRIPTS / "check_transformers_neuronx.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    done = run(SCRIPT, tmp_path, "dense", "low")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    wanted = "is no checkout of transformers-neuronx: it has no src/transformers_neuronx"
    assert done.stderr.splitlines()[-1].endswith(wanted)


def test_a_tiny_model_dense_and_compressed(tmp_path: Path) -> None:
    found = find_spec("transformers_neuronx")
    if found is None or found.origin is None or Path(found.origin).parent.parent.name != "src":
        pytest.skip("no checkout of transformers-neuronx is importable")
    dense, low = tmp_path / "dense", tmp_path / "low"
    assert run(SCRIPTS / "verify_neuron.py", "tiny", dense).returncode == 0
    compress(dense, low, CompressionConfig.build(None, ratio=0.2, targets="all", method="svd", refine="off"))
    command = SCRIPT, Path(found.origin).parents[2], dense, low, "--tp", "2", "--new-tokens", 3
    good = run(*command)
    *lines, summary = good.stdout.splitlines()
    assert good.returncode == 0, good.stderr
    assert len(lines) == 2 * 3 and all(line.startswith("ok  ") for line in lines)
    assert [line.endswith(" 0 kernels run") for line in lines] == [True] * 3 + [False] * 3
    assert json.loads(summary)["failed"] == []
