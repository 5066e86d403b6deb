"""Load a server, ours or vLLM's, for minutes with clients that also leave: is anything lost, does its memory grow?

Each prompt is first asked alone; its greedy text is what every later answer has to be, and what a client that leaves
half way has to have the beginning of. Then the streams ask for random prompts, one after the other.

    python scripts/soak_serving.py MODEL --streams 32 --minutes 10 --page docs/results/serving.md
    python scripts/soak_serving.py MODEL --draft int4              our server with a draft
    python scripts/soak_serving.py OUT --vllm .venv-vllm/bin/python       vLLM in this environment, in float32

``--page`` puts the table into that page, between the lines that mark its place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from bench_serving import TEXT, serving, vllm_command

BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"
SHORTEST = 5  # words of a prompt
EVERY = 5.0  # seconds between two looks at the memory


@dataclass
class Soak:
    """What happened: answers, and resident bytes of the server by time in seconds."""

    whole: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)


async def pieces(url: str, model: str, prompt: str, new: int) -> AsyncIterator[str]:
    """Yield the text of a streamed greedy completion; closing the iterator closes the connection.

    Raises:
        ConnectionError: the server ended the answer early.
    """
    asked = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    body, address = json.dumps(asked).encode(), urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        async for line in reader:
            if line.startswith(b"data: {"):
                document: Any = json.loads(line.removeprefix(b"data: "))
                if "error" in document:
                    raise ConnectionError(document["error"]["message"])
                yield document["choices"][0]["text"]
            elif line.startswith(b"data: [DONE]"):
                return
        raise ConnectionError("the answer has no end")
    finally:
        writer.close()


async def stream(url: str, model: str, alone: dict[str, str], args: argparse.Namespace, seed: int, soak: Soak) -> None:
    """Ask for one random prompt after the other until the time is over; leave a third of the answers half way."""
    draw, end = random.Random(seed), time.monotonic() + 60 * args.minutes
    while time.monotonic() < end:
        prompt, leaves = draw.choice(list(alone)), draw.random() < 1 / 3
        most, text = draw.randint(1, args.new // 2), ""
        try:
            async with aclosing(pieces(url, model, prompt, args.new)) as answer:  # type: ignore[type-var]
                number = 0
                async for piece in answer:
                    text, number = text + piece, number + 1
                    if leaves and number == most:
                        break
        except (ConnectionError, OSError) as error:
            soak.wrong.append(f"lost: {error}")
            continue
        soak.tokens += number
        expected = alone[prompt]
        if not (expected.startswith(text) if leaves else expected == text):
            soak.wrong.append(f"another text after {prompt[:40]!r}...")
        soak.left, soak.whole = soak.left + leaves, soak.whole + (not leaves)


async def run(url: str, server: psutil.Process, args: argparse.Namespace) -> Soak:
    """Ask for every prompt alone, then load the server."""
    draw, model = random.Random(1), Path(args.model).name
    prompts = [
        " ".join(draw.choices(TEXT.split(), k=draw.randint(SHORTEST, args.longest))) for _ in range(args.prompts)
    ]
    alone: dict[str, str] = {}
    for prompt in prompts:
        alone[prompt] = "".join([piece async for piece in pieces(url, model, prompt, args.new)])
    soak, begin = Soak(), time.monotonic()

    async def watch() -> None:
        while True:
            with suppress(psutil.NoSuchProcess):  # a child that has just ended
                processes = [server, *server.children(recursive=True)]
                soak.memory.append((time.monotonic() - begin, sum(one.memory_info().rss for one in processes)))
            await asyncio.sleep(EVERY)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(stream(url, model, alone, args, seed, soak) for seed in range(args.streams)))
    watching.cancel()
    return soak


def table(soak: Soak, args: argparse.Namespace) -> str:
    """Return the result as Markdown."""
    seconds = soak.memory[-1][0]
    third = max(1, len(soak.memory) // 3)
    first, last = (
        statistics.median(rss for _, rss in part) / 1e6 for part in (soak.memory[:third], soak.memory[-third:])
    )
    rows = {
        "streams, rows that run at once": f"{args.streams}, {args.max_batch}",
        "minutes under load": f"{seconds / 60:.1f}",
        "whole answers": f"{soak.whole}",
        "answers that the client left half way": f"{soak.left}",
        "lost or with another text than alone": f"{len(soak.wrong)}",
        "pieces of text (about a token each) per second": f"{soak.tokens / seconds:.0f}",
        "resident memory, median of the first and of the last third": f"{first:.1f} MB and {last:.1f} MB",
        "growth": f"{last - first:+.1f} MB",
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["| measured | |", "|---|---:|", *lines]) + "\n"


def into(page: Path, text: str) -> None:
    """Replace what is between the marks of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{page}: has no place for the table, {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{text}{END}{after}")


def main() -> None:
    """Parse the command line, run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--longest", type=int, default=300, help="words of the longest prompt; default 300")
    parser.add_argument("--new", type=int, default=48, help="tokens of an answer; default 48")
    parser.add_argument("--max-batch", type=int, default=8)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--draft", help="our server's --draft")
    kind.add_argument("--vllm", metavar="PYTHON", help="vLLM in the environment of this interpreter, not our server")
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--page", type=Path, help="put the table there")
    args = parser.parse_args()
    url = f"http://127.0.0.1:{args.port}"
    context, name = args.longest + args.new + 64, Path(args.model).name
    if args.vllm:
        # In bf16 its sums depend on the other rows, and so do its tokens where two are almost equally likely.
        options = ["--dtype", "float32", "--served-model-name", name]
        command = vllm_command(args.vllm, args.model, args.port, args.max_batch, context, *options)
    else:
        limits = ["--max-batch", str(args.max_batch), "--context", str(context)]
        drafts = ["--draft", args.draft] if args.draft else []
        command = [sys.executable, "-m", "neuronmm", "serve", args.model, "--port", str(args.port), *limits, *drafts]
    with serving(command, url):
        (server,) = (child for child in psutil.Process().children() if str(args.port) in child.cmdline())
        soak = asyncio.run(run(url, server, args))
    result = table(soak, args)
    print(result, *soak.wrong[:10], sep="\n")
    if args.page:
        into(args.page, result)
    if soak.wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
