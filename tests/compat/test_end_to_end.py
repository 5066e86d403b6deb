"""End to end on every supported transformers: compress with the command line, load, and compare the tokens.

``make test`` runs this folder and ``tests/models`` on the oldest supported transformers, and all tests on the newest.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from neuronmm.cli import main
from neuronmm.kernels import Form
from neuronmm.models import LowRankLinear
from tiny_models import load_plain, make_tiny
from word_tokenizer import word_tokenizer

PROMPT = "w7 w21 w40 w9"


@pytest.mark.parametrize("form", ["two", "pivoted"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])  # transformers 5 only loads Qwen2's tokenizer for qwen2
def test_compress_then_generate_equals_transformers(
    model_type: str, tied: bool, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    make_tiny(model_type, tied=tied).save_pretrained(model)
    word_tokenizer().save_pretrained(model)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{3 + i * i % 61}" for i in range(2000)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("calibration_length: 64\n")  # the default is longer than the context of a tiny model
    command = ["compress", str(model), "-o", str(out), "--ratio", "0.3", "--targets", "all", "--align", "2"]
    command += ["--recipe", str(recipe), "--form", form]
    assert main([*command, "--calibration", str(text), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["realised_ratio"] == pytest.approx(0.3, abs=0.05)

    plain = load_plain(out)
    forms = {module.form is Form.TWO for module in plain.modules() if isinstance(module, LowRankLinear)}
    assert forms and (False in forms) == (form == "pivoted")
    tokens = word_tokenizer()(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = plain.generate(tokens, max_new_tokens=16, do_sample=False)[0, tokens.shape[1] :]
    generate = ["generate", str(out), "--prompt", PROMPT, "--max-new-tokens", "16", "--dtype", "fp32", "--json"]
    assert main(generate) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == expected.tolist()
