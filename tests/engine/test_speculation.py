"""Drafts change the speed and nothing else: tokens, text and reasons to stop are those of the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from core_decoding import needs_core
from draws import examples
from neuronmm.cli import main
from neuronmm.engine import loop, speculation
from neuronmm.engine.draft_length import DraftLength, StepTimes
from neuronmm.engine.engine import load
from neuronmm.engine.loop import Generation, Row
from neuronmm.engine.sampling import SamplingParams
from neuronmm.engine.speculation import Speculation
from neuronmm.engine.text import TextStream
from neuronmm.models import UserError
from neuronmm.models.families import FAMILIES
from tiny_models import make_tiny
from word_tokenizer import word_tokenizer

VOCABULARY = 6
SAMPLED = [SamplingParams(max_new_tokens=40, temperature=1.0, top_k=8, seed=seed) for seed in (0, 1, 2)]
PARAMS = [SamplingParams(max_new_tokens=40, ignore_eos=True), SamplingParams(repetition_penalty=1.3), *SAMPLED]


class OracleDecoder:
    """Logits that depend on the whole past. It refuses a token after one that should have been forgotten."""

    batch, max_len, state_bytes = 1, 64, 0

    def __init__(self, seed: int) -> None:
        self.tokens: list[int] = []
        self.seed = seed

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.tokens = input_ids[0].tolist()
        return self._logits()

    def decode(self, token_ids: Tensor) -> Tensor:
        self.tokens += token_ids.tolist()
        assert len(self.tokens) <= self.max_len
        return self._logits()

    def verify(self, token_ids: Tensor) -> Tensor:
        return torch.cat([self.decode(token) for token in token_ids.split(1)])

    def rewind(self, length: int) -> None:
        assert length <= len(self.tokens)
        del self.tokens[length:]

    def _logits(self) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, *self.tokens)) % 2**63)
        return 3 * torch.randn(1, VOCABULARY, generator=generator)


class ScriptedDrafter:
    """Drafts the tokens of the plain run, with errors: one of 0 is right, others are added to the token."""

    acceptance = 0.7

    def __init__(self, answer: list[int], errors: list[int], cost: float) -> None:
        self.answer, self.errors, self.seconds = answer, errors, cost

    def cost(self, count: int) -> float:
        return self.seconds

    def behind(self, context: list[int]) -> float:
        return 0.0

    def propose(self, context: list[int], count: int) -> list[int]:
        ahead = self.answer[len(context) :][:count]
        return [(token + self.errors.pop()) % VOCABULARY for token in ahead if self.errors]


def make_row(limit: int, tokenizer: PreTrainedTokenizerBase) -> Row:
    return Row([3, 4, 5], limit, "length", 7, TextStream(tokenizer, [3, 4, 5], ()), Generation("", 3))


@examples(100)
@given(st.data())
def test_any_draft_gives_the_plain_run(data: st.DataObject) -> None:
    """Right, wrong and mixed drafts of any length, greedy and sampled, with EOS and limits inside accepted runs."""
    draw, tokenizer = data.draw, word_tokenizer()
    limit, eos = draw(st.integers(1, 30)), frozenset(draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=1)))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7])), repetition_penalty=draw(st.sampled_from([1.0, 1.2]))
    )
    decoder = OracleDecoder(draw(st.integers(0, 99)))
    plain, drafted = make_row(limit, tokenizer), make_row(limit, tokenizer)
    for _ in loop.run(decoder, [plain], params, eos, torch.device("cpu")):
        pass
    errors = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=60))
    answer = [*plain.prompt_ids, *plain.result.token_ids, 0, 1, 2, 3]  # it drafts beyond the end, too
    drafter = ScriptedDrafter(answer, errors, draw(st.sampled_from([0.0, 1.0])))
    counts = draw(st.lists(st.integers(0, 7), max_size=30))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftLength, "choose", lambda self, most, *_: min(most, counts.pop() if counts else 0))
        drafts = Speculation(decoder, drafter, StepTimes())
        list(speculation.run(decoder, drafted, params, eos, drafts))
    mine, theirs = drafted.result, plain.result
    assert (mine.token_ids, mine.text, mine.finish_reason) == (theirs.token_ids, theirs.text, theirs.finish_reason)
    figures = mine.draft
    assert figures is not None and 0 <= figures.accepted <= figures.drafted
    # A step adds the accepted tokens and one more, unless an accepted token was the last.
    assert len(mine.token_ids) - 1 - figures.accepted in (figures.steps, figures.steps - 1)


def force(patch: pytest.MonkeyPatch, count: int) -> None:
    """Draft ``count`` tokens in every step, whatever the times are."""
    patch.setattr(DraftLength, "choose", lambda self, most, *_: min(most, count))


@needs_core
@pytest.mark.parametrize("draft", ["ngram", "int8", "int4", "itself", "other"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_same_tokens_greedy_and_sampled(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, model_type: str, dtype: str, draft: str
) -> None:
    folder = checkpoint(model_type)
    name = {"itself": folder, "other": checkpoint(model_type, compressed=False)}.get(draft, draft)
    plain, drafted = load(folder, dtype=dtype), load(folder, dtype=dtype, draft=name)
    accepted = 0
    for count in (2, 7):
        force(monkeypatch, count)
        for params, prompt in product(PARAMS, ("w9 w10 w9 w10", "w30 w31", "w50 w3 w7")):
            (expected,), (result,) = (engine.generate([prompt], params) for engine in (plain, drafted))
            assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
            assert result.finish_reason == expected.finish_reason and expected.draft is None and result.draft
            accepted += result.draft.accepted
            if draft == "itself" and params is PARAMS[0]:  # the model agrees with itself: only the last step is short
                assert result.draft.accepted == result.draft.drafted
                assert result.draft.steps == -(-39 // (count + 1))
    if draft not in ("ngram", "other"):  # a random model need not repeat itself, nor another one
        assert accepted


@needs_core
def test_a_draft_model_follows_the_text_again_after_a_pause(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After twenty tokens without a draft it reads what it missed."""
    folder = checkpoint()
    engine, counts = load(folder, dtype="fp32", draft=folder), [2, 2] + [0] * 20 + [3, 3]
    monkeypatch.setattr(DraftLength, "choose", lambda self, most, *_: min(most, counts.pop(0) if counts else 0))
    (result,) = engine.generate(["w9 w10"], PARAMS[0])
    assert result.draft is not None and result.draft.accepted == result.draft.drafted == 10


@needs_core
def test_a_draft_of_fewer_bits_works_on_the_cache_of_the_model(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pause it has nothing to catch up with, and it predicts from the keys and values of the model itself.

    It drafts the token that the rounded model gives after these, which is not the one that follows from its own.
    """
    folder = checkpoint(compressed=False)
    engine, rounded = load(folder, dtype="fp32", draft="int4"), load(folder, dtype="fp32", weight_dtype="int4")
    drafts: Any = engine.drafts
    decoder: Any = engine.runner.decoder(1, 32)
    twin: Any = rounded.runner.decoder(1, 32)
    drafter, context = drafts.drafters([decoder])(0), list(range(3, 23))
    prompt = torch.tensor([context[:-1]])
    decoder.prefill(prompt, torch.ones_like(prompt))
    twin.prefill(prompt, torch.ones_like(prompt))
    assert drafter.behind(context) == 0.0
    for mine, its in zip(decoder.cache.keys, twin.cache.keys, strict=True):
        assert not torch.equal(mine, its)
        its.copy_(mine)
    for mine, its in zip(decoder.cache.values, twin.cache.values, strict=True):
        its.copy_(mine)
    expected = [int(twin.decode(torch.tensor(context[-1:])).argmax())]
    for _ in range(3):
        expected.append(int(twin.decode(torch.tensor(expected[-1:])).argmax()))
    assert drafter.propose(context, 4) == expected


@needs_core
def test_stop_strings_streaming_and_the_end_of_the_context(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint()
    plain, drafted = load(folder, dtype="fp32"), load(folder, dtype="fp32", draft=folder)
    force(monkeypatch, 7)
    (free,) = plain.generate(["w9 w10"], PARAMS[0])
    for stop in {f" {word}" for word in free.text.split()[1:12]}:
        params = SamplingParams(max_new_tokens=40, ignore_eos=True, stop=(stop,))
        stream = drafted.stream("w9 w10", params)
        assert "".join(stream) == stream.result.text == free.text.split(stop)[0]
        assert stream.result.finish_reason == "stop"
    for words in (100, 127):
        prompt = " ".join(["w9", "w10", "w11", "w12"] * 32).split()[:words]
        params = SamplingParams(max_new_tokens=40, ignore_eos=True)
        (expected,), (result,) = (engine.generate([" ".join(prompt)], params) for engine in (plain, drafted))
        assert result.token_ids == expected.token_ids and result.finish_reason == "context"


@needs_core
@pytest.mark.parametrize("kind", ["ngram", "int4", "itself"])
def test_smollm2(smollm2: Path, kind: str) -> None:
    """The real model in bf16, with lengths chosen as a user gets them: greedy, and sampled with two seeds."""
    plain, drafted = load(smollm2), load(smollm2, draft=smollm2 if kind == "itself" else kind)
    prompt = "Repeat this list twice: red, green, blue, yellow, black, white."
    for params in (
        SamplingParams(max_new_tokens=48, ignore_eos=True),
        *(SamplingParams(max_new_tokens=32, temperature=0.7, top_p=0.9, seed=seed) for seed in (0, 1)),
    ):
        (expected,), (result,) = (engine.generate([prompt], params, chat=True) for engine in (plain, drafted))
        assert (result.token_ids, result.text) == (expected.token_ids, expected.text)


@needs_core
def test_smollm2_repeats_what_an_ngram_says(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's words come again, so with three tokens in every step some are accepted."""
    force(monkeypatch, 3)
    prompt = "Repeat this list twice: red, green, blue, yellow, black, white."
    params = SamplingParams(max_new_tokens=48, ignore_eos=True)
    (result,) = load(smollm2, draft="ngram").generate([prompt], params, chat=True)
    assert result.draft is not None and result.draft.accepted > 10


@needs_core
def test_smollm2_in_four_bits_drafts_what_the_model_says(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With three tokens in every step, most are accepted."""
    force(monkeypatch, 3)
    params = SamplingParams(max_new_tokens=64, ignore_eos=True)
    (result,) = load(smollm2, draft="int4").generate(["Why is the sky blue?"], params, chat=True)
    assert result.draft is not None and result.draft.accepted > 0.8 * result.draft.drafted


@needs_core
@pytest.mark.parametrize("model, draft", [(64, 70), (70, 64)])
def test_embeddings_may_be_padded_to_other_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: int, draft: int
) -> None:
    """The larger model also chooses tokens of its padding, which the smaller one can neither read nor draft."""
    for vocabulary in (model, draft):
        torch.manual_seed(1)
        make_tiny(vocabulary=vocabulary).save_pretrained(tmp_path / str(vocabulary))
        word_tokenizer().save_pretrained(tmp_path / str(vocabulary))
    plain = load(tmp_path / str(model), dtype="fp32")
    drafted = load(tmp_path / str(model), dtype="fp32", draft=tmp_path / str(draft))
    force(monkeypatch, 3)
    largest = drafts = 0
    for seed in range(6):
        params = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=1.5, seed=seed)
        (expected,), (result,) = (engine.generate(["w9 w10"], params) for engine in (plain, drafted))
        assert result.token_ids == expected.token_ids and result.draft is not None
        drafts += result.draft.drafted
        largest = max(largest, *result.token_ids)
    assert drafts and (model == 64 or largest >= 64)


@needs_core
def test_what_cannot_draft_is_refused_in_one_line(
    checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(checkpoint())
    renamed = tmp_path / "renamed"
    make_tiny().save_pretrained(renamed)
    tokenizer: Any = word_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(renamed)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w9\nw10\n")
    one = ["--prompt", "w9"]
    for options, words in (
        ([*one, "--draft", str(renamed)], "another vocabulary"),
        ([*one, "--draft", str(tmp_path / "nothing")], "nothing"),
        ([*one, "--draft", "ngram", "--impl", "torch"], "C++ core"),
        ([*one, "--draft", "int4", "--impl", "torch"], "C++ core"),
        ([*one, "--draft", "ngram", "--dtype", "fp16"], "C++ core"),
        (["--batch-file", str(prompts), "--draft", "ngram"], "one prompt at a time"),
    ):
        capsys.readouterr()
        assert main(["generate", folder, *options]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    with pytest.raises(UserError, match="not 2"):
        load(folder, draft="ngram").generate(["w9", "w10"])


@needs_core
def test_the_command_reports_what_was_accepted(
    checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(checkpoint()), "--prompt", "w9 w10 w9 w10", "--draft", "ngram"]
    assert main(command) == 0
    assert "drafted tokens accepted" in capsys.readouterr().err
    assert main([*command, "--json"]) == 0
    out = capsys.readouterr().out
    assert '"draft": {"steps": ' in out and '"accepted": ' in out
