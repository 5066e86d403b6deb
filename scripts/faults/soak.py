"""Generate for long, load and drop engines, use one engine from two threads, and watch what the process holds."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from neuronmm.engine.engine import Engine, load
from neuronmm.engine.sampling import SamplingParams
from tiny_models import fill_tiny, make_tiny, pivoted_spec, write_checkpoint
from word_tokenizer import word_tokenizer

TOKENS = 100
"""New tokens of one generation."""


def held() -> dict[str, int]:
    """Return what this process holds now: resident bytes, threads, open files and child processes."""
    gc.collect()
    process = psutil.Process()
    files, children = len(os.listdir("/proc/self/fd")), len(process.children())
    return {"bytes": process.memory_info().rss, "threads": process.num_threads(), "files": files, "children": children}


def slope(samples: list[dict[str, int]]) -> float:
    """Return by how many bytes resident memory grows from sample to sample: the median of all pairs (Theil and Sen)."""
    pairs = [
        (later["bytes"] - earlier["bytes"]) / (j - i)
        for i, earlier in enumerate(samples)
        for j, later in enumerate(samples[i + 1 :], i + 1)
    ]
    return sorted(pairs)[len(pairs) // 2]


def watch(times: int, warm: int, action: Callable[[int], None]) -> dict[str, Any]:
    """Repeat ``action``, and say what the process holds after the ``warm`` first times and at the end.

    Thirty samples are taken in between. A process that does not leak holds as many threads, files and children at the
    end as after warming up.
    """
    samples = []
    for number in range(warm + times):
        action(number)
        if number >= warm and (number - warm) % max(1, times // 30) == 0:
            samples.append(held())
    first, last = samples[0], held()
    findings = [
        f"{what}: {first[what]} after warming up, {last[what]} at the end"
        for what in ("threads", "files", "children")
        if last[what] > first[what]
    ]
    per_step = slope(samples) / max(1, times // 30)
    if per_step * times > 16 << 20:
        findings.append(f"memory grows by {per_step:.0f} bytes each time")
    return {"times": times, "bytes_per_time": round(per_step, 1), "first": first, "last": last, "findings": findings}


def write_model(work: Path) -> Path:
    """Write a compressed tiny model in bf16."""
    torch.manual_seed(0)
    model = make_tiny(dtype=torch.bfloat16)
    folder = write_checkpoint(model, fill_tiny(model, pivoted_spec()), work / "low")
    word_tokenizer().save_pretrained(folder)
    return folder


def generate(engine: Engine, number: int) -> list[int]:
    """Continue a prompt that depends on ``number``, with a chat template, greedily or by sampling."""
    draw = random.Random(number)
    prompt = " ".join(f"w{draw.randrange(3, 64)}" for _ in range(draw.randrange(1, 20)))
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, temperature=number % 2, seed=number)
    return engine.generate([prompt], params, chat=number % 3 == 0)[0].token_ids


def study(steps: int, loads: int, work: Path, plant: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Generate ``steps`` tokens, load and drop ``loads`` engines, and let two threads share one.

    ``plant`` is called at every repetition, to plant a leak.
    """
    folder = write_model(work)
    engine = load(folder)

    def step(number: int) -> None:
        plant()
        generate(engine, number)

    def another(number: int) -> None:
        plant()
        generate(load(folder, weight_dtype="int8" if number % 2 else None), 3 * number)

    generations = watch(steps // TOKENS, 30, step)
    dropped = watch(loads, 10, another)
    return {
        "generation": {
            **generations,
            "steps": steps,
            "bytes_per_step": round(generations["bytes_per_time"] / TOKENS, 3),
        },
        "engines loaded and dropped": dropped,
        "two threads, one engine": _threads(engine, max(10, loads)),
    }


def _threads(engine: Engine, times: int) -> dict[str, Any]:
    """Let two threads generate at the same time; each has to get the tokens that it gets alone."""
    expected = [generate(engine, number) for number in range(times)]
    findings: list[str] = []

    def work(first: int) -> None:
        for number in [*range(first, times), *range(first)]:
            try:
                if generate(engine, number) != expected[number]:
                    findings.append(f"prompt {number}: other tokens than alone")
            except Exception as error:
                findings.append(f"prompt {number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, times // 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"generations": 2 * times, "findings": findings[:20]}
