"""The timing model against published measurements: every one, with its signed error.

One constant is fitted: ``NeuronCore.matmul_overhead_cycles``, to the nine latencies of the three kernels whose
schedules are known. :func:`leave_one_out` refits it without each one in turn. The compiler's own schedules are not
published, so its rows carry a lower bound (tensor time or traffic, whichever is longer), not a prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from neuronmm.emulator.nki.trace import Trace
from neuronmm.emulator.timing import measured
from neuronmm.emulator.timing.inference import Decoder, predict
from neuronmm.emulator.timing.measured import Sweep
from neuronmm.emulator.timing.published import dense_xw, fused_xuv, sequential_xuv
from neuronmm.emulator.timing.report import Report, report
from neuronmm.emulator.timing.simulate import simulate
from neuronmm.emulator.timing.spill import spill
from neuronmm.kernels.hardware import TRN1, NeuronCore

GIB = float(1 << 30)
_K, _R, _N = measured.SWEEP
_KERNELS: tuple[tuple[Sweep, Callable[[int], Trace]], ...] = (
    (measured.NEURONMM, lambda m: fused_xuv(m, _K, _R, _N)),
    (measured.NKI_XUV, lambda m: sequential_xuv(m, _K, _R, _N)),
    (measured.NKI_XW, lambda m: dense_xw(m, _K, _N)),
)


@dataclass(frozen=True)
class Row:
    """One comparison. ``kind`` is latency (ms), traffic (GiB) or bound (ms, a lower bound of a latency)."""

    kind: str
    case: str
    published: float
    predicted: float
    spills: bool = False

    @property
    def error(self) -> float:
        """Signed, relative to the published figure."""
        return self.predicted / self.published - 1


def rows(core: NeuronCore = TRN1, sizes: Iterable[int] = (8192, 16384, 32768)) -> list[Row]:
    """Every published figure for the given M, and the dense decode step."""
    return [*_kernel_rows(core, tuple(sizes)), *_bounds(core, tuple(sizes)), decode_row(core)]


def decode_row(core: NeuronCore = TRN1) -> Row:
    """Dense decode of Llama-3.2-1B, every weight read once a token, against the published time a token."""
    llama = Decoder(2048, 8192, layers=16, heads=32, kv_heads=8, head=64, vocabulary=128256)
    tpot = predict(llama, core, prompt=32).tpot
    return Row("latency", "dense decode of Llama-3.2-1B, a token", measured.DENSE_DECODE_MS, tpot * 1e3)


def mean_error(table: Iterable[Row], kind: str = "latency") -> float:
    """Mean absolute relative error of the rows of one kind that belong to the sweep."""
    errors = [abs(row.error) for row in table if row.kind == kind and "M = " in row.case]
    return sum(errors) / len(errors)


def leave_one_out(low: int = 32, high: int = 56) -> tuple[int, dict[str, float]]:
    """The overhead fitted to all nine latencies, and each one's signed error when fitted to the other eight.

    The fit takes the whole number of cycles with the least mean absolute error; latencies between the two simulated
    overheads are interpolated, which is exact where the same engine stays the longest.
    """
    ends = []
    for overhead in (low, high):
        core = dataclasses.replace(TRN1, matmul_overhead_cycles=float(overhead))
        ends.append([r for r in _kernel_rows(core, tuple(measured.NEURONMM.latency)) if r.kind == "latency"])

    def errors(overhead: int) -> list[float]:
        share = (overhead - low) / (high - low)
        return [a.error + share * (b.error - a.error) for a, b in zip(*ends, strict=True)]

    def best(without: int | None) -> int:
        def loss(overhead: int) -> float:
            return sum(abs(e) for i, e in enumerate(errors(overhead)) if i != without)

        return min(range(low, high + 1), key=loss)

    return best(None), {row.case: errors(best(i))[i] for i, row in enumerate(ends[0])}


@lru_cache(maxsize=64)
def sweep_report(name: str, m: int, core: NeuronCore) -> tuple[Report, bool]:
    """A published kernel of the sweep at M, simulated; and whether it spills."""
    build = next(build for sweep, build in _KERNELS if sweep.name == name)
    trace = build(m)
    fitting = spill(trace, core.sbuf_partition_bytes)
    return report(simulate(fitting, core)), fitting is not trace


def _kernel_rows(core: NeuronCore, sizes: tuple[int, ...]) -> Iterator[Row]:
    for sweep, _ in _KERNELS:
        for m in sizes:
            result, spills = sweep_report(sweep.name, m, core)
            case = f"{sweep.name}, M = {m}"
            yield Row("latency", case, sweep.latency[m], result.latency * 1e3, spills)
            yield Row("traffic", case, sweep.traffic[m], result.traffic / GIB, spills)


def _bounds(core: NeuronCore, sizes: tuple[int, ...]) -> Iterator[Row]:
    columns = core.moving_columns + core.matmul_overhead_cycles
    for sweep, macs in ((measured.COMPILER_XUV, _R * (_K + _N)), (measured.COMPILER_XW, _K * _N)):
        for m in sizes:
            tensor = m * macs / (128 * 128 * core.moving_columns) * columns / core.tensor_ghz
            dma = sweep.traffic[m] * GIB / core.dma_rate
            yield Row("bound", f"{sweep.name}, M = {m}", sweep.latency[m], max(tensor, dma) / 1e6)
