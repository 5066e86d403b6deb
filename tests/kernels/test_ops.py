"""Every implementation of every op against the reference, and the rules by which one is chosen."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from draws import examples
from error_rule import POOL, assert_twice_plain, draws_to_pool
from neuronmm.kernels import (
    KernelError,
    LowRank,
    Op,
    implementations,
    low_rank_linear,
    low_rank_swiglu,
    ops,
)
from neuronmm.kernels.ops import choose
from neuronmm.kernels.plain import _stacked, stack
from random_factors import LAYOUTS, doubled, make_factors, quantised

TABLE = [pytest.param(op, i.name, id=f"{op.value}-{i.name}") for op in Op for i in implementations(op)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Shape(NamedTuple):
    """Sizes of one call. ``leading`` are x's batch dimensions; ``wide`` is the other side of the (first) linear.

    ``ranks`` and ``layouts`` are those of the linears, in order; a pivoted one has full rank at most.
    """

    leading: tuple[int, ...]
    hidden: int
    wide: int
    ranks: tuple[int, int, int]
    bias: bool
    layouts: tuple[str, str, str] = ("two", "two", "two")


# Odd sizes and sizes around vector widths and tiles, so that every kernel meets its tails.
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 160, 257]))
SHAPES = st.builds(
    Shape,
    leading=st.sampled_from([(), (1,), (3,), (1, 1), (2, 5), (4, 1), (1, 17), (2, 1, 3), (33,)]),
    hidden=SIZES,
    wide=SIZES,
    ranks=st.tuples(SIZES, SIZES, SIZES),
    bias=st.booleans(),
    layouts=st.just(("two", "two", "two")),
)
PIVOTED = st.builds(
    Shape._replace, SHAPES, layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3).filter(lambda drawn: drawn[0] != "two")
)


def linear_call(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, LowRank]:
    x = torch.randn(*shape.leading, shape.hidden).to(dtype)
    return x, make_factors(shape.wide, shape.hidden, shape.ranks[0], shape.bias, dtype, shape.layouts[0])


def swiglu_call(shape: Shape, dtype: torch.dtype, adjacent: bool = True) -> tuple[Tensor, LowRank, LowRank, LowRank]:
    """``adjacent``: the A factors of gate and up are stacked."""
    x = torch.randn(*shape.leading, shape.hidden).to(dtype)
    sizes = ((shape.wide, shape.hidden), (shape.wide, shape.hidden), (shape.hidden, shape.wide))
    parts = zip(sizes, shape.ranks, shape.layouts, strict=True)
    gate, up, down = (make_factors(*size, rank, shape.bias, dtype, layout) for size, rank, layout in parts)
    if adjacent and gate.A.shape[1] == up.A.shape[1]:
        a_gate, a_up = stack(gate.A, up.A)
        gate, up = gate._replace(A=a_gate), up._replace(A=a_up)
    return x, gate, up, down


def sharing_call(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, LowRank, LowRank, LowRank]:
    """Gate and up have one A in common, unless only one of them is in column form."""
    rank = min(shape.ranks[0], shape.wide, shape.hidden) if set(shape.layouts) != {"two"} else shape.ranks[0]
    x, gate, up, down = swiglu_call(shape._replace(ranks=(rank, rank, shape.ranks[2])), dtype, adjacent=False)
    return x, gate, up if gate.A.shape != up.A.shape else up._replace(A=gate.A), down


def int8_call(op: Op, shape: Shape, dtype: torch.dtype) -> tuple:
    """Every factor in int8; gate and up share theirs."""
    x, *weights = linear_call(shape, dtype) if op is Op.LINEAR else sharing_call(shape, dtype)
    return x, *quantised(*weights)


CALLS: dict[Op, Callable[..., tuple]] = {Op.LINEAR: linear_call, Op.SWIGLU: swiglu_call}


def run(op: Op, name: str, call: tuple) -> Tensor:
    """The op's public function, by an implementation's name."""
    x, *weights = call
    with torch.no_grad():
        if op is Op.LINEAR:
            return low_rank_linear(x, *weights[0], impl=name)
        return low_rank_swiglu(x, *weights, impl=name)


def exact(op: Op, call: tuple) -> Tensor:
    """The fp32 reference; for fp32 inputs plain torch in fp64, since the reference would be judging itself."""
    x, *weights = call
    if x.dtype != torch.float32:
        return run(op, "reference", call)
    return run(op, "naive", (x.double(), *map(doubled, weights)))


def test_every_op_has_a_reference_and_is_tested_here() -> None:
    assert set(CALLS) == set(Op)
    for op in Op:
        assert {"reference", "naive", "torch"} <= {i.name for i in implementations(op)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "name"), TABLE)
@given(shape=SHAPES, seed=st.integers(0, 2**31))
@examples(25)
def test_error_is_at_most_twice_plain_torchs(op: Op, name: str, dtype: torch.dtype, shape: Shape, seed: int) -> None:
    check(op, name, dtype, lambda: CALLS[op](shape, dtype), seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [i.name for i in implementations(Op.SWIGLU)])
@given(shape=SHAPES, seed=st.integers(0, 2**31))
@examples(10)
def test_so_is_it_with_a_shared_a(name: str, dtype: torch.dtype, shape: Shape, seed: int) -> None:
    check(Op.SWIGLU, name, dtype, lambda: sharing_call(shape, dtype), seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "name"), TABLE)
@given(shape=PIVOTED, shared=st.booleans(), seed=st.integers(0, 2**31))
@examples(15)
def test_so_is_it_with_pivoted_factors(
    op: Op, name: str, dtype: torch.dtype, shape: Shape, shared: bool, seed: int
) -> None:
    make = sharing_call if op is Op.SWIGLU and shared else CALLS[op]
    check(op, name, dtype, lambda: make(shape, dtype), seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "name"), TABLE)
@given(shape=st.one_of(SHAPES, PIVOTED), seed=st.integers(0, 2**31))
@examples(15)
def test_and_so_is_it_with_int8_factors(op: Op, name: str, dtype: torch.dtype, shape: Shape, seed: int) -> None:
    """Plain torch computes with the weights that int8 stands for, in the call's dtype."""
    check(op, name, dtype, lambda: int8_call(op, shape, dtype), seed)


def check(op: Op, name: str, dtype: torch.dtype, make: Callable[[], tuple], seed: int) -> None:
    """The rule on calls that ``make`` draws, or the refusal where the implementation does not serve them."""
    torch.manual_seed(seed)
    first = make()
    reason = ops._TABLE[op, name].refuses(*first)
    if reason is not None:
        with pytest.raises(KernelError, match=re.escape(reason)):
            run(op, name, first)
        return
    x, *weights = first
    # However wide a result is, what went through a rank of 1 is one number a row.
    narrowest = min(size for w in weights for size in (*w.A.shape, *w.B.shape))
    numbers = x.numel() // x.shape[-1] * narrowest
    assert_twice_plain(
        (make() for _ in range(draws_to_pool(numbers, most=POOL))),
        run=lambda call: run(op, name, call).to(dtype),
        plain=lambda call: run(op, "naive", call),
        exact=lambda call: exact(op, call),
    )


@pytest.mark.parametrize("name", ["reference", "naive", "torch"])
def test_a_shared_a_is_multiplied_once(name: str) -> None:
    shape = Shape((5,), 24, 40, (8, 8, 4), False)
    counts = []
    for call in (sharing_call(shape, torch.float32), swiglu_call(shape, torch.float32)):
        with FlopCounterMode(display=False) as counter:
            run(Op.SWIGLU, name, call)
        counts.append(counter.get_total_flops())
    assert counts[1] - counts[0] == 2 * 5 * 8 * 24


@pytest.mark.parametrize(("op", "name"), [p for p in TABLE if p.values[1] != "reference"])
def test_inputs_stay_as_they_were_and_the_dtype_is_kept(op: Op, name: str) -> None:
    call = CALLS[op](Shape((3,), 24, 40, (8, 12, 4), True), torch.bfloat16)
    if ops._TABLE[op, name].refuses(*call) is not None:
        pytest.skip("does not serve bf16 on this machine")
    tensors = [call[0], *(t for part in call[1:] for t in part.tensors)]
    before = [t.clone() for t in tensors]
    assert run(op, name, call).dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@pytest.mark.parametrize("op", list(Op))
def test_reference_is_fp32_even_under_autocast(op: Op) -> None:
    call = CALLS[op](Shape((5,), 96, 160, (32, 48, 24), True), torch.float32)
    plain = run(op, "reference", call)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(op, "reference", call), plain)
    assert plain.dtype == torch.float32
    assert torch.allclose(plain.double(), exact(op, call), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["auto", *sorted({i.name for op in Op for i in implementations(op)})])
def test_shapes_that_do_not_fit_never_reach_a_kernel(name: str) -> None:
    shape = Shape((2,), 8, 12, (4, 5, 6), True)
    x, factor = linear_call(shape, torch.float32)
    long = factor._replace(bias=torch.zeros(13))
    for bad in ((x[:, :7], factor), (x, factor._replace(A=factor.B)), (x, factor._replace(B=factor.A)), (x, long)):
        with pytest.raises(KernelError, match="do not fit"):
            run(Op.LINEAR, name, bad)
    x, gate, up, down = swiglu_call(shape, torch.float32)
    narrow = up._replace(B=up.B[:11], bias=None)
    with pytest.raises(KernelError, match="gate and up differ in width: 12 and 11"):
        run(Op.SWIGLU, name, (x, gate, narrow, down))
    for bad in ((x, gate, up, gate), (x, down, up, down), (x[:, :7], gate, up, down)):
        with pytest.raises(KernelError, match="do not fit"):
            run(Op.SWIGLU, name, bad)


def test_stacked_factors_are_seen_only_where_they_are_adjacent() -> None:
    a, b = stack(torch.randn(3, 8), torch.randn(5, 8))
    both = _stacked(a, b)
    assert both is not None and torch.equal(both, torch.cat([a, b])) and both.data_ptr() == a.data_ptr()
    assert _stacked(b, a) is None
    assert _stacked(a, b.clone()) is None
    assert _stacked(a.T, b.T) is None
    flat = torch.randn(64)
    assert _stacked(flat[:24].view(3, 8), flat[24:].view(10, 4)) is None


def test_stacked_and_separate_factors_agree() -> None:
    shape = Shape((7,), 33, 65, (17, 9, 11), True)
    x, gate, up, down = swiglu_call(shape, torch.float32)
    apart = gate._replace(A=gate.A.clone()), up._replace(A=up.A.clone())
    assert _stacked(gate.A, up.A) is not None and _stacked(apart[0].A, apart[1].A) is None
    one = run(Op.SWIGLU, "torch", (x, gate, up, down))
    two = run(Op.SWIGLU, "torch", (x, *apart, down))
    assert torch.allclose(one, two, rtol=1e-5, atol=1e-5)


@pytest.fixture
def table() -> Iterator[None]:
    """Lets a test register implementations of its own."""
    entries, said = dict(ops._TABLE), set(ops._FELL_BACK)
    yield
    ops._TABLE.clear()
    ops._TABLE.update(entries)
    ops._FELL_BACK.clear()
    ops._FELL_BACK.update(said)
    implementations.cache_clear()


CALL = linear_call(Shape((2,), 8, 8, (4, 4, 4), False), torch.float32)


def test_unknown_name_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(
        KernelError, match=r"low_rank_linear has no implementation named 'cud'; there are: auto, .*naive"
    ):
        run(Op.LINEAR, "cud", CALL)


@pytest.mark.usefixtures("table")
def test_a_named_implementation_that_refuses_raises_and_says_why() -> None:
    ops.register(Op.LINEAR, "picky", refuses=lambda *_: "it is Sunday", priority=99)(lambda *_: torch.empty(0))
    with pytest.raises(KernelError, match="cannot run on 'picky': it is Sunday"):
        run(Op.LINEAR, "picky", CALL)


@pytest.mark.usefixtures("table")
def test_the_automatic_choice_falls_back_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    best = choose(Op.LINEAR, "auto", *CALL)
    ops.register(Op.LINEAR, "picky", refuses=lambda *_: "it is Sunday", priority=99)(lambda *_: torch.empty(0))
    with caplog.at_level(logging.INFO):
        assert choose(Op.LINEAR, "auto", *CALL) is best
        assert choose(Op.LINEAR, "auto", *CALL) is best
    assert [r.getMessage() for r in caplog.records] == ["low_rank_linear falls back from picky: it is Sunday"]


@pytest.mark.usefixtures("table")
def test_the_automatic_choice_is_by_priority_and_never_a_baseline() -> None:
    assert choose(Op.LINEAR, "auto", *CALL).name not in ("naive", "reference")
    ops.register(Op.LINEAR, "quick", refuses=lambda *_: None, priority=99)(lambda *_: torch.empty(0))
    assert choose(Op.LINEAR, "auto", *CALL).name == "quick"


@pytest.mark.usefixtures("table")
def test_one_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="already has an implementation named 'torch'"):
        ops.register(Op.LINEAR, "torch", refuses=lambda *_: None, priority=0)(lambda *_: torch.empty(0))


def test_the_rule_catches_a_strip_kept_in_too_few_bits() -> None:
    """The accuracy rule can fail: three mantissa bits in the rank intermediate are too few for bf16."""

    def coarse(call: tuple) -> Tensor:
        x, w = call
        strip = (x @ w.A.T).to(torch.float8_e4m3fn).to(x.dtype)
        return strip @ w.B.T

    calls = [linear_call(Shape((4,), 64, 64, (32, 32, 32), False), torch.bfloat16)]
    with pytest.raises(AssertionError, match="times plain torch's"):
        assert_twice_plain(
            calls, coarse, lambda c: run(Op.LINEAR, "naive", c), lambda c: run(Op.LINEAR, "reference", c)
        )


def test_the_rule_catches_a_wrong_tail() -> None:
    calls = [linear_call(Shape((4,), 64, 65, (32, 32, 32), False), torch.bfloat16)]

    def without_tail(call: tuple) -> Tensor:
        y = run(Op.LINEAR, "naive", call)
        y[..., 64:] = 0
        return y

    with pytest.raises(AssertionError, match="times plain torch's"):
        assert_twice_plain(
            calls, without_tail, lambda c: run(Op.LINEAR, "naive", c), lambda c: run(Op.LINEAR, "reference", c)
        )
