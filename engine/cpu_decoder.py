"""The decoder on the C++ core: one call per decode step, and one call per prefill if the core supports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from neuronmm.engine.decoder import TorchDecoder
from neuronmm.engine.kv_cache import KVCache
from neuronmm.kernels import KernelError
from neuronmm.kernels.cpu.library import FP8_FACTORS, MAX_BATCH, NOT_BUILT, core
from neuronmm.kernels.cpu.step import DecodeStep, LayerWeights, LinearWeights, ModelWeights
from neuronmm.models.fp8 import Fp8Linear
from neuronmm.models.low_bits import Int4Linear, Int8Linear, LowBitsModule, matrix_of
from neuronmm.models.lowrank import LowRankLinear

_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""RoPE variants whose angles depend only on the position, so that a table can hold them."""


class CpuDecoder(TorchDecoder):
    """The torch decoder with its steps in C++. Prefill runs in C++ only in bf16 and with AVX2 or more.

    The logits of ``decode`` are float32.

    ``weights`` replace the model's own weights in the core's steps. They must describe the same model and at least
    ``max_len`` positions. ``cache`` is used instead of a new one.

    Raises:
        KernelError: the core does not support the model; :func:`refuses` tells so beforehand.
    """

    def __init__(
        self,
        model: Any,
        batch: int,
        max_len: int,
        weights: ModelWeights | None = None,
        cache: KVCache | None = None,
    ) -> None:
        super().__init__(model, batch, max_len, cache)
        if batch > MAX_BATCH:
            raise KernelError(f"the core takes batch 1 to {MAX_BATCH}, not batch {batch}")
        self._core_step = DecodeStep(weights or describe(model, max_len), self.cache.keys, self.cache.values)
        self._starts = torch.zeros(batch, dtype=torch.int32)

    @property
    def reads_prompts(self) -> bool:
        """Whether prefill runs in the core."""
        return self._core_step.reads_prompts

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """See :class:`neuronmm.engine.decoder.Decoder`."""
        self._starts = (attention_mask == 0).sum(-1, dtype=torch.int32)
        if not self.reads_prompts:
            return super().prefill(input_ids, attention_mask)
        self.cache.reset(attention_mask)
        return self._advance(input_ids, self._core_step)

    @torch.inference_mode()
    def decode(self, token_ids: Tensor) -> Tensor:
        """See :class:`neuronmm.engine.decoder.Decoder`."""
        return self._advance(token_ids[:, None], self._core_step)

    @torch.inference_mode()
    def extend(self, input_ids: Tensor) -> Tensor:
        """See :meth:`TorchDecoder.extend`.

        In the core the logits are those of one prefill, bit by bit, if each part has more than 8 tokens.
        """
        return self._advance(input_ids, self._core_step) if self.reads_prompts else super().extend(input_ids)

    @torch.inference_mode()
    def verify(self, token_ids: Tensor) -> Tensor:
        """Append the tokens [n], at most 8, to the only row and return the logits [n, vocab] of each.

        They equal those of n calls of :meth:`decode`, bit by bit.
        """
        return self._advance(token_ids[None], self._core_step.verify)[0]

    def rewind(self, length: int) -> None:
        """Forget the positions from ``length`` on."""
        self.cache.length = length

    def _advance(self, input_ids: Tensor, step: Callable[[Tensor, int, Tensor], Tensor]) -> Tensor:
        end = self._end(input_ids)
        logits = step(input_ids, self.cache.length, self._starts)
        self.cache.length = end
        return logits


def refuses(model: Any, batch: int) -> str | None:
    """Return the reason why the core cannot decode this model; None if it can."""
    if core() is None:
        return NOT_BUILT
    if batch > MAX_BATCH:
        return f"{batch} rows; the core takes at most {MAX_BATCH}"
    low = {id(part) for module in model.modules() if isinstance(module, LowBitsModule) for part in module.matrix[:2]}
    dtypes = {parameter.dtype for parameter in model.parameters() if id(parameter) not in low}
    if not dtypes <= {torch.float32, torch.bfloat16}:
        return f"weights in {', '.join(sorted(map(str, dtypes)))}; the core takes float32 and bfloat16"
    if any(isinstance(module, Fp8Linear) for module in model.modules()):
        return FP8_FACTORS
    rope = getattr(model.model.rotary_emb, "rope_type", "default")
    if rope not in _FIXED_ROPE:
        return f"RoPE of type {rope!r}"
    for layer in model.model.layers:
        for name in _LINEARS:
            module = getattr(layer.mlp if name in ("gate_proj", "up_proj", "down_proj") else layer.self_attn, name)
            if type(module) not in (nn.Linear, LowRankLinear, Int8Linear, Int4Linear):
                return f"{name} is a {type(module).__name__}"
    return None


def describe(model: Any, max_len: int) -> ModelWeights:
    """Describe the weights of a transformers model to :class:`DecodeStep`. Only the small tensors are copied."""
    base, attention = model.model, model.model.layers[0].self_attn
    positions = torch.arange(max_len)[None]
    cos, sin = base.rotary_emb(torch.empty(1, dtype=torch.float32), positions)
    return ModelWeights(
        embedding=matrix_of(base.embed_tokens),
        layers=[_layer(layer) for layer in base.layers],
        final_norm=base.norm.weight,
        head=_linear(model.lm_head),
        cos=cos[0],
        sin=sin[0],
        heads=model.config.num_attention_heads,
        eps=base.norm.variance_epsilon,
        scale=attention.head_dim**-0.5,
    )


def _layer(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = {name: getattr(attention, name).weight for name in ("q_norm", "k_norm") if hasattr(attention, name)}
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        post_norm=layer.post_attention_layernorm.weight,
        q=_linear(attention.q_proj),
        k=_linear(attention.k_proj),
        v=_linear(attention.v_proj),
        o=_linear(attention.o_proj),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        **head_norms,
    )


def _linear(module: Any) -> LinearWeights:
    if isinstance(module, LowRankLinear):
        return LinearWeights(*module.factors)
    return LinearWeights(matrix_of(module), None, module.bias)
