"""Pivoted linears and MLPs: values in both dialects, refused inputs, traffic, and the solver.

The rules are those of the two-factor kernels: 1e-5 of float64 in float32, twice torch's error in bfloat16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draws import examples
from error_rule import draws_to_pool
from neuronmm.emulator.nki import TensorSpec, run
from neuronmm.emulator.nki.trace import Engine, Space, Trace
from neuronmm.emulator.timing import report, simulate
from neuronmm.kernels import KernelError
from neuronmm.kernels.factors import Form, LowRank
from neuronmm.kernels.hardware import TRN1, TRN2
from neuronmm.kernels.nki.choice import linear_plans
from neuronmm.kernels.nki.forms import linear_packings, mlp_packings
from neuronmm.kernels.nki.layout import Packing, pack, unpacked
from neuronmm.kernels.nki.low_rank_mlp_torch import low_rank_swiglu_mlp
from neuronmm.kernels.nki.objects import Options, factor
from neuronmm.kernels.nki.problem import Blocks, MlpProblem, Pivots, Problem, Ranks
from neuronmm.kernels.nki.tiling import solve
from nki_cases import judge, to_torch

DIALECTS = ("neuronxcc", "nki")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCKS = st.builds(
    Blocks,
    tokens=st.sampled_from([64, 128, 520]),
    moving=st.sampled_from([32, 100, 512]),
    depth=st.sampled_from([0, 1, 2]),
    intermediate=st.sampled_from([0, 1, 2]),
    panels=st.sampled_from([1, 2, 3]),
)
TOKENS = st.sampled_from([1, 2, 16, 65, 128, 200])
FLAGS = ("residual", "tokens_first")
OPTIONS = st.fixed_dictionaries({name: st.booleans() for name in FLAGS})


def near(actual: torch.Tensor, exact: torch.Tensor) -> None:
    error = (actual.double() - exact).norm() / exact.norm()
    assert error <= 1e-5, f"relative error {error:.3g}"


@st.composite
def linears(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes and pivots of a pivoted linear."""
    rank, rest, other = draw(st.integers(1, 300)), draw(st.integers(1, 400)), draw(st.integers(1, 300))
    options = {name: draw(st.booleans()) for name in (*FLAGS, "bias")}
    if draw(st.booleans()):
        return {"inputs": rank + rest, "rank": rank, "out": other, "pivots": "columns", **options}
    options["norm"] = draw(st.booleans())
    return {"inputs": other, "rank": rank, "out": rank + rest, "pivots": draw(st.integers(0, rest)), **options}


@st.composite
def mlps(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes and pivots of an MLP: each linear has pivots, ``rank`` or fewer, or two factors; any ranges may overlap."""
    middle = draw(st.integers(2, 900))
    ranks = [draw(st.integers(1, 400)) for _ in range(3)]
    shared = draw(st.booleans())
    ranks[1] = ranks[0] if shared else ranks[1]
    counts = [draw(st.just(most) | st.integers(1, most)) for most in (min(rank, middle - 1) for rank in ranks)]
    gate, up = (draw(st.none() | st.tuples(st.integers(0, middle - n), st.just(n))) for n in counts[:2])
    pivots = gate, None if shared else up, draw(st.sampled_from([None, ("columns", counts[2])]))
    options = {name: draw(st.booleans()) for name in (*FLAGS, "norm")}
    return {"middle": middle, "ranks": tuple(ranks), "shared": shared, "pivots": pivots, **options}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", DTYPES)
@examples(20)
@given(sizes=linears(), tokens=TOKENS, blocks=BLOCKS)
def test_linears(
    kernels: Any, make: Any, dialect: str, dtype: str, sizes: dict[str, Any], tokens: int, blocks: Blocks
) -> None:
    drawn = range(draws_to_pool(tokens * min(sizes["inputs"], sizes["rank"], sizes["out"])))
    cases = [make.linear(tokens=tokens, dtype=DTYPES[dtype], seed=seed, **sizes) for seed in drawn]
    judge(cases, lambda case: case.run(kernels, dialect, blocks))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", DTYPES)
@examples(20)
@given(hidden=st.integers(1, 300), sizes=mlps(), tokens=TOKENS, blocks=BLOCKS)
def test_mlps(
    kernels: Any, make: Any, dialect: str, dtype: str, hidden: int, sizes: dict[str, Any], tokens: int, blocks: Blocks
) -> None:
    drawn = range(draws_to_pool(tokens * min(hidden, *sizes["ranks"])))
    cases = [make.mlp(hidden, tokens=tokens, dtype=DTYPES[dtype], seed=seed, **sizes) for seed in drawn]
    judge(cases, lambda case: case.run(kernels, dialect, blocks))


@pytest.mark.parametrize("tokens", [1, 600])
@pytest.mark.parametrize("layout", ["HSB", "BSH"])
def test_entries_of_both_dialects(kernels: Any, make: Any, tokens: int, layout: str) -> None:
    drawn: dict[str, Any] = {"residual": True, "tokens_first": layout == "BSH"}
    shape = tokens, torch.float32
    cases = [make.linear(200, 130, 350, *shape, norm=True, bias=True, pivots=101, **drawn)]
    cases += [make.linear(350, 130, 200, *shape, pivots="columns", **drawn)]
    for shared in (False, True):
        ranks = 230, 230 if shared else 170, 190
        for gate, up, down in ((100, 150, "columns"), ((100, 140), (30, 160), ("columns", 60))):
            pivots = gate, None if shared else up, down
            cases += [make.mlp(140, 500, ranks, *shape, shared=shared, norm=True, pivots=pivots, **drawn)]
    for case in cases:
        tensors = case.arguments()
        options = {"epsilon": case.epsilon, "residual": True, "layout": layout}
        if case.is_mlp:
            name, static = f"low_rank_swiglu_mlp{'_shared' * case.shared}", case.ranks()
            tensors = [t for i, t in enumerate(tensors) if i != 3 or not case.shared]
        else:
            name, static = "low_rank_matmul", len(case.weights[0])
            options |= dict(zip(("form", "pivots"), case.form, strict=True), bias=case.bias is not None)
        first = getattr(kernels.entry_neuronxcc, name)(static, **options)
        second = getattr(kernels.entry_nki, name)(static, **options)
        near(case.result(run(first, *tensors, outputs=[case.output()]).outputs[0]), case.exact())
        near(case.result(second(*tensors)), case.exact())


@pytest.mark.parametrize("layout", ["HSB", "BSH"])
def test_a_partial_mlp_adds_its_pivots(kernels: Any, make: Any, layout: str) -> None:
    case = make.mlp(
        200, 700, (330, 200, 410), 70, torch.float32, pivots=(100, 150, "columns"), tokens_first=layout == "BSH"
    )
    kernel = kernels.entry_neuronxcc.low_rank_swiglu_mlp(case.ranks(), layout=layout, partial=True)
    shape = (70, 410) if case.tokens_first else (410, 70)
    part = case.result(run(kernel, *case.arguments()[:-1], outputs=[TensorSpec(shape)]).outputs[0])
    near(case.weights[5].double() @ part.double(), case.exact())


@pytest.mark.parametrize(
    "pivots",
    [
        (100, 150, "columns"),
        (100, None, None),
        (None, 10, "columns"),
        ((100, 130), (150, 1), ("columns", 400)),
    ],
)
def test_references_expand_the_pivots(kernels: Any, make: Any, pivots: tuple[Any, ...]) -> None:
    case = make.mlp(200, 700, (330, 200, 410), 30, torch.float32, norm=True, pivots=pivots)
    x, *tensors = (to_torch(array) for array in case.arguments())
    result = low_rank_swiglu_mlp(x, case.factors(kernels, tensors), Options(case.epsilon))
    near(result, case.exact())


@given(sizes=linears(), dtype=st.sampled_from(list(DTYPES.values())))
def test_packing_is_inverted_with_the_identity_block(sizes: dict[str, Any], dtype: torch.dtype) -> None:
    inputs, rank, out, pivots = (sizes[name] for name in ("inputs", "rank", "out", "pivots"))
    form = Form.COLUMNS if pivots == "columns" else Form.ROWS
    first = 0 if form is Form.COLUMNS else pivots
    A = torch.randn(rank, inputs - rank * (form is Form.COLUMNS)).to(dtype)
    B = torch.randn(out - rank * (form is Form.ROWS), rank).to(dtype)
    expanded = LowRank(A, B, None, form, first).expanded()
    for weight, full, packing in zip(
        (A, B), expanded[:2], linear_packings(inputs, rank, out, A.itemsize, form, first), strict=True
    ):
        packed = pack(weight, packing=packing)
        assert packed.shape == (packing.elements,)
        assert torch.equal(unpacked(packing.factor(packed)), full)
        assert torch.equal(unpacked(factor(packed, packing.plan())), full)
        padding = 1 if len(packing.rows.segments) == 1 else 15
        columns = sum(panel.columns for panel in packing.panels)
        assert packing.elements <= weight.numel() + padding * packing.rows.count * columns


def test_what_the_kernels_do_not_support_is_refused() -> None:
    with pytest.raises(KernelError, match="pivots are an index"):
        linear_packings(30, 8, 40, 4, Form.ROWS, torch.arange(8))  # type: ignore[arg-type]
    with pytest.raises(KernelError, match=r"pivots \[33, 41\): must be some, but not all, of 40 features"):
        linear_packings(30, 8, 40, 4, Form.ROWS, 33)
    with pytest.raises(KernelError, match="some, but not all, of 30"):
        linear_packings(30, 30, 40, 4, Form.COLUMNS)
    with pytest.raises(KernelError, match="only gate has pivots"):
        mlp_packings(30, Ranks(8, 8, 8, 40, Pivots(0, 8), Pivots(0, 8)), True, 4)
    with pytest.raises(KernelError, match="9 pivots: must be at most the rank, 8"):
        mlp_packings(30, Ranks(8, 8, 8, 40, None, None, 9), True, 4)
    with pytest.raises(KernelError, match="cannot normalise an input with pivots"):
        Problem(4, 30, 8, 40, norm=True, form=Form.COLUMNS)


MODELS = {
    "Llama-3.2-1B": (2048, 8192, 1536),
    "SmolLM2-135M": (576, 1536, 384),
}
"""Hidden size, intermediate size, and a rank that is a multiple of 128."""


def plain(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "bfloat16")


def trace_of(kernels: Any, problem: MlpProblem, core: Any = TRN2, blocks: Blocks | None = None) -> Trace:
    packings = mlp_packings(problem.hidden, problem.ranks, problem.shared, 2)
    packed = [plain(p.elements) for i, p in enumerate(packings) if i != 2 or not problem.shared]
    name = f"low_rank_swiglu_mlp{'_shared' * problem.shared}"
    entry = kernels.entry_nki if core is TRN2 else kernels.entry_neuronxcc
    kernel = getattr(entry, name)(problem.ranks, blocks)
    x = plain(problem.hidden, problem.tokens)
    outputs = [] if core is TRN2 else [x]
    return run(kernel, x, *packed, outputs=outputs, core=core).trace


def ranged(tokens: int, hidden: int, middle: int, rank: int, shared: bool, overlap: int = 256) -> MlpProblem:
    """Gate's pivots end ``overlap`` features after down's begin; up's are the first 128 and all of these."""
    first = middle - 2 * rank + overlap
    up = rank if shared else overlap + 128
    return MlpProblem(
        tokens, hidden, middle, rank, up, rank, shared=shared, gate_pivots=Pivots(first, rank),
        up_pivots=None if shared else Pivots(middle - rank - 128, up), down_pivots=rank,
    )  # fmt: skip


def part_of_two(tokens: int, shared: bool) -> MlpProblem:
    """One of two cores' parts of Llama-3.2-1B's MLP."""
    up = None if shared else Pivots(1792, 640)
    return MlpProblem(
        tokens, 2048, 4096, 1536, 1280, 1536, shared=shared, gate_pivots=Pivots(1664, 768), up_pivots=up,
        down_pivots=768,
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [1, 128])
@pytest.mark.parametrize("shared", [False, True])
def test_decode_reads_every_stored_weight_once(kernels: Any, name: str, tokens: int, shared: bool) -> None:
    """Weights are r (in + out - r) numbers per linear, and an identity block has neither bytes nor matmuls."""
    hidden, middle, rank = MODELS[name]
    problem = ranged(tokens, hidden, middle, rank, shared)
    up = problem.ranks.up
    numbers = 2 * rank * (hidden + middle - rank)
    numbers += up * middle if shared else up * (hidden + middle - up)
    trace = trace_of(kernels, problem)
    read, written = trace.traffic()
    assert 2 * (numbers + hidden * tokens) <= read <= 1.01 * 2 * numbers + 2 * hidden * tokens
    assert written == 2 * hidden * tokens
    assert trace.multiply_adds() == numbers * tokens + hidden * (tokens == 1)
    assert problem.multiply_adds == numbers * tokens
    assert {i.op for i in trace.instructions if i.engine is Engine.DMA} == {"dma"}
    assert not any(i.op == "transpose" for i in trace.instructions)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("cores", [2, 4])
def test_a_core_reads_every_stored_weight_of_its_part_once(kernels: Any, cores: int, shared: bool) -> None:
    """One core's MLP of several: its pivots are fewer than the ranks, and it stores r (in + out - pivots) numbers."""
    hidden, middle, rank = 2048, 8192 // cores, 1536
    pivots, up = rank // cores, rank if shared else 512
    problem = MlpProblem(
        1, hidden, middle, rank, up, rank, shared=shared, gate_pivots=Pivots(128, pivots),
        up_pivots=None if shared else Pivots(128, up // cores), down_pivots=pivots,
    )  # fmt: skip
    numbers = 2 * rank * (hidden + middle - pivots) + (up * middle if shared else up * (hidden + middle - up // cores))
    trace = trace_of(kernels, problem)
    assert 2 * (numbers + 2 * hidden) <= sum(trace.traffic()) <= 1.01 * 2 * numbers + 4 * hidden
    assert trace.multiply_adds() == numbers + hidden
    assert problem.multiply_adds == numbers


@pytest.mark.parametrize("overlap", [70, 171, 300])
def test_ranges_that_are_not_multiples_of_128_read_little_more(kernels: Any, overlap: int) -> None:
    """Packing pads the chunks of a segment to a multiple of 16 partitions, or only the last partition."""
    hidden, middle, rank = 576, 1536, 417
    problem = MlpProblem(
        1, hidden, middle, rank, rank, rank, shared=True, gate_pivots=Pivots(middle - 2 * rank + overlap, rank),
        down_pivots=rank,
    )  # fmt: skip
    numbers = rank * (2 * hidden + 3 * middle - 2 * rank)
    assert problem.multiply_adds == numbers
    for core in (TRN1, TRN2):
        trace = trace_of(kernels, problem, core)
        assert trace.multiply_adds() == numbers + hidden
        assert 2 * (numbers + 2 * hidden) <= sum(trace.traffic()) <= 1.09 * 2 * numbers + 4 * hidden


def test_linears_read_every_stored_weight_once(kernels: Any) -> None:
    for form, inputs, out in ((Form.ROWS, 576, 1536), (Form.COLUMNS, 1536, 576)):
        rank, tokens = 256, 1
        packings = linear_packings(inputs, rank, out, 2, form, 128)
        kernel = kernels.entry_neuronxcc.low_rank_matmul(rank, form=form, pivots=128)
        specs = plain(inputs, tokens), *(plain(p.elements) for p in packings)
        trace = run(kernel, *specs, outputs=[plain(out, tokens)]).trace
        numbers = rank * (inputs + out - rank)
        read, written = trace.traffic()
        assert 2 * (numbers + inputs) <= read <= 1.01 * 2 * numbers + 2 * inputs
        assert written == 2 * out * tokens
        assert trace.multiply_adds() == numbers + inputs


@pytest.mark.parametrize(
    ("problem", "core"),
    [
        (ranged(1, 2048, 8192, 1536, False), TRN2),
        (ranged(16, 2048, 8192, 1536, True), TRN1),
        (ranged(700, 1024, 3072, 640, False), TRN1),
        (ranged(1024, 1024, 3072, 640, True), TRN2),
        (ranged(64, 576, 1536, 417, True, 171), TRN1),
        (part_of_two(1, False), TRN2),
        (part_of_two(2048, True), TRN1),
    ],
    ids=str,
)
def test_the_simulator_agrees_with_the_solver(kernels: Any, problem: MlpProblem, core: Any) -> None:
    tiling = solve(problem, core)
    trace = trace_of(kernels, problem, core, tiling.blocks)
    result = report(simulate(trace, core))
    assert trace.peak(Space.SBUF) <= max(tiling.sbuf)
    assert result.traffic == pytest.approx(tiling.traffic, rel=1e-3)
    warm_up = core.tensor_warm_up_ns * 1e-9
    assert result.latency == pytest.approx(tiling.seconds, rel=0.1, abs=4e-6 + warm_up)


@examples(12)
@given(sizes=linears(), tokens=st.integers(1, 700))
def test_a_linear_needs_no_more_memory_than_is_counted(kernels: Any, sizes: dict[str, Any], tokens: int) -> None:
    inputs, rank, out, pivots = (sizes[name] for name in ("inputs", "rank", "out", "pivots"))
    form, first = (Form.COLUMNS, 0) if pivots == "columns" else (Form.ROWS, pivots)
    options = sizes.get("norm", False), sizes["residual"], sizes["tokens_first"]
    problem = Problem(tokens, inputs, rank, out, "bfloat16", *options, form, first)
    tiling = solve(problem)
    layout = "BSH" if problem.tokens_first else "HSB"
    kernel = kernels.entry_neuronxcc.low_rank_matmul(
        rank, tiling.blocks, 0.1 * problem.norm, problem.residual, layout=layout, form=form, pivots=first
    )
    specs = [plain(*shape[:: -1 if problem.tokens_first else 1]) for shape in ((inputs, tokens), (out, tokens))]
    packings = linear_packings(inputs, rank, out, 2, form, first)
    extra = [specs[1]] if problem.residual else []
    trace = run(kernel, specs[0], *(plain(p.elements) for p in packings), *extra, outputs=[specs[1]]).trace
    assert trace.peak(Space.SBUF) <= max(tiling.sbuf)


@examples(12)
@given(hidden=st.integers(1, 900), sizes=mlps(), tokens=st.integers(1, 700))
def test_an_mlp_needs_no_more_memory_than_is_counted(
    kernels: Any, hidden: int, sizes: dict[str, Any], tokens: int
) -> None:
    gate, up = (pivots and Pivots(*pivots) for pivots in sizes["pivots"][:2])
    down = sizes["pivots"][2]
    problem = MlpProblem(
        tokens, hidden, sizes["middle"], *sizes["ranks"], shared=sizes["shared"],
        gate_pivots=gate, up_pivots=up, down_pivots=down[1] if down else 0,
    )  # fmt: skip
    tiling = solve(problem)
    trace = trace_of(kernels, problem, TRN1, tiling.blocks)
    assert trace.peak(Space.SBUF) <= max(tiling.sbuf)
    assert trace.traffic()[0] + trace.traffic()[1] == pytest.approx(tiling.traffic, rel=1e-3)


def test_without_pivots_the_packing_is_that_of_two_factors() -> None:
    for two, one in zip(mlp_packings(576, Ranks(320, 200, 352, 1536), False, 2), (
        (576, 320), (320, 1536), (576, 200), (200, 1536), (1536, 352), (352, 576)), strict=True):  # fmt: skip
        assert two.plan() == Packing.of(*one, 2).plan()
    assert linear_plans(576, 320, 1000, torch.zeros(1, dtype=torch.bfloat16)) == (
        Packing.of(576, 320, 2).plan(), Packing.of(320, 1000, 2).plan())  # fmt: skip
    assert replace(Packing.of(576, 320, 2)).elements == Packing.of(576, 320, 2).elements
