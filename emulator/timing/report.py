"""What a simulated run amounts to: latency, traffic, busy shares, memory peaks and the critical path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from neuronmm.emulator.nki.trace import Engine, Space
from neuronmm.emulator.timing.simulate import Timeline, segment_weights


@dataclass(frozen=True)
class Report:
    """One kernel on one NeuronCore, predicted.

    ``latency`` is in seconds, sizes in bytes, the other figures are shares. ``mfu`` is the matrix products' FLOPs
    over what the tensor engine could do in the latency; ``busy`` says how long each engine worked, gaps excluded
    (dma: mean of the 16); ``dma_share`` is the traffic over what the DMA engines could move in the latency.
    SBUF and PSUM peaks are for all partitions together, by live ranges in program order. ``critical_path`` gives
    each kind of step's share of the longest chain of dependent steps, ``"dma wait"`` being start latencies.
    """

    name: str
    core: str
    latency: float
    hbm_read: int
    hbm_written: int
    multiply_adds: int
    mfu: float
    dma_share: float
    busy: dict[str, float]
    sbuf_peak: int
    psum_peak: int
    critical_path: dict[str, float]
    drift: float

    @property
    def traffic(self) -> int:
        """HBM bytes moved in both directions."""
        return self.hbm_read + self.hbm_written

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def report(timeline: Timeline) -> Report:
    """Summarise a simulated run."""
    program = timeline.program
    trace, core = program.trace, program.core
    read, written = trace.traffic()
    macs = trace.multiply_adds()
    dtype = next((i.dtype for i in trace.instructions if i.op == "matmul"), "bfloat16")
    ns = max(timeline.latency, 1e-9)
    return Report(
        name=trace.name,
        core=core.device,
        latency=timeline.latency / 1e9,
        hbm_read=read,
        hbm_written=written,
        multiply_adds=macs,
        mfu=2 * macs / (ns * 1e-9 * core.peak_flops(dtype if dtype == "float32" else "bfloat16")),
        dma_share=(read + written) / (ns * core.dma_rate),
        busy={engine.value: time / ns for engine, time in _busy(timeline).items()},
        sbuf_peak=trace.peak(Space.SBUF) * core.partitions,
        psum_peak=trace.peak(Space.PSUM) * core.partitions,
        critical_path=_shares(timeline),
        drift=timeline.drift,
    )


def critical_path(timeline: Timeline) -> Iterator[int]:
    """The chain of steps that led to the last one to end, last first."""
    step = max(range(len(timeline.end)), key=timeline.end.__getitem__, default=-1)
    while step >= 0:
        yield step
        step = timeline.cause[step]


def _busy(timeline: Timeline) -> dict[Engine, float]:
    """Time every engine worked, in ns, over all executed instructions; DMA: the mean of the 16.

    The iterations of a fold that were not simulated count as the one that gave their period did.
    """
    program = timeline.program
    total = dict.fromkeys(Engine, 0.0)
    for (start, stop, _), weight in zip(program.segments, segment_weights(program), strict=True):
        for step in range(start, stop):
            engine = program.trace.instructions[program.source[step]].engine
            if engine is Engine.DMA:
                time = program.costs[step].busy * program.costs[step].engines / program.core.dma_engines
            else:
                time = timeline.end[step] - timeline.start[step]
            total[engine] += time * weight
    return total


def _shares(timeline: Timeline) -> dict[str, float]:
    instructions, source = timeline.program.trace.instructions, timeline.program.source
    time: dict[str, float] = {}
    reached = max(timeline.end, default=0.0)
    total = max(reached, 1e-9)
    for step in critical_path(timeline):
        instruction = instructions[source[step]]
        kind = f"{instruction.engine.value} {instruction.op}"
        time[kind] = time.get(kind, 0.0) + reached - timeline.start[step]
        cause = timeline.cause[step]
        reached = timeline.end[cause] if cause >= 0 else 0.0
        time["dma wait"] = time.get("dma wait", 0.0) + timeline.start[step] - reached
    ranked = sorted(time.items(), key=lambda item: -item[1])
    return {kind: span / total for kind, span in ranked if span > 0}
