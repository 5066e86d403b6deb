"""Write pivoted.md: predicted times of the MLP kernel with pivots and with two factors, at equal bytes.

The NKI emulator traces each kernel on shapes, the timing model simulates it. Nothing is measured on a device.

  python scripts/pivoted_timing.py [--output docs/results]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from neuronmm.emulator.nki import nki_modules
from neuronmm.kernels.hardware import CORES, NeuronCore
from neuronmm.kernels.nki.forms import mlp_packings
from neuronmm.kernels.nki.problem import MlpProblem, Pivots
from neuronmm.models.neuronx.intermediate import split

with nki_modules():
    import paper_cases as cases

    from neuronmm.kernels.nki.entry_neuronxcc import low_rank_swiglu_mlp, low_rank_swiglu_mlp_shared
    from neuronmm.kernels.nki.tiling import solve

TILE = 128
OVERLAP = 0.25
"""Share of down's pivots that are pivots of gate too: 0.17 to 0.41 were measured on SmolLM2-135M."""
PREFILL = 2048
DECODES = (1, 64)
DEGREES = (1, 2, 4, 8)
"""Numbers of cores that share an MLP."""
WIDTH = 40
"""Characters of a bar of the picture up to the time of two factors."""
TOKENS = (1, 512)
"""Tokens per call in the tables of several cores."""
TEXT = f"""\
# Pivoted factors on Trainium, predicted

On one core, pivoted factors in full tiles are as fast as two factors of the same bytes, or a little faster. On two
cores they take up to 6 % more time and on eight up to 17 %, because every core reads all of `P` and `Q`, whose rank is
higher. At equal rank they are as fast as two factors or faster for these five models; for SmolLM2-135M on two cores
they are slower ([lab book](../log.md)).

One kernel computes the whole MLP in bfloat16. `two` has two factors per linear, with the ranks of
[timing.md](timing.md) at ratio 0.2. `pivoted` has at most its bytes in the checkpoint: gate and up in the row form,
down in the column form. Up's pivots are gate's, and {OVERLAP:.0%} of down's are gate's too. `expanded` has the rank of
`pivoted` in two factors: what the kernel runs if it does not use the pivots. Every time is predicted; no kernel ran on
a device. A ratio is a time over that of `two`, so below 1 is faster.

The kernel of one core on trn1, without the all-reduce, which is the same in every form: the least and the largest ratio
of five models, each with two A and with one A for gate and up.
"""
PICTURE = """\
The largest ratio of each row at 512 tokens; `|` marks the time of two factors:
"""
APPENDIX = f"""\
## How to repeat it

    python scripts/pivoted_timing.py

Nothing in it is random.

# Appendix

- **aligned**: the largest ranks that are multiples of {TILE}; all ranges begin and end at multiples of {TILE}.
- **exact**: the largest ranks. The ranges begin and end anywhere, so more chunks have fewer than {TILE} partitions.
- **one A**: gate and up share one A, and all its pivots are gate's. Ranks and ranges are aligned.
"""


class Pair(NamedTuple):
    """The two problems that a row compares; ``tokens`` is 1."""

    name: str
    kind: str
    two: MlpProblem
    pivoted: MlpProblem

    def on(self, cores: int) -> Pair:
        """Return the problems of one of several cores."""
        return self._replace(two=part(self.two, cores), pivoted=part(self.pivoted, cores))

    @property
    def expanded(self) -> MlpProblem:
        """The pivoted problem with two factors per linear."""
        return replace(self.pivoted, gate_pivots=None, up_pivots=None, down_pivots=0)

    @property
    def bytes(self) -> float:
        """Bytes of the pivoted weights over those of two factors."""
        return self.pivoted.multiply_adds / self.two.multiply_adds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "pivoted.md").write_text("\n".join(document()) + "\n", encoding="utf-8")


def document() -> Iterator[str]:
    pairs = [pair for mlp in cases.MLPS for pair in pairs_of(mlp)]
    full = [pair for pair in pairs if pair.kind != "exact"]
    yield TEXT
    yield from summary(full)
    yield APPENDIX
    for cores in DEGREES[1:]:
        title = f"One of {cores} cores, trn1"
        yield from table(title, [pair.on(cores) for pair in full], TOKENS, CORES["trn1"], 1e6, "µs")
    for device, core in CORES.items():
        yield from table(f"One core, decode on {device}", pairs, DECODES, core, 1e6, "µs")
    yield from table("One core, prefill on trn1", pairs, (PREFILL,), CORES["trn1"], 1e3, "ms")


def summary(pairs: list[Pair]) -> Iterator[str]:
    """Yield the ranges of the ratios by number of cores, and the picture of the largest ones."""
    bars = []
    heads = [f"{text(tokens)}, {form}" for tokens in TOKENS for form in ("pivoted", "expanded")]
    yield f"| cores | bytes per core, pivoted | {' | '.join(heads)} |"
    yield "|---:|---:|" + "---:|" * len(heads)
    for cores in DEGREES:
        parts = [pair.on(cores) for pair in pairs]
        columns = [[pair.bytes for pair in parts]]
        for tokens in TOKENS:
            columns += zip(*(ratios(pair, tokens, CORES["trn1"]) for pair in parts), strict=True)
        yield f"| {cores} | {' | '.join(f'{min(c):.2f} to {max(c):.2f}' for c in columns)} |"
        for form, values in zip(("pivoted", "expanded"), columns[-2:], strict=True):
            bars.append(bar(f"{cores} core{'s' * (cores > 1)}, {form}", round(max(values), 2)))
    yield from ("", PICTURE, "```", *bars, "```", "")


def bar(label: str, ratio: float) -> str:
    """Return one line of the picture."""
    marks = "#" * round(WIDTH * ratio)
    return f"{label:<20} {marks[:WIDTH]:<{WIDTH}}|{marks[WIDTH:]:<10} {ratio:.2f}"


def ratios(pair: Pair, tokens: int, core: NeuronCore) -> tuple[float, float]:
    """Return the time of pivoted and of expanded factors over that of two."""
    problems = (pair.two, pair.pivoted, pair.expanded)
    two, pivoted, expanded = (latency(replace(problem, tokens=tokens), core) for problem in problems)
    print(f"{text(tokens)}, {pair.name} {pair.kind}: {pivoted / two:.3f} {expanded / two:.3f}", flush=True)
    return pivoted / two, expanded / two


def table(
    title: str, pairs: list[Pair], counts: tuple[int, ...], core: NeuronCore, scale: float, unit: str
) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    columns = [f"{text(n)}: two, {unit} | pivoted, {unit} | time ratio" for n in counts]
    yield f"| model | ranges | rank, two | rank, pivoted | bytes ratio | {' | '.join(columns)} |"
    yield "|---|---|---:|---:|---:|" + "---:|---:|---:|" * len(counts)
    for pair in pairs:
        cells = []
        for tokens in counts:
            two, pivoted = (latency(replace(problem, tokens=tokens), core) for problem in (pair.two, pair.pivoted))
            cells.append(f"{two * scale:.2f} | {pivoted * scale:.2f} | {pivoted / two:.3f}")
        ranks = f"{pair.two.gate} | {pair.pivoted.gate}"
        print(f"{title}: {pair.name} {pair.kind} {ranks} {pair.bytes:.3f} {' | '.join(cells)}", flush=True)
        yield f"| {pair.name} | {pair.kind} | {ranks} | {pair.bytes:.3f} | {' | '.join(cells)} |"
    yield ""


def text(tokens: int) -> str:
    return f"{tokens} token{'s' * (tokens > 1)}"


def pairs_of(mlp: cases.Mlp) -> Iterator[Pair]:
    """Yield the rows of one model."""
    hidden, middle = mlp.hidden, mlp.intermediate
    two = MlpProblem(1, hidden, middle, mlp.rank, mlp.rank, mlp.rank)
    equal = pivoted_rank(mlp.rank, hidden + middle)
    yield Pair(mlp.name, "aligned", two, pivoted(two, equal // TILE * TILE, equal // TILE * TILE, TILE))
    yield Pair(mlp.name, "exact", two, pivoted(two, equal, equal, 1))
    rank = int(mlp.kept * 2 * hidden * middle / (hidden + 2 * middle)) // TILE * TILE
    one = replace(two, gate=rank, up=rank, shared=True)
    gate, down = (rank // TILE * TILE for rank in (pivoted_rank(rank, hidden + 2 * middle), equal))
    yield Pair(mlp.name, "one A", one, pivoted(one, gate, down, TILE))


def pivoted_rank(rank: int, sizes: int) -> int:
    """Return the largest rank r with r (sizes - r) <= rank * sizes, where ``sizes`` is in + out."""
    return int((sizes - math.sqrt(sizes * sizes - 4 * rank * sizes)) / 2)


def pivoted(two: MlpProblem, gate: int, down: int, align: int) -> MlpProblem:
    """Return the MLP with these ranks and ranges of pivots that overlap in a multiple of ``align``."""
    overlap = round(OVERLAP * down / align) * align
    rows = Pivots(two.intermediate - down - gate + overlap, gate)
    up = None if two.shared else rows
    return replace(two, gate=gate, up=gate, down=down, gate_pivots=rows, up_pivots=up, down_pivots=down)


def part(problem: MlpProblem, cores: int) -> MlpProblem:
    """Return one core's part of an MLP."""
    ranks = split(problem.ranks, cores).per_core
    pivots = {"gate_pivots": ranks.gate_pivots, "up_pivots": ranks.up_pivots, "down_pivots": ranks.down_pivots}
    return replace(problem, intermediate=ranks.intermediate, **pivots)


@cache
def latency(problem: MlpProblem, core: NeuronCore) -> float:
    """Return the predicted seconds of the kernel, with the block sizes of the tiling solver."""
    entry = low_rank_swiglu_mlp_shared if problem.shared else low_rank_swiglu_mlp
    kernel = entry(problem.ranks, solve(problem, core).blocks)
    packings = mlp_packings(problem.hidden, problem.ranks, problem.shared, 2)
    weights = [(packing.elements,) for i, packing in enumerate(packings) if i != 2 or not problem.shared]
    x = problem.hidden, problem.tokens
    return cases.figures(cases.shapes(kernel, x, *weights, out=x, core=core), core)["latency"]


if __name__ == "__main__":
    main()
