"""A tiny random model in a GGUF file, with a tokenizer of a few characters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, quantize

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def write_gguf(
    path: Path,
    *,
    vocabulary: int = 64,
    hidden: int = 32,
    wide: int = 48,
    heads: int = 4,
    keys: int = 2,
    family: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    tied: bool = False,
    extra: dict[str, np.ndarray] | None = None,
    rope: dict[str, str | float] | None = None,
    pre: str = "default",
    tokenizer: dict[str, bool | int] | None = None,
    special: tuple[str, str, str] = ("<s>", "</s>", "<pad>"),
    parts: int = 1,
    rotated: int | None = None,
) -> None:
    """Write a one-layer model to ``path``: matrices of type ``kind``, norms, biases and ``extra`` in float32.

    ``rope`` has further entries of the header, without the architecture in their names; ``tokenizer`` those of the
    tokenizer, which splits words as ``pre`` says and has the tokens ``special`` for the beginning, the end and padding.
    ``parts`` is the number of files that the header says the model is in, ``rotated`` of the features of a head that
    RoPE turns.
    """
    writer = GGUFWriter(path, family)
    writer.add_name("tiny")  # transformers 4.47 needs one
    if f"MOSTLY_{kind.name}" in LlamaFileType.__members__:
        writer.add_file_type(LlamaFileType[f"MOSTLY_{kind.name}"])
    if parts > 1:
        writer.add_uint16("split.count", parts)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(rotated or hidden // heads)
    others = {f"{family}.{name}": value for name, value in (rope or {}).items()}
    others |= {f"tokenizer.ggml.{name}": value for name, value in (tokenizer or {}).items()}
    for name, value in others.items():
        add_value = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
        add_value[type(value)](name, value)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    characters = [chr(33 + index) for index in range(vocabulary - 5)]
    writer.add_token_list([*characters, *special, '!"', "#$"])
    writer.add_token_types([1] * len(characters) + [3, 3, 3, 1, 1])
    writer.add_token_merges(['! "', "# $"])  # transformers 4.47 fails with a single one
    for add, offset in ((writer.add_bos_token_id, 5), (writer.add_eos_token_id, 4), (writer.add_pad_token_id, 3)):
        add(vocabulary - offset)
    writer.add_chat_template(TEMPLATE)
    draw = np.random.default_rng(0)
    head = hidden // heads
    shapes = {
        "token_embd": (vocabulary, hidden),
        "output_norm": (hidden,),
        "output": (vocabulary, hidden),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (heads * head, hidden),
        "blk.0.attn_k": (keys * head, hidden),
        "blk.0.attn_v": (keys * head, hidden),
        "blk.0.attn_output": (hidden, heads * head),
        "blk.0.ffn_gate": (wide, hidden),
        "blk.0.ffn_up": (wide, hidden),
        "blk.0.ffn_down": (hidden, wide),
    }
    if family == "qwen3":
        shapes |= {"blk.0.attn_q_norm": (head,), "blk.0.attn_k_norm": (head,)}
    if tied:
        del shapes["output"]
    for name, shape in shapes.items():
        values = draw.normal(0, 0.1, shape).astype(np.float32)
        stored = kind if len(shape) == 2 else GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", quantize(values, stored), raw_dtype=stored)
    if family == "qwen2":
        for name in ("attn_q", "attn_k", "attn_v"):
            bias = draw.normal(0, 0.1, shapes[f"blk.0.{name}"][0])
            writer.add_tensor(f"blk.0.{name}.bias", bias.astype(np.float32))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def header_length(path: Path) -> int:
    """Return the offset of the weights, in bytes."""
    return int(GGUFReader(path).data_offset)
