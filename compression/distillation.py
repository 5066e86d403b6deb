"""The loss of the whole model: KL divergence from the dense model's next-token distributions.

Compression does not change the output head, so the dense model's final hidden states determine its logits. They are
computed once and stay in memory; the dense and the compressed model are never in memory together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from neuronmm.compression.config import CompressionConfig
from neuronmm.models import processes
from neuronmm.models.load import load_pretrained
from neuronmm.models.model_config import ModelConfig
from neuronmm.models.progress import Progress

PASS_TOKENS = 1024  # tokens per forward pass, at least one row
# Positions per call of the output head: the logits of a whole pass would take more memory than the model. A chunk of
# 256 x 49152 logits exceeds what glibc reuses (32 MB), and page faults make a step 10 % slower.
_CHUNK = 128


def rows_per_pass(length: int) -> int:
    """Return how many rows of this length one forward pass takes."""
    return max(1, PASS_TOKENS // length)


def working_memory(sizes: ModelConfig, config: CompressionConfig) -> tuple[int, int]:
    """Return about how many bytes a recovery holds besides the model and the training's state.

    The first number is in main memory: the dense model's final states for all rows. The second is on the device, in one
    pass: the inputs of all layers, the activations and gradients of one layer, and for the head two copies of its
    weights in bf16 and seven tensors of a chunk's logits.
    """
    length, hidden = config.calibration_length, sizes.hidden_size
    states = config.calibration_rows * length * hidden
    per_token = sizes.num_hidden_layers * hidden + 16 * hidden + 10 * sizes.intermediate_size
    layers = rows_per_pass(length) * length * per_token
    return 4 * states, 4 * (layers + sizes.vocab_size * (hidden + 7 * _CHUNK))


@dataclass(frozen=True)
class Lesson:
    """Rows of token ids [rows, length], and the dense model's final states [rows, length, hidden]."""

    tokens: Tensor
    states: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def pick(self, rows: Tensor) -> Lesson:
        """Return the rows with the given indices."""
        return Lesson(self.tokens[rows], self.states[rows])

    def passes(self) -> list[Lesson]:
        """Split the rows of this process into forward passes of at most PASS_TOKENS tokens."""
        return [self.pick(part) for part in _passes(*self.tokens.shape)]

    @property
    def predictions(self) -> int:
        """Number of predicted tokens: all but the first of each row."""
        return len(self) * (self.tokens.shape[1] - 1)


def _passes(count: int, length: int) -> list[Tensor]:
    """Return the indices of the rows of each forward pass of this process, of ``count`` rows of ``length`` tokens."""
    parts = processes.part(torch.arange(count)).split(rows_per_pass(length))
    return [part for part in parts if len(part)]


@torch.no_grad()
def dense_states(folder: Path, rows: Tensor, device: str, progress: Progress) -> Tensor:
    """Return the dense model's final hidden states [rows, length, hidden], float32, for ``rows`` [rows, length]."""
    model = load_pretrained(folder, torch.float32, device)
    states = torch.zeros(*rows.shape, model.config.hidden_size)
    parts = _passes(*rows.shape)
    for part in parts:
        states[part] = model.model(input_ids=rows[part].to(device), use_cache=False)[0].cpu()
        progress("dense model", 1 / len(parts))
    processes.add_up(states)  # each has the states of its rows, and zeros
    return states


@torch.no_grad()
def evaluate(model: Any, lesson: Lesson) -> float:
    """Return the mean KL divergence from the dense model's distributions, in nats per predicted token."""
    return processes.total(sum(loss_sum(model, part) for part in lesson.passes())) / lesson.predictions


def loss_sum(model: Any, lesson: Lesson, scale: float | None = None, autocast: bool = False) -> float:
    """Return the loss summed over the predicted tokens of ``lesson``; with ``scale``, add ``scale`` x its gradients.

    The forward and backward pass of the head run on one chunk of positions at a time and keep only the gradient of the
    hidden states. At most [chunk, vocabulary] logits are in memory.
    """
    head = model.get_output_embeddings()
    device = head.weight.device
    tokens = lesson.tokens.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        hidden = model.model(input_ids=tokens, use_cache=False)[0][:, :-1].flatten(0, 1).float()
    references = lesson.states[:, :-1].flatten(0, 1).to(device)
    leaf = hidden.detach().requires_grad_(scale is not None)
    total = 0.0
    for chunk, reference in zip(leaf.split(_CHUNK), references.split(_CHUNK), strict=True):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits = head(chunk).float()
            with torch.no_grad():
                target = head(reference).float().log_softmax(-1)
        loss = kl_div(logits.log_softmax(-1), target, reduction="sum", log_target=True)
        if scale is not None:
            (loss * scale).backward()
        total += loss.item()
    if scale is not None:
        hidden.backward(leaf.grad)
    return total
