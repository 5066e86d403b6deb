"""The script that runs SVD-LLM, with a stand-in for the peer's checkout that truncates by plain SVD."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from neuronmm.compression.config import BARE, CompressionConfig
from neuronmm.measure.evaluate import evaluate
from neuronmm.measure.sweep import sweep
from neuronmm.measure.sweep_config import SweepConfig
from tiny_models import make_tiny
from word_tokenizer import word_tokenizer

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "peer_svdllm.py"
STAND_IN = """
import json, torch
from torch import nn

def profle_svdllm_low_resource(name, model, loader, dev):
    model(**loader[0])
    json.dump([batch["input_ids"].tolist() for batch in loader], open("seen.json", "w"))
    return {"rows": len(loader), "length": model.seqlen}

def whitening(name, model, profile, ratio, dev):
    assert (profile, dev) == ({"rows": 4, "length": 16}, "cpu")
    for layer in model.model.layers:
        for block in ("self_attn", "mlp"):
            new = nn.Module()
            for full, linear in getattr(layer, block).named_children():
                if isinstance(linear, nn.Linear):
                    rows, columns = linear.weight.shape
                    rank = int(rows * columns * ratio / (rows + columns))
                    u, s, v = torch.linalg.svd(linear.weight, full_matrices=False)
                    short = full.removesuffix("_proj")
                    for side, weight in (("u", u[:, :rank] * s[:rank]), ("v", v[:rank])):
                        factor = nn.Linear(1, 1, bias=False)
                        factor.weight.data = weight
                        setattr(new, f"{short}_{side}_proj", factor)
            setattr(layer, block, new)
"""


@pytest.fixture
def drive(tmp_path: Path) -> Callable[..., list[dict[str, object]]]:
    """Run the script on a tiny model: ``drive("--ratios", "0.2,0.4")`` returns the printed reports."""
    make_tiny(dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "SVDLLM.py").write_text(STAND_IN)
    (tmp_path / "text.txt").write_text(" ".join(f"w{3 + i % 60}" for i in range(200)))

    def run(*more: str) -> list[dict[str, object]]:
        command = [sys.executable, str(SCRIPT), "model", "--checkout", "checkout", "--python", sys.executable]
        command += ["--calibration", "text.txt", "--rows", "4", "--length", "16", "-o", "out", *more]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def test_the_peers_factors_become_checkpoints_that_evaluate_reads(
    drive: Callable[..., list[dict[str, object]]], tmp_path: Path
) -> None:
    reports = drive("--ratios", "0.2,0.4", "--targets", "mlp", "all")
    out = tmp_path / "out"
    assert [(report["targets"], report["asked_ratio"]) for report in reports] == [
        ("mlp", 0.2), ("all", 0.2), ("mlp", 0.4), ("all", 0.4),
    ]  # fmt: skip
    tokens = load_file(out / "tokens.safetensors")["tokens"]
    assert [row for (row,) in json.loads((out / "seen.json").read_text())] == tokens.tolist()
    before = load_file(tmp_path / "model" / "model.safetensors")
    for report in reports:
        targets, ratio = report["targets"], report["asked_ratio"]
        folder = out / f"{targets}-{ratio}"
        stored = json.loads((folder / "compression_report.json").read_text())
        assert stored == report and stored["calibration"]["rows"] == 4
        after = load_file(folder / "model.safetensors")
        changed = {name.removesuffix(".weight") for name in after if not torch.equal(after[name], before[name])}
        assert changed == set(stored["ranks"]) and len(changed) == (2 * 3 if targets == "mlp" else 2 * 7)
        dense = factors = 0
        for name, rank in stored["ranks"].items():
            weight = before[f"{name}.weight"].float()
            u, s, v = torch.linalg.svd(weight, full_matrices=False)
            expected = (u[:, :rank] * s[:rank]) @ v[:rank]
            assert rank == int(weight.numel() * (1 - ratio) / sum(weight.shape))
            torch.testing.assert_close(after[f"{name}.weight"].float(), expected, rtol=2**-8, atol=1e-3)
            dense, factors = dense + weight.numel(), factors + rank * sum(weight.shape)
        assert stored["realised_ratio"] == pytest.approx(1 - factors / dense)
        assert ratio < stored["realised_ratio"] < ratio + 0.1
    assert evaluate(out / "all-0.4", text=tmp_path / "text.txt", context=16)["results"][0]["models"]["model"]["value"]


def test_the_results_become_points_of_a_sweep(drive: Callable[..., list[dict[str, object]]], tmp_path: Path) -> None:
    base = CompressionConfig(align=2, **BARE)
    config = SweepConfig([0.3], ["svd"], [tmp_path / "text.txt"], base, context=16)
    ours = sweep(tmp_path / "model", tmp_path / "sweep", config).points
    (report,) = drive("--ratios", "0.3", "--sweep", "sweep")
    points = sweep(tmp_path / "model", tmp_path / "sweep", config, resume=True).points
    dense, peer = ours[0], points[1]
    assert [point["name"] for point in points] == ["dense", "SVD-LLM", "svd"]
    assert (peer["ratio"], peer["targets"]) == (0.3, "mlp")
    assert peer["bytes"] == 2 * report["parameters"]["compressed"] < dense["bytes"]
    assert peer["perplexity"]["text"] != dense["perplexity"]["text"]


def test_a_folder_that_is_not_a_sweep_is_refused_before_anything_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "model", "--checkout", "checkout", "--python", sys.executable]
    command += ["--calibration", "text.txt", "-o", "out", "--sweep", "here"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith(
        "here: is not the folder of a sweep; start one with neuronmm sweep"
    )
    assert not (tmp_path / "out").exists()
