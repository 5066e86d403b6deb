"""Unpacking a GGUF file: against transformers' own reader, and files that are wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from neuronmm.measure.inspection import inspect
from neuronmm.models import UserError, gguf_file
from neuronmm.models.gguf_file import unpack
from neuronmm.models.load import DTYPE, load_config, load_pretrained, load_tokenizer
from tiny_gguf import header_length, write_gguf

KINDS = [getattr(GGMLQuantizationType, name) for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1")]


def unpacked(file: Path) -> Path:
    folder = file.with_suffix("")
    folder.mkdir()
    unpack(file, folder)
    return folder


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("qwen2", False)])
def test_the_weights_are_those_that_transformers_reads(
    tmp_path: Path, family: str, tied: bool, kind: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "_PIECE", 200)  # several pieces, and the last is shorter
    file = tmp_path / "model.gguf"
    write_gguf(file, family=family, kind=kind, tied=tied, wide=64)
    options = {DTYPE: torch.float32}
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, **options).bfloat16().state_dict()
    folder = unpacked(file)
    stored = load_file(folder / "model.safetensors")
    assert tied is ("lm_head.weight" not in stored)
    assert {name for name in stored if name.endswith(".bias")} == {name for name in expected if name.endswith(".bias")}
    assert set(expected) - set(stored) <= {"lm_head.weight"}
    for name, tensor in stored.items():
        assert torch.equal(tensor, expected[name]), name
    load_pretrained(folder, torch.bfloat16)


@pytest.mark.skipif("qwen3" not in CONFIG_MAPPING, reason="this transformers has no qwen3")
def test_the_size_of_a_head_is_that_of_the_file(tmp_path: Path) -> None:
    """transformers takes 128, its default of a Qwen3."""
    file = tmp_path / "model.gguf"
    write_gguf(file, family="qwen3", rope={"attention.key_length": 8})
    model = load_pretrained(unpacked(file), torch.float32)
    assert model.config.head_dim == inspect(file).config.head == 8


def test_a_large_model_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file)
    whole = load_file(unpacked(file) / "model.safetensors")
    monkeypatch.setattr(gguf_file, "_SHARD", 10_000)
    folder, stages = tmp_path / "shards", []
    folder.mkdir()
    unpack(file, folder, lambda stage, fraction: stages.append(fraction))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    assert len(shards) > 2 and max(sum(t.nbytes for t in shard.values()) for shard in shards.values()) <= 10_000
    for name, tensor in whole.items():
        assert torch.equal(shards[index["weight_map"][name]][name], tensor)
    assert abs(sum(stages) - 1) < 1e-6
    model = load_pretrained(folder, torch.bfloat16)
    assert torch.equal(model.state_dict()["lm_head.weight"], whole["lm_head.weight"])
    assert load_tokenizer(folder).decode([0, 1]) == '!"'


def llama3_factors(head: int, factor: float, theta: float = 10000.0) -> np.ndarray:
    """Return what llama.cpp stores for the RoPE scaling of Llama 3.x."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head, 2) / head)
    smooth = (8192 / wavelengths - 1) / 3
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelengths < 2048, 1.0, np.where(wavelengths > 8192, factor, between)).astype(np.float32)


def test_the_rope_scaling_of_llama_3_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, hidden=128, heads=2, keys=2, extra={"rope_freqs.weight": llama3_factors(64, 8.0)})
    config = load_config(unpacked(file))
    rope = getattr(config, "rope_parameters", None) or config.rope_scaling
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("llama3", 8.0, 8192)


@pytest.mark.parametrize("factors", [np.full(32, 2, np.float32), np.ones(16, np.float32), np.zeros(32, np.float32)])
def test_another_rope_scaling_is_refused(tmp_path: Path, factors: np.ndarray) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, hidden=128, heads=2, keys=2, extra={"rope_freqs.weight": factors})
    with pytest.raises(UserError, match="RoPE scaling"):
        unpacked(file)


PLAIN = 10000.0 ** -(np.arange(0, 8, 2) / 8)


def yarn(factor: float, original: int, head: int = 8) -> np.ndarray:
    """The frequencies of YaRN (arXiv 2309.00071, section 3.2): extrapolated above 32 turns, interpolated below one."""
    low, high = (head * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(10000.0)) for turns in (32, 1))
    low, high = max(np.floor(low), 0), min(np.ceil(high), head - 1)
    ramp = np.clip((np.arange(head // 2) - low) / max(high - low, 0.001), 0, 1)
    return PLAIN * (1 - ramp) + PLAIN / factor * ramp


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("rope", "frequencies", "attention"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, PLAIN, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, PLAIN, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, PLAIN / 4, 1.0),
        ({"rope.scaling.factor": 2.0, "rope.scaling.finetuned": True}, PLAIN / 2, 1.0),
        ({"rope.scale_linear": 8.0}, PLAIN / 8, 1.0),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
            yarn(4.0, 64),
            0.1 * np.log(4) + 1,
        ),
    ],
)
def test_a_rope_scaling_of_the_header_is_kept(
    rope: dict[str, Any], frequencies: np.ndarray, attention: float, family: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, family=family, rope=rope)
    rotary = load_pretrained(unpacked(file), torch.float32).model.rotary_emb
    np.testing.assert_allclose(rotary.inv_freq.numpy(), frequencies, rtol=1e-5)
    assert rotary.attention_scaling == pytest.approx(attention)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": float("nan")},
        {"rope.scaling.type": "linear", "rope.scaling.factor": -2.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": "4"},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 2.0},
    ],
)
def test_a_rope_scaling_that_nobody_reads_is_refused(rope: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, rope=rope)
    with pytest.raises(UserError, match="the header has a RoPE scaling that is not supported"):
        unpacked(file)


def test_rope_on_a_part_of_a_head_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, rotated=4)
    for read in (unpacked, inspect):
        with pytest.raises(UserError, match="RoPE turns 4 of the 8 features of a head"):
            read(file)


def test_a_llama_with_attention_biases_keeps_them(tmp_path: Path) -> None:
    file, draw = tmp_path / "model.gguf", np.random.default_rng(1)
    sizes = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32}
    biases = {f"blk.0.{name}.bias": draw.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    write_gguf(file, extra=biases)
    attention = load_pretrained(unpacked(file), torch.float32).model.layers[0].self_attn
    assert inspect(file).config.attention_bias
    for module, name in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
        bias = biases[f"blk.0.{name}.bias"]
        if module in "qk":  # the two rows that RoPE turns together lie half a head apart
            bias = np.concatenate([np.concatenate([head[::2], head[1::2]]) for head in bias.reshape(-1, 8)])
        stored = attention.get_submodule(f"{module}_proj").bias
        assert torch.equal(stored, torch.from_numpy(bias).bfloat16().float()), module


def test_biases_of_some_linears_only_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, extra={"blk.0.attn_q.bias": np.zeros(32, np.float32)})
    with pytest.raises(UserError, match=r"only some linears have biases, blk.0.attn_k.bias is not there"):
        unpacked(file)


def test_a_tensor_of_no_part_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, extra={"blk.0.ffn_gate_inp.weight": np.zeros((4, 32), np.float32)})
    with pytest.raises(UserError, match=r"ffn_gate_inp.weight belongs to no part of a llama model"):
        unpacked(file)


def test_a_missing_tensor_and_a_wrong_shape_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xp.weight", 1))
    with pytest.raises(UserError, match=r"ffn_up.weight .* is not in this GGUF file"):
        unpacked(file)
    other = tmp_path / "other.gguf"
    write_gguf(other, extra={"blk.0.attn_q.bias": np.zeros(31, np.float32)})
    with pytest.raises(UserError, match=r"attn_q.bias has shape \[31\], not \[32\]"):
        unpacked(other)


def test_a_cut_file_and_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file)
    start = header_length(file)
    content = bytearray(file.read_bytes())
    file.write_bytes(content[:-4])
    with pytest.raises(UserError, match="end before its tensors do"):
        unpacked(file)
    content[start + 64 : start + 68] = np.float32(np.nan).tobytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content)
    with pytest.raises(UserError, match="NaN or infinity"):
        unpacked(broken)


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    """A flipped bit of an offset gives one tensor the bytes of another."""
    file = tmp_path / "model.gguf"
    write_gguf(file)
    content = bytearray(file.read_bytes())
    name = b"blk.0.ffn_up.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8 + 4  # after the rank, two sizes and the type
    offset = int.from_bytes(content[place : place + 8], "little")
    assert offset % 32 == 0 and 0 < offset < len(content)
    content[place : place + 8] = (offset - 32).to_bytes(8, "little")
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"ffn_gate.weight and blk.0.ffn_up.weight overlap"):
        unpacked(file)


def test_a_part_of_a_model_is_told_how_to_be_joined(tmp_path: Path) -> None:
    file = tmp_path / "model-00001-of-00003.gguf"
    write_gguf(file, parts=3)
    with pytest.raises(UserError, match="one of the 3 parts of a model; join them with llama-gguf-split --merge"):
        unpack(file, tmp_path / "out")


def test_a_full_disk_is_named_with_another_place_for_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = tmp_path / "model.gguf", tmp_path / "cache" / "out"
    write_gguf(file)
    out.mkdir(parents=True)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(gguf_file.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(UserError, match=r"cache: 0.0 GB of disk free, .* name another folder in NEURONMM_CACHE"):
            unpack(file, out)

    def full(*arguments: Any, **options: Any) -> None:
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(gguf_file, "save_file", full)
    with pytest.raises(UserError, match=r"cache: cannot be written \(No space left .* NEURONMM_CACHE"):
        unpack(file, out)
