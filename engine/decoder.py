"""The decoder interface, and its torch implementation on the modules of a transformers model.

This file contains no code for one model family. Embedding, norms, projections, RoPE and MLP are modules of the loaded
model, called in the order common to Llama and Qwen. This file adds the static KV cache and the attention over it. It
does not use transformers' cache classes, which differ between versions.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from neuronmm.engine.kv_cache import KVCache
from neuronmm.kernels.widened_linears import widened_linears


class Decoder(Protocol):
    """The interface between the generation loop and a backend: the state of a batch, advanced one step at a time.

    Dimensions: input_ids, attention_mask [batch, prompt] (left-padded, 1 = token); token_ids [batch]; logits
    [batch, vocab] of the last position, in the model's dtype or float32. The state holds at most ``max_len`` positions
    in ``state_bytes`` bytes.
    """

    batch: int
    max_len: int
    state_bytes: int

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Reset the state, process the prompts and return the logits of their last positions."""
        ...

    def decode(self, token_ids: Tensor) -> Tensor:
        """Append one token to every row and return its logits."""
        ...


class TorchDecoder:
    """The torch decoder, for any device. It can be reused: every ``prefill`` resets the cache.

    ``cache`` [batch, ..., max_len, ...] is used instead of a new one.

    Raises:
        ValueError: a call needs more than ``max_len`` positions or another number of rows.
    """

    def __init__(self, model: Any, batch: int, max_len: int, cache: KVCache | None = None) -> None:
        config, attention = model.config, model.model.layers[0].self_attn
        self.batch, self.max_len = batch, max_len
        self._model, self._layers = model.model, list(model.model.layers)
        self._head: nn.Module = model.lm_head
        self._head_dim: int = attention.head_dim
        self._kv_heads: int = config.num_key_value_heads
        self._groups = config.num_attention_heads // config.num_key_value_heads
        self._qk_norm = hasattr(attention, "q_norm")
        self.cache = cache or new_cache(model, batch, max_len)
        self.state_bytes = self.cache.nbytes
        self._positions = torch.zeros(batch, dtype=torch.long, device=self.cache.valid.device)

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """See :class:`Decoder`."""
        self.cache.reset(attention_mask)
        positions = (attention_mask.cumsum(-1) - 1).clamp_(min=0)
        self._positions = positions[:, -1] + 1
        mask = None
        if self.cache.padded:
            length = input_ids.shape[1]
            causal = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril_()
            # A padding position attends to itself, because a softmax over nothing is NaN.
            diagonal = torch.eye(length, dtype=torch.bool, device=input_ids.device)
            mask = (causal & self.cache.valid[:, None, None, :length]) | diagonal
        with widened_linears(input_ids.device):
            return self._step(input_ids, positions, mask)

    @torch.inference_mode()
    def decode(self, token_ids: Tensor) -> Tensor:
        """See :class:`Decoder`."""
        positions = self._positions[:, None]
        self._positions = self._positions + 1
        mask = self.cache.valid[:, None, None, : self.cache.length + 1] if self.cache.padded else None
        return self._step(token_ids[:, None], positions, mask)

    @torch.inference_mode()
    def extend(self, input_ids: Tensor) -> Tensor:
        """Append the tokens [batch, n] to rows without padding and return the logits [batch, vocab] of the last."""
        start, count = self.cache.length, input_ids.shape[1]
        positions = torch.arange(start, start + count, device=input_ids.device)[None].expand_as(input_ids)
        self._positions = positions[:, -1] + 1
        causal = torch.ones(count, start + count, dtype=torch.bool, device=input_ids.device).tril_(start)
        with widened_linears(input_ids.device):
            return self._step(input_ids, positions, causal)

    def _step(self, input_ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Run the model on the next positions and return the last logits.

        Dimensions: input_ids, positions [batch, n]; mask [batch, 1, n or 1, filled] or None -> [batch, vocab].
        """
        cache, end = self.cache, self._end(input_ids)
        x = self._model.embed_tokens(input_ids)
        cos, sin = (table.unsqueeze(1) for table in self._model.rotary_emb(x, positions))
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            attention = layer.self_attn
            hidden = layer.input_layernorm(x)
            q, k, v = (
                self._heads(projection(hidden)) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if self._qk_norm:
                q, k = attention.q_norm(q), attention.k_norm(k)
            keys[:, :, cache.length : end] = _rotate(k, cos, sin)
            values[:, :, cache.length : end] = v
            attended = self._attend(_rotate(q, cos, sin), keys[:, :, :end], values[:, :, :end], mask)
            x = x + attention.o_proj(attended)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        cache.length = end
        return self._head(self._model.norm(x[:, -1]))

    def _end(self, input_ids: Tensor) -> int:
        """Return the length of the cache after ``input_ids`` [batch, n]."""
        rows, end = len(input_ids), self.cache.length + input_ids.shape[1]
        if end > self.max_len or rows != self.batch:
            raise ValueError(f"{rows} rows of {end} positions do not fit [{self.batch}, {self.max_len}]")
        return end

    def _heads(self, x: Tensor) -> Tensor:
        """Split the heads: [batch, n, heads * head_dim] -> [batch, heads, n, head_dim]."""
        return x.view(*x.shape[:2], -1, self._head_dim).transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend to the filled cache.

        Dimensions: q [batch, heads, n, head_dim]; k, v [batch, kv_heads, filled, head_dim] -> [batch, n, hidden].
        """
        batch, _, n, _ = q.shape
        if n == 1:
            # The query heads of one KV head become its query rows, which is far faster than enable_gqa for one
            # position.
            out = scaled_dot_product_attention(q.view(batch, self._kv_heads, self._groups, -1), k, v, attn_mask=mask)
            return out.reshape(batch, 1, -1)
        if self._groups > 1:
            k, v = (t[:, :, None].expand(-1, -1, self._groups, -1, -1).flatten(1, 2) for t in (k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return out.transpose(1, 2).reshape(batch, n, -1)


def new_cache(model: Any, batch: int, max_len: int) -> KVCache:
    """Allocate an empty cache for ``batch`` sequences of a transformers model."""
    layers, config, norm = model.model.layers, model.config, model.model.norm.weight  # a float in every model
    head_dim = layers[0].self_attn.head_dim
    return KVCache(len(layers), batch, config.num_key_value_heads, max_len, head_dim, norm.dtype, norm.device)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE, half-split as in transformers: x [batch, heads, n, head_dim]; cos, sin [batch, 1, n, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
