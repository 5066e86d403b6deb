"""The tiling solver: choices fit the memory, match the published optimum, and agree with the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from draws import examples
from neuronmm.emulator.nki import TensorSpec, nki_modules, run
from neuronmm.emulator.nki.trace import Space, Trace
from neuronmm.emulator.timing import report, simulate
from neuronmm.kernels import KernelError
from neuronmm.kernels.hardware import CORES, DTYPE_BYTES, TRN1, NeuronCore
from neuronmm.kernels.nki.choice import TensorType, linear_blocks
from neuronmm.kernels.nki.layout import Packing
from neuronmm.kernels.nki.problem import Blocks, MlpProblem, Problem, Ranks
from neuronmm.kernels.nki.tiling import LONG_TOKEN, consider, evaluate, explain, solve

DEEPSEEK_UP = Problem(tokens=4096, inputs=7168, rank=4096, outputs=18432)
FLAGS = {name: st.booleans() for name in ("norm", "residual", "tokens_first")}
OPTIONS = {"dtype": st.sampled_from(("bfloat16", "float32")), **FLAGS}
linears = st.builds(
    Problem,
    tokens=st.integers(1, 40000),
    inputs=st.integers(1, 16384),
    rank=st.integers(1, 4096),
    outputs=st.integers(1, 20000),
    **OPTIONS,
)
mlps = st.builds(
    MlpProblem,
    tokens=st.integers(1, 9000),
    hidden=st.integers(1, 8192),
    intermediate=st.integers(1, 16384),
    gate=st.integers(1, 2048),
    up=st.integers(1, 2048),
    down=st.integers(1, 2048),
    shared=st.booleans(),
    **OPTIONS,
)
problems = st.one_of(linears, mlps)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path))


def kernel_trace(problem: Problem | MlpProblem, blocks: Blocks, core: NeuronCore) -> Trace:
    def packed(rows: int, columns: int) -> TensorSpec:
        return TensorSpec((Packing.of(rows, columns, DTYPE_BYTES[problem.dtype]).elements,), problem.dtype)

    def activation(features: int) -> TensorSpec:
        shape = (features, problem.tokens)
        return TensorSpec(shape[::-1] if problem.tokens_first else shape, problem.dtype)

    epsilon, layout = (0.1 if problem.norm else 0.0), ("BSH" if problem.tokens_first else "HSB")
    with nki_modules():
        from neuronmm.kernels.nki.entry_neuronxcc import (
            low_rank_matmul,
            low_rank_swiglu_mlp,
            low_rank_swiglu_mlp_shared,
        )

        if isinstance(problem, Problem):
            kernel = low_rank_matmul(problem.rank, blocks, epsilon, problem.residual, layout=layout)
            x, y = activation(problem.inputs), activation(problem.outputs)
            weights = [packed(problem.inputs, problem.rank), packed(problem.rank, problem.outputs)]
        else:
            p = problem
            entry = low_rank_swiglu_mlp_shared if p.shared else low_rank_swiglu_mlp
            ranks = Ranks(p.gate, p.gate if p.shared else p.up, p.down, p.intermediate)
            kernel = entry(ranks, blocks, epsilon, p.residual, layout)
            x = y = activation(p.hidden)
            weights = [packed(p.hidden, ranks.gate), packed(ranks.gate, p.intermediate)]
            weights += [] if p.shared else [packed(p.hidden, ranks.up)]
            weights += [packed(ranks.up, p.intermediate), packed(p.intermediate, p.down), packed(p.down, p.hidden)]
        extra = [y] if problem.residual else []
        return run(kernel, x, *weights, *extra, outputs=[y], core=core, fold=True).trace


def test_the_published_optimum() -> None:
    """In the paper's block sweep of DeepSeek-V3's up projection, 1024 is best, and 2048 and 4096 spill."""
    assert solve(DEEPSEEK_UP).blocks.tokens == 1024
    for strip in (2048, 4096):
        refusals = [refusal for t, refusal in consider(DEEPSEEK_UP, TRN1) if t.blocks.tokens == strip]
        assert refusals and all(refusal is not None and "would spill" in refusal for refusal in refusals)
        with pytest.raises(KernelError, match="would spill"):
            evaluate(DEEPSEEK_UP, Blocks(strip, 512, 8))


def test_traffic_is_the_papers_equation() -> None:
    m, k, r, n = 8192, 8192, 4096, 16384
    tiling = solve(Problem(m, k, r, n))
    assert tiling.traffic == 2 * (m * k + m // tiling.blocks.tokens * (k * r + r * n) + m * n)


@examples(60)
@given(problems, st.sampled_from(sorted(CORES)))
def test_what_is_chosen_fits(problem: Problem | MlpProblem, device: str) -> None:
    """For any sizes; with tokens first, only up to ``LONG_TOKEN`` bytes per token is that certain."""
    core = CORES[device]
    features = max(problem.inputs, problem.outputs) if isinstance(problem, Problem) else problem.hidden
    try:
        tiling = solve(problem, core)
    except KernelError as error:
        assert problem.tokens_first and features * DTYPE_BYTES[problem.dtype] > LONG_TOKEN
        assert "lay out features first" in str(error)
        return
    assert max(tiling.sbuf) <= core.sbuf_usable_bytes
    assert tiling.psum_banks <= core.psum_banks
    assert 0 < tiling.mfu <= 1
    assert tiling.seconds >= max(tiling.tensor, tiling.dma / 2, tiling.vector / 2)
    fitting = [t for t, refusal in consider(problem, core) if refusal is None]
    assert tiling.seconds <= 1.01 * min(t.seconds for t in fitting)


@pytest.mark.parametrize(
    ("problem", "device"),
    [
        (Problem(2048, 2048, 1280, 4096), "trn1"),
        (Problem(1024, 2048, 1024, 4096), "trn2"),
        (Problem(1500, 576, 200, 1536), "trn1"),
        (Problem(512, 1024, 512, 1024, "float32"), "trn1"),
        (Problem(1, 2048, 1280, 8192), "trn1"),
        (Problem(64, 2048, 1280, 8192), "trn3"),
        (Problem(1024, 1024, 512, 2048, tokens_first=True), "trn1"),
        (MlpProblem(1, 2048, 8192, 1280, 1280, 1280), "trn1"),
        (MlpProblem(16, 2048, 6144, 1280, 1280, 1280), "trn2"),
        (MlpProblem(4, 2048, 6144, 1280, 1280, 1280), "trn3"),
        (MlpProblem(1024, 1024, 3072, 640, 512, 768), "trn1"),
        (MlpProblem(700, 1024, 3072, 640, 640, 768, shared=True, norm=True, residual=True), "trn2"),
    ],
    ids=str,
)
def test_the_simulator_agrees(problem: Problem | MlpProblem, device: str) -> None:
    """The kernel under the emulator fits the modelled memory, moves the modelled bytes and takes the modelled time."""
    core = CORES[device]
    tiling = solve(problem, core)
    trace = kernel_trace(problem, tiling.blocks, core)
    result = report(simulate(trace, core))
    assert trace.peak(Space.SBUF) <= max(tiling.sbuf)
    assert result.traffic == pytest.approx(tiling.traffic, rel=1e-3)
    warm_up = core.tensor_warm_up_ns * 1e-9
    assert result.latency == pytest.approx(tiling.seconds, rel=0.1, abs=4e-6 + warm_up)


@examples(16)
@given(
    st.one_of(
        st.builds(
            Problem, tokens=st.integers(1, 700), inputs=st.integers(1, 1500), rank=st.integers(1, 600),
            outputs=st.integers(1, 1500), **FLAGS,
        ),
        st.builds(
            MlpProblem, tokens=st.integers(1, 700), hidden=st.integers(1, 900), intermediate=st.integers(1, 1500),
            gate=st.integers(1, 400), up=st.integers(1, 400), down=st.integers(1, 400), shared=st.booleans(), **FLAGS,
        ),
    )
)  # fmt: skip
@example(Problem(181, 385, 1, 1, tokens_first=True))  # a static_range that fills a list in each turn
@example(Problem(4607, 7168, 4096, 18432))  # a last strip of less than 512 tokens, which stores its outputs at once
def test_the_kernel_needs_no_more_than_is_counted(problem: Problem | MlpProblem) -> None:
    tiling = solve(problem)
    trace = kernel_trace(problem, tiling.blocks, TRN1)  # the emulator raises where memory runs out
    assert trace.peak(Space.SBUF) <= max(tiling.sbuf)
    moving = sum(i.k * i.m * i.n for i in trace.instructions if i.op == "matmul" and "moves.py" in i.location)
    assert trace.multiply_adds() - moving - squares(problem) == problem.multiply_adds


def squares(problem: Problem | MlpProblem) -> int:
    """Multiply-adds of the norm's sum of squares, which also runs on the tensor engine."""
    inputs = problem.inputs if isinstance(problem, Problem) else problem.hidden
    return 128 * inputs * problem.tokens * problem.norm


def test_the_last_strip_counts() -> None:
    with pytest.raises(KernelError, match="would spill"):
        evaluate(Problem(1535, 128, 128, 30000), Blocks(1024, 512, 0, 8, 1))
    assert evaluate(Problem(1536, 128, 128, 30000), Blocks(1024, 512, 0, 8, 1))


def test_decode_reaches_the_dma_limit() -> None:
    """In the simulator, the MLPs of the supported models reach 90 % of the DMA rate on every generation."""
    for device, core in CORES.items():
        for hidden, intermediate, rank in ((2048, 8192, 1280), (2048, 6144, 1280)):
            problem = MlpProblem(1, hidden, intermediate, rank, rank, rank)
            result = report(simulate(kernel_trace(problem, solve(problem, core).blocks, core), core))
            assert result.traffic / core.dma_rate * 1e-9 >= 0.9 * result.latency, (device, hidden, intermediate)


@pytest.mark.parametrize("tokens", [1, 128, 129, 4096])
@pytest.mark.parametrize("device", CORES)
def test_tokens_first_fit_up_to_the_bound(tokens: int, device: str) -> None:
    for dtype, size in DTYPE_BYTES.items():
        most = LONG_TOKEN // size
        solve(Problem(tokens, most, 4096, most, dtype, True, True, True), CORES[device])
        solve(MlpProblem(tokens, most, 4 * most, 4096, 4096, 4096, dtype, False, True, True, True), CORES[device])


def test_one_token_needs_one_row() -> None:
    """One row of 12161 float32 features fits beside the weights; two rows, for more than 128 tokens, do not."""
    problem = Problem(1, 12161, 3938, 1, "float32", tokens_first=True)
    tiling = solve(problem)
    assert kernel_trace(problem, tiling.blocks, TRN1).peak(Space.SBUF) <= max(tiling.sbuf)
    with pytest.raises(KernelError, match="lay out features first"):
        solve(replace(problem, tokens=129))
    solve(replace(problem, tokens=129, tokens_first=False))


def test_the_explanation_names_the_choice_and_the_refusals() -> None:
    lines = explain(DEEPSEEK_UP)
    assert any(line.strip().startswith("1024") and "<- chosen" in line for line in lines)
    assert sum("refused" in line for line in lines) == 2


def test_bad_problems_are_refused() -> None:
    with pytest.raises(KernelError, match="must be positive"):
        Problem(0, 1, 1, 1)
    with pytest.raises(KernelError, match="at most 1048576"):  # the solver would enumerate panels for hours
        MlpProblem(4096, 999999937, 999999937, 7, 7, 7)
    with pytest.raises(KernelError, match="dtype 'int8'"):
        Problem(1, 1, 1, 1, "int8")
    with pytest.raises(KernelError, match="does not fit"):
        solve(Problem(4096, 4096, 400000, 4096))


def test_a_norm_of_float16_is_refused() -> None:
    """The squares of 256 and more would be infinite, and the result zero."""
    for dtype in ("bfloat16", "float32"):
        assert linear_blocks(TensorType(dtype, (128, 4)), TensorType(dtype), 32, 64, TRN1, norm=True)
    with pytest.raises(KernelError, match="squares of float16 overflow"):
        linear_blocks(TensorType("float16", (128, 4)), TensorType("bfloat16"), 32, 64, TRN1, norm=True)
