"""Write a simulated run as a Chrome trace (open it in https://ui.perfetto.dev) or as a PNG."""

from __future__ import annotations

import json
from pathlib import Path

from neuronmm.emulator.nki.trace import Engine
from neuronmm.emulator.timing.report import critical_path
from neuronmm.emulator.timing.simulate import Timeline

_COLOURS = {
    Engine.TENSOR: "#4c72b0",
    Engine.VECTOR: "#55a868",
    Engine.SCALAR: "#dd8452",
    Engine.GPSIMD: "#8172b3",
    Engine.DMA: "#937860",
}
_ROWS = (Engine.TENSOR, Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD, Engine.DMA)


def write_chrome_trace(timeline: Timeline, path: Path) -> None:
    """Write every simulated step as a complete event, in microseconds: one track per engine, two for DMA (in, out)."""
    trace = timeline.program.trace
    tracks = [engine.value for engine in _ROWS[:-1]] + ["dma in", "dma out"]
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": track}}
        for tid, track in enumerate(tracks)
    ]
    events.append({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{trace.name} (predicted)"}})
    critical = set(critical_path(timeline))
    for step, i in enumerate(timeline.program.source):
        instruction = trace.instructions[i]
        track = instruction.engine.value
        if instruction.engine is Engine.DMA:
            track = "dma out" if instruction.target is not None and instruction.target.value == "hbm" else "dma in"
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": tracks.index(track),
                "name": instruction.op,
                "ts": timeline.start[step] / 1e3,
                "dur": (timeline.end[step] - timeline.start[step]) / 1e3,
                "args": {"at": instruction.location, "bytes": instruction.bytes, "critical": step in critical},
            }
        )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}), encoding="utf-8")


def write_png(timeline: Timeline, path: Path, window: tuple[float, float] | None = None) -> None:
    """Draw one row per engine, and the critical path in red below.

    ``window`` is (from, to) in microseconds; None draws the whole run.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    trace = timeline.program.trace
    low, high = window or (0.0, max(timeline.end, default=0.0) / 1e3)
    spans: dict[Engine, list[tuple[float, float]]] = {engine: [] for engine in _ROWS}
    critical: list[tuple[float, float]] = []
    on_path = set(critical_path(timeline))
    for step, i in enumerate(timeline.program.source):
        span = (timeline.start[step] / 1e3, (timeline.end[step] - timeline.start[step]) / 1e3)
        if span[0] <= high and sum(span) >= low:
            spans[trace.instructions[i].engine].append(span)
            if step in on_path:
                critical.append(span)
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, engine in enumerate(_ROWS):
        axes.broken_barh(spans[engine], (-row - 0.4, 0.8), color=_COLOURS[engine], linewidth=0)
    axes.broken_barh(critical, (-len(_ROWS) - 0.25, 0.5), color="#c44e52", linewidth=0)
    axes.set_yticks(range(0, -len(_ROWS) - 1, -1), [*(engine.value for engine in _ROWS), "critical path"])
    axes.set_xlim(low, high)
    axes.set_xlabel("µs (predicted)")
    axes.set_title(f"{trace.name} on one {timeline.program.core.device} core")
    figure.savefig(path, dpi=110)
