"""Several linears of one input in one call, as a torch op: against plain torch, compiled, and from several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from core_decoding import needs_core
from draws import examples
from error_rule import assert_twice_plain, draws_to_pool
from neuronmm.kernels import Form, KernelError, LowRank
from neuronmm.kernels.cpu.linears import describe
from neuronmm.kernels.cpu.step import LinearWeights
from neuronmm.kernels.plain import linears
from random_factors import LAYOUTS, doubled, make_factors, quantised

pytestmark = needs_core
SIZES = st.integers(1, 130)
ROWS = st.one_of(st.integers(1, 8), st.sampled_from([9, 16, 33, 256, 257, 300]))
PARTS = st.lists(st.tuples(SIZES, SIZES, st.sampled_from(["dense", *LAYOUTS])), min_size=1, max_size=3)
Group = list["LowRank | Tensor"]


def make_group(inner: int, parts: list[tuple[int, int, str]], dtype: torch.dtype, int8: bool, shared: bool) -> Group:
    """Random linears of one input; ``shared``: those whose A has the shape of an earlier one use that A."""
    group: Group = []
    for out, rank, layout in parts:
        if layout == "dense":
            group.append((torch.randn(out, inner) / inner**0.5).to(dtype))
            continue
        factors = make_factors(out, inner, rank, False, dtype, layout)
        leaders = [other for other in group if isinstance(other, LowRank)] if shared else []
        A = next((other.A for other in leaders if other.A.shape == factors.A.shape), factors.A)
        group.append(factors._replace(A=A))
    if int8:
        low_rank = iter(quantised(*(part for part in group if isinstance(part, LowRank))))
        group = [next(low_rank) if isinstance(part, LowRank) else part for part in group]
    return group


def weights(group: Group) -> list[LinearWeights]:
    return [LinearWeights(part) if isinstance(part, Tensor) else LinearWeights(*part) for part in group]


def width(group: Group) -> int:
    return sum(part.shape[0] if isinstance(part, Tensor) else part.out_features for part in group)


def run(x: Tensor, group: Group) -> Tensor:
    return torch.ops.neuronmm.linears(x, describe(weights(group), x.dtype), width(group))


def exact(x: Tensor, group: Group) -> Tensor:
    wide = [part.double() if isinstance(part, Tensor) else doubled(part) for part in group]
    return linears(x.double(), wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
class TestRule:
    """At most twice the error of plain torch."""

    @examples(60)
    @given(ROWS, SIZES, PARTS, st.booleans(), st.booleans(), st.integers(0, 999))
    @torch.inference_mode()
    def test_linears(
        self,
        dtype: torch.dtype,
        rows: int,
        inner: int,
        parts: list[tuple[int, int, str]],
        int8: bool,
        shared: bool,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        narrowest = min(inner, *(min(out, rank) for out, rank, _ in parts))
        cases = [
            (torch.randn(rows, inner).to(dtype), make_group(inner, parts, dtype, int8, shared))
            for _ in range(draws_to_pool(rows * narrowest))
        ]
        assert_twice_plain(cases, lambda c: run(*c), lambda c: linears(*c), lambda c: exact(*c))

    @pytest.mark.parametrize("rows", [1, 8, 9, 40])
    @torch.inference_mode()
    def test_every_instruction_set(self, isa: str, dtype: torch.dtype, rows: int) -> None:
        torch.manual_seed(rows)
        for layout in LAYOUTS:
            group = make_group(129, [(193, 77, layout), (96, 31, "two"), (50, 1, "dense")], dtype, False, False)
            cases = [(torch.randn(rows, 129).to(dtype), group) for _ in range(4)]
            assert_twice_plain(cases, lambda c: run(*c), lambda c: linears(*c), lambda c: exact(*c))

    @torch.inference_mode()
    def test_more_inputs_than_a_panel_takes_at_once(self, isa: str, dtype: torch.dtype) -> None:
        """Of any instruction set: three panels, of which the last has a tail, an odd one."""
        torch.manual_seed(0)
        group = make_group(4301, [(45, 0, "dense"), (33, 21, "two")], dtype, False, False)
        cases = [(torch.randn(40, 4301).to(dtype), group) for _ in range(4)]
        assert_twice_plain(cases, lambda c: run(*c), lambda c: linears(*c), lambda c: exact(*c))


@torch.inference_mode()
def test_the_last_rows_of_many_are_rounded_as_the_others(isa: str) -> None:
    """Equal rows have equal results; the first chunk takes 256."""
    group = make_group(64, [(48, 16, "two"), (24, 0, "dense")], torch.bfloat16, False, False)
    x = torch.randn(64).bfloat16().expand(264, 64)
    for rows in (257, 264):
        y = run(x[:rows].contiguous(), group)
        assert torch.equal(y, y[:1].expand_as(y)), rows


@torch.inference_mode()
def test_a_bias_is_added_to_every_form() -> None:
    x, ones = torch.randn(3, 40), LinearWeights(torch.ones(2, 40), bias=torch.ones(2))
    for layout in LAYOUTS:
        factors = make_factors(24, 40, 8, True, torch.float32, layout)
        y = torch.ops.neuronmm.linears(x, describe([LinearWeights(*factors), ones], x.dtype), 26)
        expected = torch.cat([linears(x, [factors]), x.sum(1, keepdim=True).expand(3, 2) + 1], 1)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_leading_dimensions_strided_and_empty_input() -> None:
    group = make_group(16, [(24, 4, "two"), (8, 4, "dense")], torch.bfloat16, False, False)
    x = torch.randn(2, 32, 3).bfloat16().transpose(1, 2)[..., ::2]
    assert torch.equal(run(x, group), run(x.contiguous().view(6, 16), group).view(2, 3, 32))
    assert run(x[:0], group).shape == (0, 3, 32)


@torch.inference_mode()
def test_it_compiles_into_one_graph_of_any_batch() -> None:
    group = make_group(16, [(24, 4, "two"), (24, 4, "index")], torch.float32, False, False)
    described = describe(weights(group), torch.float32)

    def doubled_result(x: Tensor) -> Tensor:
        return torch.ops.neuronmm.linears(x * 2, described, 48) * 2

    compiled = torch.compile(doubled_result, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (2, 5, 11):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(compiled(x), run(x, group) * 4)


def test_the_op_follows_the_rules_of_torch() -> None:
    group = make_group(16, [(24, 4, "two")], torch.float32, False, False)
    arguments = (torch.randn(3, 16), describe(weights(group), torch.float32), 24)
    torch.library.opcheck(torch.ops.neuronmm.linears.default, arguments)


def test_several_threads_call_it_at_once() -> None:
    group = make_group(64, [(96, 32, "rows"), (96, 32, "two")], torch.bfloat16, False, True)
    described, x = describe(weights(group), torch.bfloat16), torch.randn(8, 12, 64).bfloat16()

    def one(rows: Tensor) -> Tensor:
        return torch.ops.neuronmm.linears(rows, described, 192)

    alone = [one(rows) for rows in x]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            assert all(map(torch.equal, threads.map(one, x), alone))


@pytest.mark.parametrize("form", ["dense", "two", "rows", "columns"])
def test_an_input_or_a_result_of_another_width_is_refused(form: str) -> None:
    described = describe(weights(make_group(16, [(24, 4, form)], torch.float32, False, False)), torch.float32)
    assert torch.ops.neuronmm.linears(torch.zeros(3, 16), described, 24).shape == (3, 24)
    for features, out in ((15, 24), (17, 24), (0, 24), (16, 23), (16, 25)):
        with pytest.raises(KernelError, match=f"do not take {features} features, or do not return {out}"):
            torch.ops.neuronmm.linears(torch.zeros(3, features), described, out)


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("1 to 3 linears", []),
        ("1 to 3 linears", [LinearWeights(torch.zeros(2, 4))] * 4),
        ("differ in its width: 4 and 5", [LinearWeights(torch.zeros(2, 4)), LinearWeights(torch.zeros(2, 5))]),
        ("float64", [LinearWeights(torch.zeros(2, 4).double())]),
        ("int8", [LinearWeights(torch.zeros(2, 4).char())]),
        ("not contiguous", [LinearWeights(torch.zeros(4, 2).T)]),
        ("bias", [LinearWeights(torch.zeros(2, 4), bias=torch.zeros(2).bfloat16())]),
        ("bias is not contiguous", [LinearWeights(torch.zeros(2, 4), bias=torch.zeros(4)[::2])]),
        ("do not fit", [LinearWeights(torch.zeros(2, 4), torch.zeros(5, 3))]),
        ("rank 0", [LinearWeights(torch.zeros(0, 4), torch.zeros(5, 0))]),
    ],
)
def test_it_says_what_it_cannot_describe(reason: str, changed: list[LinearWeights]) -> None:
    with pytest.raises(KernelError, match=reason):
        describe(changed, torch.float32)


def test_pivots_that_are_a_view_are_refused() -> None:
    """The core reads them one after the other."""
    A, B, pivots = torch.randn(4, 8), torch.randn(6, 4), torch.arange(10, dtype=torch.int32)[::2][:4]
    describe([LinearWeights(A, B, None, Form.ROWS, pivots.contiguous())], torch.float32)
    with pytest.raises(KernelError, match="a tensor of pivots is not contiguous"):
        describe([LinearWeights(A, B, None, Form.ROWS, pivots)], torch.float32)


def test_factors_that_begin_at_one_address_are_not_shared() -> None:
    """Nested ranks: the A of the first linear is the first rows of the other's."""
    A = torch.randn(32, 24)
    group: Group = [
        LowRank(A[:8], torch.randn(40, 8)),
        LowRank(A, torch.randn(40, 32)),
        LowRank(A[:16], torch.randn(40, 16)),
    ]
    x = torch.randn(3, 24)
    torch.testing.assert_close(run(x, group), exact(x, group).float())


def test_a_tensor_that_describes_no_group_is_refused() -> None:
    one = describe([LinearWeights(torch.randn(8, 4))], torch.float32)
    other = describe([LinearWeights(torch.randn(8, 6))], torch.float32)
    for described, out in ((one[:0], 0), (torch.cat([one] * 4), 32), (torch.cat([one, other]), 16)):
        with pytest.raises(KernelError, match="do not take 4 features"):
            torch.ops.neuronmm.linears(torch.zeros(3, 4), described, out)
    with pytest.raises(KernelError, match=f"described in {one.numel() - 1} bytes"):
        torch.ops.neuronmm.linears(torch.zeros(3, 4), one[1:], 8)
    with pytest.raises(KernelError, match="float16"):
        torch.ops.neuronmm.linears(torch.zeros(3, 4).half(), one, 8)
