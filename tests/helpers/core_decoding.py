"""The C++ core: the mark of tests that need it, its decoder against transformers and the torch decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from neuronmm.engine.cpu_decoder import CpuDecoder
from neuronmm.engine.decoder import TorchDecoder
from neuronmm.kernels.cpu import core
from neuronmm.kernels.cpu.step import ModelWeights
from tiny_models import make_tokens

needs_core = pytest.mark.skipif(core() is None, reason="the C++ core is not built")

PROMPT, NEW = 9, 12
"""Tokens of a prompt, and tokens decoded after it."""


def make_prompts(batch: int) -> tuple[Tensor, Tensor]:
    """Left-padded prompts of several lengths."""
    ids, mask = make_tokens(batch, PROMPT), torch.ones(batch, PROMPT, dtype=torch.long)
    for row in range(batch):
        mask[row, : row % 4] = 0
    return ids, mask


@torch.no_grad()
def exact_logits(model: torch.nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """transformers' own logits of the last position, without a cache."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]


def assert_equals_transformers(model: torch.nn.Module, batch: int, weights: ModelWeights | None = None) -> None:
    """Greedy decoding in the core: tokens equal, logits close, at every step.

    ``weights`` are what the core takes instead of the model's own, here as below.
    """
    ids, mask = make_prompts(batch)
    decoder = CpuDecoder(model, batch, PROMPT + NEW, weights)
    logits = decoder.prefill(ids, mask)
    for _ in range(NEW):
        token = logits.argmax(-1)
        ids, mask = torch.cat([ids, token[:, None]], 1), torch.cat([mask, torch.ones_like(token)[:, None]], 1)
        logits, expected = decoder.decode(token), exact_logits(model, ids, mask)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def assert_decodes_within_the_rule(
    model: torch.nn.Module, wide: torch.nn.Module, weights: ModelWeights | None = None
) -> None:
    """The core's error over the decoded tokens is at most twice that of torch in the dtype of ``model``.

    ``wide`` is the same model in fp32.
    """
    ids, mask = make_prompts(4)
    decoders = [CpuDecoder(model, 4, PROMPT + NEW, weights), *(TorchDecoder(m, 4, PROMPT + NEW) for m in (model, wide))]
    errors = torch.zeros(2)
    logits = [decoder.prefill(ids, mask) for decoder in decoders]
    for _ in range(NEW):
        token = logits[2].argmax(-1)
        logits = [decoder.decode(token) for decoder in decoders]
        errors += torch.stack([(y.float() - logits[2]).norm() for y in logits[:2]])
    assert errors[0] <= 2 * errors[1]


def assert_reads_prompts(models: Iterable[tuple[Any, ...]], batch: int, length: int) -> None:
    """The core's logits and cache of a prompt are within the rule of torch's, over all ``models`` together.

    Each is a model in bf16, the same in fp32 and, if not the model's own, the weights for the core. One prompt has so
    few logits that torch's error is now and then small by chance.
    """
    errors = sum((_prompt_errors(batch, length, *model) for model in models), torch.zeros(2, 2))
    assert (errors[:, 0] <= 4 * errors[:, 1]).all()


def drawn(count: int, make: Callable[[], tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield ``count`` results of ``make``, each of a seed of its own."""
    for seed in range(count):
        torch.manual_seed(seed)
        yield make()


def _prompt_errors(
    batch: int, length: int, model: torch.nn.Module, wide: torch.nn.Module, weights: ModelWeights | None = None
) -> Tensor:
    """Squared errors [logits or cache, the core's or torch's] of a prompt of bf16 ``model`` against ``wide``, fp32."""
    core_decoder = CpuDecoder(model, batch, length + 3, weights)
    if not core_decoder.reads_prompts:
        pytest.skip("prompts are read by torch on this processor")
    decoders = [core_decoder, TorchDecoder(model, batch, length + 3), TorchDecoder(wide, batch, length + 3)]
    ids, mask = make_tokens(batch, length), torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        mask[row, : min(row % 4 * length // 5, length - 1)] = 0
    logits = [decoder.prefill(ids, mask).float() for decoder in decoders]
    valid = mask.bool()[:, None, :, None]
    cached = [
        torch.stack([torch.where(valid, t[:, :, :length].float(), 0) for t in (*d.cache.keys, *d.cache.values)])
        for d in decoders
    ]
    assert all(torch.isfinite(results[0]).all() for results in (logits, cached))
    return torch.tensor(
        [[(result - exact).square().sum() for result in results] for *results, exact in (logits, cached)]
    )
