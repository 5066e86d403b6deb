"""Fuzz config.json: a command gives the result that transformers gives for the same file, or one clear line.

Two kinds of damage: entries of any type and name (``tests/helpers/fuzzing.py``), and plausible values of entries that a
model is built from. The second kind passes more checks, so it is the one that can give a wrong result.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from tally import TAKEN, Finding, Tally, command, memory_growth
from transformers import AutoConfig, AutoModelForCausalLM

from fuzzing import damage_json
from neuronmm.models import UserError
from neuronmm.models.contents import inspect
from neuronmm.models.families import TARGETS
from neuronmm.models.load import DTYPE, load_tokenizer, quiet
from neuronmm.models.source import resolve
from tiny_models import fill_tiny, layer_ranks, make_spec, make_tiny, pivoted_spec, write_checkpoint
from word_tokenizer import word_tokenizer

PROMPT = "w9 w10 w11 w9 w12"
NEW_TOKENS = 4

ROPE = ("rope_parameters", "rope_scaling")
PLAUSIBLE: dict[str, tuple[Any, ...]] = {
    "rms_norm_eps": (1e-6, 1e-5, 1e-2, 0.5, 0, 1, "1e-5"),
    "rope_theta": (100.0, 1e4, 10000, 5e5, 0, -1.0, 1e300, "1e4"),
    "hidden_act": ("silu", "gelu", "swish", "relu", None, ["silu"], ""),
    "hidden_size": (32, 16, 64, 31, 0),
    "intermediate_size": (48, 47, 96),
    "num_hidden_layers": (1, 2, 3, 0),
    "num_attention_heads": (4, 2, 8, 1, 3),
    "num_key_value_heads": (2, 4, 1, None, 0),
    "head_dim": (8, 4, 16, None, 0, 7),
    "vocab_size": (64, 63, 65),
    "max_position_embeddings": (128, 6, 5, 1, 0, 2**31, 2**40, None, 8.5),
    "tie_word_embeddings": (True, False, None, 1, "false"),
    "attention_bias": (True, False, None, 1),
    "mlp_bias": (True, False, None),
    "attention_dropout": (0.0, 0.5, 1.0, -1, "x"),
    "use_sliding_window": (True, False),
    "sliding_window": (2, 1, 0, None, 4096, -1),
    "max_window_layers": (0, 1, 28, -1),
    "layer_types": (["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention"], [], None),
    "eos_token_id": (2, [2, 3], None, 64, -1, [], "2", [None]),
    "bos_token_id": (1, None, 64, -1, "x", 2**70),
    "pad_token_id": (0, None, -1, 63, 64),
    "torch_dtype": ("float32", "bfloat16", "float16", "float64", "int8", "float8_e4m3fn", 5, "auto"),
    "dtype": ("float32", "bfloat16", "float16", "float64", "complex64", None, "torch.float32"),
    "initializer_range": (0.02, -1, "x", None),
    "use_cache": (True, False, None),
    "pretraining_tp": (1, 2, 0),
    "partial_rotary_factor": (1.0, 0.5, 0.1, 2.0),
    "original_max_position_embeddings": (4, 64, 2**31, -1),
    "output_hidden_states": (True, False),
    "return_dict": (True, False),
    "is_decoder": (True, False),
    "tie_encoder_decoder": (True,),
    "cross_attention_hidden_size": (32,),
    "add_cross_attention": (True,),
    "chunk_size_feed_forward": (0, 1, -1),
    "temperature": (0.0, 2.0, "x"),
    "num_labels": (0, 2, 70000),
    "id2label": ({"0": "a"}, {"x": 1}, 5),
    "auto_map": ({"AutoModelForCausalLM": "evil.Model"}, {"AutoConfig": "../evil.Config"}, {"AutoConfig": None}),
    "_attn_implementation": ("eager", "flash_attention_2", "nobody/kernel", 5),
    "quantization_config": ({}, {"quant_method": "bitsandbytes", "load_in_8bit": True}, {"quant_method": "fp8"}, []),
    "architectures": (["LlamaForCausalLM"], ["Qwen2ForCausalLM"], ["Qwen3ForCausalLM"], [], ["BertModel"], None),
    "model_type": ("llama", "qwen2", "qwen3", "bert", "mistral", "", None),
    "per_layer_config": ([{}], {"0": {"hidden_size": 16}}),
    "transformers_version": ("4.0", "99", 5),
    "name_or_path": ("/etc", "../x"),
    "_name_or_path": ("/etc/passwd",),
    "base_model_tp_plan": ({"layers.*": "colwise"}, 5),
    "attribute_map": ({"hidden_size": "vocab_size"}, {"num_hidden_layers": "num_attention_heads"}),
    "keys_to_ignore_at_inference": (["logits"], 5),
    "sub_configs": ({}, {"text_config": 1}),
    "text_config": ({}, {"hidden_size": 64}, 5),
    "rope_interleaved": (True,),
    "torchscript": (True,),
    "tokenizer_class": ("LlamaTokenizer", "os.system", 5),
}
"""Entry of config.json -> values that a model might be built from."""

ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 1},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 32.0},
    {"rope_type": "yarn", "factor": 2.0, "mscale": 2.0, "mscale_all_dim": 1.0, "attention_factor": 3.0},
    {"rope_type": "yarn", "factor": 2.0, "truncate": False},
    {
        "rope_type": "llama3",
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    },
    {"rope_type": "longrope", "short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [2.0, 3.0, 4.0, 5.0]},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0, 3.0], "factor": 2.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"type": "linear", "rope_type": "default", "factor": 9.0},
    {"type": "linear", "factor": 3.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    {},
)
"""Blocks of RoPE parameters; the entry ``rope_theta`` is added to most."""


def plausible(document: dict[str, Any], seed: int) -> bytes:
    """Return ``document`` with one to three entries changed to plausible values."""
    draw, changed = random.Random(seed), deepcopy(document)
    for _ in range(draw.choice((1, 1, 2, 3))):
        if draw.randrange(4) == 0:
            block = deepcopy(draw.choice(ROPES)) | {"rope_theta": draw.choice((1e4, 1e4, 500.0, 10000))}
            if draw.randrange(4) == 0:
                block["partial_rotary_factor"] = draw.choice((0.5, 1.0, 0.26))
            changed[draw.choice(ROPE)] = block
            continue
        name = draw.choice(list(PLAUSIBLE))
        changed[name] = deepcopy(draw.choice(PLAUSIBLE[name]))
    return json.dumps(changed).encode()


def write_models(folder: Path) -> dict[str, Path]:
    """Write tiny models of each family, dense and in two compressed forms, and return their folders."""
    folders = {}
    torch.manual_seed(0)
    for family in ("llama", "qwen2", "qwen3"):
        model = make_tiny(family)
        model.save_pretrained(folder / family)
        folders[family] = folder / family
    for name, spec in (("two", make_spec(layer_ranks(TARGETS["mlp"]))), ("pivoted", pivoted_spec())):
        model = make_tiny()
        folders[name] = write_checkpoint(model, fill_tiny(model, spec), folder / name)
    for path in folders.values():
        word_tokenizer().save_pretrained(path)
    return folders


def generated(folder: Path) -> tuple[str | None, list[int]]:
    """Return the error line of ``neuronmm generate``, or None and the tokens that it generated."""
    line, out = command(["generate", str(folder), "--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS), "--json"])
    return line, [] if line else json.loads(out)["token_ids"]


@torch.inference_mode()
def check_tokens(folder: Path, tokens: list[int]) -> None:
    """Compare generated tokens with the logits of plain transformers, in float32 and without a cache.

    Entries that only choose the attention kernel or the type of transformers' results are overruled.

    Raises:
        Finding: a token is none of those that rounding explains, or there are none.
    """
    with quiet():
        config = AutoConfig.from_pretrained(folder)
        config._attn_implementation, config.return_dict = "eager", True
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, **{DTYPE: torch.float32}).eval()
        prompt = load_tokenizer(folder)(PROMPT).input_ids or [1]  # as the engine does: BOS
    if not tokens:
        raise Finding("no token was generated")
    for count, token in enumerate(tokens):
        ids = torch.tensor([prompt + tokens[:count]])
        logits = model(ids, use_cache=False).logits[0, -1]
        if not logits.isfinite().all():  # weights at the edge of an overflow: the order of the sums decides
            return
        behind, width = (float(logits.max().double() - logits[to].double()) for to in (token, logits.argmin()))
        if behind > 0.1 * width:  # bf16 rounds a tiny model's logits by a few per cent of their range
            raise Finding(f"token {count} is {token}, not {int(logits.argmax())}, {behind:.2g} of {width:.2g} behind")


def study(inputs: int, work: Path, every: int = 40, first: int = 0) -> dict[str, Any]:
    """Run the study on ``inputs`` damaged files, of the seeds from ``first`` on.

    All go through the check with which every command begins (``inspect`` of ``models/contents.py``), and three in
    ``every`` through commands: most through ``generate``, whose tokens are compared, some through ``compress`` and
    ``predict``.
    """
    folders = write_models(work / "models")
    names = list(folders)
    whole = {name: json.loads((folder / "config.json").read_text()) for name, folder in folders.items()}
    tally = Tally()
    small = ["--method", "svd", "--align", "2", "--force"]
    with memory_growth() as grown:
        for seed in range(first, first + inputs):
            name, turn = names[seed % len(names)], seed // len(names)
            folder, content = folders[name], whole[name]
            block = content.get("quantization_config")
            if block is not None and turn % 2:
                damaged = json.dumps(content | {"quantization_config": json.loads(damage_json(block, 6 * seed + 1))})
                (folder / "config.json").write_text(damaged)
            else:
                (folder / "config.json").write_bytes((damage_json if turn % 4 == 2 else plausible)(content, seed))
            others = {
                7 * every: ["compress", str(folder), "-o", str(work / "out"), *small],
                8 * every: ["predict", str(folder), "--json"],
            }
            words = others.get(turn % (10 * every))
            check = _check(folder, turn % every < 3) if words is None else _runs(words)
            tally.add(f"{name} seed {seed}", check)
    return {**tally.to_dict(), "peak_memory_growth_bytes": grown["bytes"]}


def _check(folder: Path, further: bool) -> Callable[[], str | None]:
    def check() -> str | None:
        try:
            inspect(resolve(folder))
        except UserError as error:
            if not str(error).isprintable():
                raise Finding(f"the line {str(error)!r} is not printable") from None
            return str(error)
        if not further:
            return TAKEN
        line, tokens = generated(folder)
        if line is None:
            check_tokens(folder, tokens)
        return line

    return check


def _runs(words: list[str]) -> Callable[[], str | None]:
    return lambda: command(words)[0]
