"""The script that runs a model in transformers-neuronx: a tiny model where it is importable, and refused input."""

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


def test_a_folder_that_is_not_a_checkout_is_refused(tmp_path: Path) -> None:
    done = run(SCRIPT, tmp_path, "dense", "low")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    message = "is not a checkout of transformers-neuronx: it has no src/transformers_neuronx"
    assert done.stderr.splitlines()[-1].endswith(message)


def test_a_tiny_model_dense_and_compressed(tmp_path: Path) -> None:
    host = find_spec("transformers_neuronx")
    if host is None or host.origin is None or Path(host.origin).parent.parent.name != "src":
        pytest.skip("no checkout of transformers-neuronx is importable")
    dense, low = tmp_path / "dense", tmp_path / "low"
    assert run(SCRIPTS / "verify_neuron.py", "tiny", dense).returncode == 0
    compress(dense, low, CompressionConfig.build(None, ratio=0.2, targets="all", method="svd", refine="off"))
    command = SCRIPT, Path(host.origin).parents[2], dense, low, "--tp", "2", "--new-tokens", 3
    finished = run(*command)
    *lines, summary = finished.stdout.splitlines()
    assert finished.returncode == 0, finished.stderr
    assert len(lines) == 2 * 3 and all(line.startswith("ok  ") for line in lines)
    assert [line.endswith(" 0 kernels run") for line in lines] == [True] * 3 + [False] * 3
    assert json.loads(summary)["failed"] == []
