"""The benchmark of drafts: plain decoding and the same decoding with drafts, alternating, on three kinds of text.

How many drafted tokens a model accepts depends on the text, so the prompts are words and not random tokens.
"""

from __future__ import annotations

import copy
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, cast

import torch

from neuronmm.engine.cpu_decoder import CpuDecoder
from neuronmm.engine.engine import Engine, load
from neuronmm.engine.loop import Generation
from neuronmm.engine.sampling import SamplingParams
from neuronmm.kernels.cpu.library import MAX_BATCH
from neuronmm.measure.config import BenchmarkConfig
from neuronmm.measure.machine import Machine, describe_machine
from neuronmm.measure.statistics import Spread, summarise
from neuronmm.models.errors import UserError
from neuronmm.models.progress import Progress, no_progress

_CODE = """Add type hints to this code and repeat all of it:

def area(shape, width, height):
    if shape == "rectangle":
        return width * height
    if shape == "triangle":
        return width * height / 2
    raise ValueError(f"unknown shape: {shape}")
"""
PROMPTS = {
    "chat": ("Explain to a child why the sky is blue.", True),
    "code": (_CODE, True),
    "free text": ("The old lighthouse stood at the end of the pier, and every evening", False),
}
"""Name -> text, and whether it is a user's message."""

_STEPS = 7  # times that each length of a step is measured


@dataclass
class DraftFigures:
    """One prompt. ``speedup`` is drafted over plain tokens/s, by round; the counts are sums over the rounds."""

    plain_tokens_per_second: Spread
    drafted_tokens_per_second: Spread
    speedup: Spread
    steps: int
    drafted: int
    accepted: int
    acceptance: float | None
    tokens_per_step: float


@dataclass
class StepFigures:
    """A step of a token and its draft: seconds with drafting, and the accepted tokens from which on it pays."""

    drafted: int
    seconds: float
    break_even: float


@dataclass
class DraftBenchmarkResult:
    """All that ``neuronmm benchmark --draft`` measures."""

    model: str
    draft: str
    backend: str
    kernels: str
    machine: Machine
    dtype: str
    threads: int
    runs: int
    new_tokens: int
    steps: list[StepFigures]
    prompts: dict[str, DraftFigures]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {"kind": "measured", "what": "benchmark", **asdict(self)}


def benchmark_drafts(config: BenchmarkConfig, progress: Progress = no_progress) -> DraftBenchmarkResult:
    """Measure greedy decoding with and without drafts on every prompt of :data:`PROMPTS`.

    Raises:
        UserError: the draft does not fit the model, or prompts and new tokens exceed its context.
        RuntimeError: a text with drafts differs from the plain one.
    """
    assert config.draft is not None
    options = {"backend": config.backend, "dtype": config.dtype, **config.options}
    drafted = load(config.model, draft=config.draft, progress=progress, **options)
    plain = copy.copy(drafted)
    plain.drafts = None
    chat = bool(drafted.tokenizer.chat_template)
    longest = max(len(drafted.encode(text, chat and message)) for text, message in PROMPTS.values())
    if longest + config.new_tokens > drafted.context:
        raise UserError(
            f"{longest} prompt tokens and {config.new_tokens} new tokens exceed the model's context of "
            f"{drafted.context}; lower --new-tokens"
        )
    figures = {}
    for name, (text, message) in PROMPTS.items():
        rounds = []
        progress(name, 0.0)
        for index in range(config.runs + 1):  # the first one warms up
            order = (plain, drafted) if index % 2 else (drafted, plain)
            results = {engine is drafted: _generate(engine, text, chat and message, config) for engine in order}
            rounds.append((results[False], results[True]))
            progress(name, 1 / (config.runs + 1))
        figures[name] = _summarise(name, rounds[1:])
    return DraftBenchmarkResult(
        model=str(config.model),
        draft=str(config.draft),
        backend=drafted.runner.backend,
        kernels=drafted.runner.path,
        machine=describe_machine(drafted.runner.device),
        dtype=str(drafted.runner.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        runs=config.runs,
        new_tokens=config.new_tokens,
        steps=_steps(drafted, longest),
        prompts=figures,
    )


def _generate(engine: Engine, text: str, chat: bool, config: BenchmarkConfig) -> Generation:
    params = SamplingParams(max_new_tokens=config.new_tokens, ignore_eos=True)
    return engine.generate([text], params, chat=chat)[0]


def _summarise(name: str, rounds: list[tuple[Generation, Generation]]) -> DraftFigures:
    if any(plain.token_ids != drafted.token_ids for plain, drafted in rounds):
        raise RuntimeError(f"prompt {name!r}: the text with drafts differs from the plain one; please report this")
    speeds = [(plain.tokens_per_second or 0.0, drafted.tokens_per_second or 0.0) for plain, drafted in rounds]
    counts = [drafted.draft for _, drafted in rounds if drafted.draft]
    steps, tokens, accepted = (sum(getattr(c, key) for c in counts) for key in ("steps", "drafted", "accepted"))
    later = sum(len(drafted.token_ids) - 1 for _, drafted in rounds)
    return DraftFigures(
        plain_tokens_per_second=summarise([plain for plain, _ in speeds]),
        drafted_tokens_per_second=summarise([drafted for _, drafted in speeds]),
        speedup=summarise([drafted / plain for plain, drafted in speeds]),
        steps=steps,
        drafted=tokens,
        accepted=accepted,
        acceptance=accepted / tokens if tokens else None,
        tokens_per_step=later / steps,
    )


def _steps(engine: Engine, length: int) -> list[StepFigures]:
    """Measure steps of 1 to 8 tokens after a prompt of ``length`` tokens, in turn."""
    assert engine.drafts is not None
    decoder = cast(CpuDecoder, engine.runner.decoder(1, length + MAX_BATCH))
    drafter = engine.drafts.drafters([decoder])(0)
    prompt = torch.zeros(1, length, dtype=torch.long)
    decoder.prefill(prompt, torch.ones_like(prompt))
    times: dict[int, list[float]] = {count: [] for count in range(1, MAX_BATCH + 1)}
    for _ in range(_STEPS):
        for count, measured in times.items():
            decoder.rewind(length)
            start = time.perf_counter()
            decoder.verify(prompt.new_zeros(count))
            measured.append(time.perf_counter() - start)
    single = median(times[1])
    totals = [median(times[n + 1]) + drafter.cost(n) for n in range(1, MAX_BATCH)]
    return [StepFigures(n, total, total / single - 1) for n, total in enumerate(totals, 1)]
