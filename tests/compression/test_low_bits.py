"""Dense weights stored in few bits: what is written, that it is the rounding at load, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from compression_runs import SMALL, Interrupted, config, stop_at, tensors, weights
from neuronmm.cli import main
from neuronmm.compression import checkpoint
from neuronmm.compression.convert import convert
from neuronmm.compression.error_feedback import ErrorFeedback
from neuronmm.compression.pipeline import compress
from neuronmm.compression.recover import recover
from neuronmm.engine.engine import load
from neuronmm.kernels import Int4, quantise, quantise_int4
from neuronmm.models import UserError, quantise_weights
from neuronmm.models.families import LAYERS, LINEARS
from neuronmm.models.load import load_pretrained
from neuronmm.models.low_bits import weight_dtype_of
from neuronmm.models.neuronx.checkpoint import Checkpoint
from tiny_models import load_plain, logits

Dense = Callable[..., Path]
FITTED: dict[str, Any] = {"ratio": 0, "method": "whitened", "weight_dtype": "int4"}


def plain(dtype: str, **more: Any) -> Any:
    return config(ratio=0, method="svd", weight_dtype=dtype, **more)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_plain_rounding_is_stored_as_load_rounds_it(
    dtype: str, tied: bool, dense: Dense, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_SHARD_BYTES", 9000)
    source = dense("qwen2", tied=tied, dtype=torch.bfloat16)
    report = compress(source, tmp_path / "out", plain(dtype))
    rounded = load_pretrained(source, torch.bfloat16)
    quantise_weights(rounded, dtype)
    expected = logits(rounded)
    for model in (load_pretrained(tmp_path / "out", torch.bfloat16), load_plain(tmp_path / "out", torch.bfloat16)):
        pairs = zip(model.named_parameters(), rounded.named_parameters(), strict=True)
        for (name, stored), (other, at_load) in pairs:
            assert name == other and stored.dtype == at_load.dtype and torch.equal(stored, at_load), name
        assert torch.equal(logits(model), expected) and weight_dtype_of(model) == dtype
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors(tmp_path / "out")) and len(set(index["weight_map"].values())) > 1
    assert report["bytes"]["compressed"] < report["bytes"]["dense"] and report["format"] == 3
    texts = [load(folder, **options).generate(["w9 w10"])[0].text
             for folder, options in ((tmp_path / "out", {}), (source, {"weight_dtype": dtype}))]  # fmt: skip
    assert texts[0] == texts[1]


def test_int4_is_fitted_to_the_inputs_behind_what_is_rounded(dense: Dense, text: Path, tmp_path: Path) -> None:
    """A model of transformers, whose modules are rounded one layer after the other, gives the same tensors."""
    source = dense()
    compress(source, tmp_path / "out", config(**FITTED, calibration=str(text)))
    stored, model = load_file(tmp_path / "out" / "model.safetensors"), load_pretrained(source, torch.float32)
    rows = calibration(source, text, tmp_path)
    table = model.get_input_embeddings()
    table.weight.data = quantise(table.weight).dequantise(torch.float32)
    for index in range(2):
        layer = model.model.layers[index]
        linears = {name: layer.get_submodule(name) for name in LINEARS.values()}
        seen = {name: [] for name in linears}
        for name, linear in linears.items():
            linear.register_forward_pre_hook(lambda _, inputs, seen=seen[name]: seen.append(inputs[0].flatten(0, 1)))
        with torch.no_grad():
            model(rows)
        for name, linear in linears.items():
            full, feedback = f"{LAYERS}.{index}.{name}.weight", ErrorFeedback(seen[name][0].T @ seen[name][0])
            found = Int4(stored[full], stored[f"{full}_scale"], linear.in_features)
            expected, weight = feedback.int4(linear.weight), linear.weight.detach()
            # Other sums in float32 may decide a tie in another way, which later columns feel.
            assert (found.values == expected.values).float().mean() > 0.98, full
            assert feedback.loss(weight, found) < 0.95 * feedback.loss(weight, quantise_int4(weight))
            linear.weight.data = found.dequantise(torch.float32)


def calibration(source: Path, text: Path, tmp_path: Path) -> torch.Tensor:
    """Return the calibration rows of a run."""
    store = tmp_path / "store"
    compress(source, tmp_path / "other", config(method="whitened", calibration=str(text)), store=store)
    return load_file(store / "tokens.safetensors")["tokens"][: SMALL["calibration_rows"]]  # the others are held out


@pytest.mark.parametrize("factors", ["model", "int8"])
def test_a_compressed_model_keeps_its_factors(factors: str, dense: Dense, text: Path, tmp_path: Path) -> None:
    source = dense(dtype=torch.bfloat16)
    settings = {"method": "whitened", "form": "pivoted", "calibration": str(text), "factor_dtype": factors}
    compress(source, tmp_path / "exact", config(**settings))
    compress(source, tmp_path / "int4", config(**settings, weight_dtype="int4"))
    before, after = tensors(tmp_path / "exact"), tensors(tmp_path / "int4")
    for name, tensor in before.items():
        if ".mlp." in name or "norm" in name:
            assert torch.equal(after[name], tensor)
        else:
            dtype = torch.int8 if "embed" in name or "lm_head" in name else torch.uint8
            assert after[name].dtype == dtype and after[f"{name}_scale"].dtype == torch.float32
    assert torch.isfinite(logits(load_plain(tmp_path / "int4"))).all()


def test_recover_rounds_at_its_end(dense: Dense, text: Path, tmp_path: Path) -> None:
    settings = {"method": "whitened", "calibration": str(text), "calibration_rows": 16}
    source = dense()
    compress(source, tmp_path / "low", config(**settings))
    compress(source, tmp_path / "whole", config(**settings, recover="factors", weight_dtype="int4"))
    recover(tmp_path / "low", tmp_path / "out", weight_dtype="int4")
    expected = tensors(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(tmp_path / "out").items())


@pytest.mark.parametrize("damage", [None, "rounded-00000", "rounding-00001"])
def test_an_interrupted_rounding_continues(damage: str | None, dense: Dense, text: Path, tmp_path: Path) -> None:
    source, settings = dense(), config(**FITTED, calibration=str(text))
    compress(source, tmp_path / "whole", settings)
    with pytest.raises(Interrupted):
        compress(source, tmp_path / "out", settings, progress=stop_at("rounding", 1))
    if damage is not None:
        file = tmp_path / "out.partial" / f"{damage}.safetensors"
        file.write_bytes(file.read_bytes()[:100])
    compress(source, tmp_path / "out", settings, resume=True)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": 0}, "give a weight_dtype or a higher ratio"),
        ({"ratio": 0.01, "weight_dtype": "int4"}, "must be 0.05 to 0.6, or 0 with a weight_dtype"),
        ({"ratio": 0, "weight_dtype": "int4", "recover": "factors"}, "leaves no factors"),
        ({"ratio": 0, "weight_dtype": "int4", "factor_dtype": "int8"}, "leaves no factors"),
        ({"weight_dtype": "int3"}, "int3"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((UserError, ValidationError), match=message):
        config(**settings)


def test_what_a_stored_checkpoint_is_not_for(dense: Dense, tmp_path: Path) -> None:
    only, both = tmp_path / "only", tmp_path / "both"
    compress(dense(), only, plain("int8"))
    compress(dense(), both, config(method="svd", weight_dtype="int4"))
    for folder, message in ((only, "has no factors to train"), (both, "int4 weights cannot be trained")):
        with pytest.raises(UserError, match=message):
            recover(folder, tmp_path / "out")
    for folder, message in ((only, "has no factors to convert"), (both, "int4 weights cannot be converted")):
        with pytest.raises(UserError, match=message):
            convert(folder, tmp_path / "out")
    with pytest.raises(UserError, match="already compressed"):
        compress(only, tmp_path / "out", plain("int8"))
    with pytest.raises(UserError, match="have few bits already"):
        load(only, weight_dtype="int4")
    with pytest.raises(UserError, match="stored in int4, which the Neuron hosts cannot run"):
        Checkpoint(both, torch.float32)


def test_the_commands_show_what_is_stored(dense: Dense, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text(" ".join(f"w{3 + i % 40}" for i in range(200)))
    source = str(dense())
    options = ["--ratio", "0", "--weight-dtype", "int4", "--method", "svd"]
    assert main(["compress", source, "-o", str(out), *options]) == 0
    assert "int4, embedding and head int8" in capsys.readouterr().out
    assert "rounded to `int4`" in (out / "README.md").read_text()
    counts = []
    for folder in (source, str(out)):
        assert main(["inspect", folder, "--json"]) == 0
        counts.append(json.loads(capsys.readouterr().out)["parameters"])
    assert counts[0] == counts[1]
    assert main(["inspect", str(out)]) == 0
    assert "dense weights: int4, embedding and head int8" in capsys.readouterr().out
    assert main(["generate", str(out), "--prompt", "w9", "--max-new-tokens", "2"]) == 0
    assert "int4" in capsys.readouterr().err
    assert main(["evaluate", str(out), "--baseline", source, "--text", str(text), "--context", "20", "--json"]) == 0
    models = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
    assert models["model"]["dtype"] == "float32, int4 weights" and models["baseline"]["dtype"] == "float32"
    command = ["benchmark", str(out), "--baseline", source, "--prompt-lengths", "4", "--new-tokens", "2", "--runs", "1"]
    assert main([*command, "--json"]) == 0
    variants = json.loads(capsys.readouterr().out.splitlines()[-1])["variants"]
    assert list(variants) == ["dense", "fused"]
    assert variants["fused"]["weight_bytes_per_token"] < 0.4 * variants["dense"]["weight_bytes_per_token"]
    assert main(["report", str(out), "-o", str(tmp_path / "page.html")]) == 0
