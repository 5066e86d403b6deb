"""Packing: it is inverted exactly, rows are long enough, and little is padded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draws import examples
from neuronmm.kernels.nki.layout import Chunks, Packing, order, pack, unpack

FEATURES = st.integers(1, 1200)
MODELS = [(2048, 8192, 1280), (3072, 8192, 1792), (2560, 9728, 1664), (4096, 14336, 2560), (576, 1536, 320)]
"""Hidden size, intermediate size and one rank of Llama-3.2-1B and -3B, Qwen3-4B, Llama-3.1-8B, SmolLM2-135M."""


@examples(40)
@given(rows=FEATURES, columns=FEATURES, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_unpack_inverts_pack(rows: int, columns: int, dtype: torch.dtype) -> None:
    weight = torch.arange(rows * columns).reshape(columns, rows).remainder(251).to(dtype)
    packed = pack(weight)
    assert packed.dtype == dtype and packed.shape == (Packing.of(rows, columns, weight.element_size()).elements,)
    assert torch.equal(unpack(packed, rows, columns), weight)


def test_the_norms_weight_is_folded_in() -> None:
    weight, scale = torch.randn(7, 300), torch.randn(300)
    assert torch.equal(unpack(pack(weight, scale), 300, 7), weight * scale)


@given(size=st.integers(1, 3000))
def test_chunks_cover_a_dimension_once(size: int) -> None:
    cut = Chunks(size)
    lengths = [cut.length(c) for c in range(cut.count)]
    assert cut.count == -(-size // 128) and sum(lengths) == size and max(lengths) == cut.width <= 128
    assert max(lengths) - min(lengths) <= 1
    assert sorted(order(cut)) == list(range(size))
    assert [cut.start(c) for c in range(cut.count)] == [sum(lengths[:c]) for c in range(cut.count)]


@pytest.mark.parametrize(("hidden", "middle", "rank"), MODELS)
def test_rows_of_the_models_are_long_and_little_is_padded(hidden: int, middle: int, rank: int) -> None:
    for rows, columns in ((hidden, rank), (rank, middle), (middle, rank), (rank, hidden)):
        packing = Packing.of(rows, columns, 2)
        assert packing.elements <= 1.01 * rows * columns
        panels = packing.panels
        assert sum(p.columns for p in panels) == columns
        assert all(packing.rows.count * p.columns * 2 >= 2048 for p in panels)


@given(rows=st.integers(1, 9000), columns=st.integers(1, 9000))
def test_the_last_panels_are_the_smallest(rows: int, columns: int) -> None:
    """A panel begins every ``group`` chunks, so that blocks are complete panels; no row is shorter than 2 KiB."""
    packing = Packing.of(rows, columns, 2)
    sizes = packing.chunks_of_panels()
    assert sum(sizes) == packing.columns.count and max(sizes) <= packing.group
    starts = {panel.first for panel in packing.panels}
    assert starts >= set(range(0, packing.columns.count, packing.group))
    assert min(sizes) >= min(packing.least, packing.columns.count % packing.group or packing.group)
    if packing.columns.count > packing.group > packing.least:
        assert sizes[-1] < packing.group
        assert sizes[-1] <= max(packing.least, -(-packing.group // 4)) or packing.columns.count % packing.group


def test_a_panel_is_contiguous_for_each_partition() -> None:
    rows, columns = 256, 300
    weight = torch.arange(rows * columns, dtype=torch.float32).reshape(columns, rows)
    packing, packed = Packing.of(rows, columns, 4), pack(weight)
    panel = packing.panels[0]
    part = packed[panel.offset : panel.offset + 128 * 2 * panel.columns].view(128, 2, panel.columns)
    features = order(packing.columns)
    for p, c, q in ((0, 0, 0), (3, 1, 5), (127, 1, panel.columns - 1)):
        assert part[p, c, q] == weight[features[packing.columns.start(panel.first) + q], p * packing.rows.count + c]
