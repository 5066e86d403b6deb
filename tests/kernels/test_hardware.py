"""Figures derived from the NeuronCore dataclass equal the documented ones; the curve of DMA row efficiency."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuronmm.kernels.hardware import CORES, TRN1


@pytest.mark.parametrize(
    ("device", "tflops", "dma", "hbm_share", "sbuf_mib"),
    [("trn1", 92, 272, 410, 24), ("trn2", 79, 362.5, 362.5, 28), ("trn3", 79, 528, 587.5, 32)],
)
def test_derived_figures_are_the_documented_ones(
    device: str, tflops: float, dma: float, hbm_share: float, sbuf_mib: int
) -> None:
    core = CORES[device]
    assert core.peak_flops() / 1e12 == pytest.approx(tflops, rel=0.01)
    assert core.peak_flops("float32") == core.peak_flops() / 4
    assert core.dma_rate == pytest.approx(dma, rel=0.01)
    assert core.hbm_rate == pytest.approx(hbm_share, rel=0.01)
    assert core.partitions * core.sbuf_partition_bytes == sbuf_mib << 20
    assert core.partitions * core.psum_partition_bytes == 2 << 20


def test_replace_selects_the_other_of_two_contradicting_figures() -> None:
    other = dataclasses.replace(TRN1, dma_engine_rate=27.2)
    assert other.dma_rate == TRN1.hbm_rate  # the engines together exceed this core's share of the HBM


@pytest.mark.parametrize(("row", "share"), [(512, 0.21), (1024, 0.42), (2048, 0.81), (4096, 0.97), (1 << 20, 1.0)])
def test_row_efficiency_passes_through_the_documented_points(row: int, share: float) -> None:
    assert TRN1.row_efficiency(row) == pytest.approx(share)


@given(st.integers(1, 1 << 16), st.integers(1, 1 << 16))
def test_longer_rows_never_move_slower_and_never_finish_sooner(a: int, b: int) -> None:
    a, b = sorted((a, b))
    assert 0 < TRN1.row_efficiency(a) <= TRN1.row_efficiency(b) <= 1
    assert a / TRN1.row_efficiency(a) <= b / TRN1.row_efficiency(b) * (1 + 1e-9)
