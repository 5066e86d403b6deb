"""The decode step with linears in pivoted forms, against plain torch on the same factors."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from core_decoding import (
    NEW,
    PROMPT,
    assert_decodes_within_the_rule,
    assert_equals_transformers,
    assert_reads_prompts,
    drawn,
    needs_core,
)
from draws import examples
from error_rule import draws_to_pool
from few_bits import quantise_model
from neuronmm.engine.cpu_decoder import CpuDecoder, describe
from neuronmm.kernels import Int8, KernelError, LowRank, low_rank_linear
from neuronmm.kernels.cpu.step import LinearWeights, ModelWeights
from random_factors import LAYOUTS, make_factors, quantised
from tiny_models import make_tiny

pytestmark = needs_core

MLP, ATTENTION = ("gate", "up", "down"), ("q", "k", "v", "o")
POSITIONS = 512


@dataclass(frozen=True)
class Plan:
    """The form and rank of some of a layer's linears, and whose A others use."""

    layouts: dict[str, str]
    ranks: dict[str, int] = field(default_factory=dict)
    leaders: dict[str, str] = field(default_factory=dict)
    int8: bool = False


ALL = {"gate": "rows", "up": "two", "down": "columns", "q": "index", "k": "two", "v": "rows", "o": "index"}
LEADERS = {"up": "gate", "k": "q", "v": "q"}
PLANS = {
    "one P in the MLP": Plan({"gate": "rows", "up": "two", "down": "columns"}, leaders={"up": "gate"}),
    "two P in the MLP": Plan({"gate": "rows", "up": "rows", "down": "columns"}, {"gate": 13, "up": 9}),
    "index": Plan({"gate": "index", "up": "index", "down": "index", "o": "index"}),
    "columns": Plan(dict.fromkeys((*MLP, *ATTENTION), "columns"), {"q": 9, "v": 5}, {"k": "q"}),
    "all": Plan(ALL, leaders=LEADERS),
    "full rank": Plan({**ALL, "down": "index", "o": "columns"}, dict.fromkeys((*MLP, *ATTENTION), 99)),
    "rank 1": Plan({**ALL, "k": "index"}, dict.fromkeys((*MLP, *ATTENTION), 1)),
    "int8": Plan(ALL, leaders=LEADERS, int8=True),
}


class TorchLinear(nn.Module):
    """A factorised linear in plain torch, in the dtype of its input."""

    def __init__(self, factors: LowRank) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        A, B, bias = (t.to(x.dtype) if isinstance(t, Tensor) else t for t in self.factors[:3])
        return low_rank_linear(x, A, B, bias, self.factors.form, self.factors.pivots, impl="naive")


def pivot(model: nn.Module, plan: Plan) -> ModelWeights:
    """Replace linears of ``model`` by random ones in the forms of ``plan``; return the weights for the core."""
    weights, layers = describe(model, POSITIONS), []
    for layer, described in zip(model.model.layers, weights.layers, strict=True):
        parts: dict[str, LowRank] = {}
        for name, layout in plan.layouts.items():
            linear = getattr(layer.mlp if name in MLP else layer.self_attn, f"{name}_proj")
            rank = plan.ranks.get(name, 11)
            leader = plan.leaders.get(name)
            if leader:
                rank = parts[leader].rank
            part = make_factors(linear.out_features, linear.in_features, rank, True, linear.weight.dtype, layout)
            parts[name] = part._replace(A=parts[leader].A) if leader else part
        if plan.int8:
            parts = dict(zip(parts, quantised(*parts.values()), strict=True))
        for name, part in parts.items():
            setattr(layer.mlp if name in MLP else layer.self_attn, f"{name}_proj", TorchLinear(part))
        layers.append(replace(described, **{name: LinearWeights(*part) for name, part in parts.items()}))
    return replace(weights, layers=layers)


def twins(plan: Plan, **shape: float) -> tuple[nn.Module, nn.Module, ModelWeights]:
    """A model in bf16, the same in fp32, and the weights for the core."""
    model = make_tiny("qwen2", dtype=torch.bfloat16, **shape)
    weights = pivot(model, plan)
    return model, copy.deepcopy(model).float(), weights


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("batch", [1, 3])
def test_equals_transformers_in_fp32(plan: str, batch: int, threads: int) -> None:
    model = make_tiny("qwen3" if batch == 1 else "qwen2")
    assert_equals_transformers(model, batch, pivot(model, PLANS[plan]))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("plan", ["all", "two P in the MLP", "columns", "int8"])
def test_every_instruction_set(plan: str) -> None:
    model = make_tiny("llama")
    assert_equals_transformers(model, 2, pivot(model, PLANS[plan]))


@pytest.mark.parametrize("plan", PLANS)
def test_bf16_keeps_the_rule(plan: str) -> None:
    assert_decodes_within_the_rule(*twins(PLANS[plan]))


@pytest.mark.parametrize("length", [9, 70])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("plan", PLANS)
def test_prompts_keep_the_rule(plan: str, batch: int, length: int, threads: int) -> None:
    assert_reads_prompts([twins(PLANS[plan])], batch, length)


@pytest.mark.parametrize("plan", ["all", "two P in the MLP", "columns", "full rank", "int8"])
def test_prompts_keep_the_rule_on_every_instruction_set(plan: str, isa: str) -> None:
    if isa != "portable":
        assert_reads_prompts([twins(PLANS[plan])], 2, 24)


@pytest.mark.usefixtures("isa")
@examples(8)
@given(st.data())
def test_prompts_of_models_of_any_width(data: st.DataObject) -> None:
    """Pivots before, between and after the panels' boundaries, and more rows of C than are scattered together."""
    draw = data.draw
    hidden, intermediate = draw(st.integers(8, 400)), draw(st.integers(8, 400))
    shape = {"hidden_size": hidden, "intermediate_size": intermediate, "initializer_range": hidden**-0.5}
    layouts = {name: draw(st.sampled_from(LAYOUTS)) for name in MLP}
    ranks = {name: draw(st.integers(1, 300)) for name in MLP}
    batch, length = draw(st.integers(1, 3)), draw(st.integers(2, 40))
    count = draws_to_pool(min(hidden, *ranks.values()) * batch, 8)
    assert_reads_prompts(drawn(count, lambda: twins(Plan(layouts, ranks), **shape)), batch, length)


def test_quantising_a_model_keeps_forms_and_pivots() -> None:
    model = make_tiny("llama")
    weights = pivot(model, PLANS["full rank"])
    for layer, before in zip(quantise_model(weights).layers, weights.layers, strict=True):
        for name in (*MLP, *ATTENTION):
            part, unquantised = getattr(layer, name), getattr(before, name)
            assert isinstance(part.A, Int8) and isinstance(part.B, Int8)
            assert part.form is unquantised.form and part.pivots is unquantised.pivots
    decoder = CpuDecoder(model, 1, PROMPT + NEW, quantise_model(weights))
    decoder.prefill(torch.ones(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.long))
    assert torch.isfinite(decoder.decode(torch.ones(1, dtype=torch.long))).all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("o", {"pivots": torch.arange(11).int().flip(0)}, "strictly increasing, in [0, 32)"),
        ("o", {"pivots": torch.arange(22, 33).int()}, "strictly increasing, in [0, 32)"),
        ("o", {"pivots": torch.arange(-1, 10).int()}, "strictly increasing, in [0, 32)"),
        ("o", {"pivots": torch.arange(11)}, "they have to be [11] of torch.int32"),
        ("o", {"pivots": torch.arange(22).int()[::2]}, "contiguous"),
        ("o", {"pivots": None}, "needs pivots"),
        ("gate", {"pivots": 38}, "first pivot 38 is not in [0, 37]"),
        ("gate", {"pivots": -1}, "first pivot -1 is not in [0, 37]"),
        ("gate", {"B": torch.zeros(36, 11)}, "a linear 32 -> 47 where 32 -> 48 belongs"),
        ("down", {"pivots": 0}, "columns takes no pivots"),
        ("down", {"A": torch.zeros(11, 36)}, "a linear 47 -> 32 where 48 -> 32 belongs"),
    ],
)
def test_forms_that_do_not_fit_are_refused(name: str, change: dict[str, object], message: str) -> None:
    model = make_tiny("llama")
    weights = pivot(model, PLANS["all"])
    *layers, last = weights.layers
    layers.append(replace(last, **{name: replace(getattr(last, name), **change)}))
    with pytest.raises(KernelError) as raised:
        CpuDecoder(model, 1, 4, replace(weights, layers=layers))
    assert message in str(raised.value)
