"""Dense weights rounded when a model is loaded: through the engine, the commands and the measures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from compression_runs import edit_tensors
from core_decoding import needs_core
from neuronmm.cli import main
from neuronmm.engine.engine import load
from neuronmm.kernels import Int4, Int8, quantise, quantise_int4
from neuronmm.measure.benchmark import benchmark
from neuronmm.measure.evaluate import evaluate
from neuronmm.models import Int4Linear, Int8Embedding, Int8Linear, LowRankLinear, UserError
from neuronmm.models.low_bits import LowBitsModule, WeightDtype, quantise_weights

Capture = pytest.CaptureFixture[str]
Checkpoint = Callable[..., Path]
ROUNDED = get_args(WeightDtype)
pytestmark = needs_core


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("compressed", [True, False])
def test_load_rounds_the_dense_weights_only(checkpoint: Checkpoint, dtype: str, compressed: bool) -> None:
    folder = checkpoint(compressed=compressed)
    plain, rounded = load(folder).runner.model, load(folder, weight_dtype=dtype).runner.model
    kind = {"int8": Int8Linear, "int4": Int4Linear}[dtype]
    round_to: Callable[[Any], Int8 | Int4] = {"int8": quantise, "int4": quantise_int4}[dtype]
    assert isinstance(rounded.get_input_embeddings(), Int8Embedding)
    assert isinstance(rounded.get_output_embeddings(), Int8Linear)
    for name, module in plain.model.layers.named_modules():
        twin = rounded.model.layers.get_submodule(name)
        if type(module) is torch.nn.Linear:
            if name.endswith((".A", ".B")):
                assert torch.equal(twin.weight, module.weight)
            else:
                assert type(twin) is kind
                assert torch.equal(twin.matrix.values, round_to(module.weight).values)
                assert torch.equal(twin.matrix.scales, round_to(module.weight).scales)
    assert any(isinstance(module, LowRankLinear) for module in rounded.modules()) == compressed


@pytest.mark.parametrize("dtype", ROUNDED)
def test_the_core_and_torch_generate_the_same_text(checkpoint: Checkpoint, dtype: str) -> None:
    folder = checkpoint(compressed=False)
    texts = [
        [row.text for row in load(folder, weight_dtype=dtype, impl=impl).generate(["w9 w10", "w3"])]
        for impl in ("auto", "naive")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", ROUNDED)
def test_generate_names_the_weights(checkpoint: Checkpoint, dtype: str, capsys: Capture) -> None:
    command = ["generate", str(checkpoint()), "--prompt", "w9", "--max-new-tokens", "3", "--weight-dtype", dtype]
    assert main(command) == 0
    assert dtype in capsys.readouterr().err


def test_other_backends_and_dtypes_are_refused_in_one_line(checkpoint: Checkpoint, capsys: Capture) -> None:
    command = ["generate", str(checkpoint()), "--prompt", "w9", "--backend", "neuron", "--emulate"]
    assert main([*command, "--weight-dtype", "int8"]) == 2
    assert capsys.readouterr().err.count("backend neuron has no option weight_dtype; backend cpu has it") == 1
    with pytest.raises(UserError, match="unknown weight dtype 'int3'; there are: int8, int4"):
        load(checkpoint(), weight_dtype="int3")


def test_what_the_core_does_not_run_is_refused_instead_of_slow(checkpoint: Checkpoint, capsys: Capture) -> None:
    command = ["generate", str(checkpoint()), "--prompt", "w9", "--weight-dtype", "int4", "--dtype", "fp16"]
    assert main(command) == 2
    assert "weights in int4 need the C++ core, which does not run this model" in capsys.readouterr().err


def test_weights_are_rounded_once(checkpoint: Checkpoint) -> None:
    model = load(checkpoint(), weight_dtype="int8").runner.model
    with pytest.raises(UserError, match="have few bits already"):
        quantise_weights(model, "int4")


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("converted", [torch.bfloat16, torch.float16])
def test_scales_stay_float32_and_tied_in_a_converted_model(
    checkpoint: Checkpoint, dtype: str, converted: torch.dtype
) -> None:
    model = load(checkpoint(compressed=False), weight_dtype=dtype).runner.model.to(converted)
    low = [module for module in model.modules() if isinstance(module, LowBitsModule)]
    assert low and {module.weight_scale.dtype for module in low} == {torch.float32}
    assert model.get_input_embeddings()(torch.tensor([3])).dtype == converted


@pytest.mark.parametrize("dtype", ROUNDED)
def test_drafts_and_siblings_of_a_rounded_model(checkpoint: Checkpoint, dtype: str) -> None:
    folder = checkpoint(compressed=False)
    prompt = ["w9 w10 w9 w10"]
    plain = load(folder, weight_dtype=dtype)
    drafted = load(folder, weight_dtype=dtype, draft=checkpoint())
    assert plain.generate(prompt)[0].text == drafted.generate(prompt)[0].text
    twin = plain.runner.sibling("naive").model
    for one, two in zip(twin.parameters(), plain.runner.model.parameters(), strict=True):
        assert one is two


def test_nan_is_found_before_it_turns_into_a_number(checkpoint: Checkpoint) -> None:
    folder = checkpoint(compressed=False)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = float("nan")

    edit_tensors(folder, spoil)
    with pytest.raises(UserError, match=r"q_proj\.weight holds NaN"):
        load(folder, weight_dtype="int8")


@pytest.mark.parametrize("dtype", ROUNDED)
def test_the_benchmark_shows_the_rounded_weights_beside_the_model(checkpoint: Checkpoint, dtype: str) -> None:
    settings: dict[str, Any] = {"prompt_lengths": (4,), "new_tokens": 2, "runs": 1, "weight_dtype": dtype}
    dense = benchmark(checkpoint(compressed=False), **settings)["variants"]
    assert list(dense) == ["dense", dtype]
    assert dense[dtype]["weight_bytes_per_token"] < dense["dense"]["weight_bytes_per_token"]
    compressed = benchmark(checkpoint(), checkpoint(compressed=False), **settings)["variants"]
    assert list(compressed) == ["dense", dtype, "fused"]
    assert compressed["dense"]["weight_bytes_per_token"] == dense["dense"]["weight_bytes_per_token"]
    assert compressed["fused"]["weight_bytes_per_token"] < compressed["dense"]["weight_bytes_per_token"]


def test_evaluate_rounds_the_model_and_not_the_baseline(
    checkpoint: Checkpoint, tmp_path: Path, capsys: Capture
) -> None:
    folder, text = str(checkpoint(compressed=False)), tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 40}" for i in range(300)))
    command = ["evaluate", folder, "--baseline", folder, "--text", str(text), "--weight-dtype", "int4", "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["models"]["model"]["dtype"] == "float32, int4 weights"
    assert document["models"]["baseline"]["dtype"] == "float32"
    alone = evaluate(folder, text=text)["results"][0]["models"]["model"]["value"]
    results = document["results"][0]["models"]
    assert results["baseline"]["value"] == alone != results["model"]["value"]
