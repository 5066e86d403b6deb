"""The event-driven simulation: when every instruction starts and ends.

Tensor, Vector, Scalar and GpSimd execute their instructions in program order. A DMA waits for its start latency, which
overlaps with other transfers, and then for one engine per descriptor, up to all 16. Of the DMAs that are ready the
first in program order starts first, so a distant prefetch does not delay the data needed now. On NeuronCore v3 and v4
the tensor engine runs at half speed when cold and reaches full speed after ``tensor_warm_up_ns`` of work; idle time
cools it at the same rate.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from neuronmm.emulator.nki.trace import Engine, Trace
from neuronmm.emulator.timing.cost import Cost
from neuronmm.emulator.timing.program import Program, prepare
from neuronmm.kernels.hardware import NeuronCore

FOLD_SAMPLES = 6
"""Iterations of a fold that are simulated at first; doubled until the period is steady."""

STEADY = 0.005
"""Largest drift of a steady state."""


@dataclass
class Timeline:
    """The times of every step of a program, in ns from the start.

    Attributes:
        program: the program.
        start: when each step starts on its engine; a DMA's start latency is before that.
        end: when each step ends.
        cause: the step whose end let each step start; -1 for none.
        latency: of the whole kernel, with the iterations of folds that were not simulated.
        drift: relative difference in period between the iteration that represents those and the one before it, in the
            worst fold; 0 in a steady state.
    """

    program: Program
    start: list[float]
    end: list[float]
    cause: list[int]
    latency: float
    drift: float


def simulate(trace: Trace, core: NeuronCore, generations: int = 2) -> Timeline:
    """Simulate ``trace`` on ``core``; an allocation site has up to ``generations`` places (2: double buffering).

    Raises:
        CapacityError: the live buffers do not fit SBUF or PSUM.
    """
    samples = FOLD_SAMPLES
    while True:
        timeline = run(prepare(trace, core, generations, samples))
        if timeline.drift < STEADY or all(fold.times <= samples for fold in trace.folds):
            return timeline
        samples *= 2


def run(program: Program) -> Timeline:
    """Simulate a prepared program."""
    core, instructions = program.core, program.trace.instructions
    count = len(program.source)
    engine_of = [instructions[i].engine for i in program.source]
    waiting, after, heads = _graph(program, engine_of)
    start, end, cause = [0.0] * count, [0.0] * count, [-1] * count
    ready = [0.0] * count
    lanes = _Lanes(core)
    warm = core.tensor_warm_up_ns
    heat = tensor_end = 0.0
    wake = -1.0
    events = [(core.dma_start_ns if engine_of[i] is Engine.DMA else 0.0, i) for i in heads]
    heapq.heapify(events)
    pending: list[int] = []  # DMAs that are ready and wait for an engine

    def done(i: int, finish: float) -> None:
        end[i] = finish
        for j in after[i]:
            if finish >= ready[j]:
                ready[j], cause[j] = finish, i
            waiting[j] -= 1
            if not waiting[j]:
                latency = core.dma_start_ns if engine_of[j] is Engine.DMA else 0.0
                heapq.heappush(events, (ready[j] + latency, j))

    while events:
        now, i = heapq.heappop(events)
        if i < count and engine_of[i] is not Engine.DMA:
            start[i] = now
            busy = program.costs[i].busy
            if warm and engine_of[i] is Engine.TENSOR:
                heat = max(0.0, heat - (now - tensor_end))
                busy /= 0.5 + 0.5 * heat / warm
                heat = min(warm, heat + busy)
                tensor_end = now + busy
            done(i, now + busy)
            continue
        if i < count:
            heapq.heappush(pending, i)
        while pending and lanes.free <= now:
            i = heapq.heappop(pending)
            if now > ready[i] + core.dma_start_ns:
                cause[i] = lanes.last
            start[i] = now
            done(i, lanes.take(i, now, program.costs[i]))
        if pending and wake <= now:
            wake = lanes.free
            heapq.heappush(events, (wake, count))  # look again when an engine is free
    latency, drift = _extrapolate(program, end)
    return Timeline(program, start, end, cause, latency, drift)


class _Lanes:
    """The DMA engines: ``free`` is when the first of them becomes free, ``last`` the step that it runs until then."""

    def __init__(self, core: NeuronCore) -> None:
        self._until = [(0.0, -1)] * core.dma_engines
        self.free, self.last = self._until[0]

    def take(self, step: int, now: float, cost: Cost) -> float:
        """Run ``step`` on the engines that become free first; return when it ends."""
        finish = now
        for lane in range(cost.engines):  # the list is sorted by time
            finish = max(now, self._until[lane][0]) + cost.busy
            self._until[lane] = (finish, step)
        self._until.sort()
        self.free, self.last = self._until[0]
        return finish


def _graph(program: Program, engine_of: list[Engine]) -> tuple[list[int], list[list[int]], list[int]]:
    """Return, per step, how many steps it waits for and which steps wait for it; and the steps that wait for none."""
    count = len(engine_of)
    waiting = [0] * count
    after: list[list[int]] = [[] for _ in range(count)]
    last: dict[Engine, int] = {}
    heads = []
    for i, before in enumerate(program.before):
        for j in before:
            after[j].append(i)
        waiting[i] = len(before)
        engine = engine_of[i]
        if engine is not Engine.DMA:
            if engine in last:
                after[last[engine]].append(i)
                waiting[i] += 1
            last[engine] = i
        if not waiting[i]:
            heads.append(i)
    return waiting, after, heads


def segment_weights(program: Program) -> list[int]:
    """Return how many iterations each simulated segment represents.

    The middle one represents those that were not simulated. The first ones fill the pipeline, and the last ones do not
    share the DMA engines with the loads of successors.
    """
    weights = [1] * len(program.segments)
    for number, fold in enumerate(program.trace.folds):
        iterations = [s for s, segment in enumerate(program.segments) if segment.fold == number]
        if fold.times > len(iterations):
            weights[iterations[len(iterations) // 2]] += fold.times - len(iterations)
    return weights


def _extrapolate(program: Program, end: list[float]) -> tuple[float, float]:
    """Return the latency of the whole kernel and the drift of the worst fold."""
    ends: list[float] = []  # when all segments up to each one have ended
    for segment in program.segments:
        ends.append(max([*ends[-1:], *end[segment.start : segment.stop]]))
    latency = max(end, default=0.0)
    drift = 0.0
    for s, weight in enumerate(segment_weights(program)):
        if weight > 1:
            period, before = ends[s] - ends[s - 1], ends[s - 1] - ends[s - 2]
            latency += (weight - 1) * period
            drift = max(drift, abs(period - before) / period)
    return latency, drift
