"""Checkpoints of format 3: through transformers, and with damaged or hostile tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compression_runs import edit_tensors
from neuronmm.engine.engine import load
from neuronmm.kernels import Int4
from neuronmm.models import CompressionSpec, Int8Embedding, UserError, quantise_weights
from neuronmm.models.load import load_pretrained
from neuronmm.models.low_bits import LowBitsModule
from tiny_models import layer_ranks, load_plain, make_spec, make_tiny, make_tokens, shared_spec, write_checkpoint
from word_tokenizer import word_tokenizer

Tensors = dict[str, torch.Tensor]
OUT, EMBEDDING = "model.layers.1.self_attn.o_proj.weight", "model.embed_tokens.weight"


def stored(folder: Path, dtype: str = "int4", *, tied: bool = False) -> Path:
    """Write a model whose weights are rounded, without any factor."""
    model = make_tiny(tied=tied)
    quantise_weights(model, dtype)  # type: ignore[arg-type]
    write_checkpoint(model, make_spec({}, format=3, weights=dtype), folder)
    if tied:
        edit_tensors(folder, lambda t: [t.pop(name, None) for name in ("lm_head.weight", "lm_head.weight_scale")])
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_converts_and_saves_it(dtype: str, tied: bool, tmp_path: Path) -> None:
    model = load_plain(stored(tmp_path / "one", dtype, tied=tied), torch.bfloat16)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(table, Int8Embedding) and isinstance(head, LowBitsModule)
    assert (head.weight is table.weight and head.weight_scale is table.weight_scale) == tied
    low = [module for module in model.modules() if isinstance(module, LowBitsModule)]
    assert {module.weight_scale.dtype for module in low} == {torch.float32}
    assert not any(module.weight.requires_grad or module.weight_scale.requires_grad for module in low)
    assert table(make_tokens()).dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "two")
    again = load_plain(tmp_path / "two", torch.bfloat16)
    assert torch.equal(again(make_tokens()).logits, model(make_tokens()).logits)
    assert model.half().get_input_embeddings()(make_tokens()).dtype == torch.float16


def test_missing_scales_are_no_random_numbers(tmp_path: Path) -> None:
    folder = stored(tmp_path / "one")
    for name in (f"{EMBEDDING}_scale", f"{OUT}_scale"):
        edit_tensors(stored(tmp_path / name), lambda t, name=name: t.pop(name))
        with pytest.raises(UserError, match=f"{name} is in no shard"):
            load_plain(tmp_path / name)
    assert load_plain(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({OUT: t[OUT][:, :-1].clone()}), f"{OUT} has shape [2, 287], not [2, 288]"),
        (lambda t: t.update({OUT: t[OUT].to(torch.int8)}), f"{OUT} is stored as I8, not as U8"),
        (lambda t: t.update({OUT: torch.zeros(32, 32)}), f"{OUT} has shape [32, 32], not [2, 288]"),
        (lambda t: t.update({f"{OUT}_scale": torch.ones(31)}), f"{OUT}_scale has shape [31], not [32]"),
        (lambda t: t.update({f"{OUT}_scale": torch.ones(32).half()}), f"{OUT}_scale is stored as F16, not as F32"),
        (lambda t: t[f"{OUT}_scale"].fill_(float("nan")), f"{OUT}_scale holds NaN or infinity"),
        (lambda t: t[f"{EMBEDDING}_scale"].view(-1)[2:3].fill_(float("inf")), f"{EMBEDDING}_scale holds NaN"),
        (lambda t: t.update({EMBEDDING: t[EMBEDDING].to(torch.uint8)}), f"{EMBEDDING} is stored as U8, not as I8"),
        (lambda t: t.pop(f"{EMBEDDING}_scale"), f"{EMBEDDING}_scale is in no shard"),
        (lambda t: t.update({"lm_head.weight_zero": torch.ones(2)}), "lm_head.weight_zero belongs to no part"),
    ],
    ids=["columns", "int8", "float", "short scales", "fp16 scales", "nan", "inf", "uint8", "no scales", "unknown"],
)
def test_damaged_tensors(change: Callable[[Tensors], None], message: str, tmp_path: Path) -> None:
    folder = stored(tmp_path / "one")
    edit_tensors(folder, change)
    with pytest.raises(UserError) as caught:
        load(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("tied", [True, False])
def test_any_bytes_are_a_matrix(tied: bool, tmp_path: Path) -> None:
    """No value of a byte is invalid: the core and torch compute with the same matrix."""
    generator = torch.Generator().manual_seed(3)

    def scramble(tensors: Tensors) -> None:
        for tensor in tensors.values():
            if not tensor.is_floating_point():
                low = 0 if tensor.dtype is torch.uint8 else -128
                tensor.copy_(torch.randint(low, low + 256, tensor.shape, generator=generator).to(tensor.dtype))

    folder = stored(tmp_path / "one", tied=tied)
    edit_tensors(folder, scramble)
    model = load_pretrained(folder, torch.float32)
    assert isinstance(model.model.layers[0].mlp.up_proj.matrix, Int4)
    tokens = make_tokens(1, 8)
    expected = model(tokens).logits[0]
    decoder = load(folder).runner.decoder(1, 16)
    prompt = decoder.prefill(tokens[:, :7], torch.ones(1, 7, dtype=torch.long))[0]
    for found, exact in ((prompt, expected[6]), (decoder.decode(tokens[:, 7])[0], expected[7])):
        # Int4 also rounds the activations of a linear to 16 bits, which is off by 3e-4 of the result's norm.
        assert (found - exact).norm() <= 4e-4 * exact.norm()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"weights": "int4"}, "int4 needs format 3"),
        ({"weights": "int3", "format": 3}, "weights"),
        ({"ranks": {}}, "needs format 3"),
        ({"format": 4}, r"format 4 is none of \(1, 2, 3\)"),
    ],
)
def test_blocks_that_contradict_themselves(block: dict[str, Any], message: str) -> None:
    valid = json.loads(json.dumps(make_spec(layer_ranks()).model_dump()))
    with pytest.raises(UserError, match=message):
        CompressionSpec.parse({**valid, **block}, "config.json")


def test_older_formats_are_written_as_older_versions_read_them() -> None:
    assert not {"weights", "forms"} & make_spec(layer_ranks()).model_dump().keys()
    block = shared_spec(format=3, weights="int8").model_dump()
    assert block["weights"] == "int8" and CompressionSpec.parse(block, "config.json").weights == "int8"
