"""Measure servers under load, ours, llama.cpp's and vLLM's: output tokens/s, TTFT and TPOT for several streams.

Each server is a process of its own, which starts once. A round asks each of them in turn for the same work at each
number of streams; the order rotates from round to round. A stream asks for one completion after the other, with another
prompt each time, so that no cache of prompts helps. The clients are in this process.

    python scripts/bench_serving.py MODEL.gguf --install     install llama.cpp's server in an environment of its own
    python scripts/bench_serving.py MODEL.gguf OUT --drafts int4 --rounds 3 --streams 1 4 16 --results results.jsonl
    python scripts/bench_serving.py MODEL.gguf OUT --vllm .venv-vllm/bin/python   also vLLM, with MODEL and with OUT
                                                       (a CPU without bf16 may run MODEL faster in float32: both)
    python scripts/bench_serving.py --report results.jsonl

MODEL is a GGUF file, which is converted for llama.cpp to bf16 and to f16. OUT are further models for our server and for
vLLM, compressed checkpoints for example; `make test-vllm` makes an environment with vLLM and its plugin. Results are
appended as JSON lines. ``--report`` prints the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cpu_peers

from neuronmm.models.source import resolve

LLAMA = cpu_peers.python_of("llama.cpp-BF16")
"""The interpreter of the environment that has llama.cpp's own server."""
PEERS = ["llama.cpp-BF16", "llama.cpp-F16"]
"""llama.cpp with the model in these types."""
THREADS = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
"""Threads of the other servers: as many as ours takes."""
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
"""vLLM's environment. By default it would leave a core without a thread."""
_PERCENTILES = ("TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95")
TEXT = """
the of and to in is that it was for on are as with they be at one have this from by hot word but what some we can out
other were all there when up use your how said an each she which do their time if will way about many then them write
would like so these her long make thing see him two has look more day could go come did
"""


@contextmanager
def serving(command: list[str], url: str) -> Iterator[str]:
    """Run a server and yield its URL when it is healthy; one that ends before leaves the end of what it wrote."""
    with tempfile.TemporaryFile() as written:
        process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
        try:
            while True:
                if process.poll() is not None:
                    written.seek(max(0, written.tell() - 2000))
                    last = written.read().decode(errors="replace")
                    raise SystemExit(f"{last}\n{command[0]} ended with status {process.returncode}")
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5)
                    break
                except (urllib.error.URLError, ConnectionError, TimeoutError):
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait()


def vllm_command(python: str, model: str, port: int, rows: int, context: int, *options: str) -> list[str]:
    """Return the command of vLLM's server for a folder, compiled (its default), without a cache of prompts."""
    settings = {**VLLM, "OMP_NUM_THREADS": THREADS}
    limits = ["--port", port, "--max-num-seqs", rows, "--max-model-len", context, "--no-enable-prefix-caching"]
    server = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *map(str, limits), *options]
    return ["env", *(f"{name}={value}" for name, value in settings.items()), *server]


def servers(models: list[str], args: argparse.Namespace) -> dict[str, tuple[list[str], str]]:
    """Return each server's command and URL, by name."""
    commands: dict[str, tuple[list[str], str]] = {}
    rows, context = max(args.streams), args.prompt + args.new + 64
    ours = {"neuronmm": [models[0]], **{f"neuronmm {Path(model).name}": [model] for model in models[1:]}}
    ours |= {f"neuronmm --draft {draft}": [models[0], "--draft", draft] for draft in args.drafts}
    common = ["--context", str(context), "--max-batch", str(rows), "--dtype", "bf16"]
    ports = itertools.count(args.port)
    for name, options in ours.items():
        port = next(ports)
        command = [sys.executable, "-m", "neuronmm", "serve", *options, "--port", str(port), *common]
        commands[name] = (command, f"http://127.0.0.1:{port}")
    for engine in args.engines:
        port, script = next(ports), str(Path(__file__).with_name("llama_server.py"))
        file = str(cpu_peers.write_gguf(models[0], engine.removeprefix("llama.cpp-")))
        command = [str(LLAMA), script, file, str(port), str(rows), str(context), str(THREADS)]
        commands[engine] = (command, f"http://127.0.0.1:{port}")
    theirs = {"vLLM": (models[0], "bfloat16"), "vLLM float32": (models[0], "float32")}
    theirs |= {f"vLLM {Path(model).name}": (model, "bfloat16") for model in models[1:]}
    for name, (model, dtype) in theirs.items() if args.vllm else ():
        port = next(ports)
        command = vllm_command(args.vllm, str(resolve(model)), port, rows, context, "--dtype", dtype)
        commands[name] = (command, f"http://127.0.0.1:{port}")
    return commands


async def one_request(url: str, model: str, prompt: str, new: int) -> dict[str, Any]:
    """Return TTFT and the mean TPOT of one streamed completion in seconds, and its number of tokens.

    The client only notes when events arrive, because it takes its time from the cores of the server.
    """
    asked = {"model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    body = json.dumps({**asked, "stream": True, "stream_options": {"include_usage": True}}).encode()
    address = urlsplit(url)
    begin, times, last = time.perf_counter(), [], b""
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    async for line in reader:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            last = line
    writer.close()
    usage = json.loads(last.removeprefix(b"data: "))["usage"]
    tokens, times = usage["completion_tokens"], times[:-1]  # the last event has no text
    if tokens != new:
        raise SystemExit(f"{url} sent {tokens} tokens instead of {new}")
    return {"ttft": times[0] - begin, "tpot": (times[-1] - times[0]) / (tokens - 1), "tokens": tokens}


async def load(url: str, streams: int, requests: int, args: argparse.Namespace, draw: random.Random) -> dict[str, Any]:
    """Run ``streams`` clients with ``requests`` each, one after the other."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.loads(answer.read())["data"][0]["id"]

    async def stream() -> list[dict[str, Any]]:
        prompts = [" ".join(draw.choices(TEXT.split(), k=args.prompt)) for _ in range(requests)]
        return [await one_request(url, model, prompt, args.new) for prompt in prompts]

    begin = time.perf_counter()
    results = [one for many in await asyncio.gather(*(stream() for _ in range(streams))) for one in many]
    seconds = time.perf_counter() - begin
    tokens = sum(one["tokens"] for one in results)
    return {"tokens_per_second": tokens / seconds, **{k: [one[k] for one in results] for k in ("ttft", "tpot")}}


def measure(args: argparse.Namespace) -> None:
    """Run all rounds and append each measurement to the file."""
    draw = random.Random(args.first_round)
    with ExitStack() as stack:
        commands = servers(args.models, args)
        urls = {name: stack.enter_context(serving(*command)) for name, command in commands.items()}
        for url in urls.values():
            asyncio.run(load(url, 1, 1, args, draw))
        for number in range(args.first_round, args.first_round + args.rounds):
            names = list(urls)
            for streams in args.streams:
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    result = asyncio.run(load(urls[name], streams, args.requests, args, draw))
                    line = {"server": name, "streams": streams, "round": number, "prompt": args.prompt, **result}
                    with args.results.open("a") as file:
                        print(json.dumps({**line, "new": args.new}), file=file)
                    print(f"round {number}, {streams} streams, {name}: {result['tokens_per_second']:.0f} tokens/s")


def report(path: Path) -> None:
    """Print one table: medians over the rounds, and the throughput relative to the first server's."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    columns = ["streams", "server", "output tokens/s", "over the first, by round", *_PERCENTILES]
    print(f"| {' | '.join(columns)} |\n|---:|---|{'---:|' * (len(columns) - 2)}")
    speeds = {(row["streams"], row["server"], row["round"]): row["tokens_per_second"] for row in rows}
    names = list(dict.fromkeys(row["server"] for row in rows))
    for streams in sorted({row["streams"] for row in rows}):
        for name in names:
            mine = [row for row in rows if (row["streams"], row["server"]) == (streams, name)]
            if not mine:
                continue
            speed = [row["tokens_per_second"] for row in mine]
            ratios = [
                row["tokens_per_second"] / speeds.get((streams, names[0], row["round"]), math.nan) for row in mine
            ]
            cells = [f"{statistics.median(speed):.0f} ({min(speed):.0f} to {max(speed):.0f})"]
            cells += [f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
            for key in ("ttft", "tpot"):
                values = sorted(value * 1e3 for row in mine for value in row[key])
                cells += [f"{statistics.median(values):.1f}", f"{values[math.ceil(0.95 * len(values)) - 1]:.1f}"]
            print(f"| {streams} | {name} | {' | '.join(cells)} |")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--report", type=Path, metavar="FILE")
    parser.add_argument("--drafts", nargs="*", default=[], help="our server also with these as --draft")
    parser.add_argument("--engines", nargs="*", default=PEERS, choices=PEERS, help="other servers; default all")
    parser.add_argument("--vllm", metavar="PYTHON", help="also vLLM, in the environment of this interpreter")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-round", type=int, default=0)
    parser.add_argument("--requests", type=int, default=2, help="requests per stream and round; default 2")
    parser.add_argument("--prompt", type=int, default=100, help="words of a prompt, about a token each; default 100")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer; default 64")
    parser.add_argument("--port", type=int, default=8200, help="first of the ports; default 8200")
    parser.add_argument("--results", type=Path, default=Path("serving.jsonl"))
    args = parser.parse_args()
    if args.install and not cpu_peers.install(["llama.cpp"]):
        raise SystemExit("llama.cpp's server could not be installed; the lines above say why")
    if args.report:
        report(args.report)
    elif args.models:
        measure(args)


if __name__ == "__main__":
    main()
