"""The decoder as one C++ call: a decode step (one token per row), or the prefill of a prompt.

``ModelWeights`` describes a Llama, Qwen2 or Qwen3 decoder with plain tensors. Each linear is dense or factorised, in
floats or few bits. Linears with the same input may use the same A tensor, which is then read once. ``DecodeStep`` binds
the weights to a static KV cache. Nothing is copied: the core works on the tensors in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuronmm.kernels.cpu.library import MAX_BATCH, TYPES, Layer, Linear, Matrix, Model, core, malformed
from neuronmm.kernels.factors import Form, LowRank
from neuronmm.kernels.low_bits import Int4, Weight, stored
from neuronmm.kernels.ops import KernelError, width_after


@dataclass(frozen=True)
class LinearWeights:
    """``y = A x + bias``, or a factorised linear if ``B`` is given.

    Dimensions: dense ``A`` [out, in], ``bias`` [out]; factorised linears are those of :class:`LowRank`. The matrices
    are float32, bfloat16 or of few bits, contiguous.
    """

    A: Weight
    B: Weight | None = None
    bias: Tensor | None = None
    form: Form = Form.TWO
    pivots: int | Tensor | None = None

    @property
    def factors(self) -> LowRank | None:
        """The factorised linear, or None if this one is dense."""
        return None if self.B is None else LowRank(self.A, self.B, self.bias, self.form, self.pivots)

    @property
    def out_features(self) -> int:
        """The width of the result."""
        return self.A.shape[0] if self.factors is None else self.factors.out_features


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Norms are [hidden]; ``q_norm`` and ``k_norm`` are [head_dim] if the family has them."""

    input_norm: Tensor
    post_norm: Tensor
    q: LinearWeights
    k: LinearWeights
    v: LinearWeights
    o: LinearWeights
    gate: LinearWeights
    up: LinearWeights
    down: LinearWeights
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class ModelWeights:
    """A decoder.

    Dimensions: ``embedding`` [vocab, hidden], not in int4; ``cos`` and ``sin`` [max_len, head_dim] are the RoPE tables
    by position, in the half-split layout of transformers (both halves of a row are equal), with the attention scaling.
    ``scale`` multiplies the attention scores; ``eps`` is the epsilon of every norm.
    """

    embedding: Weight
    layers: Sequence[LayerWeights]
    final_norm: Tensor
    head: LinearWeights
    cos: Tensor
    sin: Tensor
    heads: int
    eps: float
    scale: float


class DecodeStep:
    """Run the decoder for a batch: one token per row, or several if :attr:`reads_prompts` holds.

    Dimensions: ``keys[layer]`` and ``values[layer]`` [batch, kv_heads, max_len, head_dim], contiguous, float32 or
    bfloat16. A call and :meth:`verify` serve a batch of at most 8 rows; :meth:`step_lanes` serves up to 8 of more.

    Raises:
        KernelError: the core is not built, or a tensor has a wrong device, dtype, layout or shape.
    """

    def __init__(self, weights: ModelWeights, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._alive: list[Tensor] = []
        library = core()
        if library is None:
            raise KernelError("the decode step needs the C++ core, which is not built")
        self._library = library
        batch, kv_heads, max_len, head_dim = keys[0].shape
        q_size, kv_size = weights.heads * head_dim, kv_heads * head_dim
        self._batch, self._dtype = batch, keys[0].dtype
        if batch < 1 or weights.heads % kv_heads or head_dim % 2:
            raise KernelError(
                f"the core takes batch 1 or more, a multiple of the KV heads as heads, and an even head size; "
                f"not batch {batch}, {weights.heads} heads, {kv_heads} KV heads, head size {head_dim}"
            )
        if isinstance(weights.embedding, Int4):
            raise KernelError("an embedding in int4: the core looks up rows of floats or int8")
        embedding = self._matrix(weights.embedding)
        hidden, intermediate = embedding.cols, weights.layers[0].gate.out_features
        self._vocab = weights.head.out_features
        layers = (Layer * len(weights.layers))()
        for layer, part, k, v in zip(layers, weights.layers, keys, values, strict=True):
            for name, size in (
                ("input_norm", hidden),
                ("post_norm", hidden),
                ("q_norm", head_dim),
                ("k_norm", head_dim),
            ):
                setattr(layer, name, self._floats(getattr(part, name), (size,)))
            for name, shape in {
                "q": (q_size, hidden),
                "k": (kv_size, hidden),
                "v": (kv_size, hidden),
                "o": (hidden, q_size),
                "gate": (intermediate, hidden),
                "up": (intermediate, hidden),
                "down": (hidden, intermediate),
            }.items():
                setattr(layer, name, self._linear(getattr(part, name), *shape))
            layer.keys, layer.values = (self._cache(t, keys[0]) for t in (k, v))
        table = (max_len, head_dim)
        self._model = Model(
            *(len(layers), hidden, weights.heads, kv_heads, head_dim, intermediate, batch, max_len),
            *(TYPES[keys[0].dtype], weights.eps, weights.scale, embedding),
            self._linear(weights.head, self._vocab, hidden),
            self._floats(weights.final_norm, (hidden,)),
            self._floats(weights.cos[:max_len], table),
            self._floats(weights.sin[:max_len], table),
            layers,
        )

    @property
    def reads_prompts(self) -> bool:
        """Whether a call may have several tokens per row: AVX2 or more, no fp32 matrix, and a bf16 cache."""
        return bool(self._library.neuronmm_reads_prompts(ctypes.byref(self._model)))

    def __call__(self, token_ids: Tensor, slot: int, starts: Tensor) -> Tensor:
        """Write the tokens to the cache from ``slot`` on and return the logits of the last token of each row.

        Dimensions: token_ids int64 [batch, count]; starts int32 [batch], the first slot of each row that holds a token
        (left padding); logits float32 [batch, vocab].

        Raises:
            KernelError: the arguments do not fit the cache, or count is above 1 and prompts are not supported.
        """
        return self._run(self._library.neuronmm_step, token_ids, slot, starts, (self._batch, self._vocab))

    def verify(self, token_ids: Tensor, slot: int, starts: Tensor) -> Tensor:
        """Do the same, and return the logits of every token, float32 [batch, count, vocab], for any dtype.

        Logits and cache equal those of ``count`` calls with one token bit by bit.

        Raises:
            KernelError: the arguments do not fit the cache, or these are more than 8 tokens in total.
        """
        return self._run(self._library.neuronmm_verify, token_ids, slot, starts, (*token_ids.shape, self._vocab))

    def step_lanes(self, token_ids: Tensor, lanes: Tensor, slots: Tensor) -> Tensor:
        """Append one token to each of n independent sequences, at most 8, and return their logits.

        Each sequence fills the slots of its lane (row of the cache) from 0 to before its ``slots`` entry. Logits and
        cache equal those of a step of each sequence alone bit by bit.

        Dimensions: token_ids int64 [n]; lanes, slots int32 [n]; logits float32 [n, vocab].

        Raises:
            KernelError: an argument has a wrong dtype or shape, or does not fit the cache or the vocabulary.
        """
        kinds = [(tensor.dtype, tensor.shape, tensor.device.type) for tensor in (token_ids, lanes, slots)]
        count = token_ids.numel()
        if kinds != [(dtype, (count,), "cpu") for dtype in (torch.int64, torch.int32, torch.int32)]:
            raise KernelError(f"tokens, lanes and slots are {kinds}, not int64, int32 and int32 [n] on the CPU")
        logits = torch.empty(count, self._vocab, dtype=torch.float32, device="cpu")
        token_ids, lanes, slots = (tensor.contiguous() for tensor in (token_ids, lanes, slots))
        tokens_at, lanes_at, slots_at, logits_at = (
            ctypes.c_void_p(tensor.data_ptr()) for tensor in (token_ids, lanes, slots, logits)
        )
        step, model = self._library.neuronmm_step_lanes, ctypes.byref(self._model)
        if step(model, tokens_at, count, lanes_at, slots_at, logits_at, torch.get_num_threads()):
            raise KernelError(
                f"the lanes {lanes.tolist()} at the slots {slots.tolist()} do not fit a cache of {self._batch} lanes "
                f"of {self._model.max_len} slots, or are more than {MAX_BATCH}, or a token is outside the vocabulary"
            )
        return logits

    def _run(self, step: Any, token_ids: Tensor, slot: int, starts: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self._batch > MAX_BATCH:
            raise KernelError(f"the core takes batch 1 to {MAX_BATCH}, not batch {self._batch}")
        if token_ids.ndim != 2 or len(token_ids) != self._batch or token_ids.dtype != torch.int64:
            raise KernelError(
                f"token_ids are {token_ids.dtype} {list(token_ids.shape)}, not int64 [{self._batch}, count]"
            )
        if starts.shape != (self._batch,) or starts.dtype != torch.int32:
            raise KernelError(f"starts are {starts.dtype} {list(starts.shape)}, not int32 [{self._batch}]")
        if not token_ids.device.type == starts.device.type == "cpu":
            raise KernelError(f"token_ids are on {token_ids.device} and starts on {starts.device}, not on the CPU")
        token_ids, starts = token_ids.contiguous(), starts.contiguous()
        logits = torch.empty(shape, dtype=torch.float32, device="cpu")
        model, threads = ctypes.byref(self._model), torch.get_num_threads()
        tokens_at, starts_at, logits_at = (ctypes.c_void_p(t.data_ptr()) for t in (token_ids, starts, logits))
        count = token_ids.shape[1]
        if step(model, tokens_at, count, starts_at, slot, logits_at, threads):
            raise KernelError(
                f"a token is outside the vocabulary, slot {slot} is before a row's start or past the end of the cache, "
                f"or {count} tokens per row are more than the processor, the dtype or the step allows"
            )
        return logits

    def _floats(self, tensor: Tensor | None, shape: tuple[int, ...]) -> int | None:
        """Return the address of a small tensor, converted to float32."""
        if tensor is None:
            return None
        if tensor.shape != shape:
            raise KernelError(f"a tensor of shape {list(tensor.shape)} where {list(shape)} belongs")
        return self._address(tensor.detach().float().contiguous())

    def _matrix(self, weight: Weight) -> Matrix:
        """Describe a matrix after checking it and keep it alive."""
        reason = malformed(weight)
        if reason is not None:
            raise KernelError(f"a weight: {reason}")
        for tensor in stored(weight):
            self._address(tensor)
        return Matrix.of(weight, self._dtype)

    def _linear(self, linear: LinearWeights, out: int, inner: int) -> Linear:
        a, factors = self._matrix(linear.A), linear.factors
        width = a.cols if factors is None else factors.in_features
        if (width, linear.out_features) != (inner, out):
            raise KernelError(f"a linear {width} -> {linear.out_features} where {inner} -> {out} belongs")
        bias = self._floats(linear.bias, (out,))
        if factors is None:
            return Linear(a, Matrix(), bias)
        self._matrix(factors.B)
        width_after(inner, factors)
        if isinstance(factors.pivots, Tensor):
            self._address(factors.pivots)
        return Linear.of(factors, bias, self._dtype)

    def _cache(self, tensor: Tensor, like: Tensor) -> int:
        if (
            tensor.shape != like.shape
            or tensor.dtype != like.dtype
            or tensor.dtype not in (torch.float32, torch.bfloat16)
        ):
            raise KernelError(f"a cache tensor {list(tensor.shape)} of {tensor.dtype} beside {list(like.shape)}")
        return self._address(tensor)

    def _address(self, tensor: Tensor) -> int:
        """Return the address of a contiguous tensor in main memory and keep the tensor alive."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise KernelError(
                f"a tensor {list(tensor.shape)} on {tensor.device}: it has to be contiguous, in main memory"
            )
        self._alive.append(tensor.detach())  # an alias: a parameter that gets other data lets its old memory go
        return tensor.data_ptr()
