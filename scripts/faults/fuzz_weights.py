"""Damage the files that hold weights: headers of safetensors shards, their index, tensors, and GGUF files.

A weight that changes to another finite weight cannot be detected. Every other damage gives one clear line, or the
tokens of the undamaged model.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fuzz_config import check_tokens, generated
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from tally import Finding, Tally, command, memory_growth

from fuzzing import damage_bytes
from neuronmm.models import UserError
from neuronmm.models.contents import inspect
from neuronmm.models.source import resolve
from tiny_gguf import header_length, write_gguf
from tiny_models import make_tiny
from word_tokenizer import word_tokenizer

INDEX = "model.safetensors.index.json"

LIES: tuple[Callable[[random.Random, dict[str, Any], str], Any], ...] = (
    lambda draw, header, name: header[name].update(shape=[2**40, 2**40]),
    lambda draw, header, name: header[name].update(shape=header[name]["shape"][::-1]),
    lambda draw, header, name: header[name].update(shape=[-1, *header[name]["shape"]]),
    lambda draw, header, name: header[name].update(shape=[0]),
    lambda draw, header, name: header[name].update(shape=[]),
    lambda draw, header, name: header[name].update(shape=[1] * 70 + header[name]["shape"]),
    lambda draw, header, name: header[name].update(dtype=draw.choice(("F64", "I8", "BF16", "F8_E4M3", "BOOL", "X"))),
    lambda draw, header, name: header[name].update(data_offsets=[0, 2**63]),
    lambda draw, header, name: header[name].update(data_offsets=[8, 4]),
    lambda draw, header, name: header[name].update(data_offsets=header[draw.choice(list(header))]["data_offsets"]),
    lambda draw, header, name: header[name].pop(draw.choice(("shape", "dtype", "data_offsets"))),
    lambda draw, header, name: header.update({draw.choice(("", "a/../b", "x" * 5000, "\0")): header.pop(name)}),
    lambda draw, header, name: header.update({name: draw.choice((None, 5, [], "x", {}))}),
    lambda draw, header, name: header.update({f"copy {n}": dict(header[name]) for n in range(1000)}),
    lambda draw, header, name: header.pop(name),
    lambda draw, header, name: header.update(__metadata__=draw.choice((5, {"format": "flax"}, {"format": 1}, {}))),
)
"""Lies of a header about one of its tensors."""

INDEX_NAMES = (
    *("../model-00001-of-00002.safetensors", "/etc/passwd", "", ".", "..", "x.bin", "a\0.safetensors", "pytorch.pt"),
    *("sub/x.safetensors", "\u202e.safetensors", "x" * 300 + ".safetensors", "model.safetensors\n", " .safetensors"),
    *(5, None, [], {"x": 1}, True),
)


def lie(content: bytes, seed: int) -> bytes:
    """Return a shard whose header lies about one or two tensors, or about its own length."""
    draw = random.Random(seed)
    (length,) = struct.unpack("<Q", content[:8])
    if draw.randrange(8) == 0:
        wrong = draw.choice((0, 1, length - 1, length + 1, len(content), 2**32, 2**63, 2**64 - 1))
        return struct.pack("<Q", wrong) + content[8:]
    header = json.loads(content[8 : 8 + length])
    for _ in range(draw.choice((1, 1, 2))):
        names = [name for name, entry in header.items() if name != "__metadata__" and _is_entry(entry)]
        try:
            draw.choice(LIES)(draw, header, draw.choice(names))
        except (KeyError, TypeError, IndexError):  # two lies about one tensor
            continue
    changed = json.dumps(header).encode()
    return struct.pack("<Q", len(changed)) + changed + content[8 + length :]


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and {"shape", "dtype", "data_offsets"} <= set(entry)


def write_sharded(folder: Path) -> Path:
    """Write a dense tiny model in several shards."""
    torch.manual_seed(0)
    make_tiny().save_pretrained(folder, max_shard_size="10KB")
    word_tokenizer().save_pretrained(folder)
    return folder


def headers(inputs: int, work: Path) -> dict[str, Any]:
    """Truncate a shard, flip its bits, or let its header lie."""
    folder, tally = write_sharded(work / "headers"), Tally()
    shards = sorted(folder.glob("*.safetensors"))
    whole = {shard: shard.read_bytes() for shard in shards}
    with memory_growth() as grown:
        for seed in range(inputs):
            shard = shards[seed % len(shards)]
            header = 8 + struct.unpack("<Q", whole[shard][:8])[0]
            damaged = damage_bytes(whole[shard], seed, 0, header) if seed % 3 else lie(whole[shard], seed)
            shard.write_bytes(damaged)
            tally.add(f"{shard.name} seed {seed}", lambda: _tokens(folder))
            shard.write_bytes(whole[shard])
    return {**tally.to_dict(), "peak_memory_growth_bytes": grown["bytes"]}


def index(inputs: int, work: Path) -> dict[str, Any]:
    """Let the index of the shards name files elsewhere, good shards among them, and things that are no files."""
    folder, tally = write_sharded(work / "index"), Tally()
    path = folder / INDEX
    good = json.loads(path.read_text())
    shutil.copytree(folder, work / "elsewhere")
    names = sorted(good["weight_map"])
    for seed in range(inputs):
        draw, places = random.Random(seed), dict(good["weight_map"])
        for name in draw.sample(names, draw.choice((1, 1, 2, len(names)))):
            shard = good["weight_map"][name]
            outside = (f"../elsewhere/{shard}", str(work / "elsewhere" / shard), f"./../index/../elsewhere/{shard}")
            other = draw.choice([*INDEX_NAMES, *outside * 3, *good["weight_map"].values()])
            places[draw.choice((name, name, f"{name}x", ""))] = other
        path.write_text(json.dumps({**good, "weight_map": places}))
        tally.add(f"index seed {seed}", lambda places=places: _inside(folder, places))
    return tally.to_dict()


def _inside(folder: Path, places: dict[str, Any]) -> str | None:
    """Generate; only an index whose entries are names of the folder may succeed."""
    line = _tokens(folder)
    if line is None and any("/" in str(place) for place in places.values()):
        raise Finding("a file outside the folder was read")
    return line


def values(inputs: int, work: Path) -> dict[str, Any]:
    """Store tensors with NaN or infinity, in a wrong shape or dtype, missing or superfluous."""
    folder, tally = work / "values", Tally()
    torch.manual_seed(0)
    make_tiny().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    path = folder / "model.safetensors"
    good = load_file(path)
    for seed in range(inputs):
        draw, tensors = random.Random(seed), dict(good)
        name = draw.choice(sorted(tensors))
        tensors[name] = _wrong(draw, tensors[name].clone())
        save_file(tensors, path, metadata={"format": "pt"})
        tally.add(f"{name} seed {seed}", lambda: _tokens(folder))
    return tally.to_dict()


def _wrong(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    kind = draw.randrange(5)
    if kind == 0:
        tensor.view(-1)[draw.randrange(tensor.numel())] = draw.choice((float("nan"), float("inf"), -float("inf")))
    elif kind == 1:
        dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool, torch.float8_e5m2)
        tensor = tensor.to(draw.choice(dtypes))
    elif kind == 2:
        tensor = draw.choice((tensor.flatten(), tensor[None], tensor[:1], tensor[..., :-1], tensor.sum()))
    elif kind == 3:
        tensor = tensor * draw.choice((1e38, 1e-38, 0.0, 1e20, 1e-45))
    else:
        tensor = torch.cat([tensor, tensor])
    return tensor.contiguous()


def _tokens(folder: Path) -> str | None:
    line, tokens = generated(folder)
    if line is None:
        check_tokens(folder, tokens)
    return line


def gguf(inputs: int, work: Path, places: int = 1000) -> dict[str, Any]:
    """Damage a GGUF file at ``places`` places of its header and at as many as fit of its weights.

    A file that is taken has the tensors of the good one, in name, shape and, if only its header was damaged, in value.
    """
    work.mkdir(parents=True, exist_ok=True)
    tally = Tally()
    files, weights = {}, {}
    for family, kind in (("llama", "F32"), ("qwen2", "Q8_0"), ("llama", "Q4_0")):
        good = work / f"{family}-{kind}.gguf"
        write_gguf(good, family=family, kind=getattr(GGMLQuantizationType, kind), wide=64)
        files[good] = (good.read_bytes(), header_length(good))
        weights[good] = _all(resolve(good))
    with memory_growth() as grown:
        for seed in range(inputs):
            good = list(files)[seed % len(files)]
            content, header = files[good]
            at = 4 + (header - 4) * (seed % places) // places
            damaged = damage_bytes(content, seed, at, at + 1) if seed % 4 else damage_bytes(content, seed, header)
            path = work / f"damaged-{seed}.gguf"
            path.write_bytes(damaged)
            expected = weights[good] if damaged[header:] == content[header:] else {}
            tally.add(f"{good.name} seed {seed}", lambda path=path, expected=expected: _unpacked(path, expected))
            path.unlink()
    return {**tally.to_dict(), "peak_memory_growth_bytes": grown["bytes"]}


def _unpacked(path: Path, expected: dict[str, torch.Tensor]) -> str | None:
    """Unpack a file; its tensors have the ``expected`` values, in any order, since the order depends on the heads."""
    try:
        folder = resolve(path)
        inspect(folder)
    except UserError as error:
        if not str(error).isprintable():
            raise Finding(f"the line {str(error)!r} is not printable") from None
        return str(error)
    for name, tensor in _all(folder).items():
        if not torch.isfinite(tensor).all():
            raise Finding(f"{name} is not finite")
        if name in expected and not torch.equal(tensor.flatten().sort().values, expected[name].flatten().sort().values):
            raise Finding(f"{name} has other values than in the good file")
    line, _ = command(["generate", str(folder), "--prompt", "#$", "--max-new-tokens", "2", "--json"])
    return line


def _all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
