"""The commands on a real Neuron host with an emulated runtime, the compile cache, and the example of the document."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neuron_cases import PARAMS, PROMPTS, cpu_tokens, neuron_host
from neuronmm import cli
from neuronmm.emulator.runtime import neuron_emulation
from neuronmm.engine.engine import Engine
from neuronmm.models.neuronx import sdk


def test_generate_command(
    host: str, neuron_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = neuron_checkpoint("llama", "mlp")
    command = ["generate", str(folder), "--prompt", "w7 w8 w9", "--max-new-tokens", "8", "--json", "--dtype", "fp32"]
    assert cli.main(command) == 0
    plain = json.loads(capsys.readouterr().out)
    assert cli.main([*command, "--backend", "neuron", "--tp", "2", "--positions", "64", "--emulate"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["token_ids"] == plain["token_ids"]
    assert f"backend neuron, float32, kernels: low-rank NKI; {host}" in err and "emulated on this CPU, tp 2" in err
    assert cli.main([*command, "--tp", "2"]) == 2
    assert "backend cpu has no option tp_degree" in capsys.readouterr().err


KEYS = [
    *("kind", "what", "model", "baseline", "backend", "emulated", "device", "cores", "runs", "new_tokens"),
    *("variants", "points", "validation"),
]
PREDICTED = [
    *("ttft", "tpot", "decode_tokens_per_second", "kernel_seconds", "collective_seconds", "hbm_bytes_read"),
]
BENCHMARK = ["--backend", "neuron", "--prompt-lengths", "8,16", "--new-tokens", "6", "--batch", "1", "--runs", "2"]


def test_an_emulated_benchmark_separates_prediction_and_emulation(
    host: str, neuron_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    dense, low = neuron_checkpoint("llama", "dense"), neuron_checkpoint("llama", "mlp")
    assert cli.main(["benchmark", str(low), "--baseline", str(dense), *BENCHMARK, "--emulate"]) == 0
    out = capsys.readouterr().out
    assert "predicted for 1 trn1 core(s), not measured" in out and "not of a device" in out
    assert "TTFT ms (not validated)" in out and "TTFT is not validated" in " ".join(out.split())
    result = json.loads(out.splitlines()[-1])
    assert list(result) == KEYS and list(result["variants"]["fused"]) == ["kernels"]
    assert result["validation"]["ttft"] == "not validated"
    assert (result["kind"], result["emulated"], len(result["points"])) == ("predicted", True, 2)
    for point in result["points"]:
        assert list(point["variants"]) == ["dense", "fused"]
        for figures in point["variants"].values():
            assert list(figures) == ["predicted", "emulation"]
            assert list(figures["emulation"]) == ["what", "ttft", "tpot", "ready_seconds"]
            assert list(figures["predicted"]) == PREDICTED
            assert 0 < figures["predicted"]["tpot"] < 1e-3  # of a device; the emulation's time is this machine's
            assert 0 < figures["emulation"]["tpot"]["median"] != figures["predicted"]["tpot"]


def test_a_benchmark_on_a_device_is_measured(
    host: str,
    neuron_checkpoint: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sdk, "check_cores", lambda wanted: None)
    with neuron_emulation():  # stands in for the device
        assert cli.main(["benchmark", str(neuron_checkpoint("llama", "mlp")), *BENCHMARK]) == 0
    out = capsys.readouterr().out
    assert "measured on 1 trn1 core(s): 2 runs of 6 tokens" in out and "predicted" not in out
    result = json.loads(out.splitlines()[-1])
    assert result["kind"] == "measured" and set(result["points"][0]["variants"]["fused"]) == {"measured"}


def test_compiled_graphs_are_cached(
    host: str, neuron_checkpoint: Callable[..., Path], neuron: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = neuron_checkpoint("llama", "mlp")

    def cached(**options: Any) -> bool:
        engine = neuron(folder, **options)
        path = engine.runner.path
        hit = neuron_host(engine).cached
        assert ("compile cache hit" in path) == hit and ("compile cache miss" in path) == (not hit)
        assert engine.generate(PROMPTS[:1], PARAMS)[0].token_ids == tokens
        return bool(hit)

    tokens = cpu_tokens(folder, PROMPTS[:1])[0]
    assert not cached()
    assert cached()
    assert not cached(n_positions=72)
    assert not cached(layout="BSH")
    assert not cached(tp_degree=2)
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    assert not cached()
    monkeypatch.delenv("NEURON_CC_FLAGS")
    for neff in (Path(os.environ["NEURONMM_CACHE"]) / "neuronx").rglob("*.neff"):
        neff.unlink()
    assert not cached()
    assert cached()
    folder.rename(folder.with_name("first"))
    neuron_checkpoint("llama", "mlp")  # other weights of the same shape: a hit, but other tokens
    before, tokens = tokens, cpu_tokens(folder, PROMPTS[:1])[0]
    assert tokens != before
    assert cached()


def test_the_document(
    host: str, neuron_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The Python of docs/trainium.md runs unchanged, except for ``emulate`` and a smaller model."""
    monkeypatch.chdir(tmp_path)
    neuron_checkpoint("llama", "mlp").rename(tmp_path / "OUT")
    text = (Path(__file__).parents[2] / "docs" / "trainium.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(block.replace("n_positions=512", "n_positions=128, emulate=True"), {})
    assert "tp 2, batch 1, 128 positions; compile cache miss" in capsys.readouterr().out
