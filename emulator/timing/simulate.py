"""The event-driven simulation: when does every instruction start and end?

Tensor, Vector, Scalar and GpSimd execute their instructions in program order. DMAs start in the order in which
they become ready, each on as many of the 16 engines as it has descriptors (up to all), after a start latency that
overlaps with other transfers. On NeuronCore v3 and v4 the tensor engine runs at half speed when cold and reaches
full speed after ``tensor_warm_up_ns`` of work; idle time cools it at the same rate.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from neuronmm.emulator.nki.trace import Engine, Trace
from neuronmm.emulator.timing.program import Program, prepare
from neuronmm.kernels.hardware import NeuronCore

FOLD_SAMPLES = 6
"""Iterations of a fold that are simulated at first."""

STEADY = 0.005
"""Largest drift that passes for a steady state; above it twice as many iterations are simulated."""


@dataclass
class Timeline:
    """When every step of a program ran, in ns from the start.

    ``start`` and ``end`` hold the time on the engine (a DMA's start latency lies before ``start``); ``cause[i]`` is
    the step whose end let step ``i`` start, -1 for none. ``latency`` covers the whole kernel, iterations of folds
    that were not simulated included; ``drift`` is how much the iteration that stands for those differs from the one
    before it, in the worst fold: 0 in a steady state.
    """

    program: Program
    start: list[float]
    end: list[float]
    cause: list[int]
    latency: float
    drift: float


def simulate(trace: Trace, core: NeuronCore, generations: int = 2) -> Timeline:
    """Run ``trace`` on ``core``; every allocation site gets up to ``generations`` places (2: double buffering).

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
    """Run a prepared program."""
    core, instructions = program.core, program.trace.instructions
    count = len(program.source)
    engine_of = [instructions[i].engine for i in program.source]
    waiting, after, heads = _graph(program, engine_of)
    start, end, cause = [0.0] * count, [0.0] * count, [-1] * count
    ready, ready_cause = [0.0] * count, [-1] * count
    dma_free, dma_last = [0.0] * core.dma_engines, [-1] * core.dma_engines
    warm = core.tensor_warm_up_ns
    heat = tensor_end = 0.0
    events = [(core.dma_start_ns if engine_of[i] is Engine.DMA else 0.0, i) for i in heads]
    heapq.heapify(events)
    while events:
        now, i = heapq.heappop(events)
        busy = program.costs[i].busy
        cause[i] = ready_cause[i]
        begin = now
        if engine_of[i] is Engine.DMA:
            lanes = range(core.dma_engines)
            if program.costs[i].engines < core.dma_engines:
                lanes = sorted(lanes, key=dma_free.__getitem__)[: program.costs[i].engines]  # type: ignore[assignment]
            begin = max(now, min(dma_free[lane] for lane in lanes))
            finish = now
            for lane in lanes:
                if dma_free[lane] > now:
                    cause[i] = dma_last[lane]
                dma_free[lane] = max(now, dma_free[lane]) + busy
                dma_last[lane] = i
                finish = max(finish, dma_free[lane])
        elif engine_of[i] is Engine.TENSOR and warm:
            heat = max(0.0, heat - (now - tensor_end))
            finish = now + busy / (0.5 + 0.5 * heat / warm)
            heat = min(warm, heat + finish - now)
            tensor_end = finish
        else:
            finish = now + busy
        start[i], end[i] = begin, finish
        for j in after[i]:
            if finish >= ready[j]:
                ready[j], ready_cause[j] = finish, i
            waiting[j] -= 1
            if not waiting[j]:
                latency = core.dma_start_ns if engine_of[j] is Engine.DMA else 0.0
                heapq.heappush(events, (ready[j] + latency, j))
    latency, drift = _extrapolate(program, end)
    return Timeline(program, start, end, cause, latency, drift)


def _graph(program: Program, engine_of: list[Engine]) -> tuple[list[int], list[list[int]], list[int]]:
    """For every step how many it waits for, and which wait for it; and the steps that wait for none."""
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
    """How many iterations each simulated segment stands for.

    The middle one stands for all that were not simulated: the first ones fill the pipeline, and the last ones have
    no successors whose loads they share the DMA engines with.
    """
    weights = [1] * len(program.segments)
    for number, fold in enumerate(program.trace.folds):
        turns = [s for s, segment in enumerate(program.segments) if segment.fold == number]
        if fold.times > len(turns):
            weights[turns[len(turns) // 2]] += fold.times - len(turns)
    return weights


def _extrapolate(program: Program, end: list[float]) -> tuple[float, float]:
    """Latency of the whole kernel, and the drift of the worst fold."""
    fronts: list[float] = []
    for segment in program.segments:
        fronts.append(max([*fronts[-1:], *end[segment.start : segment.stop]]))
    latency = max(end, default=0.0)
    drift = 0.0
    for s, weight in enumerate(segment_weights(program)):
        if weight > 1:
            period, before = fronts[s] - fronts[s - 1], fronts[s - 1] - fronts[s - 2]
            latency += (weight - 1) * period
            drift = max(drift, abs(period - before) / period)
    return latency, drift
