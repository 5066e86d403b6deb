"""Every kernel in both dialects, in bfloat16 and float32, over random shapes with tails.

At most twice the error of torch in the same dtype (``error_rule``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draws import examples
from error_rule import assert_twice_plain, draws_to_pool
from neuronmm.emulator.nki import TensorSpec, run
from neuronmm.kernels import KernelError
from neuronmm.kernels.nki.problem import Blocks
from nki_cases import baselines_of, judge, two_kernel_mlp

DIALECTS = ("neuronxcc", "nki")
SIZES = st.sampled_from([1, 2, 7, 64, 127, 128, 129, 200, 255, 256, 257, 300, 384])
TOKENS = st.sampled_from([1, 2, 3, 16, 65, 128, 129, 200])
BLOCKS = st.builds(
    Blocks,
    tokens=st.sampled_from([64, 128, 513]),
    moving=st.sampled_from([32, 100, 512]),
    depth=st.sampled_from([0, 1, 2]),
    intermediate=st.sampled_from([0, 1, 2]),
    panels=st.sampled_from([1, 2, 3]),
)
OPTIONS = st.fixed_dictionaries({name: st.booleans() for name in ("norm", "residual", "tokens_first")})
QUICK = examples(20)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@QUICK
@given(inputs=SIZES, rank=SIZES, out=SIZES, tokens=TOKENS, sizes=BLOCKS, options=OPTIONS, bias=st.booleans())
def test_low_rank_matmul(
    kernels: Any, make: Any, dialect: str, dtype: torch.dtype, inputs: int, rank: int, out: int, tokens: int,
    sizes: Blocks, options: dict[str, bool], bias: bool,
) -> None:  # fmt: skip
    seeds = range(draws_to_pool(tokens * min(inputs, rank, out)))
    cases = [make.linear(inputs, rank, out, tokens, dtype, seed=s, bias=bias, **options) for s in seeds]
    judge(cases, lambda c: c.run(kernels, dialect, sizes))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@QUICK
@given(
    hidden=SIZES, middle=SIZES, ranks=st.tuples(SIZES, SIZES, SIZES), tokens=TOKENS, sizes=BLOCKS, options=OPTIONS,
    shared=st.booleans(),
)  # fmt: skip
def test_low_rank_swiglu_mlp(
    kernels: Any, make: Any, dialect: str, dtype: torch.dtype, hidden: int, middle: int, ranks: tuple[int, int, int],
    tokens: int, sizes: Blocks, options: dict[str, bool], shared: bool,
) -> None:  # fmt: skip
    if shared:
        ranks = (ranks[0], ranks[0], ranks[2])
    seeds = range(draws_to_pool(tokens * min(hidden, middle, *ranks)))
    cases = [make.mlp(hidden, middle, ranks, tokens, dtype, seed=s, shared=shared, **options) for s in seeds]
    judge(cases, lambda c: c.run(kernels, dialect, sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 33, 600])
def test_the_dialects_agree_to_the_bit(kernels: Any, make: Any, dtype: torch.dtype, tokens: int) -> None:
    for case in (
        make.linear(576, 200, 300, tokens, dtype, norm=True, residual=True),
        make.mlp(200, 300, (130, 64, 70), tokens, dtype, norm=True),
        make.linear(576, 200, 300, tokens, dtype, bias=True, tokens_first=True),
    ):
        assert torch.equal(case.run(kernels, "neuronxcc"), case.run(kernels, "nki"))


@pytest.mark.parametrize("tokens", [1, 600])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("layout", ["HSB", "BSH"])
def test_entries_of_both_dialects(kernels: Any, make: Any, tokens: int, residual: bool, layout: str) -> None:
    drawn = {"norm": True, "residual": residual, "tokens_first": layout == "BSH"}
    for shared in (False, True):  # a linear has a bias where the MLP has a shared A
        linear = make.linear(200, 130, 150, tokens, torch.float32, bias=shared, **drawn)
        mlp = make.mlp(200, 300, (130, 130, 70), tokens, torch.float32, shared=shared, **drawn)
        for case in (linear, mlp):
            tensors = case.arguments()
            if case.shared:
                del tensors[3]
            name = "low_rank_matmul" if case is linear else f"low_rank_swiglu_mlp{'_shared' * shared}"
            static = len(case.weights[0]) if case is linear else case.ranks()
            options = {"epsilon": case.epsilon, "residual": residual, "layout": layout}
            options |= {"bias": shared} if case is linear else {}
            first = getattr(kernels.entry_neuronxcc, name)(static, **options)
            second = getattr(kernels.entry_nki, name)(static, **options)
            results = run(first, *tensors, outputs=[case.output()]).outputs[0], second(*tensors)
            for actual in results:
                judge([case], lambda c, y=actual: c.result(y))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layout", ["HSB", "BSH"])
def test_a_partial_mlp_stops_at_the_rank_of_down(kernels: Any, make: Any, shared: bool, layout: str) -> None:
    case = make.mlp(200, 1101, (130, 130, 1101), 70, torch.float32, shared=shared, tokens_first=layout == "BSH")
    tensors = [t for i, t in enumerate(case.arguments()[:-1]) if i != 3 or not shared]
    name = f"low_rank_swiglu_mlp{'_shared' * shared}"
    kernel = getattr(kernels.entry_neuronxcc, name)(case.ranks(), layout=layout, partial=True)
    shape = (70, 1101) if case.tokens_first else (1101, 70)
    part = case.result(run(kernel, *tensors, outputs=[TensorSpec(shape)]).outputs[0])
    judge([case], lambda c: (c.weights[5].double() @ part.double()).float())


def test_an_unknown_layout_is_refused(kernels: Any) -> None:
    for entry in (kernels.entry_neuronxcc, kernels.entry_nki):
        with pytest.raises(KernelError, match="layout 'SBH'"):
            entry.low_rank_matmul(4, layout="SBH")


@pytest.mark.parametrize("seed", range(3))
def test_order_of_strips_does_not_matter(kernels: Any, make: Any, arrays: Any, seed: int) -> None:
    case = make.linear(130, 40, 70, 200, torch.float32)
    kernel = kernels.entry_neuronxcc.low_rank_matmul(40, Blocks(tokens=32, moving=32))
    tensors = [arrays.to_numpy(case.x), *case.packed()]
    shuffled = run(kernel, *tensors, outputs=[case.output()], shuffle=seed).outputs[0]
    judge([case], lambda _: arrays.to_torch(shuffled))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [3, 150, 600])
def test_baselines(kernels: Any, make: Any, arrays: Any, dialect: str, dtype: torch.dtype, tokens: int) -> None:
    case, sizes = make.linear(300, 130, 200, tokens, dtype), Blocks(tokens=512, moving=256, intermediate=2)
    for name, body, tensors, exact, plain in baselines_of(case, kernels, dialect, sizes):
        spec = TensorSpec(tuple(exact.shape), arrays.to_numpy(case.x).dtype)
        actual = arrays.to_torch(run(body, *(arrays.to_numpy(t) for t in tensors), outputs=[spec]).outputs[0])
        assert_twice_plain([name], lambda _, y=actual: y, lambda _, y=plain: y, lambda _, y=exact: y)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_papers_two_kernel_mlp(kernels: Any, make: Any, dialect: str) -> None:
    case = make.mlp(200, 300, (130, 64, 70), 100, torch.float32)
    sizes = Blocks(tokens=64, moving=64, intermediate=1)
    judge([case], lambda c: two_kernel_mlp(c, kernels, dialect, sizes))
