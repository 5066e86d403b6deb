"""What clients get, over HTTP with the openai package: texts equal those of the engine alone."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from neuronmm.engine.engine import Engine
from neuronmm.engine.sampling import SamplingParams
from served import KEY, Server

CHAT: Any = [{"role": "system", "content": "w20"}, {"role": "user", "content": [{"type": "text", "text": "w9 w10"}]}]
SAMPLED: Any = {"temperature": 0.9, "top_p": 0.9, "seed": 11}


def alone(engine: Engine, prompt: str, **params: Any) -> str:
    return engine.generate([prompt], SamplingParams(**params))[0].text


def test_the_model_is_listed(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == [server.model] == ["tiny"]


def test_the_model_is_found_by_its_name(client: openai.OpenAI, server: Server) -> None:
    assert client.models.retrieve(server.model) == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="there is no model 'an/other' here"):
        client.models.retrieve("an/other")
    for path in ("", server.model):
        asked = urllib.request.Request(f"{server.url}/v1/models/{path}", headers={"Authorization": f"Bearer {KEY}"})
        assert urllib.request.urlopen(asked).status == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{server.url}/v1/models/{path}")


def test_a_completion(client: openai.OpenAI, server: Server, engine: Engine) -> None:
    answer = client.completions.create(
        model="tiny", prompt="w9 w10", max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    Completion.model_validate(answer.to_dict())
    (choice,) = answer.choices
    (expected,) = engine.generate(["w9 w10"], SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 12, 14)


def test_the_default_length_of_a_completion_is_that_of_openai(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="w9", extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_several_prompts_and_choices_are_seeded_in_order(client: openai.OpenAI, engine: Engine) -> None:
    prompts = ["w9 w10", "w11"]
    expected = [
        alone(engine, prompt, max_new_tokens=9, temperature=0.9, top_p=0.9, seed=11 + 2 * i + j)
        for i, prompt in enumerate(prompts)
        for j in range(2)
    ]
    for given in (prompts, [engine.encode(prompt) for prompt in prompts]):
        answer = client.completions.create(model="tiny", prompt=given, max_tokens=9, n=2, **SAMPLED)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None and answer.usage.prompt_tokens == 3
    assert len(set(expected)) > 1


def test_a_chat(client: openai.OpenAI, engine: Engine) -> None:
    prompt = "w3 w20 w4w3 w9 w10 w4 w5"
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=12, **SAMPLED)
    ChatCompletion.model_validate(answer.to_dict())
    message = answer.choices[0].message
    assert (message.role, message.content) == (
        "assistant",
        alone(engine, prompt, max_new_tokens=12, temperature=0.9, top_p=0.9, seed=11),
    )


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI, chat: bool) -> None:
    both: Any = {"model": "tiny", "max_tokens": 20, "n": 2, "extra_body": {"ignore_eos": True}, **SAMPLED}
    texts, chunks = {0: "", 1: ""}, []
    if chat:
        whole: Any = client.chat.completions.create(messages=CHAT, **both)
        for chunk in client.chat.completions.create(messages=CHAT, stream=True, **both):
            ChatCompletionChunk.model_validate(chunk.to_dict())
            chunks.append(chunk)
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert [choice.message.content for choice in whole.choices] == list(texts.values())
        assert [chunk.choices[0].delta.role for chunk in chunks].count("assistant") == 2
    else:
        whole = client.completions.create(prompt="w9", **both)
        for part in client.completions.create(prompt="w9", stream=True, **both):
            chunks.append(part)
            texts[part.choices[0].index] += part.choices[0].text
        assert [choice.text for choice in whole.choices] == list(texts.values())
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons.count("length") == 2 and set(reasons) == {None, "length"}
    assert len(chunks) > 20  # a piece per token, not all at the end


def test_a_stream_counts_tokens_on_request(client: openai.OpenAI) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.completions.create(model="tiny", prompt="w9 w10", max_tokens=3, temperature=0, **options)
    assert last.choices == []
    assert last.usage is not None and last.usage.prompt_tokens == 2
    options["stream_options"] = {"include_usage": None, "include_obfuscation": False}
    *_, last = client.completions.create(model="tiny", prompt="w9 w10", max_tokens=3, temperature=0, **options)
    assert last.choices and last.usage is None


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_string(client: openai.OpenAI, engine: Engine, stream: bool) -> None:
    text = alone(engine, "w9 w10", max_new_tokens=40, ignore_eos=True)
    stop = text.split()[5]
    asked: Any = {"model": "tiny", "prompt": "w9 w10", "max_tokens": 40, "temperature": 0, "stop": ["w99", stop]}
    asked["extra_body"] = {"ignore_eos": True}
    expected = text[: text.index(stop)]
    if stream:
        chunks = list(client.completions.create(stream=True, **asked))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        choice = chunks[-1].choices[0]
    else:
        answer = client.completions.create(**asked)
        choice = answer.choices[0]
        assert choice.text == expected
        assert answer.usage is not None and answer.usage.completion_tokens < 40
    assert choice.finish_reason == "stop"


def test_an_end_of_sequence_is_a_stop(client: openai.OpenAI, engine: Engine) -> None:
    """A seed is searched whose text ends by itself."""
    for seed in range(200):
        params = SamplingParams(max_new_tokens=30, temperature=1.0, seed=seed)
        (expected,) = engine.generate(["w9"], params)
        if expected.finish_reason == "eos":
            break
    answer = client.completions.create(model="tiny", prompt="w9", max_tokens=30, temperature=1.0, seed=seed)
    assert expected.finish_reason == "eos"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, "stop")


def test_the_extensions_reach_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    extra = {"top_k": 3, "repetition_penalty": 1.4}
    answer = client.completions.create(
        model="tiny", prompt="w9", max_tokens=9, temperature=0.8, seed=4, extra_body={**extra, "user": None}
    )
    assert answer.choices[0].text == alone(engine, "w9", max_new_tokens=9, temperature=0.8, seed=4, **extra)
