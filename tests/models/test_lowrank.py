"""The low-rank modules against the dense modules that they replace, and against the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from neuronmm.kernels import KernelError
from neuronmm.models import LowRankLinear, LowRankSwiGLU, fuse


def exact_factors(linear: nn.Linear) -> LowRankLinear:
    """Return a full-rank factorisation of ``linear``, which computes the same function."""
    rank = min(linear.weight.shape)
    low_rank = LowRankLinear(linear.in_features, linear.out_features, rank, linear.bias is not None)
    u, s, vt = torch.linalg.svd(linear.weight.detach(), full_matrices=False)
    with torch.no_grad():
        low_rank.B.weight.copy_(u * s)
        low_rank.A.weight.copy_(vt)
        if linear.bias is not None:
            low_rank.B.bias.copy_(linear.bias)
    return low_rank


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("into", "out"), [(24, 40), (40, 24), (1, 7), (7, 1)])
def test_full_rank_factors_compute_the_dense_linear(into: int, out: int, bias: bool) -> None:
    linear = nn.Linear(into, out, bias=bias)
    x = torch.randn(2, 3, into)
    assert torch.allclose(exact_factors(linear)(x), linear(x), atol=1e-5)


def test_parameter_names_are_the_checkpoints() -> None:
    names = dict(LowRankLinear(8, 6, 3, bias=True).named_parameters())
    assert {name: tuple(p.shape) for name, p in names.items()} == {
        "A.weight": (3, 8),
        "B.weight": (6, 3),
        "B.bias": (6,),
    }


def make_swiglu(bias: bool = False) -> tuple[LowRankSwiGLU, list[nn.Linear]]:
    dense = [nn.Linear(16, 24, bias), nn.Linear(16, 24, bias), nn.Linear(24, 16, bias)]
    return LowRankSwiGLU(*(exact_factors(linear) for linear in dense)), dense


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("impl", [None, "auto", "torch", "naive", "reference"])
def test_full_rank_swiglu_computes_the_dense_mlp(impl: str | None, bias: bool) -> None:
    mlp, (gate, up, down) = make_swiglu(bias)
    x = torch.randn(2, 5, 16)
    expected = down(silu(gate(x)) * up(x))
    if impl is not None:
        fuse(mlp, impl)
    with torch.no_grad():
        assert torch.allclose(mlp(x), expected, atol=1e-5)


def test_fuse_lays_the_factors_out_adjacent_without_a_second_copy() -> None:
    mlp, _ = make_swiglu()
    before = mlp.gate_proj.A.weight.clone(), mlp.up_proj.A.weight.clone()
    fuse(mlp)
    gate, up = mlp.gate_proj.A.weight, mlp.up_proj.A.weight
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])
    assert up.data_ptr() == gate.data_ptr() + gate.numel() * gate.element_size()
    assert gate.untyped_storage().nbytes() == (gate.numel() + up.numel()) * gate.element_size()


def test_a_named_implementation_that_is_not_there_raises_when_called() -> None:
    mlp, _ = make_swiglu()
    fuse(mlp, "abacus")
    with pytest.raises(KernelError, match="no implementation named 'abacus'"):
        mlp(torch.randn(1, 16))


def test_hooks_on_the_inner_linears_run_until_fused() -> None:
    mlp, _ = make_swiglu()
    calls: list[str] = []
    mlp.down_proj.A.register_forward_hook(lambda *_: calls.append("A"))
    mlp(torch.randn(1, 16))
    assert calls == ["A"]


def test_training_reaches_every_factor() -> None:
    mlp, _ = make_swiglu(bias=True)
    mlp(torch.randn(4, 16)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in mlp.parameters())
