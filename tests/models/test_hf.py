"""The bridge to transformers: a plain ``from_pretrained`` loads the compressed model with any options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

from neuronmm.models import FAMILIES, LowRankLinear, LowRankSwiGLU, UserError, fuse
from neuronmm.models.families import TARGETS
from neuronmm.models.hf import NeuronMMQuantizer, register
from tiny_models import (
    compress_tiny,
    layer_ranks,
    load_plain,
    logits,
    make_tiny,
    make_tokens,
    tiny_checkpoint,
    write_checkpoint,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_and_target_round_trips(model_type: str, targets: str, tied: bool, tmp_path: Path) -> None:
    linears = tuple(name for name in TARGETS[targets] if name not in ("self_attn.v_proj", "self_attn.o_proj"))
    model = tiny_checkpoint(tmp_path / "one", model_type, linears, tied=tied)
    loaded = load_plain(tmp_path / "one")
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "two")
    again = load_plain(tmp_path / "two")
    assert torch.equal(logits(again), logits(model))
    assert sum(isinstance(m, LowRankLinear) for m in again.modules()) == len(layer_ranks(linears))
    one, two = (json.loads((tmp_path / n / "config.json").read_text())["quantization_config"] for n in ("one", "two"))
    assert one == two
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "out", dtype=dtype)
    for asked in (dtype, "auto"):
        loaded = load_plain(tmp_path / "out", dtype=asked)
        assert {p.dtype for p in loaded.parameters()} == {dtype}
        assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checkpoint_loads_in_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "out", dtype=torch.float32)
    loaded = dict(load_plain(tmp_path / "out", dtype=dtype).named_parameters())
    assert all(torch.equal(loaded[name], p.to(dtype)) for name, p in model.named_parameters())


def test_a_loaded_model_converts_like_any_other(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "out")
    loaded = load_plain(tmp_path / "out")
    assert loaded.half().dtype == torch.float16
    assert loaded.to(torch.bfloat16).dtype == torch.bfloat16
    assert loaded.bfloat16().float().dtype == torch.float32
    assert loaded.to("cpu").cpu() is loaded


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_device_maps(device_map: Any, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "out")
    loaded = load_plain(tmp_path / "out", device_map=device_map)
    assert torch.allclose(logits(loaded).cpu(), logits(model), atol=1e-4)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_layers_offloaded_to_disk(tied: bool, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "out", "qwen2", tied=tied)
    where = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    where |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    loaded = load_plain(tmp_path / "out", device_map=where, offload_folder=str(tmp_path / "offload"))
    assert loaded.model.layers[1].mlp.gate_proj.A.weight.is_meta
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.gate_proj has no weights in memory"):
        fuse(loaded)


def test_generate_greedy_beams_and_sampling(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "out")
    loaded, tokens = load_plain(tmp_path / "out"), make_tokens()
    for ways in ({"do_sample": False}, {"num_beams": 2, "do_sample": False}, {"do_sample": True, "top_k": 5}):
        config = GenerationConfig(max_new_tokens=8, pad_token_id=0, **ways)
        outs = []
        for each in (model, loaded):
            torch.manual_seed(3)
            outs.append(each.generate(tokens, generation_config=config))
        assert torch.equal(*outs)


def test_many_small_shards(tmp_path: Path) -> None:
    model = make_tiny("qwen2")
    spec = compress_tiny(model, layer_ranks())
    write_checkpoint(model, spec, tmp_path / "one", max_shard_size="10KB")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 3
    loaded = load_plain(tmp_path / "one")
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "two", max_shard_size="10KB")
    assert torch.equal(logits(load_plain(tmp_path / "two")), logits(model))


def test_a_fused_model_saves_every_weight(tmp_path: Path) -> None:
    """Fused factors share one buffer, but each must be written once."""
    tiny_checkpoint(tmp_path / "one")
    fuse(load_plain(tmp_path / "one")).save_pretrained(tmp_path / "two")
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_classifier_head_on_the_compressed_body(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "out")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", num_labels=3).eval()
    assert sum(isinstance(m, LowRankSwiGLU) for m in classifier.modules()) == 2
    with torch.no_grad():
        ours, theirs = (m.model(make_tokens()).last_hidden_state for m in (classifier, model))
    assert torch.allclose(ours, theirs, atol=1e-5)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


def test_a_rank_that_disagrees_with_the_tensors_raises(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "out")
    edit_config(tmp_path / "out", ranks={**layer_ranks(), "model.layers.1.mlp.up_proj": 7})
    with pytest.raises(
        (RuntimeError, ValueError), match=r"mismatch|set a tensor of shape .*\[16, 32\].* shape .*\[7, 32\]"
    ):
        load_plain(tmp_path / "out")


def test_a_linear_promised_but_not_stored_raises(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "out")
    edit_config(tmp_path / "out", ranks={**layer_ranks(), "model.layers.1.self_attn.o_proj": 7})
    with pytest.raises(UserError, match=r"disagree: model\.layers\.1\.self_attn\.o_proj\.[AB]\.weight is in no shard"):
        load_plain(tmp_path / "out")


def test_a_linear_stored_but_not_promised_raises(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "out")
    ranks = layer_ranks()
    del ranks["model.layers.0.mlp.down_proj"]
    edit_config(tmp_path / "out", ranks=ranks)
    with pytest.raises(UserError, match=r"disagree: model\.layers\.0\.mlp\.down_proj\.weight is in no shard"):
        load_plain(tmp_path / "out")


def test_a_lost_bias_raises(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "out", "qwen2", ("self_attn.q_proj",))
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.q_proj.B.bias"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"q_proj\.B\.bias is in no shard"):
        load_plain(tmp_path / "out")


def test_a_malformed_block_raises(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "out")
    edit_config(tmp_path / "out", format=9)
    with pytest.raises(UserError, match=r"format 9 is none of \(1, 2, 3\)"):
        load_plain(tmp_path / "out")


def test_a_dense_model_is_not_touched(tmp_path: Path) -> None:
    model = make_tiny()
    model.save_pretrained(tmp_path / "dense")
    loaded = load_plain(tmp_path / "dense")
    assert torch.equal(logits(loaded), logits(model))
    assert not any(isinstance(m, LowRankLinear) for m in loaded.modules())


def test_transformers_may_compile_and_train_it(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "out")
    quantizer = load_plain(tmp_path / "out").hf_quantizer
    assert isinstance(quantizer, NeuronMMQuantizer)
    assert quantizer.is_trainable and quantizer.is_serializable() and quantizer.is_compileable


def test_registering_twice_is_harmless() -> None:
    register()
    register()


def test_importing_neuronmm_is_all_a_fresh_interpreter_needs(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "out")
    code = """
import sys, torch, neuronmm
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.save(model(torch.load(sys.argv[2])).logits.detach(), sys.argv[2])
"""
    shared = tmp_path / "tensor.pt"
    torch.save(make_tokens(), shared)
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out"), str(shared)], check=True, cwd=tmp_path)
    assert torch.equal(torch.load(shared), logits(model))


def test_loading_shows_no_missing_or_unexpected_keys(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "out", tied=True)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_the_model_without_head_is_refused_with_its_reason(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "out")
    with pytest.raises(UserError, match="not in this LlamaModel; load the model as AutoModelForCausalLM"):
        AutoModel.from_pretrained(tmp_path / "out")
