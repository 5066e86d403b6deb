"""``load_pretrained``: every weight is present, or a one-line error names the one that is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from neuronmm.models import LowRankSwiGLU, UserError
from neuronmm.models import load as load_module
from neuronmm.models.contents import inspect, weight_files
from neuronmm.models.load import load_pretrained, load_tokenizer, quiet
from tiny_models import compress_tiny, layer_ranks, make_tiny, make_tokens, tiny_checkpoint, write_checkpoint

OLD = int(transformers.__version__.split(".")[0]) < 5


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A compressed checkpoint in several shards."""
    model = make_tiny()
    spec = compress_tiny(model, layer_ranks())
    return write_checkpoint(model, spec, tmp_path / "out", max_shard_size="10KB")


def test_a_compressed_folder_loads_in_eval_mode(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "out", "qwen2", tied=True)
    loaded = load_pretrained(tmp_path / "out", torch.float32)
    assert not loaded.training and isinstance(loaded.model.layers[0].mlp, LowRankSwiGLU)
    with torch.no_grad():
        assert torch.equal(loaded(make_tokens()).logits, model(make_tokens()).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_the_asked_one(dtype: torch.dtype, tmp_path: Path) -> None:
    make_tiny().save_pretrained(tmp_path / "dense")
    assert {p.dtype for p in load_pretrained(tmp_path / "dense", dtype).parameters()} == {dtype}


def test_weight_files_maps_every_tensor_to_its_shard(sharded: Path) -> None:
    files = weight_files(sharded)
    assert len(set(files.values())) > 3
    assert all(name in load_file(file) for name, file in files.items())


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def cut_a_shard(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])


def drop_a_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def copy_a_tensor(folder: Path) -> None:
    shard = weight_files(folder)["model.norm.weight"]
    other = next(file for file in sorted(folder.glob("*.safetensors")) if file != shard)
    copied = load_file(shard)["model.norm.weight"]
    save_file({**load_file(other), "model.norm.weight": copied}, other, metadata={"format": "pt"})


def garble_a_header(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(b"\0" * 64)


def break_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def empty_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')


def list_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')


def drop_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def add_a_tensor(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        shard = next(iter(weight_files(folder).values()))
        save_file({**load_file(shard), name: torch.ones(32)}, shard, metadata={"format": "pt"})
        edit(index, lambda content: content["weight_map"].update({name: shard.name}))

    return change


def drop_a_tensor(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        shard = weight_files(folder)[name]
        tensors = load_file(shard)
        del tensors[name]
        save_file(tensors, shard, metadata={"format": "pt"})

    return change


def promise(**ranks: int) -> Callable[[Path], None]:
    named = {f"model.layers.0.{name}": rank for name, rank in ranks.items()}
    return lambda folder: edit(folder / "config.json", lambda c: c["quantization_config"]["ranks"].update(named))


def break_the_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lla')


def list_the_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def deny_compression(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c.pop("quantization_config"))


def set_config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", lambda c: c.update(values))


DAMAGES = [
    (cut_a_shard, "corrupt shard"),
    (garble_a_header, "corrupt shard"),
    (drop_a_shard, "named in model.safetensors.index.json but missing"),
    (copy_a_tensor, r"holds model\.norm\.weight, and so does model-"),
    (break_the_index, "not valid JSON"),
    (empty_the_index, "not a safetensors index"),
    (list_the_index, "not a safetensors index"),
    (drop_the_index, "neither model.safetensors nor model.safetensors.index.json"),
    (add_a_tensor("model.layers.0.self_attn.q_proj.bias"), r"q_proj\.bias belongs to no part of the model"),
    (add_a_tensor("model.layers.0.mlp.up_proj.B.bias"), r"up_proj\.B\.bias belongs to no part of the model"),
    (add_a_tensor("model.layers.0.self_attn.q_norm.weight"), r"q_norm\.weight belongs to no part of the model"),
    (drop_a_tensor("model.layers.0.mlp.up_proj.B.weight"), r"up_proj\.B\.weight"),
    (drop_a_tensor("model.layers.1.input_layernorm.weight"), r"input_layernorm\.weight"),
    (drop_a_tensor("model.norm.weight"), r"model\.norm\.weight"),
    (promise(**{"mlp.up_proj": 7}), r"up_proj\.A\.weight has shape \[16, 32\], not \[7, 32\]"),
    (promise(**{"self_attn.o_proj": 7}), r"o_proj\.A\.weight is in no shard"),
    (promise(**{"mlp.nothing": 7}), r"mlp\.nothing belongs to no part of the model"),
    (break_the_config, "not valid JSON"),
    (list_the_config, "not a JSON object"),
    (deny_compression, "disagree"),
    (set_config(quantization_config=[]), "quantization_config is not a JSON object"),
    (set_config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised by 'gptq'"),
    (set_config(quantization_config={"load_in_8bit": True}), "is another program's; use the original checkpoint"),
    (set_config(model_type="mistral", architectures=["MistralForCausalLM"]), "MistralForCausalLM is not supported"),
    (set_config(hidden_size=64), "disagree"),
    (set_config(num_hidden_layers=1), r"layers\.1\..* belongs to no part of the model"),
    (set_config(num_hidden_layers=3), "disagree"),
    (set_config(vocab_size=99), "disagree"),
    (set_config(attention_bias=True), r"q_proj\.bias is in no shard"),
    (set_config(mlp_bias=True), r"gate_proj\.B\.bias is in no shard"),
]


def name_of(value: object) -> str | None:
    return getattr(value, "__qualname__", None) if callable(value) else None


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=name_of)
def test_damage_is_one_clear_line(damage: Callable[[Path], None], message: str, sharded: Path) -> None:
    damage(sharded)
    with pytest.raises(UserError, match=message) as caught:
        load_pretrained(sharded, torch.float32)
    assert "\n" not in str(caught.value) and str(sharded) in str(caught.value)


@pytest.mark.skipif(OLD, reason="transformers before 5 cannot read null there")
def test_null_for_the_compression_is_a_dense_model(tmp_path: Path) -> None:
    make_tiny().save_pretrained(tmp_path)
    plain = load_pretrained(tmp_path, torch.float32).state_dict()
    edit(tmp_path / "config.json", lambda config: config.update(quantization_config=None))
    assert inspect(tmp_path).spec is None
    for name, tensor in load_pretrained(tmp_path, torch.float32).state_dict().items():
        assert torch.equal(tensor, plain[name]), name


def test_a_folder_without_tokenizer_is_one_clear_line(sharded: Path) -> None:
    with pytest.raises(UserError, match="no usable tokenizer") as caught:
        load_tokenizer(sharded)
    assert "\n" not in str(caught.value)


def test_quiet_gives_the_settings_back_even_after_an_error() -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with pytest.raises(KeyError), quiet():
        assert not logging.is_progress_bar_enabled()
        raise KeyError
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_an_architecture_this_transformers_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path)
    monkeypatch.setattr(load_module, "CONFIG_MAPPING", {})
    with pytest.raises(UserError, match="does not know LlamaForCausalLM; install a newer one"):
        load_pretrained(tmp_path, torch.float32)


def test_a_config_transformers_cannot_read_is_one_line(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_attention_heads": "four"}))
    with pytest.raises(UserError, match=r"config\.json") as caught:
        load_pretrained(tmp_path, torch.float32)
    assert "\n" not in str(caught.value)
