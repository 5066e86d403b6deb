"""The timing model against published measurements. Everything here is deterministic: the bounds are the claim."""

from __future__ import annotations

import pytest

from neuronmm.emulator.timing import measured
from neuronmm.emulator.timing.published import sequential_xuv
from neuronmm.emulator.timing.validation import Row, decode_row, mean_error, rows


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return rows()


def test_no_published_figure_is_left_out(table: list[Row]) -> None:
    for sweep in (measured.NEURONMM, measured.NKI_XUV, measured.NKI_XW):
        for m, published in sweep.latency.items():
            assert Row("latency", f"{sweep.name}, M = {m}", published, 0).case in {r.case for r in table}
            (traffic,) = [r for r in table if r.kind == "traffic" and r.case == f"{sweep.name}, M = {m}"]
            assert traffic.published == sweep.traffic[m]
    assert len(table) == 9 + 9 + 6 + 1


def test_traffic(table: list[Row]) -> None:
    traffic = [row for row in table if row.kind == "traffic"]
    assert all(abs(row.error) <= 0.03 for row in traffic if row.case.startswith("NeuronMM"))
    assert all(abs(row.error) <= 0.15 for row in traffic)
    assert {row.case for row in traffic if row.spills} == {
        f"{name}, M = {m}" for name in ("NKI XW", "NKI XUV") for m in (16384, 32768)
    }, "which kernels spill is a prediction too: the published traffic jumps there"


def test_latency(table: list[Row]) -> None:
    assert mean_error(table) <= 0.10
    assert mean_error(table) == pytest.approx(measured.MEAN_LATENCY_ERROR, abs=5e-4), "what predictions carry with them"
    assert all(abs(row.error) <= 0.20 for row in table if row.kind == "latency")
    assert all(row.error < 0 for row in table if row.kind == "bound"), "a lower bound above the measurement is wrong"


def test_dense_decode() -> None:
    assert abs(decode_row().error) <= 0.15
    assert decode_row().error == pytest.approx(measured.DECODE_ERROR, abs=5e-4), "what predictions carry with them"


def test_traffic_of_the_sequential_baseline_is_the_closed_form_where_nothing_spills() -> None:
    m, k, r, n = 2048, 4096, 2048, 1024
    read, written = sequential_xuv(m, k, r, n).traffic()
    assert read == 2 * (k * m + m // 512 * k * r + r * n + n // 512 * r * m)
    assert written == 2 * (r * m + m * n)
