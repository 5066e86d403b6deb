"""A trial of generation on this machine: a tiny random model, compressed, on the kernels that would be chosen."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from neuronmm.engine.backends import choose
from neuronmm.engine.backends.cpu import CpuRunner
from neuronmm.engine.backends.torch_runner import TorchRunner
from neuronmm.kernels.cpu import arena
from neuronmm.models.families import LAYERS, TARGETS
from neuronmm.models.patch import patch
from neuronmm.models.spec import CompressionSpec
from neuronmm.version import VERSION

_PROMPT, _NEW = 7, 4
_TOLERANCE = 1e-3
"""Largest difference of a logit from the reference's, relative to the largest logit; both are in float32."""


def try_generation() -> tuple[str, str]:
    """Generate a few tokens on the backend that ``auto`` chooses: in float32 against the reference, and in bf16.

    Returns:
        The backend and, in one line, the kernels that run in bf16.

    Raises:
        RuntimeError: the logits are wrong, or the backend fails.
    """
    backend = choose("auto")
    kind = CpuRunner if backend.name == "cpu" else TorchRunner
    model = _tiny_model().to(backend.name)
    found, expected = _logits(kind(model)), _logits(TorchRunner(model).sibling("reference"))
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error <= _TOLERANCE:
        raise RuntimeError(f"the logits differ from the reference's by {error:.2g} of the largest one")
    runner = kind(model.bfloat16())
    if backend.name == "cpu":
        arena.gather(runner.model.parameters())
    if not torch.isfinite(_logits(runner)).all():
        raise RuntimeError("the logits in bf16 are not finite")
    return backend.name, runner.path


def _tiny_model() -> Any:
    """Return a random float32 model of two layers whose MLP is factorised.

    The vocabulary is so large that the system can grant huge pages.
    """
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 1 << 16, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
        spec = CompressionSpec(
            ranks={f"{LAYERS}.{layer}.{linear}": 16 for layer in range(2) for linear in TARGETS["mlp"]},
            method="random",
            targets="mlp",
            asked_ratio=0.5,
            realised_ratio=0.5,
            model_ratio=0.2,
            align=16,
            version=VERSION,
        )
        patch(model, spec)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(std=parameter.shape[1] ** -0.5)
    return model


@torch.inference_mode()
def _logits(runner: TorchRunner) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] of a prompt's last position and of the tokens after it, in float32."""
    decoder = runner.decoder(1, _PROMPT + _NEW)
    prompt = torch.arange(3, 3 + _PROMPT, device=runner.device)[None]
    rows = [decoder.prefill(prompt, torch.ones_like(prompt))]
    rows += [decoder.decode(torch.tensor([20 + step], device=runner.device)) for step in range(_NEW - 1)]
    return torch.cat([row.float().clone() for row in rows])
