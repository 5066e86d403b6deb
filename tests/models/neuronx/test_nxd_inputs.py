"""The arguments of NxD Inference's steps: padding on the right, positions of each row's own, slots in order."""

from __future__ import annotations

import torch

from neuronmm.models.neuronx import nxd_inputs

ROWS = torch.tensor([[0, 0, 7, 8], [3, 4, 5, 6]])
START = torch.tensor([2, 0])


def test_prompts_are_moved_to_the_left() -> None:
    step = nxd_inputs.batch(ROWS, None, START, 16)
    assert step.inputs["input_ids"].tolist() == [[7, 8, 0, 0], [3, 4, 5, 6]]
    assert step.inputs["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert step.inputs["position_ids"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert step.rows.tolist() == [0, 1]


def test_a_decode_step_has_the_rows_own_positions() -> None:
    step = nxd_inputs.batch(torch.tensor([[9], [9]]), torch.tensor([4]), START, 16)
    assert step.inputs["position_ids"].tolist() == [[2], [4]] and set(step.inputs) == {"input_ids", "position_ids"}


def test_a_prompt_of_one_token_fills_its_bucket_with_position_0() -> None:
    """NxD would fill it with position 1 and return the logits of that one."""
    step = nxd_inputs.batch(torch.tensor([[0, 7], [3, 4]]), None, torch.tensor([1, 0]), 6)
    assert step.inputs["position_ids"].tolist() == [[0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert step.inputs["attention_mask"].sum(1).tolist() == [1, 2]
    joined = nxd_inputs.slots(torch.tensor([[7, 7]]), torch.tensor([[0, 0]]), torch.tensor([3]), 5)
    assert joined.inputs["input_ids"].tolist() == [[7, 0, 0, 0, 0]] and joined.inputs["seq_ids"].tolist() == [3]
    assert not joined.inputs["position_ids"].any()


def test_slots_are_in_order_and_logits_in_the_callers() -> None:
    step = nxd_inputs.slots(torch.tensor([[7], [8], [9]]), torch.tensor([[4], [5], [6]]), torch.tensor([2, 0, 1]), 16)
    assert step.inputs["seq_ids"].tolist() == [0, 1, 2]
    assert step.inputs["input_ids"].tolist() == [[8], [9], [7]]
    assert step.inputs["input_ids"][step.rows].tolist() == [[7], [8], [9]]
