"""The static KV cache: allocated once, filled in place, read up to the filled length.

Each layer has one contiguous tensor for the keys and one for the values, so that the C++ core can work on the same
memory through plain pointers.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, and a mask of the slots that hold tokens.

    Dimensions: ``keys[layer]`` and ``values[layer]`` [batch, kv_heads, max_len, head_dim]; ``valid`` [batch, max_len]
    is False if a slot holds padding. Slots from ``length`` on are not filled yet.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (batch, kv_heads, max_len, head_dim)
        # Writing zeros touches every page now, so that decode steps have no page faults.
        self.keys = [torch.empty(shape, dtype=dtype, device=device).zero_() for _ in range(layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device).zero_() for _ in range(layers)]
        self.valid = torch.ones(batch, max_len, dtype=torch.bool, device=device)
        self.max_len = max_len
        self.length = 0
        self.padded = False

    def reset(self, attention_mask: Tensor) -> None:
        """Empty the cache for prompts with ``attention_mask`` [batch, prompt], in which zero marks left padding."""
        self.length = 0
        self.valid.fill_(True)
        self.valid[:, : attention_mask.shape[1]] = attention_mask.bool()
        self.padded = not bool(attention_mask.all())

    def row(self, index: int) -> KVCache:
        """Return an empty cache of one sequence in the memory of row ``index``, with a length of its own."""
        row = copy.copy(self)
        row.keys, row.values = ([t[index : index + 1] for t in tensors] for tensors in (self.keys, self.values))
        row.valid = self.valid[index : index + 1]
        row.length, row.padded = 0, False
        return row

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))
