"""Many clients at once: nothing is mixed up or lost, and whoever leaves frees its slot."""

from __future__ import annotations

import asyncio
import random
import re
import time
import urllib.request
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from neuronmm.engine.engine import Engine
from neuronmm.engine.loop import DraftCounts, Generation
from neuronmm.engine.sampling import SamplingParams
from neuronmm.serving.metrics import Metrics
from served import KEY, Server

ENDLESS: Any = {"model": "tiny", "prompt": "w9", "max_tokens": 16000, "extra_body": {"ignore_eos": True}, "n": 4}


def metric(server: Server, name: str) -> float:
    """The sum of a metric over its labels."""
    text = urllib.request.urlopen(f"{server.url}/metrics", timeout=60).read().decode()
    return sum(float(value) for value in re.findall(rf"^neuronmm_{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


def wait_until_idle(server: Server) -> None:
    deadline = time.monotonic() + 60
    while metric(server, "running_rows") or metric(server, "queue_length"):
        assert time.monotonic() < deadline, "a row that nobody waits for still runs"
        time.sleep(0.05)


def test_sixteen_streams_with_cancels_get_their_own_texts(server: Server, engine: Engine) -> None:
    draw = random.Random(5)
    prompts = [" ".join(f"w{draw.randint(3, 63)}" for _ in range(draw.randint(1, 30))) for _ in range(16)]
    limits = [draw.randint(1, 60) for _ in prompts]

    async def stream(client: openai.AsyncOpenAI, index: int) -> str | None:
        """Return the text of a prompt; every third client leaves after its third piece."""
        await asyncio.sleep(draw.random() / 5)
        sampled: Any = {"temperature": 0.9, "seed": index} if index % 2 else {"temperature": 0}
        text, pieces = "", 0
        leaves = index % 3 == 2
        asked = await client.completions.create(
            model="tiny",
            prompt=prompts[index],
            max_tokens=15000 if leaves else limits[index],
            stream=True,
            extra_body={"ignore_eos": True},
            **sampled,
        )
        async for chunk in asked:
            text, pieces = text + chunk.choices[0].text, pieces + 1
            if leaves and pieces == 3:
                await asked.close()
                return None
        return text

    async def everyone() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(stream(client, index) for index in range(16)))

    texts = asyncio.run(everyone())
    for index, text in enumerate(texts):
        if index % 3 == 2:
            assert text is None
            continue
        sampled: Any = {"temperature": 0.9, "seed": index} if index % 2 else {}
        params = SamplingParams(max_new_tokens=limits[index], ignore_eos=True, **sampled)
        assert text == engine.generate([prompts[index]], params)[0].text
    wait_until_idle(server)


def test_a_full_queue_is_status_429_until_clients_leave(client: openai.OpenAI, server: Server) -> None:
    """Five requests of four rows fill the slots and the queue; one of them waits for its whole answer."""
    wait_until_idle(server)
    running = client.completions.create(stream=True, **ENDLESS)
    next(iter(running))

    async def fill() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as others:
            waiting = [asyncio.create_task(others.completions.create(stream=i > 0, **ENDLESS)) for i in range(4)]
            deadline = time.monotonic() + 60
            while metric(server, "queue_length") < 16:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            with pytest.raises(openai.RateLimitError) as caught:
                await others.completions.create(model="tiny", prompt="w9")
            assert caught.value.code == "queue_full" and "try again" in caught.value.message
            assert (metric(server, "running_rows"), metric(server, "queue_length")) == (4, 16)
            for task in waiting:
                task.cancel()

    left = metric(server, "requests_total")
    asyncio.run(fill())
    running.close()
    wait_until_idle(server)
    assert client.completions.create(model="tiny", prompt="w9", max_tokens=1).choices
    assert metric(server, "requests_total") >= left + 6
    text = urllib.request.urlopen(f"{server.url}/metrics", timeout=60).read().decode()
    assert re.search(r'neuronmm_requests_total\{path="/v1/completions",status="429"\} 1\.0', text)
    assert re.search(r'neuronmm_requests_total\{path="/v1/completions",status="499"\} \d', text)


def test_metrics_count_tokens_and_times(client: openai.OpenAI, server: Server) -> None:
    wait_until_idle(server)
    names = ("prompt_tokens_total", "output_tokens_total", "time_to_first_token_seconds_count")
    before = [metric(server, name) for name in names]
    client.completions.create(model="tiny", prompt="w9 w10 w11", max_tokens=5, extra_body={"ignore_eos": True}, n=2)
    after = [metric(server, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [6, 10, 2]
    assert metric(server, "time_per_output_token_seconds_sum") > 0


def test_metrics_count_drafts() -> None:
    scheduler: Any = SimpleNamespace(waiting=0, running=0)
    metrics = Metrics(scheduler)
    for drafted, accepted in ((7, 5), (4, 0)):
        metrics.end(Generation("", 1, draft=DraftCounts(2, drafted, accepted)))
    metrics.end(Generation("", 1))
    text = metrics.text().decode()
    assert "neuronmm_draft_tokens_total 11.0" in text and "neuronmm_draft_tokens_accepted_total 5.0" in text
