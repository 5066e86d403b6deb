"""Log-probabilities: OpenAI's shapes, the model's values, and the tokens of the text, whole and streamed."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
import torch
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from transformers import AddedToken, PreTrainedTokenizerBase

from neuronmm.engine.engine import Engine
from neuronmm.engine.sampling import TokenLogprobs
from neuronmm.engine.text import TextStream
from neuronmm.serving.logprobs import Logprobs, token_bytes
from word_tokenizer import word_tokenizer

CHAT: Any = [{"role": "user", "content": "w9 w10"}]
SAMPLED: Any = {"temperature": 2, "seed": 3, "extra_body": {"ignore_eos": True}}
"""So hot that most tokens are words, which have text."""


def expected(engine: Engine, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """The log-probabilities [tokens, vocabulary] that torch computes."""
    with torch.inference_mode():
        logits = copy.deepcopy(engine.runner.model).float()(torch.tensor([prompt + tokens])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def test_a_completion_lists_tokens_values_and_places(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.completions.create(model="tiny", prompt="w9 w10", max_tokens=16, logprobs=3, **SAMPLED)
    Completion.model_validate(answer.to_dict())
    (choice,) = answer.choices
    found = choice.logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs and found.text_offset
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) > 1
    for place, token in zip(found.text_offset, found.tokens, strict=True):
        assert choice.text[place:].lstrip().startswith(token)  # the tokenizer puts a space between two words
    for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 3 and top.get(token, value) == value <= max(top.values())
        assert sorted(top.values(), reverse=True) == list(top.values()) and sum(map(math.exp, top.values())) < 1


def test_the_values_are_those_of_the_model_before_temperature(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.completions.create(model="tiny", prompt="w9 w10", max_tokens=8, logprobs=0, **SAMPLED)
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens and found.token_logprobs
    assert found.top_logprobs == [{}] * len(found.tokens)
    tokens = [int(engine.tokenizer.convert_tokens_to_ids(token)) for token in found.tokens]
    want = expected(engine, engine.encode("w9 w10"), tokens)[range(len(tokens)), tokens]
    torch.testing.assert_close(torch.tensor(found.token_logprobs), want, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("top", [0, 4])
def test_a_streamed_chat_lists_what_the_whole_one_lists(client: openai.OpenAI, top: int) -> None:
    asked: Any = {"model": "tiny", "messages": CHAT, "max_tokens": 16, "logprobs": True, "top_logprobs": top, **SAMPLED}
    whole = client.chat.completions.create(**asked)
    ChatCompletion.model_validate(whole.to_dict())
    chunks = list(client.chat.completions.create(stream=True, **asked))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict())
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    streamed = [entry for part in parts if part is not None and part.content for entry in part.content]
    found = whole.choices[0].logprobs
    assert found is not None and found.content == streamed and len(streamed) > 1
    for entry in streamed:
        assert bytes(entry.bytes or []).decode() == entry.token and len(entry.top_logprobs) == top
        others = {other.token: other.logprob for other in entry.top_logprobs}
        assert others.get(entry.token, entry.logprob) == entry.logprob


def test_tokens_that_a_stop_string_cuts_off_are_not_listed(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="w9 w10", max_tokens=16, logprobs=1, **SAMPLED).choices[0]
    assert whole.logprobs is not None and whole.logprobs.tokens is not None
    first, *others = whole.logprobs.tokens
    stop = " " + next(token for token in others if token != first)
    cut = client.completions.create(model="tiny", prompt="w9 w10", max_tokens=16, logprobs=1, stop=[stop], **SAMPLED)
    (choice,) = cut.choices
    assert choice.logprobs is not None and choice.logprobs.tokens is not None and stop not in choice.text
    kept = len(choice.logprobs.tokens)
    assert 0 < kept < len(whole.logprobs.tokens)
    assert choice.logprobs.tokens == whole.logprobs.tokens[:kept]


def test_without_the_parameter_there_are_none(client: openai.OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt="w9", max_tokens=2).choices[0].logprobs is None
    assert client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=2).choices[0].logprobs is None


def test_the_bytes_of_a_token_that_is_part_of_a_character(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    text = "the stop \N{GRINNING FACE} \N{LATIN SMALL LETTER E WITH ACUTE}t"
    ids: Any = byte_tokenizer(text, add_special_tokens=False).input_ids
    parts = [token_bytes(byte_tokenizer, token) for token in ids]
    assert b"".join(parts).decode() == text and b"\xf0" in parts


@pytest.mark.parametrize(("reason", "listed"), [("length", 2), ("context", 2), ("stop", 1), ("", 1)])
def test_a_token_whose_character_the_limit_cuts_is_listed(
    reason: str, listed: int, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    word, *_ = byte_tokenizer("a").input_ids
    part, *_ = byte_tokenizer("\U0001f600").input_ids
    stream, result, noted = TextStream(byte_tokenizer, [word], ()), SimpleNamespace(text="", finish_reason=""), []
    row = SimpleNamespace(stream=stream, result=result, logprobs=noted)
    logprobs = Logprobs(cast(Any, row), byte_tokenizer, chat=True)
    for token in (word, part):
        logprobs.note()
        noted.append(TokenLogprobs(token, -1.0, []))
        result.text += stream.push(token)
    result.text, result.finish_reason = result.text + stream.finish(), reason
    assert result.text == "a" and len(logprobs.take()["content"]) == listed


def test_a_token_without_text_is_not_listed() -> None:
    """As the reserved ones of Llama 3, which are none of the tokenizer's named special tokens."""
    tokenizer: Any = word_tokenizer()
    tokenizer.add_tokens([AddedToken("<|reserved|>", special=True)], special_tokens=True)
    reserved = tokenizer.convert_tokens_to_ids("<|reserved|>")
    stream, result, noted = TextStream(tokenizer, [3], ()), SimpleNamespace(text="", finish_reason=""), []
    listed = Logprobs(cast(Any, SimpleNamespace(stream=stream, result=result, logprobs=noted)), tokenizer, chat=False)
    for token in (9, reserved, 10):
        listed.note()
        noted.append(TokenLogprobs(token, -1.0, []))
        result.text += stream.push(token)
    assert listed.take()["tokens"] == ["w9", "w10"]
