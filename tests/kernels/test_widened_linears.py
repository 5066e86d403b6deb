"""16-bit linears that run in float32 where that is faster: which are widened, their values, and on which CPUs."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from core_decoding import needs_core
from error_rule import assert_twice_plain, draws_to_pool
from neuronmm.kernels import widened_linears as widening
from neuronmm.kernels.cpu import isa
from neuronmm.kernels.cpu.linears import describe
from neuronmm.kernels.widened_linears import multiplies_bf16, widened_linears
from neuronmm.measure.scoring import hidden_states
from tiny_models import LAYER_COUNT, make_tiny, make_tokens

OLD_X86 = {"architecture": "x86_64", "avx2": True}
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capabilities", "bf16"),
    [
        ({}, False),
        ({"avx512_bf16": True, "cpu_name": "AMD EPYC 9R14"}, True),
        ({"avx512_bf16": True, "cpu_name": "Intel Xeon"}, False),
        ({"avx512_bf16": True, "amx_bf16": True, "cpu_name": "Intel Xeon"}, True),
        ({"bf16": True, "cpu_name": "Neoverse V1"}, True),
    ],
)
def test_matmuls_are_in_bf16_only_where_that_is_faster(
    capabilities: dict[str, object], bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert multiplies_bf16(CPU) is bf16


@pytest.fixture
def old_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: OLD_X86, raising=False)


@pytest.mark.usefixtures("old_processor")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_widened_linear_is_the_float32_one_rounded(dtype: torch.dtype, with_bias: bool) -> None:
    x, weight = torch.randn(2, 10, 24, dtype=dtype), torch.randn(40, 24, dtype=dtype)
    bias = torch.randn(40, dtype=dtype) if with_bias else None
    with widened_linears(CPU):
        got = linear(x, weight, bias)
    exact = linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert torch.equal(got, exact.to(dtype))


def count_core_calls(monkeypatch: pytest.MonkeyPatch, smallest: int) -> Mock:
    """Let matrices of so many elements run in the core, and return what counts its calls."""
    calls = Mock(wraps=describe)
    monkeypatch.setattr(widening, "describe", calls)
    monkeypatch.setattr(widening, "_LARGE", smallest)
    return calls


@needs_core
@pytest.mark.skipif(isa() == "portable", reason="the portable core has no GEMM")
@pytest.mark.usefixtures("old_processor")
@pytest.mark.parametrize("rows", [16, 33, 192])
@pytest.mark.parametrize("with_bias", [False, True])
def test_large_linears_of_few_rows_run_in_the_core(rows: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_core_calls(monkeypatch, 40 * 200)
    x, weight = torch.randn(rows, 1, 200).bfloat16(), torch.randn(40, 200).bfloat16()
    bias = torch.randn(40).bfloat16() if with_bias else None
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    plain = linear(x, weight, bias)
    with widened_linears(CPU, in_core=True), torch.no_grad():
        got = linear(x, weight, bias)
    assert calls.call_count == 1 and got.dtype is torch.bfloat16 and got.shape == exact.shape
    assert (got.double() - exact).norm() <= 2 * (plain.double() - exact).norm()


@needs_core
@pytest.mark.skipif(isa() == "portable", reason="the portable core has no GEMM")
@pytest.mark.usefixtures("old_processor")
def test_a_model_whose_linears_run_in_the_core_is_within_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wide, ids = make_tiny(dtype=torch.bfloat16), make_tiny(), make_tokens(3, 20)
    wide.load_state_dict(model.state_dict())
    calls = count_core_calls(monkeypatch, 1)
    with torch.no_grad():
        exact, plain = wide.model(ids)[0], model.model(ids)[0].float()
        with widened_linears(CPU, in_core=True):
            got = model.model(ids)[0].float()
    assert calls.call_count == 7 * LAYER_COUNT
    assert (got - exact).norm() <= 2 * (plain - exact).norm()


WEIGHT = torch.randn(40, 24).bfloat16()


@needs_core
@pytest.mark.skipif(isa() == "portable", reason="the portable core has no GEMM")
@pytest.mark.parametrize("capabilities", [OLD_X86, {"architecture": "x86_64", "bf16": True, "avx512_fp16": True}])
@pytest.mark.parametrize(("rows", "calls_of_core"), [(1, 1), (4, 1), (5, 0)])
def test_steps_of_few_rows_run_in_the_core_on_every_x86_processor(
    capabilities: dict[str, object], rows: int, calls_of_core: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    calls = Mock(wraps=describe)
    monkeypatch.setattr(widening, "describe", calls)
    cases = [torch.randn(rows, 1, 24).bfloat16() for _ in range(draws_to_pool(rows * 40))]

    def run(x: Tensor) -> Tensor:
        with widened_linears(CPU, in_core=True), torch.no_grad():
            return linear(x, WEIGHT)

    assert_twice_plain(cases, run, lambda x: linear(x, WEIGHT), lambda x: linear(x.double(), WEIGHT.double()))
    assert calls.call_count == calls_of_core * len(cases)


@pytest.mark.usefixtures("old_processor")
@pytest.mark.parametrize(
    ("rows", "weight", "bias"),
    [
        (193, WEIGHT, None),
        (16, WEIGHT[:39], None),
        (16, torch.randn(24, 40).bfloat16().T, None),
        (16, torch.randn(40, 48).bfloat16()[:, ::2], None),
        (16, WEIGHT, torch.randn(1).bfloat16()),
        (16, WEIGHT.half(), None),
    ],
)
def test_other_linears_are_widened(
    rows: int, weight: Tensor, bias: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_core_calls(monkeypatch, 40 * 24)
    x = torch.randn(rows, 24).to(weight.dtype)
    with widened_linears(CPU, in_core=True), torch.no_grad():
        got = linear(x, weight, bias)
    assert torch.equal(got, linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype))
    with widened_linears(CPU, in_core=True):
        linear(torch.randn(16, 24).bfloat16(), WEIGHT.clone().requires_grad_()).sum().backward()
    with widened_linears(CPU), torch.no_grad():
        linear(torch.randn(16, 24).bfloat16(), WEIGHT)
    with widened_linears(CPU, in_core=True), torch.no_grad(), pytest.raises(RuntimeError, match="cannot be multiplied"):
        linear(torch.randn(16, 25).bfloat16(), WEIGHT)
    assert not calls.called


@needs_core
@pytest.mark.usefixtures("old_processor")
@pytest.mark.skipif(isa() == "portable", reason="the portable core has no GEMM")
def test_a_bias_with_strides_runs_in_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_core_calls(monkeypatch, 40 * 24)
    x, bias = torch.randn(16, 24).bfloat16(), torch.randn(80).bfloat16()[::2]
    with widened_linears(CPU, in_core=True), torch.no_grad():
        assert torch.equal(linear(x, WEIGHT, bias), linear(x, WEIGHT, bias.clone()))
    assert calls.call_count == 2


@pytest.mark.usefixtures("old_processor")
@pytest.mark.parametrize(("weight", "bias"), [(torch.float32, None), (torch.bfloat16, torch.float32)], ids=str)
def test_operands_of_two_dtypes_are_refused_as_elsewhere(weight: torch.dtype, bias: torch.dtype | None) -> None:
    added = None if bias is None else torch.randn(40, dtype=bias)
    with widened_linears(CPU, in_core=True), torch.no_grad(), pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        linear(torch.randn(16, 24, dtype=torch.bfloat16), torch.randn(40, 24, dtype=weight), added)


@pytest.mark.usefixtures("old_processor")
def test_few_rows_and_float32_are_not_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", lambda _: pytest.fail("it was widened"))
    weight = torch.randn(40, 24)
    with widened_linears(CPU):
        linear(torch.randn(15, 24, dtype=torch.bfloat16), weight.bfloat16())
        linear(torch.randn(30, 24), weight)


@pytest.mark.parametrize(
    "capabilities",
    [
        {},
        {"architecture": "aarch64"},
        {"architecture": "x86_64", "avx512_bf16": True, "cpu_name": "AMD EPYC 9R14"},
        {"architecture": "x86_64", "amx_bf16": True, "cpu_name": "Intel Xeon"},
    ],
)
def test_nothing_is_widened_where_bf16_is_fast_or_the_cpu_is_unknown(
    capabilities: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(torch.Tensor, "float", lambda _: pytest.fail("it was widened"))
    with widened_linears(CPU):
        linear(torch.randn(30, 24, dtype=torch.bfloat16), torch.randn(40, 24, dtype=torch.bfloat16))


@pytest.mark.usefixtures("old_processor")
def test_every_linear_of_a_model_is_widened_when_it_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    model, wide, ids = make_tiny(dtype=torch.bfloat16), make_tiny(), make_tokens(3, 20)
    wide.load_state_dict(model.state_dict())
    matrices, widen = [], torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: (matrices.append(tensor.ndim == 2), widen(tensor))[1])
    widened = widen(hidden_states(model, ids))
    assert sum(matrices) == 7 * LAYER_COUNT
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    plain, exact = widen(hidden_states(model, ids)), hidden_states(wide, ids)
    assert sum(matrices) == 7 * LAYER_COUNT
    assert (widened - exact).norm() <= 2 * (plain - exact).norm()
