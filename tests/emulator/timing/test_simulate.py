"""The simulator on random programs: dependencies and bounds hold, slower hardware is never faster."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draws import examples
from neuronmm.emulator.nki.trace import Engine, Instruction, Region, Space, Trace
from neuronmm.emulator.timing import CapacityError, Timeline, report, simulate, spill
from neuronmm.emulator.timing.published_kernels import dense_xw, fused_xuv
from neuronmm.emulator.timing.report import critical_path
from neuronmm.emulator.timing.sketch import Sketch, part
from neuronmm.emulator.timing.timeline import write_chrome_trace, write_png
from neuronmm.kernels.hardware import TRN1, TRN2, TRN3, NeuronCore

WIDTH = 256
_ENGINES = (Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD)
steps = st.lists(
    st.tuples(
        st.sampled_from(("load", "store", "matmul", "copy", "add")),
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(0, 2),
        st.sampled_from((64, 128, 256)),
    ),
    min_size=1,
    max_size=60,
)
Steps = list[tuple[str, int, int, int, int]]


def random_trace(chosen: Steps) -> Trace:
    """Return a trace of the chosen steps on six SBUF tiles, three PSUM tiles and one HBM tensor."""
    sketch = Sketch("random")
    hbm = sketch.tensor("hbm", 1024, WIDTH)
    tiles = [sketch.tile(f"tile {i}", WIDTH) for i in range(6)]
    sums = [sketch.tile(f"psum {i}", WIDTH, "float32", Space.PSUM) for i in range(3)]
    for op, a, b, c, size in chosen:
        engine = _ENGINES[c]
        if op == "load":
            sketch.load(tiles[a], WIDTH - size, size, hbm, 128 * b)
        elif op == "store":
            sketch.store(hbm, tiles[a], 0, size, 128 * b)
        elif op == "matmul":
            sketch.matmul(sums[c], part(tiles[a], 0, 128), part(tiles[b], 0, size), size, "bfloat16", a % 2 > 0)
        elif op == "copy":
            sketch.elementwise(engine, "copy", part(tiles[a], 0, size), (part(sums[b % 3], 0, size),), size, "bfloat16")
        else:
            operands = (part(tiles[a], 0, size), part(tiles[b], 0, size))
            sketch.elementwise(engine, "add", part(tiles[a], 0, size), operands, size, "bfloat16")
    sketch.free(*tiles, *sums)
    return sketch.trace


def conflicts(a: tuple[Region, ...], b: tuple[Region, ...]) -> bool:
    return any(x.overlaps(y) for x in a for y in b)


def check_order(timeline: Timeline) -> None:
    """Assert that two steps that touch the same element, one of them writing it, run in program order."""
    program = timeline.program
    order = [program.trace.instructions[i] for i in program.source]
    for j, late in enumerate(order):
        for i, early in enumerate(order[:j]):
            if early.engine is late.engine and early.engine is not Engine.DMA:
                assert timeline.start[j] >= timeline.end[i], "an engine ran two instructions at once or out of order"
            hazard = conflicts(early.writes, late.reads + late.writes) or conflicts(early.reads, late.writes)
            if hazard and (early.engine is not late.engine or early.engine is Engine.DMA):
                assert timeline.start[j] >= timeline.end[i], (early, late)


@examples(60)
@given(steps)
def test_dependencies_are_respected(chosen: Steps) -> None:
    trace = random_trace(chosen)
    timeline = simulate(trace, TRN1)
    check_order(timeline)


@examples(60)
@given(steps)
def test_v2_serves_one_of_two_engines_at_a_time(chosen: Steps) -> None:
    """Vector and Scalar share PSUM, Vector and GpSimd share SBUF; v3 has neither restriction."""
    trace = random_trace(chosen)
    timeline = simulate(trace, TRN1)
    order = [trace.instructions[i] for i in timeline.program.source]
    for j, late in enumerate(order):
        for i, early in enumerate(order[:j]):
            pair = {early.engine, late.engine}
            shared = {Space.PSUM: {Engine.VECTOR, Engine.SCALAR}, Space.SBUF: {Engine.VECTOR, Engine.GPSIMD}}
            if any(pair == engines and space in accessed_spaces(trace, early) & accessed_spaces(trace, late)
                   for space, engines in shared.items()):  # fmt: skip
                assert timeline.start[j] >= timeline.end[i] or timeline.start[i] >= timeline.end[j], (early, late)


def accessed_spaces(trace: Trace, instruction: Instruction) -> set[Space]:
    return {trace.buffers[r.buffer].space for r in instruction.reads + instruction.writes}


def test_evictions_by_two_engines_overlap_from_v3_on_only() -> None:
    sketch = Sketch("evictions")
    for i in range(8):
        psum, tile = sketch.tile(f"psum {i}", 512, "float32", Space.PSUM), sketch.tile(f"tile {i}", 512)
        engine = (Engine.VECTOR, Engine.SCALAR)[i % 2]
        sketch.elementwise(engine, "copy", part(tile, 0, 512), (part(psum, 0, 512),), 512, "bfloat16")
    serial, parallel = simulate(sketch.trace, TRN1), simulate(sketch.trace, TRN3)
    assert serial.latency == pytest.approx(sum(c.busy for c in serial.program.costs))
    assert parallel.latency == pytest.approx(sum(c.busy for c in parallel.program.costs) / 2)


@examples(60)
@given(steps)
def test_latency_is_bounded_by_busy_time_and_critical_path(chosen: Steps) -> None:
    trace = random_trace(chosen)
    timeline = simulate(trace, TRN1)
    result = report(timeline)
    assert all(share <= 1 + 1e-9 for share in result.busy.values())
    path = list(critical_path(timeline))
    assert path == sorted(path, key=timeline.end.__getitem__, reverse=True)
    assert sum(timeline.program.costs[step].busy for step in path) <= timeline.latency + 1e-6
    assert sum(result.critical_path.values()) == pytest.approx(1)
    assert timeline.latency <= sum(c.busy for c in timeline.program.costs) + TRN1.dma_start_ns * len(chosen) + 1e-6


@examples(60)
@given(steps)
def test_traffic_is_the_sum_of_the_transfers(chosen: Steps) -> None:
    result = report(simulate(random_trace(chosen), TRN1))
    assert result.hbm_read == sum(128 * 2 * size for op, *_, size in chosen if op == "load")
    assert result.hbm_written == sum(128 * 2 * size for op, *_, size in chosen if op == "store")
    assert result.multiply_adds == sum(128 * 128 * size for op, *_, size in chosen if op == "matmul")


@examples(40)
@given(steps, st.integers(1, 20))
def test_one_more_instruction_never_helps(chosen: Steps, cut: int) -> None:
    """On in-order engines a prefix of a program never ends later. DMAs are excluded: they may overtake each other."""
    computing = [step for step in chosen if step[0] not in ("load", "store")]
    prefix, complete = (simulate(random_trace(steps), TRN1) for steps in (computing[:cut], computing))
    assert prefix.latency <= complete.latency + 1e-6


@pytest.mark.parametrize(
    "slower",
    [
        {"tensor_ghz": 1.4},
        {"matmul_overhead_cycles": 88.0},
        {"dma_engine_rate": 8.0},
        {"dma_start_ns": 20000.0},
        {"vector_ghz": 0.3},
        {"tensor_warm_up_ns": 3000.0},
    ],
)
def test_slower_hardware_is_slower(slower: dict[str, float]) -> None:
    trace = dense_xw(2048, 2048, 1024)
    assert simulate(trace, dataclasses.replace(TRN1, **slower)).latency > simulate(trace, TRN1).latency


def test_double_buffering_overlaps_loads_with_matmuls() -> None:
    trace = dense_xw(4096, 2048, 2048)
    single, double = simulate(trace, TRN1, generations=1), simulate(trace, TRN1, generations=2)
    assert double.latency < 0.8 * single.latency
    loads = sum(c.busy for c, i in zip(single.program.costs, single.program.source, strict=True)
                if trace.instructions[i].op == "load")  # fmt: skip
    assert single.latency > loads  # with one buffer the tensor engine waits for every block


def test_a_place_is_reused_only_after_its_last_reader() -> None:
    sketch = Sketch("ring")
    hbm = sketch.tensor("x", 128, 512)
    psum = sketch.tile("psum", 512, "float32", Space.PSUM)
    for _ in range(4):
        tile = sketch.tile("ring", 512)
        sketch.load(tile, 0, 512, hbm)
        sketch.matmul(psum, part(tile, 0, 128), part(tile, 0, 512), 512, "bfloat16", False)
        sketch.free(tile)
    sketch.free(psum)
    timeline = simulate(sketch.trace, TRN1, generations=2)
    for turn in (2, 3):  # the third load takes the place of the first one, whose matmul must have ended
        assert timeline.start[2 * turn] >= timeline.end[2 * (turn - 2) + 1] + TRN1.dma_start_ns


def unfolded(trace: Trace) -> Trace:
    """Return the same kernel with every iteration of its one fold written out."""
    (fold,) = trace.folds
    result = Trace(trace.name)
    body = fold.stop - fold.start
    for turn in range(fold.times):
        shift = {b.id: len(result.buffers) + n for n, b in enumerate(b for b in trace.buffers if b.loop)}
        if turn == 0:
            result.buffers = [dataclasses.replace(b) for b in trace.buffers]
            shift = {}
        else:
            for b in (b for b in trace.buffers if b.loop):
                late = dataclasses.replace(b, id=shift[b.id])
                late.allocated, late.released = b.allocated + turn * body, b.released + turn * body
                result.buffers.append(late)
        for i in trace.instructions:
            reads = tuple(r._replace(buffer=shift.get(r.buffer, r.buffer)) for r in i.reads)
            writes = tuple(r._replace(buffer=shift.get(r.buffer, r.buffer)) for r in i.writes)
            result.instructions.append(dataclasses.replace(i, reads=reads, writes=writes))
    return result


@pytest.mark.parametrize("core", [TRN1, TRN2, TRN3], ids=lambda c: c.device)
def test_a_folded_trace_takes_as_long_as_the_unfolded_one(core: NeuronCore) -> None:
    for trace in (fused_xuv(12288, 1024, 1024, 2048), dense_xw(2048, 2048, 6144)):
        folded, complete = simulate(trace, core), simulate(unfolded(trace), core)
        assert folded.latency == pytest.approx(complete.latency, rel=2e-3)
        assert report(folded).traffic == report(complete).traffic
        assert report(folded).busy["tensor"] == pytest.approx(report(complete).busy["tensor"], rel=5e-3)


def test_a_trace_that_does_not_fit_is_refused_and_fits_when_spilled() -> None:
    trace = dense_xw(16384, 2048, 512)
    with pytest.raises(CapacityError, match=r"sbuf: \d+ bytes per partition are live when"):
        simulate(trace, TRN1)
    spilled = spill(trace, TRN1)
    assert spilled.peak(Space.SBUF) <= TRN1.sbuf_partition_bytes
    own = [dataclasses.replace(b, bytes_per_partition=0) if b.name == "spill stage" else b for b in spilled.buffers]
    assert dataclasses.replace(spilled, buffers=own).peak(Space.SBUF) <= TRN1.sbuf_usable_bytes
    assert spilled.multiply_adds() == trace.multiply_adds()
    before, after = trace.traffic(), spilled.traffic()
    assert after[0] > before[0] and after[1] > before[1]
    assert after[0] - before[0] == after[1] - before[1], "every spilled tile is stored and loaded equally often"
    assert spill(dense_xw(2048, 2048, 512), TRN1).instructions == dense_xw(2048, 2048, 512).instructions
    simulate(spilled, TRN1)


@pytest.mark.parametrize(
    ("columns", "fits"), [(TRN1.sbuf_usable_bytes // 2, True), (TRN1.sbuf_usable_bytes // 2 + 1, False)]
)
def test_a_kernel_leaves_the_compiler_its_bytes(columns: int, fits: bool) -> None:
    sketch = Sketch("large")
    tile, hbm = sketch.tile("tile", columns), sketch.tensor("hbm", 128, columns)
    sketch.load(tile, 0, columns, hbm)
    sketch.store(hbm, tile, 0, columns)
    sketch.free(tile)
    if fits:
        assert spill(sketch.trace, TRN1) is sketch.trace
        simulate(sketch.trace, TRN1)
    else:
        with pytest.raises(CapacityError):
            simulate(sketch.trace, TRN1)


def test_a_timeline_is_written_as_a_chrome_trace_and_a_png(tmp_path: Path) -> None:
    timeline = simulate(dense_xw(2048, 1024, 512), TRN1)
    write_chrome_trace(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(timeline.start)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline.latency / 1e3)
    write_png(timeline, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
