"""Summarise a simulated run: latency, traffic, busy fractions, memory peaks and the critical path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from neuronmm.emulator.nki.trace import Engine, Space
from neuronmm.emulator.timing.simulate import Timeline, segment_weights


@dataclass(frozen=True)
class Report:
    """The prediction for one kernel on one NeuronCore.

    Attributes:
        name: the trace's name.
        core: the device.
        latency: seconds.
        hbm_read: bytes.
        hbm_written: bytes.
        multiply_adds: of the matmuls, without transpositions.
        mfu: the matmuls' FLOPs over the tensor engine's peak in the latency.
        dma_share: the traffic as a fraction of what the DMA engines could move in the latency.
        busy: for each engine, the fraction of the latency in which it works (dma: mean of the 16 engines).
        sbuf_peak: bytes of all partitions together, by live ranges in program order.
        psum_peak: the same for PSUM.
        critical_path: for each kind of step, its fraction of the longest chain of dependent steps; ``dma wait`` is the
            start latency of transfers.
        drift: see :class:`.simulate.Timeline`.
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
        """HBM bytes read and written."""
        return self.hbm_read + self.hbm_written

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary that JSON can hold."""
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
        critical_path=_fractions(timeline),
        drift=timeline.drift,
    )


def critical_path(timeline: Timeline) -> Iterator[int]:
    """Yield the chain of steps that determines when the last step ends, from the last to the first."""
    step = max(range(len(timeline.end)), key=timeline.end.__getitem__, default=-1)
    while step >= 0:
        yield step
        step = timeline.cause[step]


def _busy(timeline: Timeline) -> dict[Engine, float]:
    """Return the ns that every engine works, over all executed instructions; DMA is the mean of the 16 engines.

    An iteration that was not simulated counts as the simulated one that it is extrapolated from.
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


def _fractions(timeline: Timeline) -> dict[str, float]:
    """Return the fraction of the critical path that each kind of step takes, largest first."""
    instructions, source = timeline.program.trace.instructions, timeline.program.source
    time: dict[str, float] = {}
    end = max(timeline.end, default=0.0)
    total = max(end, 1e-9)
    for step in critical_path(timeline):
        instruction = instructions[source[step]]
        kind = f"{instruction.engine.value} {instruction.op}"
        time[kind] = time.get(kind, 0.0) + end - timeline.start[step]
        cause = timeline.cause[step]
        end = timeline.end[cause] if cause >= 0 else 0.0
        time["dma wait"] = time.get("dma wait", 0.0) + timeline.start[step] - end
    ranked = sorted(time.items(), key=lambda item: -item[1])
    return {kind: span / total for kind, span in ranked if span > 0}
