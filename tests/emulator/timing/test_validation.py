"""The timing model against published measurements. It is deterministic; the documents claim these bounds."""

from __future__ import annotations

import pytest

from neuronmm.emulator.timing import measured
from neuronmm.emulator.timing.inference import predict
from neuronmm.emulator.timing.published_kernels import sequential_xuv
from neuronmm.emulator.timing.validation import (
    LLAMA,
    Row,
    context_row,
    decode_row,
    leave_kernels_out,
    mean_error,
    rows,
)
from neuronmm.kernels.hardware import TRN1


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return rows()


def test_no_published_figure_is_left_out(table: list[Row]) -> None:
    for sweep in (measured.NEURONMM, measured.NKI_XUV, measured.NKI_XW):
        for m, published in sweep.latency.items():
            assert Row("latency", f"{sweep.name}, M = {m}", published, 0).case in {r.case for r in table}
            (traffic,) = [r for r in table if r.kind == "traffic" and r.case == f"{sweep.name}, M = {m}"]
            assert traffic.published == sweep.traffic[m]
    assert context_row() in table and context_row().published == 50.07
    assert len(table) == 9 + 9 + 6 + 1 + 1


def test_predicted_traffic_is_near_the_published(table: list[Row]) -> None:
    traffic = [row for row in table if row.kind == "traffic"]
    assert all(abs(row.error) <= 0.03 for row in traffic if row.case.startswith("NeuronMM"))
    assert all(abs(row.error) <= 0.15 for row in traffic)
    assert {row.case for row in traffic if row.spills} == {
        f"{name}, M = {m}" for name in ("NKI XW", "NKI XUV") for m in (16384, 32768)
    }, "the kernels that spill are predicted too: the published traffic jumps there"


def test_predicted_latency_is_near_the_published(table: list[Row]) -> None:
    assert mean_error(table) <= 0.10
    assert mean_error(table) == pytest.approx(
        measured.VALIDATION["published_kernel_latencies_mean_absolute_error"], abs=5e-4
    ), "the error attached to every prediction"
    assert all(abs(row.error) <= 0.20 for row in table if row.kind == "latency")
    assert all(row.error < 0 for row in table if row.kind == "bound"), "a lower bound must be below the measurement"


def test_predicted_dense_decode_is_near_the_published() -> None:
    assert abs(decode_row().error) <= 0.15
    documented = measured.VALIDATION["published_dense_decode_error"]
    assert decode_row().error == pytest.approx(documented, abs=5e-4), "the error attached to every prediction"


def test_the_published_context_encoding_is_not_explained() -> None:
    """Neither padding nor the overhead that a decode step shows explains the error of the one published TTFT."""
    documented = measured.VALIDATION["published_dense_context_encoding_error"]
    assert context_row().error == pytest.approx(documented, abs=5e-4), "the error attached to every prediction"
    assert f"{documented:+.1%}" in measured.CAVEAT and "TTFT is not validated" in measured.CAVEAT
    padded = {tokens: context_row(padded=tokens).predicted for tokens in (128, 512)}
    overhead = measured.DENSE_DECODE_MS - predict(LLAMA, TRN1, prompt=32).tpot * 1e3
    assert max(padded.values()) + overhead < 16 < measured.DENSE_CONTEXT_MS / 3
    excess = [context - token for context, token in measured.CONTEXT_REPORTS.values()]
    assert 31 < min(excess) < max(excess) < 41, "all reports have it, whichever kernels compute the MLP"


def test_one_kernel_determines_the_fitted_constant() -> None:
    """Without NeuronMM the fit finds no constant: the other kernels' latencies hardly depend on it."""
    overhead, left_out = leave_kernels_out(sizes=(8192,))
    assert abs(overhead - TRN1.matmul_overhead_cycles) <= 2
    for fit in left_out:
        if fit.kernel == "NeuronMM":
            assert fit.begin <= fit.overhead <= max(fit.begin, 16)
            assert fit.errors[0] < (-0.09 if fit.begin < 32 else -0.04)
        else:
            assert abs(fit.overhead - overhead) <= 2
    assert {(fit.kernel, fit.begin) for fit in left_out} == {
        (name, begin) for name in ("NeuronMM", "NKI XUV", "NKI XW") for begin in (0, 16, 32)
    }


def test_traffic_of_the_sequential_baseline_is_the_closed_form_where_nothing_spills() -> None:
    m, k, r, n = 2048, 4096, 2048, 1024
    read, written = sequential_xuv(m, k, r, n).traffic()
    assert read == 2 * (k * m + m // 512 * k * r + r * n + n // 512 * r * m)
    assert written == 2 * (r * m + m * n)
