"""Speed of the CPU core's MLP with plain and pivoted factors: decode steps and a prefill, in interleaved rounds.

Each model has the MLPs of a real one and almost no attention. Gate and up share one A. The variants keep 80 % of the
parameters, except for "pivoted, equal rank", which has the ranks of "two". The factors are random: only the speed means
something. A ratio is the median of the rounds' ratios to "two".

examples:
  python scripts/bench_forms.py
  python scripts/bench_forms.py --models llama-1b --batch 4 --rounds 15
  python scripts/bench_forms.py --threads 1 --clock cpu
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor

from neuronmm.kernels import Form, LowRank
from neuronmm.kernels.cpu import arena, isa
from neuronmm.kernels.cpu.step import DecodeStep, LayerWeights, LinearWeights, ModelWeights
from neuronmm.measure.machine import describe_machine

VOCABULARY, HEAD_DIM = 64, 2


class Model(NamedTuple):
    """Widths, the number of layers, and the ranks [gate and up, down] of both forms at equal bytes."""

    hidden: int
    intermediate: int
    layers: int
    two: tuple[int, int]
    pivoted: tuple[int, int]


MODELS = {
    "smollm2": Model(576, 1536, 30, (388, 335), (441, 417)),
    "smollm2-aligned": Model(576, 1536, 30, (384, 352), (448, 416)),
    "llama-1b": Model(2048, 8192, 4, (1456, 1310), (1594, 1543)),
    "llama-1b-aligned": Model(2048, 8192, 4, (1408, 1280), (1536, 1536)),
}
"""The largest ranks that keep 80 % of the parameters; aligned: multiples of 32 and 128 near them, as in checkpoints."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
VARIANTS = ("two", "pivoted, equal rank", "pivoted, equal bytes", "pivoted, equal bytes, index")


def mlp(model: Model, variant: str) -> tuple[LowRank, LowRank, LowRank]:
    """Gate, up and down of one layer."""
    hidden, wide = model.hidden, model.intermediate
    shared, rank = model.pivoted if "bytes" in variant else model.two
    a = matrix(shared, hidden)
    up = LowRank(a, matrix(wide, shared))
    if variant == "two":
        return LowRank(a, matrix(wide, shared)), up, LowRank(matrix(rank, wide), matrix(hidden, rank))
    pivots: int | Tensor = (wide - shared) // 2
    if variant.endswith("index"):
        pivots = torch.randperm(wide)[:shared].sort().values.int()
    gate = LowRank(a, matrix(wide - shared, shared), None, Form.ROWS, pivots)
    return gate, up, LowRank(matrix(rank, wide - rank), matrix(hidden, rank), None, Form.COLUMNS)


def matrix(rows: int, columns: int) -> Tensor:
    """A random bf16 matrix that keeps the scale of its input."""
    return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(std=columns**-0.5)


class Runner:
    """One variant of a model in the core."""

    def __init__(self, model: Model, variant: str, batch: int, prompt: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        hidden, ones = model.hidden, torch.ones(model.hidden)
        layers = [
            LayerWeights(
                ones,
                ones,
                *(LinearWeights(matrix(HEAD_DIM, hidden)) for _ in "qkv"),
                LinearWeights(matrix(hidden, HEAD_DIM)),
                *(LinearWeights(*part) for part in mlp(model, variant)),
            )
            for _ in range(model.layers)
        ]
        factors = {
            id(t): t for layer in layers for part in (layer.gate, layer.up, layer.down) for t in (part.A, part.B)
        }
        self.nbytes = sum(tensor.nbytes for tensor in arena.gather(factors.values()))
        table, embedding = torch.ones(prompt + 1, HEAD_DIM), matrix(VOCABULARY, hidden)
        weights = ModelWeights(embedding, layers, ones, LinearWeights(embedding), table, table, 1, 1e-5, 1.0)
        keys, values = ([torch.zeros(batch, 1, prompt + 1, HEAD_DIM).bfloat16() for _ in layers] for _ in range(2))
        self._step = DecodeStep(weights, keys, values)
        self._starts = torch.zeros(batch, dtype=torch.int32)
        self._token, self._prompt = torch.ones(batch, 1, dtype=torch.long), torch.ones(batch, prompt, dtype=torch.long)

    def decode(self, steps: int) -> float:
        """Seconds of a decode step, the median of ``steps``."""
        return statistics.median(self._seconds(self._token) for _ in range(steps))

    def prefill(self) -> float:
        """Seconds of a prefill."""
        return self._seconds(self._prompt)

    def _seconds(self, tokens: Tensor) -> float:
        begin = self._clock()
        self._step(tokens, 0, self._starts)
        return self._clock() - begin


def measure(model: Model, args: argparse.Namespace) -> tuple[dict[str, int], dict[str, dict[str, list[float]]]]:
    """Bytes of the factors by variant; milliseconds of every round by phase and variant."""
    runners = {variant: Runner(model, variant, args.batch, args.prompt, CLOCKS[args.clock]) for variant in VARIANTS}
    times: dict[str, dict[str, list[float]]] = {phase: {v: [] for v in VARIANTS} for phase in ("decode", "prefill")}
    for turn in range(args.rounds + 1):
        for i in range(len(VARIANTS)):
            variant = VARIANTS[(turn + i) % len(VARIANTS)]
            seconds = {"decode": runners[variant].decode(args.steps), "prefill": runners[variant].prefill()}
            for phase in times if turn else ():  # the first round is the warm-up
                times[phase][variant].append(1e3 * seconds[phase])
    return {variant: runner.nbytes for variant, runner in runners.items()}, times


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The quartiles, the median in the middle."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="decode steps of a variant per round")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: CPU time of the process, for one thread on a machine that other processes load",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    result = {"machine": asdict(describe_machine(torch.device("cpu"))), "isa": isa(), **vars(args), "ms": {}}
    print("| model | phase | variant | MiB | least ms | median ms | quartiles | ratio to two | quartiles |")
    print("|---|---|---|---:|---:|---:|---|---:|---|")
    for name in args.models:
        sizes, times = measure(MODELS[name], args)
        result["ms"][name] = times
        for phase, by_variant in times.items():
            for variant, values in by_variant.items():
                low, middle, high = quartiles(values)
                pairs = zip(values, by_variant["two"], strict=True)
                ratio_low, ratio, ratio_high = quartiles([value / two for value, two in pairs])
                print(
                    f"| {name} | {phase} | {variant} | {sizes[variant] / 2**20:.1f} | {min(values):.2f} "
                    f"| {middle:.2f} | {low:.2f}-{high:.2f} | {ratio:.3f} | {ratio_low:.3f}-{ratio_high:.3f} |"
                )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
