"""Compare the timing model with every published measurement, with signed errors.

One constant is fitted, ``NeuronCore.matmul_overhead_cycles``, to the nine latencies of the three kernels whose
schedules are known. :func:`leave_kernels_out` refits it without each kernel in turn. The compiler's own schedules are
not published, so its rows give a lower bound (tensor time or traffic, whichever is longer) instead of a prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from neuronmm.emulator.nki.trace import Trace
from neuronmm.emulator.timing import measured
from neuronmm.emulator.timing.inference import Decoder, predict
from neuronmm.emulator.timing.measured import Sweep
from neuronmm.emulator.timing.published_kernels import dense_xw, fused_xuv, sequential_xuv
from neuronmm.emulator.timing.report import Report, report
from neuronmm.emulator.timing.simulate import simulate
from neuronmm.emulator.timing.spill import spill
from neuronmm.kernels.hardware import TRN1, NeuronCore

GIB = float(1 << 30)
SIZES = (8192, 16384, 32768)
LLAMA = Decoder(2048, 8192, layers=16, heads=32, kv_heads=8, head=64, vocabulary=128256)
"""Llama-3.2-1B."""
_K, _R, _N = measured.SWEEP
_KERNELS: tuple[tuple[Sweep, Callable[[int], Trace]], ...] = (
    (measured.NEURONMM, lambda m: fused_xuv(m, _K, _R, _N)),
    (measured.NKI_XUV, lambda m: sequential_xuv(m, _K, _R, _N)),
    (measured.NKI_XW, lambda m: dense_xw(m, _K, _N)),
)


@dataclass(frozen=True)
class Row:
    """One comparison; ``kind`` is latency (ms), traffic (GiB), bound (ms, a lower bound on a latency) or ttft (ms)."""

    kind: str
    case: str
    published: float
    predicted: float
    spills: bool = False

    @property
    def error(self) -> float:
        """The signed error, relative to the published figure."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class LeftOut:
    """The fit without one kernel.

    Attributes:
        kernel: the kernel.
        begin: the first candidate of the search, in cycles.
        overhead: the fitted constant, in cycles.
        errors: the signed errors of the kernel's latencies, in order of M.
    """

    kernel: str
    begin: int
    overhead: int
    errors: tuple[float, ...]


def rows(core: NeuronCore = TRN1, sizes: Iterable[int] = SIZES) -> list[Row]:
    """Return every published figure of the given M, the dense decode step and the dense context encoding."""
    return [*_kernel_rows(core, tuple(sizes)), *_bounds(core, tuple(sizes)), decode_row(core), context_row(core)]


def decode_row(core: NeuronCore = TRN1) -> Row:
    """Compare dense decode of Llama-3.2-1B, each weight read once per token, with the published time per token."""
    tpot = predict(LLAMA, core, prompt=32).tpot
    return Row("latency", "dense decode of Llama-3.2-1B, per token", measured.DENSE_DECODE_MS, tpot * 1e3)


def context_row(core: NeuronCore = TRN1, padded: int = 32) -> Row:
    """Compare dense context encoding of Llama-3.2-1B with the published time; ``padded`` is the padded length."""
    ttft = predict(LLAMA, core, prompt=padded).ttft
    return Row("ttft", "dense context encoding of Llama-3.2-1B, 32 tokens", measured.DENSE_CONTEXT_MS, ttft * 1e3)


def mean_error(table: Iterable[Row], kind: str = "latency") -> float:
    """Return the mean absolute error of the sweep's rows of one kind."""
    errors = [abs(row.error) for row in table if row.kind == kind and "M = " in row.case]
    return sum(errors) / len(errors)


def leave_kernels_out(
    sizes: tuple[int, ...] = SIZES, begins: tuple[int, ...] = (0, 16, 32), last: int = 64, step: int = 16
) -> tuple[int, list[LeftOut]]:
    """Return the overhead fitted to all latencies, and the fits without each kernel, from each of ``begins``.

    A fit is the whole number of cycles, from its begin to ``last``, with the least mean absolute error. One in ``step``
    candidates is simulated. Latencies in between are interpolated, which is exact while the same engine is the slowest.
    """
    simulated = range(0, last + 1, step)
    cores = [dataclasses.replace(TRN1, matmul_overhead_cycles=float(overhead)) for overhead in simulated]
    simulated_errors = [[row.error for row in _kernel_rows(core, sizes) if row.kind == "latency"] for core in cores]
    overheads = np.arange(last + 1)
    errors = np.array([np.interp(overheads, simulated, column) for column in zip(*simulated_errors, strict=True)])
    errors = errors.reshape(len(_KERNELS), len(sizes), last + 1)

    def best(kernels: list[int], begin: int) -> int:
        return begin + int(np.abs(errors[kernels, :, begin:]).sum(axis=(0, 1)).argmin())

    every = range(len(_KERNELS))
    left_out = []
    for kernel in every:
        for begin in begins:
            overhead = best([k for k in every if k != kernel], begin)
            name, of_kernel = _KERNELS[kernel][0].name, errors[kernel, :, overhead]
            left_out.append(LeftOut(name, begin, overhead, tuple(map(float, of_kernel))))
    return best(list(every), 0), left_out


@lru_cache(maxsize=64)
def sweep_report(name: str, m: int, core: NeuronCore) -> tuple[Report, bool]:
    """Simulate a published kernel of the sweep at M; return its report and whether it spills."""
    build = next(build for sweep, build in _KERNELS if sweep.name == name)
    trace = build(m)
    fitting = spill(trace, core)
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
