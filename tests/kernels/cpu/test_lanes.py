"""Steps of independent sequences at their own positions: bit by bit those of each alone, in any lanes and order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_decoding import needs_core
from draws import examples
from neuronmm.engine.cpu_decoder import CpuDecoder, describe
from neuronmm.engine.decoder import new_cache
from neuronmm.engine.slots import CpuSlots
from neuronmm.kernels import KernelError
from neuronmm.kernels.cpu.step import DecodeStep
from neuronmm.models.families import FAMILIES
from tiny_models import fill_tiny, make_tiny, make_tokens, pivoted_spec, shared_spec, vary_norms

pytestmark = needs_core

KINDS = {"dense": None, "two": shared_spec(), "pivoted": pivoted_spec(), "int8": shared_spec(factors="int8")}
MAX_LEN = 30


def make_model(model_type: str, kind: str, dtype: torch.dtype) -> torch.nn.Module:
    model = vary_norms(make_tiny(model_type))
    spec = KINDS[kind]
    if spec:
        fill_tiny(model, spec)
    return model.to(dtype)


def assert_equals_alone(model: torch.nn.Module, batch: int, joins: list[tuple[int, int]], steps: int) -> None:
    """Sequences (slot, prompt length) join one after the other, with a step of all in between, then all advance."""
    slots, running, expected = CpuSlots(model, batch, MAX_LEN), dict[int, CpuDecoder](), torch.zeros(0)
    tokens = make_tokens(len(joins) + steps, MAX_LEN)

    def step(row: torch.Tensor) -> None:
        order = list(running)
        ids = row[: len(order)]
        logits = slots.step(order, ids)
        expected = torch.cat([running[slot].decode(token[None]) for slot, token in zip(order, ids, strict=True)])
        assert torch.equal(logits, expected)

    for (slot, length), row in zip(joins, tokens, strict=False):
        prompt = row[:length]
        running.pop(slot, None)
        running[slot] = CpuDecoder(model, 1, MAX_LEN)
        expected = running[slot].prefill(prompt[None], torch.ones_like(prompt[None]))[0]
        assert torch.equal(slots.join(slot, prompt), expected)
        step(row.flip(0))
    for row in tokens[len(joins) :]:
        step(row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_model(model_type: str, kind: str, dtype: torch.dtype, threads: int) -> None:
    assert_equals_alone(make_model(model_type, kind, dtype), 3, [(2, 4), (0, 9), (1, 1), (2, 6)], 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_torch_changes_nothing(dtype: torch.dtype) -> None:
    model, before = make_model("qwen3", "dense", torch.bfloat16), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert_equals_alone(model, 3, [(2, 4), (0, 9)], 2)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("kind", ["dense", "pivoted"])
def test_every_instruction_set(kind: str, isa: str) -> None:
    assert_equals_alone(make_model("qwen3", kind, torch.bfloat16), 3, [(2, 4), (0, 9), (1, 1)], 3)


@examples(15)
@given(
    st.lists(st.tuples(st.integers(0, 10), st.integers(1, 12)), min_size=1, max_size=14),
    st.integers(0, 4),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_any_joins_of_more_lanes_than_a_step_takes(
    joins: list[tuple[int, int]], steps: int, dtype: torch.dtype
) -> None:
    assert_equals_alone(make_model("llama", "dense", dtype), 11, joins, steps)


def test_wrong_arguments_are_refused_before_the_core_sees_them() -> None:
    model = make_model("llama", "dense", torch.float32)
    cache = new_cache(model, 9, MAX_LEN)
    step = DecodeStep(describe(model, MAX_LEN), cache.keys, cache.values)
    ids, lanes, slots = torch.tensor([5, 6]), torch.tensor([8, 0]).int(), torch.tensor([3, 0]).int()
    assert step.step_lanes(ids, lanes, slots).shape == (2, 64)
    before = torch.stack(cache.keys)
    for wrong in (
        (ids.int(), lanes, slots),
        (ids, lanes.long(), slots),
        (ids, lanes[:1], slots),
        (ids[None], lanes[None], slots[None]),
        (ids[:0], lanes[:0], slots[:0]),
        (ids, lanes * 0, slots),  # twice the same
        (ids, lanes + 1, slots),
        (ids, lanes - 1, slots),
        (ids, lanes, slots - 1),
        (ids, lanes, slots + MAX_LEN - 3),
        (ids + 58, lanes, slots),
        (torch.arange(9), torch.arange(9).int(), torch.zeros(9).int()),
    ):
        with pytest.raises(KernelError):
            step.step_lanes(*wrong)
    assert torch.equal(torch.stack(cache.keys), before)
    with pytest.raises(KernelError, match="batch 9"):
        step(torch.zeros(9, 1, dtype=torch.long), 0, torch.zeros(9, dtype=torch.int32))
