"""The kernels' traffic and memory, from shape-only runs at the sizes of the models and of the paper."""

from __future__ import annotations

from typing import Any

import pytest

from neuronmm.emulator.nki import NkiError, TensorSpec, run
from neuronmm.emulator.nki.trace import Engine, Space, Trace
from neuronmm.kernels.hardware import TRN1, TRN2
from neuronmm.kernels.nki.choice import factor_plan
from neuronmm.kernels.nki.layout import Packing
from neuronmm.kernels.nki.problem import Blocks, MlpProblem, Ranks
from neuronmm.kernels.nki.tiling import solve

MLPS = {
    "Llama-3.2-1B": (2048, 8192, 1280),
    "Llama-3.2-3B": (3072, 8192, 1792),
    "Qwen3-4B": (2560, 9728, 1664),
    "Llama-3.1-8B": (4096, 14336, 2560),
    "SmolLM2-135M": (576, 1536, 320),
}
"""Hidden size, intermediate size, rank at ratio 0.2 (SmolLM2's rank is arbitrary)."""


def packed(rows: int, columns: int) -> TensorSpec:
    return TensorSpec((Packing.of(rows, columns, 2).elements,), "bfloat16")


def plain(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "bfloat16")


def linear(kernels: Any, inputs: int, rank: int, out: int, tokens: int, blocks: Blocks, fold: bool = False) -> Trace:
    kernel = kernels.entry_neuronxcc.low_rank_matmul(rank, blocks)
    tensors = plain(inputs, tokens), packed(inputs, rank), packed(rank, out)
    return run(kernel, *tensors, outputs=[plain(out, tokens)], fold=fold).trace


def mlp(kernels: Any, name: str, tokens: int) -> Trace:
    hidden, middle, rank = MLPS[name]
    kernel = kernels.entry_nki.low_rank_swiglu_mlp(Ranks(rank, rank, rank, middle))
    up, down = (packed(hidden, rank), packed(rank, middle)), (packed(middle, rank), packed(rank, hidden))
    return run(kernel, plain(hidden, tokens), *up, *up, *down, core=TRN2).trace


@pytest.mark.parametrize("name", MLPS)
@pytest.mark.parametrize("tokens", [1, 128])
def test_decode_reads_every_weight_once_and_nothing_else(kernels: Any, name: str, tokens: int) -> None:
    hidden, middle, rank = MLPS[name]
    trace = mlp(kernels, name, tokens)
    read, written = trace.traffic()
    weights = 2 * 3 * (hidden + middle) * rank
    assert weights + 2 * hidden * tokens <= read <= 1.01 * weights + 2 * hidden * tokens
    assert written == 2 * hidden * tokens
    spread = hidden * (tokens == 1)  # matmuls with 1 spread the only token over the partitions
    assert trace.multiply_adds() == 3 * (hidden + middle) * rank * tokens + spread
    assert trace.peak(Space.SBUF) <= TRN2.sbuf_usable_bytes
    long = sum(i.bytes for i in trace.instructions if i.engine is Engine.DMA and i.row_bytes >= 2048)
    assert long >= 0.99 * weights


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "SmolLM2-135M"])
def test_prefill_keeps_the_activation_on_chip(kernels: Any, name: str) -> None:
    hidden, middle, rank = MLPS[name]
    tokens = 1100
    trace = mlp(kernels, name, tokens)
    read, written = trace.traffic()
    strips = -(-tokens // solve(MlpProblem(tokens, hidden, middle, rank, rank, rank), TRN2).blocks.tokens)
    weights = 2 * 3 * (hidden + middle) * rank
    assert written == 2 * hidden * tokens
    assert read <= 1.01 * strips * weights + 2 * hidden * tokens
    assert trace.multiply_adds() == 3 * (hidden + middle) * rank * tokens
    hbm_shapes = {b.shape for b in trace.buffers if b.space is Space.HBM}
    assert not any(middle in shape for shape in hbm_shapes)


def test_the_solvers_blocks_fit_the_largest_model(kernels: Any) -> None:
    assert mlp(kernels, "Llama-3.1-8B", 512).peak(Space.SBUF) <= TRN2.sbuf_usable_bytes


def test_traffic_of_the_published_shape_is_that_of_equation_10(kernels: Any) -> None:
    tokens, inputs, rank, out, strip = 32768, 8192, 4096, 16384, 1024
    trace = linear(kernels, inputs, rank, out, tokens, Blocks(tokens=strip, depth=8), fold=True)
    equation = 2 * (tokens * inputs + tokens // strip * (inputs + out) * rank + tokens * out)
    assert sum(trace.traffic()) == equation
    assert trace.multiply_adds() == tokens * rank * (inputs + out)
    assert trace.peak(Space.SBUF) <= TRN1.sbuf_usable_bytes


def test_a_strip_that_does_not_fit_is_refused(kernels: Any) -> None:
    with pytest.raises(NkiError, match="sbuf capacity") as caught:
        linear(kernels, 8192, 4096, 16384, 2048, Blocks(tokens=2048, depth=8))
    assert any(file in caught.value.location for file in ("moves.py", "matmuls.py", "stages.py"))


def test_tails_are_not_padded(kernels: Any) -> None:
    """Rank 1664 is 13 chunks, not 16; 576 inputs are 5, not 8; 130 tokens are 130."""
    trace = linear(kernels, 576, 1664, 576, 130, Blocks(tokens=128, moving=128))
    matmuls = [i for i in trace.instructions if i.op == "matmul"]
    assert len(matmuls) == 2 * (5 * 13 + 13 * 5)
    assert trace.multiply_adds() == 130 * 1664 * (576 + 576)


def test_decode_moves_the_tokens_and_transposes_nothing(kernels: Any) -> None:
    trace = mlp(kernels, "Llama-3.2-1B", 4)
    assert {i.n for i in trace.instructions if i.op == "matmul"} == {4}
    assert not any(i.op == "transpose" for i in trace.instructions)
    assert {i.op for i in trace.instructions if i.engine is Engine.DMA} == {"dma"}


@pytest.mark.parametrize(("inputs", "rows"), [(2048, [4096]), (576, [1150, 2])])
def test_a_single_token_is_loaded_as_one_row(kernels: Any, inputs: int, rows: list[int]) -> None:
    """128 rows of a few bytes would take a DMA longer. 576 features are five chunks whose last partition is ragged."""
    trace = linear(kernels, inputs, 128, 128, 1, Blocks(tokens=1, moving=1))
    loads = [i for i in trace.instructions if i.engine is Engine.DMA and i.partitions == 1 and i.target is Space.SBUF]
    assert [i.row_bytes for i in loads] == rows


def test_evictions_alternate_between_engines(kernels: Any) -> None:
    trace = linear(kernels, 256, 512, 1024, 512, Blocks())
    copies = [i.engine for i in trace.instructions if i.op == "copy"]
    assert copies.count(Engine.SCALAR) == copies.count(Engine.VECTOR) == len(copies) // 2


def test_baselines_move_the_bytes_of_their_schedules(kernels: Any) -> None:
    d, b = kernels.dialect_nki.Dialect(), kernels.baselines
    m, k, r, n = 2048, 1024, 512, 2048

    def factor(w: Any, rows: int, columns: int) -> Any:
        return kernels.objects.factor(w, factor_plan(rows, columns, w))

    def traffic(body: Any, *tensors: TensorSpec, out: TensorSpec) -> tuple[int, int]:
        return run(body, *tensors, outputs=[out]).trace.traffic()

    read, written = traffic(
        lambda x, w, y: b.dense_blocked(d, x, w, y, b.Tutorial()), plain(k, m), plain(k, n), out=plain(m, n)
    )
    assert (read, written) == (2 * (k * n + n // 1024 * k * m), 2 * m * n)
    read, written = traffic(
        lambda x, u, v, y: b.sequential(d, x, u, v, y, b.Tutorial()), plain(k, m), plain(k, r), plain(r, n),
        out=plain(m, n),
    )  # fmt: skip
    assert written == 2 * (r * m + m * n) and read == 2 * (k * m + 2 * k * r + r * n + 2 * r * m)
    read, written = traffic(
        lambda x, a, v, y: b.recomputing(d, x, factor(a, k, r), factor(v, r, n), y, Blocks()),
        plain(k, m), packed(k, r), packed(r, n), out=plain(n, m),
    )  # fmt: skip
    blocks_of_outputs = n // 1024
    assert written == 2 * m * n and read == 2 * (blocks_of_outputs * (k * m + m // 512 * k * r) + m // 512 * r * n)
