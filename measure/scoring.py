"""Log-likelihoods of given tokens, the ground both perplexity and multiple choice stand on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from neuronmm.kernels.widened_linears import widened_linears
from neuronmm.models.errors import UserError
from neuronmm.models.tensors import check_tokens

_ROWS = 256  # positions that meet the output head at once: the logits of a whole window would dwarf the model


@torch.inference_mode()
def hidden_states(model: Any, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Final hidden states: ids [batch, n] -> [batch, n, hidden].

    Without ``positions`` [batch, n] and the additive ``mask`` [batch, 1, n, n] each row is one sequence from its start.

    Raises:
        UserError: the model has no embedding for one of the ids.
    """
    check_tokens(ids, model.config.vocab_size)
    with widened_linears(ids.device):
        return model.model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)[0]


@torch.inference_mode()
def negative_log_likelihood(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """-log p(target | state) in nats and fp32: hidden [n, hidden], targets [n] -> [n].

    Raises:
        UserError: a likelihood is no finite number.
    """
    pairs = zip(hidden.split(_ROWS), targets.split(_ROWS), strict=True)
    with widened_linears(hidden.device):
        nll = torch.cat([cross_entropy(model.lm_head(h).float(), t, reduction="none") for h, t in pairs])
    if not torch.isfinite(nll).all():
        raise UserError("the model's likelihoods hold NaN or infinity: its weights overflow; try --dtype fp32")
    return nll
