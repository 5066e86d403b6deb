"""Factors in fp8: values in both dialects, entries, traffic, the solver, and what is refused.

The rule is that of bfloat16 (``error_rule``): at most twice the error of torch in bfloat16, which multiplies by the
factors that the eight bits and their scales stand for.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draws import examples
from error_rule import draws_to_pool
from neuronmm.emulator.nki import NkiError, TensorSpec, run
from neuronmm.emulator.nki.trace import Engine, Space
from neuronmm.emulator.timing import report, simulate
from neuronmm.kernels import KernelError
from neuronmm.kernels.fp8 import LARGEST, quantise_fp8
from neuronmm.kernels.hardware import CORES, TRN2
from neuronmm.kernels.nki.forms import mlp_packings
from neuronmm.kernels.nki.layout import Packing
from neuronmm.kernels.nki.low_rank_matmul_torch import low_rank_matmul
from neuronmm.kernels.nki.low_rank_mlp_torch import low_rank_swiglu_mlp
from neuronmm.kernels.nki.problem import FP8, Blocks, MlpProblem, Problem, Ranks
from neuronmm.kernels.nki.tiling import solve
from nki_cases import judge, to_torch

DIALECTS = ("neuronxcc", "nki")
BF16 = torch.bfloat16
SIZES = st.sampled_from([1, 2, 7, 64, 127, 128, 129, 200, 257, 300])
TOKENS = st.sampled_from([1, 2, 16, 65, 129, 200])
BLOCKS = st.builds(
    Blocks,
    tokens=st.sampled_from([64, 128, 513]),
    moving=st.sampled_from([32, 100, 512]),
    depth=st.sampled_from([0, 1, 2]),
    intermediate=st.sampled_from([0, 1, 2]),
    panels=st.sampled_from([1, 2, 3]),
)
OPTIONS = st.fixed_dictionaries({name: st.booleans() for name in ("norm", "residual", "tokens_first")})


@pytest.mark.parametrize("dialect", DIALECTS)
@examples(12)
@given(
    inputs=SIZES, rank=SIZES, rest=SIZES, form=st.sampled_from(["two", "rows", "columns"]), tokens=TOKENS, sizes=BLOCKS,
    options=OPTIONS, bias=st.booleans(),
)  # fmt: skip
def test_linears(
    kernels: Any, make: Any, dialect: str, inputs: int, rank: int, rest: int, form: str, tokens: int, sizes: Blocks,
    options: dict[str, bool], bias: bool,
) -> None:  # fmt: skip
    pivots = {"two": None, "rows": rest // 2, "columns": "columns"}[form]
    out = rest + rank * (form == "rows")
    if form == "columns":
        inputs, options = inputs + rank, {**options, "norm": False}
    shape, drawn = (inputs, rank, out, tokens, BF16), {"fp8": True, "bias": bias, "pivots": pivots, **options}
    seeds = range(draws_to_pool(tokens * min(inputs, rank, out)))
    judge([make.linear(*shape, seed=seed, **drawn) for seed in seeds], lambda c: c.run(kernels, dialect, sizes))


@pytest.mark.parametrize("dialect", DIALECTS)
@examples(12)
@given(
    hidden=SIZES, middle=SIZES, ranks=st.tuples(SIZES, SIZES, SIZES), tokens=TOKENS, sizes=BLOCKS, options=OPTIONS,
    shared=st.booleans(), pivoted=st.booleans(),
)  # fmt: skip
def test_mlps(
    kernels: Any, make: Any, dialect: str, hidden: int, middle: int, ranks: tuple[int, int, int], tokens: int,
    sizes: Blocks, options: dict[str, bool], shared: bool, pivoted: bool,
) -> None:  # fmt: skip
    ranks = (ranks[0], ranks[0] if shared else ranks[1], ranks[2])
    drawn = {"fp8": True, "shared": shared, **options}
    if pivoted:
        middle += max(ranks)
        drawn["pivots"] = (1, None if shared else 0, "columns")
    seeds = range(draws_to_pool(tokens * min(hidden, middle, *ranks)))
    cases = [make.mlp(hidden, middle, ranks, tokens, BF16, seed=seed, **drawn) for seed in seeds]
    judge(cases, lambda c: c.run(kernels, dialect, sizes))


@pytest.mark.parametrize("tokens", [1, 150])
def test_entries_references_and_dialects_agree(kernels: Any, make: Any, tokens: int) -> None:
    """Both entries give the same bits, with and without a residual; the torch reference is as near to float64."""
    for residual in (False, True):
        drawn = {"fp8": True, "norm": True, "residual": residual, "tokens_first": residual}
        linear = make.linear(200, 130, 350, tokens, BF16, bias=True, pivots=101, **drawn)
        mlps = [
            make.mlp(140, 500, (230, 230 if shared else 170, 190), tokens, BF16, shared=shared,
                     pivots=(100, None if shared else 150, "columns"), **drawn)
            for shared in (False, True)
        ]  # fmt: skip
        for case in (linear, *mlps):
            tensors = case.arguments()
            options = {
                "epsilon": case.epsilon, "residual": residual, "layout": "BSH" if residual else "HSB", "scaled": True,
            }  # fmt: skip
            if case.is_mlp:
                name, static = f"low_rank_swiglu_mlp{'_shared' * case.shared}", case.ranks()
                tensors = [t for i, t in enumerate(tensors) if i != 3 or not case.shared]
            else:
                name, static = "low_rank_matmul", len(case.weights[0])
                options |= dict(zip(("form", "pivots"), case.form, strict=True), bias=True)
            first = getattr(kernels.entry_neuronxcc, name)(static, **options)
            second = getattr(kernels.entry_nki, name)(static, **options)
            result = case.result(run(first, *tensors, outputs=[case.output()]).outputs[0])
            assert torch.equal(result, case.result(second(*tensors)))
            judge([case], lambda _, y=result: y)
            reference = low_rank_swiglu_mlp if case.is_mlp else low_rank_matmul
            exact = reference(**case.named(kernels, *map(to_torch, case.arguments())))
            judge([case], lambda c, y=exact: c.result(y.numpy()).to(BF16))


def test_a_partial_mlp(kernels: Any, make: Any) -> None:
    case = make.mlp(200, 700, (330, 200, 410), 70, BF16, pivots=(100, 150, "columns"), fp8=True)
    tensors = case.arguments()
    kernel = kernels.entry_neuronxcc.low_rank_swiglu_mlp(case.ranks(), partial=True, scaled=True)
    bf16 = tensors[0].dtype
    part = to_torch(run(kernel, *tensors[:6], tensors[7], outputs=[TensorSpec((410, 70), bf16)]).outputs[0])
    judge([case], lambda c: (c.weights[5].double() @ part.double()).to(BF16))


MODEL = 2048, 8192, 1280
"""Llama-3.2-1B's hidden and intermediate size, and the rank of its MLP at 0.2."""


def decode(kernels: Any, tokens: int, fp8: bool, norm: bool = False, device: str = "trn2") -> Any:
    hidden, middle, rank = MODEL
    packings = mlp_packings(hidden, Ranks(rank, rank, rank, middle), False, 1 if fp8 else 2)
    weights = [TensorSpec((p.elements,), FP8 if fp8 else "bfloat16") for p in packings]
    columns = sum(p.columns.count for p in packings) + norm * packings[0].rows.count
    weights += [TensorSpec((128, columns))] if fp8 else []
    problem = MlpProblem(tokens, hidden, middle, rank, rank, rank, norm=norm, factors=FP8 if fp8 else "")
    blocks = solve(problem, CORES[device]).blocks
    static = Ranks(rank, rank, rank, middle), blocks, 0.1 if norm else 0.0
    x = TensorSpec((hidden, tokens), "bfloat16")
    kernel = kernels.entry_neuronxcc.low_rank_swiglu_mlp(*static, scaled=fp8)
    return run(kernel, x, *weights, outputs=[x], core=CORES[device], fold=True).trace


@pytest.mark.parametrize("tokens", [1, 64])
def test_decode_reads_half_the_bytes(kernels: Any, tokens: int) -> None:
    hidden, middle, rank = MODEL
    trace = decode(kernels, tokens, True)
    read, written = trace.traffic()
    weights, table = 3 * (hidden + middle) * rank, 128 * 4 * (3 * 10 + 2 * 64 + 16)
    assert written == 2 * hidden * tokens
    assert weights + table + written <= read <= 1.01 * weights + table + written
    long = sum(i.bytes for i in trace.instructions if i.engine is Engine.DMA and i.row_bytes >= 2048)
    assert long >= 0.99 * weights
    assert not any(i.op == "copy" and i.dtype == FP8 for i in trace.instructions)  # nothing is widened


@pytest.mark.parametrize("device", CORES)
@pytest.mark.parametrize("tokens", [1, 512])
def test_the_solver_counts_what_the_kernel_does(kernels: Any, device: str, tokens: int) -> None:
    core, norm = CORES[device], True
    trace = decode(kernels, tokens, True, norm, device)
    tiling = solve(MlpProblem(tokens, *MODEL[:2], *[MODEL[2]] * 3, norm=norm, factors=FP8), core)
    result = report(simulate(trace, core))
    assert trace.peak(Space.SBUF) <= max(tiling.sbuf)
    assert result.traffic == pytest.approx(tiling.traffic, rel=1e-3)
    warm_up = core.tensor_warm_up_ns * 1e-9
    assert result.latency == pytest.approx(tiling.seconds, rel=0.1, abs=4e-6 + warm_up)


def test_what_is_refused(kernels: Any) -> None:
    with pytest.raises(KernelError, match="activations of 16 bits"):
        Problem(1, 8, 8, 8, "float32", factors=FP8)
    with pytest.raises(KernelError, match="must be of one dtype"):
        Problem(1, 8, 8, 8, factors="int8")
    # the compilers know e4m3fn, which reaches 448, on NeuronCore-v4 only
    x, table = TensorSpec((16, 4), "bfloat16"), TensorSpec((128, 2))
    fn = TensorSpec((128,), "float8_e4m3fn")
    kernel = kernels.entry_neuronxcc.low_rank_matmul(8, Blocks(), scaled=True)
    with pytest.raises(NkiError, match="float8_e4m3fn"):
        run(kernel, x, fn, fn, table, outputs=[x], core=TRN2)
    run(kernel, x, fn, fn, table, outputs=[x], core=CORES["trn3"])


def test_the_bytes_hold_on_every_core() -> None:
    """torch's e4m3fn and the device's e4m3 read the same numbers from the bytes, also at the ends of the range."""
    weight = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 50)[:, None]
    fp8 = quantise_fp8(torch.cat([weight, torch.zeros(1, 300), torch.full((1, 300), 1e-42)]))
    device = fp8.values.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3).astype(np.float32)
    assert np.array_equal(device, fp8.values.float().numpy())
    assert fp8.values[:50].float().abs().amax(1).tolist() == [LARGEST] * 50


@examples(20)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), exponent=st.integers(-37, 37), seed=st.integers(0, 99))
def test_no_element_changes_more_than_promised(rows: int, columns: int, exponent: int, seed: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    fp8 = quantise_fp8(weight)
    change = (fp8.dequantise(torch.float64) - weight.double()).abs()
    bound = torch.maximum(weight.double().abs() / 16, fp8.scales.double()[:, None] / 1024)
    assert (change <= bound * (1 + 1e-6)).all()


def test_packing_counts_bytes() -> None:
    """With one byte an element, rows as long have twice the column chunks."""
    assert Packing.of(2048, 8192, 1).group == 2 * Packing.of(2048, 8192, 2).group
