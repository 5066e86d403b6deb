"""Stand-ins for what the plugin uses of vllm-neuron: its modules by name, and a Llama and a Qwen3 with its parameters.

Written from the contract in :mod:`neuronmm.models.neuronx.vllm_modules`: names and shapes of parameters, the loaders
attached to them, ``from_configs`` on the meta device, the MLP's arguments and collectives. The attention is plain torch
over whole prompts, where vllm-neuron has kernels and a paged cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from neuronmm.emulator.importable import importable


@dataclass
class Group:
    """A group of ranks that are all alike. It records each collective with the shape that it got, and sums nothing."""

    world_size: int = 1
    rank_in_group: int = 0
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self.calls.append(("all_gather", tuple(x.shape)))
        return torch.cat([x] * self.world_size, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        self.calls.append(("reduce_scatter", tuple(x.shape)))
        return x.chunk(self.world_size, dim)[self.rank_in_group]

    def all_reduce(self, x: Tensor) -> None:
        self.calls.append(("all_reduce", tuple(x.shape)))


@dataclass
class Loader:
    """A loader: the function of a rank and of slices, which have ``get_shape`` and indices."""

    transform: Callable[[list[Any], int], Tensor]

    def load(self, slices: list[Any], rank: int) -> Tensor:
        return self.transform(slices, rank).contiguous()


def rows_of_rank(cores: int, by_input: bool = False) -> Loader:
    """A rank's part of a weight [out, in], transposed."""

    def transform(slices: list[Any], rank: int) -> Tensor:
        (weight,) = slices
        dim = 1 if by_input else 0
        size = weight.get_shape()[dim] // cores
        part = slice(rank * size, (rank + 1) * size)
        return weight[(slice(None), part) if by_input else (part,)].T

    return Loader(transform)


def whole(slices: list[Any], rank: int) -> Tensor:
    return slices[0][:]


def joined(slices: list[Any], rank: int) -> Tensor:
    """All outputs of weights [out, in], transposed."""
    return torch.cat([part[:] for part in slices]).T


def parameter(*shape: int, loader: Loader | None = None) -> nn.Parameter:
    result = nn.Parameter(torch.empty(shape), requires_grad=False)
    if loader is not None:
        result.weight_loader = loader  # type: ignore[attr-defined]
    return result


class Norm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = parameter(size), epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight, self.epsilon)


class Attention(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.config = c
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.qkv_proj_weight = parameter(c.hidden_size, queries + 2 * keys, loader=Loader(joined))
        self.o_proj_weight = parameter(queries, c.hidden_size, loader=Loader(joined))
        self.sizes = [queries, keys, keys]
        if c.model_type == "qwen3":
            self.q_norm, self.k_norm = Norm(c.head_dim, c.rms_norm_eps), Norm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        c, tokens = self.config, len(x)
        q, k, v = ((part.view(tokens, -1, c.head_dim)) for part in (x @ self.qkv_proj_weight).split(self.sizes, -1))
        if c.model_type == "qwen3":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(0, 1) for part in (self._rotated(q), self._rotated(k), v))
        y = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        return y.transpose(0, 1).flatten(1) @ self.o_proj_weight

    def _rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        steps = torch.arange(half) / half
        angles = torch.arange(len(x))[:, None] * self.config.rope_parameters["rope_theta"] ** -steps
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class HostMlp(nn.Module):
    def __init__(self, c: Any, group: Group) -> None:
        super().__init__()
        self.tp_group = group
        size = c.intermediate_size // group.world_size
        for name in ("gate_proj_weight", "up_proj_weight"):
            self.register_parameter(name, parameter(c.hidden_size, size, loader=rows_of_rank(group.world_size)))
        self.down_proj_weight = parameter(size, c.hidden_size, loader=rows_of_rank(group.world_size, by_input=True))

    def forward(self, x: Tensor, is_prefill: bool) -> Tensor:
        return (silu(x @ self.gate_proj_weight) * (x @ self.up_proj_weight)) @ self.down_proj_weight


class Layer(nn.Module):
    def __init__(self, c: Any, group: Group) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn, self.mlp = Attention(c), HostMlp(c, group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x), is_prefill=True)


class Body(nn.Module):
    def __init__(self, c: Any, group: Group) -> None:
        super().__init__()
        self.embed_tokens = nn.Module()
        self.embed_tokens.weight = parameter(c.vocab_size, c.hidden_size, loader=Loader(whole))
        self.layers = nn.ModuleList([Layer(c, group) for _ in range(c.num_hidden_layers)])
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)


class LlamaForCausalLM(nn.Module):
    """A model of one rank of ``group``; its attention is that of one rank."""

    group = Group()

    def __init__(self, c: Any) -> None:
        super().__init__()
        c.torch_dtype = torch.float32
        self.config, self.rank = c, self.group.rank_in_group
        self.model, self.lm_head = Body(c, self.group), nn.Module()
        self.lm_head.weight = parameter(c.vocab_size, c.hidden_size, loader=Loader(whole))

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Any:
        if getattr(hf_config, "quantization_config", None) is not None:
            raise ValueError("unsupported quantization_config")
        return cls(hf_config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits [tokens, vocabulary] of one prompt [tokens]."""
        x = self.model.embed_tokens.weight[input_ids]
        for layer in self.model.layers:
            x = layer(x)
        return self.model.norm(x) @ self.lm_head.weight.T


class Qwen3ForCausalLM(LlamaForCausalLM):
    """A factory, as vllm-neuron's Qwen3 is: its objects are of another class."""

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any = None) -> Any:
        return LlamaForCausalLM.from_configs(hf_config, neuron_config)


class NeuronPlatform:
    supported_quantization: list[str] = []  # noqa: RUF012


class Launched:
    """What ``wrap_nki`` returns: a kernel with a launch grid. ``count``: launches since the stand-ins came."""

    kernels: ClassVar[list[Any]] = []
    count = 0

    def __init__(self, kernel: Any) -> None:
        self.index = len(Launched.kernels)
        Launched.kernels.append(kernel)

    def __getitem__(self, cores: int) -> Any:
        return partial(launch, self.index, cores)


@torch._dynamo.allow_in_graph
def launch(index: int, cores: int, *arguments: Any) -> Tensor:
    """One node of a graph. While it is traced, tensors without values become ones, as in vllm-neuron's simulator."""
    kernel = Launched.kernels[index][cores]
    if not any(isinstance(a, FakeTensor) for a in arguments):
        Launched.count += 1
        return kernel(*arguments)
    with unset_fake_temporarily():
        ones = [torch.ones(a.shape, dtype=a.dtype) if isinstance(a, Tensor) else a for a in arguments]
        result = kernel(*ones)
    return torch.empty(result.shape, dtype=result.dtype)


@contextmanager
def vllm_neuron(kernels: bool | Callable[[str], bool]) -> Iterator[Any]:
    """Make the stand-ins importable; yields the registry. ``kernels``: what ``can_run_kernel`` answers, or itself."""
    Launched.count, NeuronPlatform.supported_quantization = 0, ["fp8"]
    surface: dict[str, dict[str, Any]] = {
        "vllm_neuron": {},
        "vllm_neuron.model": {},
        "vllm_neuron.model.registry": {
            "LlamaForCausalLM": LlamaForCausalLM,
            "Qwen3ForCausalLM": Qwen3ForCausalLM,
        },
        "vllm_neuron.vllm": {},
        "vllm_neuron.vllm.platform": {"NeuronPlatform": NeuronPlatform},
        "vllm_neuron.utils": {},
        "vllm_neuron.utils.neuron_utils": {"can_run_kernel": kernels if callable(kernels) else lambda device: kernels},
        "vllm_neuron.utils.weight_loader": {
            "get_weight_loader": lambda p: getattr(p, "weight_loader", Loader(whole)),
        },
        "libtorch_neuronx_lite": {},
        "libtorch_neuronx_lite.nki": {},
        "libtorch_neuronx_lite.nki.nki_hop": {"wrap_nki": Launched},
    }
    with importable(surface):
        from vllm_neuron.model import registry  # pyright: ignore[reportMissingImports]

        yield registry


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether two float32 results differ by rounding only."""
    return bool((a - b).abs().max() <= 1e-4 * max(1.0, math.sqrt(float(b.square().mean()))))
