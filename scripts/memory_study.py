"""Measure the peak memory of compressing a large checkpoint, randomly initialised and written shard by shard.

The promise under test: peak resident memory stays under the largest shard plus 4 GB, whatever the model's size.

examples:
  python scripts/memory_study.py --tokenizer SmolLM2.gguf --folder /big/disk/study
  python scripts/memory_study.py --tokenizer SmolLM2.gguf --folder study --layers 2 --rows 128 --length 256
  python scripts/memory_study.py --tokenizer SmolLM2.gguf --folder study --set share_a=off --set refine=off
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from neuronmm.models.load import load_tokenizer
from neuronmm.models.source import resolve

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHARD_BYTES = 5_000_000_000
LIMIT_OVER_SHARD = 4_000_000_000


def shapes(layers: int) -> dict[str, list[int]]:
    """Return every tensor of the checkpoint and its shape, in the order of published checkpoints."""
    hidden, inner, vocab = LLAMA_8B["hidden_size"], LLAMA_8B["intermediate_size"], LLAMA_8B["vocab_size"]
    kv = hidden // LLAMA_8B["num_attention_heads"] * LLAMA_8B["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": [hidden, hidden],
        "self_attn.k_proj": [kv, hidden],
        "self_attn.v_proj": [kv, hidden],
        "self_attn.o_proj": [hidden, hidden],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    tensors = {"model.embed_tokens.weight": [vocab, hidden]}
    for index in range(layers):
        tensors.update({f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()})
    return {**tensors, "model.norm.weight": [hidden], "lm_head.weight": [vocab, hidden]}


def write_checkpoint(final: Path, layers: int, tokenizer: str) -> None:
    """Write the checkpoint and hold at most one shard in memory; ``final`` appears when it is complete."""
    folder = final.with_suffix(".partial")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    load_tokenizer(resolve(tokenizer)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": layers}, indent=2))
    generator = torch.Generator().manual_seed(0)
    plan: list[list[str]] = [[]]
    size = 0
    wanted = shapes(layers)
    for name, shape in wanted.items():
        bytes_ = 2 * int(torch.Size(shape).numel())
        if plan[-1] and size + bytes_ > SHARD_BYTES:
            plan.append([])
            size = 0
        plan[-1].append(name)
        size += bytes_
    where = {}
    for number, names in enumerate(plan, start=1):
        file = f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        shard = {}
        for name in names:
            tensor = torch.ones(wanted[name], dtype=torch.bfloat16)
            shard[name] = tensor if name.endswith("norm.weight") else tensor.normal_(0, 0.02, generator=generator)
        save_file(shard, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(names, file))
        print(f"wrote {file}", file=sys.stderr)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    folder.rename(final)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="a model whose tokenizer the checkpoint borrows")
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder on a disk with about three times the checkpoint's size free"
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, default=32, help="calibration rows")
    parser.add_argument("--length", type=int, default=256, help="tokens per row")
    parser.add_argument("--calibration", default="self", help="a text file, or self")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="another setting of compress, as in a recipe"
    )
    parser.add_argument("--output", type=Path, help="a file to append the result's line (JSON) to")
    args = parser.parse_args()

    source, out = args.folder / "dense", args.folder / "compressed"
    if not source.exists():
        write_checkpoint(source, args.layers, args.tokenizer)
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    if layers != args.layers:
        parser.error(f"{source} has {layers} layers, not {args.layers}; give --layers {layers} or another --folder")
    largest = max(file.stat().st_size for file in source.glob("*.safetensors"))
    recipe = args.folder / "recipe.yaml"
    settings = {"calibration_rows": args.rows, "calibration_length": args.length, "calibration": args.calibration}
    asked = dict(pair.split("=", 1) for pair in args.set)
    recipe.write_text(yaml.safe_dump({**settings, "ratio": args.ratio, **asked}))
    command = [sys.executable, "-m", "neuronmm", "compress", str(source), "-o", str(out), "--recipe", str(recipe)]
    began = time.perf_counter()
    printed = subprocess.run([*command, "--force", "--json"], check=True, stdout=subprocess.PIPE, text=True).stdout
    report = json.loads(printed.splitlines()[-1])
    result = {
        "kind": "measured",
        "layers": args.layers,
        "parameters": report["parameters"]["dense"],
        "dense_bytes": sum(file.stat().st_size for file in source.glob("*.safetensors")),
        "largest_shard_bytes": largest,
        "calibration": report["calibration"],
        "settings": asked,
        "ratio": [report["asked_ratio"], report["realised_ratio"]],
        "peak_rss_bytes": report["peak_rss_bytes"],
        "limit_bytes": largest + LIMIT_OVER_SHARD,
        "within_limit": report["peak_rss_bytes"] <= largest + LIMIT_OVER_SHARD,
        "seconds": round(time.perf_counter() - began, 1),
        "threads": torch.get_num_threads(),
        "machine": platform.platform(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))
    if args.output:
        with args.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
