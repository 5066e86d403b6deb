"""Inspection counts what the model has, and promises what compress removes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from neuronmm.cli import main
from neuronmm.compression.config import CompressionConfig
from neuronmm.compression.plan import make_plan, targeted
from neuronmm.compression.reader import Reader
from neuronmm.measure.inspection import inspect
from neuronmm.models import FAMILIES, UserError
from neuronmm.models.gguf_file import unpack
from tiny_gguf import write_gguf
from tiny_models import LAYER_COUNT, make_tiny, pivoted_spec, shared_spec


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_dense_model(model_type: str, tied: bool, tmp_path: Path) -> None:
    model = make_tiny(model_type, tied=tied)
    model.save_pretrained(tmp_path)
    result = inspect(tmp_path)
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(result.parameters.values()) == result.dense_parameters == sum(counts.values())
    assert result.parameters["attention"] == sum(n for k, n in counts.items() if "_proj" in k and "self_attn" in k)
    assert result.parameters["norms"] == sum(n for k, n in counts.items() if "norm" in k)
    assert result.parameters["head"] == (0 if tied else result.parameters["embedding"])
    assert result.bytes == {"F32": 4 * sum(counts.values())}
    assert result.linears == [] and result.spec is None


def test_a_tied_head_that_is_stored_too_counts_once(tmp_path: Path) -> None:
    make_tiny(tied=True).save_pretrained(tmp_path)
    expected = inspect(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # in old checkpoints
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    result = inspect(tmp_path)
    assert result.parameters == expected.parameters and result.parameters["head"] == 0
    assert sum(result.bytes.values()) > sum(expected.bytes.values())


@pytest.mark.parametrize("factors", ["model", "int8"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_compressed_model(shared: bool, factors: str, checkpoint: Callable[..., Path]) -> None:
    spec = shared_spec(factors=factors) if shared else pivoted_spec(factors=factors)
    folder = checkpoint(spec=spec)
    result = inspect(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(result.parameters.values()) == sum(parameter.numel() for parameter in model.parameters()) - sum(
        parameter.numel() for name, parameter in model.named_parameters() if name.endswith("_scale")
    )
    assert result.dense_parameters == sum(parameter.numel() for parameter in make_tiny().parameters())
    assert set(result.bytes) == {"F32", *(["I8"] if factors == "int8" else []), *([] if shared else ["I32"])}
    assert len(result.linears) == len(spec.ranks)
    rows = {(row.layer, row.linear): row for row in result.linears}
    if shared:
        assert (rows[1, "up"].shares_a_of, rows[1, "up"].form, rows[1, "up"].rank) == ("gate", "two", 12)
        assert rows[0, "up"].parameters == 48 * 12 and rows[0, "gate"].parameters == (48 + 32) * 12
    else:
        assert {row.form for row in result.linears} == {"pivoted"}
        assert rows[0, "down"].parameters == 8 * (32 + 48 - 8) and rows[0, "down"].dense_parameters == 32 * 48


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_file_has_the_parameters_of_the_checkpoint_in_it(family: str, tied: bool, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", family=family, tied=tied)
    (tmp_path / "folder").mkdir()
    unpack(tmp_path / "model.gguf", tmp_path / "folder")
    file, folder = inspect(tmp_path / "model.gguf"), inspect(tmp_path / "folder")
    assert file.parameters == folder.parameters and file.worth == folder.worth
    assert file.config.model_dump(include={"hidden_size", "num_key_value_heads", "vocab_size", "head"}) == (
        folder.config.model_dump(include={"hidden_size", "num_key_value_heads", "vocab_size", "head"})
    )
    assert sum(file.bytes.values()) == 2 * sum(folder.bytes.values())  # float32 and bf16


def test_the_worth_of_a_ratio_is_what_compress_removes(tmp_path: Path) -> None:
    make_tiny().save_pretrained(tmp_path)
    result = inspect(tmp_path)
    assert {row.targets for row in result.worth} == {"mlp", "attention", "all"}
    for row in result.worth:
        config = CompressionConfig(ratio=row.ratio, targets=row.targets, allocation="uniform", share_a="off")
        plan = make_plan(targeted(Reader(tmp_path), LAYER_COUNT, config), config)
        assert (row.removed_parameters, row.removed_bytes) == (plan.removed, 4 * plan.removed)
        assert row.of_model == plan.removed / result.dense_parameters


def test_it_needs_neither_torch_nor_transformers(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    write_gguf(tmp_path / "model.gguf")
    for package in ("torch", "transformers"):
        (tmp_path / f"{package}.py").write_text("raise KeyboardInterrupt\n")
    for model in (checkpoint(), checkpoint(compressed=False), tmp_path / "model.gguf"):
        command = [sys.executable, "-m", "neuronmm", "inspect", str(model)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)}
        )
        assert (done.returncode, done.stderr) == (0, "") and "embedding" in done.stdout


def test_the_command(checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint(spec=shared_spec(version="\x1b[31m0\n"))
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "12 =gate" in out and "compressed: svd, mlp" in out
    assert "\x1b" not in out and "\\x1b[31m0\\n" in out
    assert main(["inspect", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["compression"]["method"] == "svd" and document["parameters"]["embedding"] == 64 * 32
    assert main(["inspect", str(checkpoint(compressed=False))]) == 0
    assert "what compress would remove" in capsys.readouterr().out


@pytest.mark.parametrize("cut", [4, 40, 4000])
def test_a_damaged_gguf_file_is_refused(cut: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:cut])
    with pytest.raises(UserError, match=r"cut\.gguf: damaged GGUF file"):
        inspect(tmp_path / "cut.gguf")
