"""Memory and arithmetic: unwritten NaN, accumulation, rounding; runs on arrays and on shapes give one trace."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from neuronmm.emulator.nki import TensorSpec, nki_modules, run
from neuronmm.emulator.nki.trace import Engine, Region, Space

with nki_modules():
    import neuronxcc.nki.isa as xisa
    import neuronxcc.nki.language as xl
    import nki.isa as nisa
    import nki.language as nl

F32, BF16 = np.float32, ml_dtypes.bfloat16


def sbuf_tile(*shape: int, dtype: Any = F32) -> Any:
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def load(x: Any) -> Any:
    tile = sbuf_tile(*x.shape, dtype=x.dtype)
    nisa.dma_copy(dst=tile, src=x)
    return tile


def store_output(tile: Any, dtype: Any = F32) -> Any:
    out = nl.ndarray(tile.shape, dtype=dtype, buffer=nl.shared_hbm)
    if tile.space is Space.PSUM:
        copy = sbuf_tile(*tile.shape)
        nisa.tensor_copy(copy, tile)
        tile = copy
    nisa.dma_copy(dst=out, src=tile)
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3"])
@pytest.mark.parametrize("buffer", ["sbuf", "psum", "hbm"])
def test_unwritten_memory_is_nan(dtype: str, buffer: str) -> None:
    def kernel() -> Any:
        space = {"sbuf": nl.sbuf, "psum": nl.psum, "hbm": nl.hbm}[buffer]
        tile = nl.ndarray((4, 8), dtype=getattr(nl, dtype), buffer=space)
        return store_output(tile)

    assert np.isnan(run(kernel).outputs[0]).all()


def test_unwritten_output_stays_nan() -> None:
    def kernel(x: Any) -> Any:
        out = nl.ndarray((4, 8), dtype=F32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out[0:4, 0:7], src=load(x)[0:4, 0:7])
        return out

    out = run(kernel, np.ones((4, 8), F32)).outputs[0]
    assert np.isnan(out[:, 7]).all() and (out[:, :7] == 1).all()


@pytest.mark.parametrize("flags", [(None, None), (False, True), (None, False), (False, False), (None, True)])
def test_overwrite_and_accumulate(flags: tuple[bool | None, bool | None]) -> None:
    def kernel(a: Any, b: Any) -> Any:
        acc = nl.ndarray((8, 4), dtype=F32, buffer=nl.psum)
        left, right = load(a), load(b)
        for flag in flags:
            nisa.nc_matmul(acc, left, right, accumulate=flag)
        return store_output(acc)

    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 8)).astype(F32), rng.standard_normal((16, 4)).astype(F32)
    result = run(kernel, a, b)
    np.testing.assert_allclose(result.outputs[0], a.T @ b * (1 if flags[1] is False else 2), rtol=1e-6)
    matmuls = [i for i in result.trace.instructions if i.op == "matmul"]
    assert [i.accumulate for i in matmuls] == [False, flags[1] is not False]


def test_first_dialect_accumulates_into_zeros_without_an_instruction() -> None:
    def kernel(a: Any, b: Any, out: Any) -> None:
        acc = xl.zeros((8, 4), dtype=F32, buffer=xl.psum)
        left, right = xl.load(a), xl.load(b)
        for _ in xl.affine_range(3):
            acc += xisa.nc_matmul(left, right)
        xl.store(out, xl.copy(acc))

    a, b = np.ones((16, 8), F32), np.ones((16, 4), F32)
    result = run(kernel, a, b, outputs=[TensorSpec((8, 4))])
    assert (result.outputs[0] == 48).all()
    assert [i.op for i in result.trace.instructions] == ["dma", "dma", "matmul", "matmul", "matmul", "copy", "dma"]
    assert [i.accumulate for i in result.trace.instructions if i.op == "matmul"] == [False, True, True]


def test_matmuls_accumulate_in_float32_and_round_once() -> None:
    def kernel(a: Any, b: Any) -> Any:
        acc = nl.ndarray((1, 1), dtype=F32, buffer=nl.psum)
        left, right = load(a), load(b)
        for i in range(64):
            nisa.nc_matmul(acc, left[0:1, i : i + 1], right[0:1, i : i + 1])
        result = sbuf_tile(1, 1, dtype=BF16)
        nisa.tensor_copy(result, acc)
        return store_output(result, BF16)

    a = np.full((1, 64), 1.0, BF16)
    b = np.full((1, 64), 1 / 256, BF16)
    a[0, 0] = b[0, 0] = 1.0  # a running sum in bfloat16 would stay at 1: 1/256 is half its step
    assert float(run(kernel, a, b).outputs[0][0, 0]) == float(BF16(1 + 63 / 256))


def test_dma_converts_and_engines_compute_in_float32() -> None:
    def kernel(x: Any) -> Any:
        tile = sbuf_tile(*x.shape)
        nisa.dma_copy(dst=tile, src=x)
        half = sbuf_tile(*x.shape, dtype=BF16)
        nisa.activation(half, op=nl.exp, data=tile, scale=0.5)
        return store_output(half, BF16)

    x = np.linspace(-4, 4, 64).astype(BF16).reshape(4, 16)
    expected = np.exp(x.astype(F32) * F32(0.5)).astype(BF16)
    np.testing.assert_array_equal(run(kernel, x).outputs[0].astype(F32), expected.astype(F32))


def blocked_matmul(a: Any, b: Any, out: Any) -> None:
    """A tiled matmul in the first dialect, with loops that the emulator records."""
    for m in xl.affine_range(a.shape[1] // 64):
        acc = xl.zeros((64, 96), dtype=F32, buffer=xl.psum)
        for k in xl.affine_range(a.shape[0] // 128):
            left = xl.load(a[k * 128 : (k + 1) * 128, m * 64 : (m + 1) * 64])
            right = xl.load(b[k * 128 : (k + 1) * 128, 0:96])
            acc += xisa.nc_matmul(left, right)
        xl.store(out[m * 64 : (m + 1) * 64, 0:96], xl.copy(acc, dtype=out.dtype))


def test_a_shape_only_run_gives_the_same_trace() -> None:
    a, b = np.ones((256, 384), F32), np.ones((256, 96), F32)
    with_data = run(blocked_matmul, a, b, outputs=[TensorSpec((384, 96))])
    shapes = run(blocked_matmul, TensorSpec(a.shape), TensorSpec(b.shape), outputs=[TensorSpec((384, 96))])
    assert (with_data.outputs[0] == 256).all() and shapes.outputs == ()
    assert with_data.trace.instructions == shapes.trace.instructions
    assert [b.bytes_per_partition for b in with_data.trace.buffers] == [
        b.bytes_per_partition for b in shapes.trace.buffers
    ]


def test_folding_keeps_totals_and_peaks() -> None:
    arguments = TensorSpec((256, 640)), TensorSpec((256, 96))
    full = run(blocked_matmul, *arguments, outputs=[TensorSpec((640, 96))]).trace
    folded = run(blocked_matmul, *arguments, outputs=[TensorSpec((640, 96))], fold=True).trace
    assert len(folded.instructions) == 3 * len(full.instructions) // 10
    assert folded.traffic() == full.traffic() and folded.multiply_adds() == full.multiply_adds() == 256 * 640 * 96
    assert folded.peak(Space.SBUF) == full.peak(Space.SBUF)


def test_the_recorded_fields_of_each_kind_of_instruction() -> None:
    def kernel(x: Any, out: Any) -> None:
        t = xl.load(x[0:64, 32:96])
        acc = xl.zeros((64, 64), dtype=F32, buffer=xl.psum)
        acc += xisa.nc_matmul(t, t)
        xl.store(out, xisa.activation(op=xl.exp, data=acc, dtype=BF16))

    trace = run(kernel, TensorSpec((64, 128), BF16), outputs=[TensorSpec((64, 64), BF16)]).trace
    loading, matmul, activation, storing = trace.instructions
    assert (loading.engine, loading.bytes, loading.row_bytes, loading.source, loading.target) == (
        Engine.DMA, 64 * 64 * 2, 64 * 2, Space.HBM, Space.SBUF,
    )  # fmt: skip
    assert loading.reads == (Region(0, 0, 64, 64, 192),)
    assert (matmul.engine, matmul.k, matmul.m, matmul.n, matmul.dtype) == (Engine.TENSOR, 64, 64, 64, "bfloat16")
    assert (activation.engine, activation.partitions, activation.elements) == (Engine.SCALAR, 64, 64)
    assert (storing.row_bytes, storing.source, storing.target) == (64 * 2, Space.SBUF, Space.HBM)
    assert trace.traffic() == (64 * 64 * 2, 64 * 64 * 2) and trace.multiply_adds() == 64**3
    used = {region.buffer for i in trace.instructions for region in (*i.reads, *i.writes)}
    for buffer in trace.buffers:
        assert trace.buffers[buffer.id] is buffer
        touched = [
            n for n, i in enumerate(trace.instructions) if buffer.id in {r.buffer for r in (*i.reads, *i.writes)}
        ]
        assert buffer.released == (touched[-1] + 1 if buffer.id in used else buffer.allocated)


def test_a_load_that_casts_reads_the_bytes_that_are_in_memory() -> None:
    def kernel(a: Any, out: Any) -> None:
        xl.store(out, xl.load(a, dtype=xl.bfloat16))

    trace = run(kernel, np.ones((128, 64), F32), outputs=[TensorSpec((128, 64))]).trace
    assert trace.traffic() == (128 * 64 * 4, 128 * 64 * 4)
