"""Chooses the block sizes of the low-rank kernels: the least modelled time within the available memory.

The model of :mod:`.strip` prices every combination of strip length, input block, activation block (of the MLP) and
panels per tile. A combination that exceeds SBUF or PSUM is refused, because it would spill to HBM. Among those within
1 % of the fastest, the one with the least traffic wins; ties go to contractions that stay in PSUM. A choice is cached
(:mod:`neuronmm.kernels.cache`) under everything that determines it, including this code.

The emulator's event-driven simulator checks the model on the real kernels (tests/kernels/nki/test_tiling.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from neuronmm.kernels import cache
from neuronmm.kernels.hardware import TRN1, NeuronCore
from neuronmm.kernels.nki.forms import linear_packings, mlp_packings
from neuronmm.kernels.nki.objects import PARTITIONS
from neuronmm.kernels.nki.problem import Blocks, MlpProblem, Problem, factor_bytes, scaled
from neuronmm.kernels.nki.strip import Strip
from neuronmm.kernels.ops import KernelError

LARGEST_STRIP = 4096
DEPTHS = (0, 4, 8, 16, 32)
INTERMEDIATES = (0, 2, 4, 8, 16)
PANELS = (1, 2, 4, 8)
TIE = 0.01
LONG_TOKEN = 24 << 10
"""Bytes of a token's features that always fit with tokens first and ranks up to 4096. All of them are on one partition,
beside a panel of weights of the same length. Features first has no such bound: its contraction is done in blocks."""
SOURCES = ("../hardware.py", "forms.py", "layout.py", "objects.py", "problem.py", "strip.py", "tiling.py")
"""The code that determines a choice, together with the problem and the core."""


@dataclass(frozen=True)
class Tiling:
    """A choice of block sizes and its modelled cost.

    ``seconds``: predicted time. ``tensor``, ``dma``, ``vector``: busy seconds. ``traffic``: HBM bytes. ``sbuf``: bytes
    per partition of each stage, double buffers included. ``psum_banks``: of 8. ``mfu``: share of the tensor engine's
    peak, 0 to 1.
    """

    problem: Problem | MlpProblem
    device: str
    blocks: Blocks
    seconds: float
    tensor: float
    dma: float
    vector: float
    traffic: int
    sbuf: tuple[int, ...]
    psum_banks: int
    mfu: float

    @property
    def bound(self) -> str:
        """The engine with the longest busy time."""
        return max(("tensor", "dma", "vector"), key=lambda engine: getattr(self, engine))


@lru_cache(maxsize=4096)
def solve(problem: Problem | MlpProblem, core: NeuronCore = TRN1) -> Tiling:
    """Return the best block sizes, from the cache if an earlier process stored them.

    Raises:
        KernelError: no block sizes fit the memory.
    """
    inputs = [type(problem).__name__, asdict(problem), asdict(core), _code()]
    name = f"tiling/{cache.digest(inputs)[:24]}.json"
    cached = cache.read(name)
    if cached is not None:
        return evaluate(problem, Blocks(**cached["blocks"]), core)
    tiling = search(problem, core)
    cache.write(name, {"problem": str(problem), "device": core.device, "blocks": asdict(tiling.blocks)})
    return tiling


def search(problem: Problem | MlpProblem, core: NeuronCore) -> Tiling:
    """:func:`solve` without the cache."""
    fitting = [tiling for tiling, refusal in consider(problem, core) if refusal is None]
    if not fitting:
        hint = f"; with tokens first, more than {LONG_TOKEN >> 10} KiB per token may not fit: lay out features first"
        raise KernelError(
            f"tiling: {problem} does not fit {core.device}'s SBUF with any block sizes{hint * problem.tokens_first}"
        )
    fastest = min(tiling.seconds for tiling in fitting)
    near = [tiling for tiling in fitting if tiling.seconds <= fastest * (1 + TIE)]
    return min(near, key=_preference)


@lru_cache(maxsize=1)
def _code() -> str:
    """Return a digest of the solver and the hardware figures that it uses."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in SOURCES)).hexdigest()


def _preference(tiling: Tiling) -> tuple[int, bool, bool, float, int]:
    """Order choices by traffic, contractions that stay in PSUM, time, and weights in flight.

    More weights in flight hide what the model leaves out, such as the tensor engine's warm-up.
    """
    blocks = tiling.blocks
    return tiling.traffic, blocks.depth > 0, blocks.intermediate > 0, tiling.seconds, -blocks.panels


def evaluate(problem: Problem | MlpProblem, blocks: Blocks, core: NeuronCore = TRN1) -> Tiling:
    """Return the modelled cost of these block sizes.

    Raises:
        KernelError: they do not fit SBUF or PSUM, so the kernel would spill.
    """
    tiling = _model(problem, blocks, core)
    refusal = _refusal(tiling, core)
    if refusal is not None:
        raise KernelError(f"tiling: {refusal}")
    return tiling


def consider(problem: Problem | MlpProblem, core: NeuronCore) -> list[tuple[Tiling, str | None]]:
    """Return every choice that the solver considers, with the reason why it is refused (None: it fits)."""
    moving = min(core.moving_columns, problem.tokens)
    strips = sorted({min(problem.tokens, n) for n in range(128, LARGEST_STRIP + 1, 128)})
    size = factor_bytes(problem)
    if isinstance(problem, Problem):
        p = problem
        factors = list(linear_packings(p.inputs, p.rank, p.outputs, size, p.form, p.pivots))
        intermediates: tuple[int, ...] = (Blocks.intermediate,)
    else:
        factors = list(mlp_packings(problem.hidden, problem.ranks, problem.shared, size)[:2])
        intermediates = tuple(n for n in INTERMEDIATES if n < factors[1].columns.count)
    depths = [n for n in DEPTHS if n == 0 or (n < factors[0].rows.count and not problem.tokens_first)]
    most = max(-(-f.columns.count // f.group) for f in factors)
    panels = [n for n in PANELS if n == 1 or n < 2 * most]
    choices = [Blocks(t, moving, deep, n, p) for t in strips for deep in depths for n in intermediates for p in panels]
    tilings = [_model(problem, blocks, core) for blocks in choices]
    return [(tiling, _refusal(tiling, core)) for tiling in tilings]


def explain(problem: Problem | MlpProblem, core: NeuronCore = TRN1) -> list[str]:
    """Return a table of the choice and its alternatives: the best of each strip length, or why none fits."""
    chosen = solve(problem, core)
    blocks, mlp = chosen.blocks, isinstance(problem, MlpProblem)
    dtypes = problem.dtype + f", factors in {problem.factors}" * scaled(problem)
    stages = ", ".join(f"{size / 1024:.1f}" for size in chosen.sbuf)
    lines = [
        f"{problem}, {dtypes}, one {core.device} core (NeuronCore {core.name})",
        f"strip of {blocks.tokens} tokens, {blocks.moving} per matmul, input "
        + (f"in blocks of {blocks.depth * PARTITIONS}" if blocks.depth else "of a strip in SBUF at once")
        + (f", activation {_blocks_of(blocks.intermediate)}" if mlp else "")
        + f", weights by {blocks.panels} panel{'s' * (blocks.panels > 1)}",
        f"modelled: {chosen.seconds * 1e3:.3f} ms, {chosen.mfu:.1%} of the tensor engine's peak, "
        f"{chosen.traffic / 2**20:.1f} MiB of HBM traffic; longest busy: {chosen.bound}",
        f"SBUF {max(chosen.sbuf) / 1024:.1f} of {core.sbuf_usable_bytes // 1024} KiB per partition "
        f"(stage by stage {stages}), PSUM {chosen.psum_banks} of {core.psum_banks} banks",
        "",
        f"strip  depth  {'act  ' if mlp else ''}panels  SBUF KiB   modelled ms    MFU  traffic MiB",
    ]
    by_strip: dict[int, list[tuple[Tiling, str | None]]] = {}
    for tiling, refusal in consider(problem, core):
        by_strip.setdefault(tiling.blocks.tokens, []).append((tiling, refusal))
    for strip, entries in by_strip.items():
        if strip & (strip - 1) and strip != blocks.tokens and strip != problem.tokens:
            continue
        fitting = [tiling for tiling, refusal in entries if refusal is None]
        if fitting:
            best = min(fitting, key=lambda t: (t != chosen, t.seconds))
            lines.append(
                f"{_sizes(best, mlp)}  {max(best.sbuf) / 1024:8.1f}  {best.seconds * 1e3:12.3f}"
                f"  {best.mfu:5.1%}  {best.traffic / 2**20:11.1f}{'  <- chosen' if best == chosen else ''}"
            )
        else:
            least, refusal = min(entries, key=lambda entry: max(entry[0].sbuf))
            lines.append(f"{_sizes(least, mlp)}  refused: {refusal}")
    return lines


def _blocks_of(chunks: int) -> str:
    return f"in blocks of {chunks * PARTITIONS}" if chunks else "whole"


def _sizes(tiling: Tiling, mlp: bool) -> str:
    blocks = tiling.blocks
    act = f"{blocks.intermediate or 'all':>3}  " if mlp else ""
    return f"{blocks.tokens:5}  {blocks.depth or 'all':>5}  {act}{blocks.panels:6}"


def _refusal(tiling: Tiling, core: NeuronCore) -> str | None:
    if max(tiling.sbuf) > core.sbuf_usable_bytes:
        return (
            f"strips of {tiling.blocks.tokens} tokens need {max(tiling.sbuf) / 1024:.1f} KiB per partition of SBUF, "
            f"{core.device} has {core.sbuf_usable_bytes // 1024} for a kernel: it would spill"
        )
    if tiling.psum_banks > core.psum_banks:
        return f"{tiling.psum_banks} PSUM banks are needed, {core.device} has {core.psum_banks}"
    return None


def _model(problem: Problem | MlpProblem, blocks: Blocks, core: NeuronCore) -> Tiling:
    """Return time, traffic and memory of the kernel with these block sizes."""
    strips, tail = divmod(problem.tokens, blocks.tokens)
    first, last = (Strip(problem, blocks, core, n) for n in (min(blocks.tokens, problem.tokens), tail or blocks.tokens))
    counted = [(stage, strips) for stage in first.stages * (strips > 0)] + [
        (stage, 1) for stage in last.stages * (tail > 0)
    ]
    ns = sum(count * stage.ns for stage, count in counted) + first.table_ns + first.fill + last.drain
    return Tiling(
        problem=problem,
        device=core.device,
        blocks=blocks,
        seconds=ns / 1e9,
        tensor=sum(count * stage.tensor for stage, count in counted) / 1e9,
        dma=(sum(count * stage.dma for stage, count in counted) + first.table_ns) / 1e9,
        vector=sum(count * stage.vector for stage, count in counted) / 1e9,
        traffic=sum(count * stage.traffic for stage, count in counted) + first.table_bytes,
        # A short last strip stores all outputs of a token at once, and may need more memory than the others.
        sbuf=tuple(max(a.sbuf, b.sbuf) for a, b in zip(first.stages, last.stages, strict=True)),
        psum_banks=2 * -(-first.moving * 4 // core.psum_bank_bytes),
        mfu=2 * problem.multiply_adds / (ns / 1e9 * core.peak_flops(problem.dtype)),
    )
