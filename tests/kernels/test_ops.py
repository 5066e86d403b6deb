"""Every implementation of every op against the reference, and how the dispatch table chooses one."""

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
    Int8,
    KernelError,
    LowRank,
    Op,
    implementations,
    low_rank_linear,
    low_rank_swiglu,
    ops,
    quantise,
)
from neuronmm.kernels.ops import choose
from neuronmm.kernels.plain import _stacked, stack

TABLE = [pytest.param(op, i.name, id=f"{op.value}-{i.name}") for op in Op for i in implementations(op)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Shape(NamedTuple):
    """Sizes of one call. ``leading`` are x's batch dimensions; ``wide`` is the other side of the (first) linear."""

    leading: tuple[int, ...]
    hidden: int
    wide: int
    ranks: tuple[int, int, int]
    bias: bool


# Odd sizes and sizes around vector widths and tiles, so that every kernel has tails.
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 160, 257]))
SHAPES = st.builds(
    Shape,
    leading=st.sampled_from([(), (1,), (3,), (1, 1), (2, 5), (4, 1), (1, 17), (2, 1, 3), (33,)]),
    hidden=SIZES,
    wide=SIZES,
    ranks=st.tuples(SIZES, SIZES, SIZES),
    bias=st.booleans(),
)


def factors(into: int, out: int, rank: int, bias: bool, dtype: torch.dtype) -> LowRank:
    """Return two factors that preserve the scale of their input."""
    a = torch.randn(rank, into) / into**0.5
    b = torch.randn(out, rank) / rank**0.5
    return LowRank(a.to(dtype), b.to(dtype), torch.randn(out).to(dtype) if bias else None)


def linear_call(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, LowRank]:
    x = torch.randn(*shape.leading, shape.hidden).to(dtype)
    return x, factors(shape.hidden, shape.wide, shape.ranks[0], shape.bias, dtype)


def swiglu_call(shape: Shape, dtype: torch.dtype, adjacent: bool = True) -> tuple[Tensor, LowRank, LowRank, LowRank]:
    """``adjacent``: the A factors of gate and up are stacked."""
    x = torch.randn(*shape.leading, shape.hidden).to(dtype)
    gate = factors(shape.hidden, shape.wide, shape.ranks[0], shape.bias, dtype)
    up = factors(shape.hidden, shape.wide, shape.ranks[1], shape.bias, dtype)
    down = factors(shape.wide, shape.hidden, shape.ranks[2], shape.bias, dtype)
    if adjacent:
        a_gate, a_up = stack(gate.A, up.A)
        gate, up = gate._replace(A=a_gate), up._replace(A=a_up)
    return x, gate, up, down


def sharing_call(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, LowRank, LowRank, LowRank]:
    """Draw a SwiGLU whose gate and up share one A."""
    one_rank = shape._replace(ranks=(shape.ranks[0], shape.ranks[0], shape.ranks[2]))
    x, gate, up, down = swiglu_call(one_rank, dtype, adjacent=False)
    return x, gate, up._replace(A=gate.A), down


def int8_call(op: Op, shape: Shape, dtype: torch.dtype) -> tuple:
    """Draw a call with every factor in int8; gate and up share an A."""
    x, *weights = linear_call(shape, dtype) if op is Op.LINEAR else sharing_call(shape, dtype)
    int8 = {id(t): quantise(t) for w in weights for t in (w.A, w.B)}
    return x, *(w._replace(A=int8[id(w.A)], B=int8[id(w.B)]) for w in weights)


CALLS: dict[Op, Callable[..., tuple]] = {Op.LINEAR: linear_call, Op.SWIGLU: swiglu_call}


def run(op: Op, name: str, call: tuple) -> Tensor:
    """Call the op's public function with the named implementation."""
    x, *weights = call
    with torch.no_grad():
        if op is Op.LINEAR:
            return low_rank_linear(x, *weights[0], impl=name)
        return low_rank_swiglu(x, *weights, impl=name)


def exact(op: Op, call: tuple) -> Tensor:
    """Return the fp32 reference; for fp32 inputs plain torch in fp64, so that the reference does not judge itself."""
    x, *weights = call
    if x.dtype != torch.float32:
        return run(op, "reference", call)
    doubled = [LowRank(*(None if t is None else double(t) for t in w)) for w in weights]
    return run(op, "naive", (x.double(), *doubled))


def double(weight: Tensor | Int8) -> Tensor:
    """Return the exact value of a weight in fp64."""
    if isinstance(weight, Int8):
        return weight.values.double() * weight.scales.double()[:, None]
    return weight.double()


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
def test_error_is_at_most_twice_plain_torchs_with_a_shared_a(
    name: str, dtype: torch.dtype, shape: Shape, seed: int
) -> None:
    check(Op.SWIGLU, name, dtype, lambda: sharing_call(shape, dtype), seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "name"), TABLE)
@given(shape=SHAPES, seed=st.integers(0, 2**31))
@examples(10)
def test_error_is_at_most_twice_plain_torchs_with_int8_factors(
    op: Op, name: str, dtype: torch.dtype, shape: Shape, seed: int
) -> None:
    """Plain torch computes with the dequantised weights, in the call's dtype."""
    check(op, name, dtype, lambda: int8_call(op, shape, dtype), seed)


def check(op: Op, name: str, dtype: torch.dtype, make: Callable[[], tuple], seed: int) -> None:
    """Check the rule on calls that ``make`` draws, or the refusal if the implementation does not support them."""
    torch.manual_seed(seed)
    first = make()
    reason = ops._TABLE[op, name].refuses(*first)
    if reason is not None:
        with pytest.raises(KernelError, match=re.escape(reason)):
            run(op, name, first)
        return
    x, *weights = first
    # A rank of 1 leaves one independent number per row, however wide the result is.
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
def test_inputs_do_not_change_and_the_result_has_their_dtype(op: Op, name: str) -> None:
    call = CALLS[op](Shape((3,), 24, 40, (8, 12, 4), True), torch.bfloat16)
    if ops._TABLE[op, name].refuses(*call) is not None:
        pytest.skip("does not support bf16 on this machine")
    before = [t.clone() for part in call for t in (part if isinstance(part, tuple) else (part,))]
    assert run(op, name, call).dtype == torch.bfloat16
    after = [t for part in call for t in (part if isinstance(part, tuple) else (part,))]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("op", list(Op))
def test_reference_is_fp32_even_under_autocast(op: Op) -> None:
    call = CALLS[op](Shape((5,), 96, 160, (32, 48, 24), True), torch.float32)
    plain = run(op, "reference", call)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(op, "reference", call), plain)
    assert plain.dtype == torch.float32
    assert torch.allclose(plain.double(), exact(op, call), rtol=0, atol=1e-5)


@pytest.mark.parametrize("op", list(Op))
def test_gradients_flow_through_the_automatic_choice(op: Op) -> None:
    x, *weights = CALLS[op](Shape((3,), 24, 40, (8, 12, 4), True), torch.float32)
    leaves = [t.detach().clone().requires_grad_() for w in weights for t in w]
    pairs = [LowRank(*leaves[i : i + 3]) for i in range(0, len(leaves), 3)]
    choose(op, "auto", x, *pairs).run(x, *pairs).sum().backward()
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in leaves)


@pytest.mark.parametrize("name", ["auto", *{i.name for op in Op for i in implementations(op)}])
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


def test_stacked_factors_are_recognised_only_if_they_are_adjacent() -> None:
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
    """Let a test register implementations; restore the table after it."""
    entries, logged = dict(ops._TABLE), set(ops._FELL_BACK)
    yield
    ops._TABLE.clear()
    ops._TABLE.update(entries)
    ops._FELL_BACK.clear()
    ops._FELL_BACK.update(logged)
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
def test_a_name_cannot_be_registered_twice() -> None:
    with pytest.raises(ValueError, match="already has an implementation named 'torch'"):
        ops.register(Op.LINEAR, "torch", refuses=lambda *_: None, priority=0)(lambda *_: torch.empty(0))


def test_the_rule_catches_an_intermediate_of_too_few_bits() -> None:
    """The rule can fail: three mantissa bits in the rank-r intermediate are too few for bf16."""

    def coarse(call: tuple) -> Tensor:
        x, w = call
        intermediate = (x @ w.A.T).to(torch.float8_e4m3fn).to(x.dtype)
        return intermediate @ w.B.T

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
