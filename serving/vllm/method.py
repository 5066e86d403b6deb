"""The linear method: how a linear of vLLM loads and applies its parts, the linears of the checkpoint that it merges.

A part is low-rank or dense, and parts differ in rank. The layer therefore has a module for each part, which takes the
tensors under the names of the checkpoint. When the last tensor of a layer has arrived, every part becomes what this
tensor-parallel rank computes of it (``parts.py``).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase, RowParallelLinear

from neuronmm.kernels.cpu import arena, core
from neuronmm.kernels.cpu.linears import describe
from neuronmm.kernels.cpu.step import LinearWeights
from neuronmm.kernels.plain import linears
from neuronmm.models import CompressionSpec, UserError
from neuronmm.serving.vllm.parts import Part, Split

_POSITIONS: dict[Any, int] = {None: 0, "q": 0, "k": 1, "v": 2, 0: 0, 1: 1}
"""vLLM's id of a part -> its position in the layer."""

_CORE_DTYPES = (torch.float32, torch.bfloat16)


class LowRankMethod(LinearMethodBase):
    """Runs the linears ``names`` of the checkpoint, low-rank or dense, as one linear of vLLM.

    On a CPU, all of them are one call of the C++ core, in float32 and bfloat16. Elsewhere they run in plain torch.
    """

    def __init__(self, spec: CompressionSpec, names: list[str]) -> None:
        self.spec, self.names = spec, names

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give ``layer`` its parts, still without parameters, and its loader."""
        in_rows = isinstance(layer, RowParallelLinear)
        layer.parts = nn.ModuleList()
        for position, (name, size) in enumerate(zip(self.names, output_partition_sizes, strict=True)):
            copies = getattr(layer, "num_kv_head_replicas", 1) if position else 1  # ranks with the same KV heads
            split = Split(layer.tp_rank // copies, layer.tp_size // copies, in_rows)
            outputs = size if in_rows else size * split.count
            layer.parts.append(Part(name, self.spec, input_size, outputs, split))
        layer.part_sizes, layer.described, layer.biased = output_partition_sizes, None, set()
        layer.load_weights = partial(self._load, layer, torch.empty(0).device, params_dtype)

    def _load(
        self, layer: Any, device: torch.device, dtype: torch.dtype, weights: Iterable[tuple[str, Tensor]]
    ) -> Iterator[str]:
        """Take tensors under their names inside a part; those of a merged linear have vLLM's attribute ``shard_id``.

        Raises:
            UserError: the layer has no such tensor, or one of another shape.
        """
        for name, tensor in weights:
            position = _POSITIONS[getattr(tensor, "shard_id", None)]
            if name in ("bias", "B.bias"):
                self._load_bias(layer, position, tensor)
            else:
                layer.parts[position].take(name, tensor)
            yield name
        if all(part.complete for part in layer.parts):
            self._build(layer, device, dtype)

    def _load_bias(self, layer: Any, position: int, tensor: Tensor) -> None:
        part, sizes = layer.parts[position], layer.part_sizes
        if layer.bias is None:
            raise UserError(f"{part.name} has a bias, but config.json says that it has none; fix config.json")
        if tensor.shape != (part.out_features,):
            raise UserError(f"the bias of {part.name} has shape {list(tensor.shape)}; compress the model again")
        layer.bias.data.split(sizes)[position].copy_(part.split.of_outputs(tensor))
        layer.biased.add(position)

    def _build(self, layer: Any, device: torch.device, dtype: torch.dtype) -> None:
        layer.described = None  # it points to the parameters that are replaced now
        parts = {part.name: part for part in layer.parts}
        for name in sorted(parts, key=lambda name: name in self.spec.shared):  # leaders first
            parts[name].build(parts.get(self.spec.shared.get(name, "")), device, dtype)
        if device.type == "cpu":
            arena.gather(layer.parts.parameters())
        layer.weight = torch.empty(0, device=device)  # vLLM puts a layer's LoRA adapters where its `weight` is

    def process_weights_after_loading(self, layer: Any) -> None:
        """Describe the loaded layer to the C++ core, if it runs there.

        Raises:
            UserError: a tensor of the layer was in no shard.
        """
        for position, part in enumerate(layer.parts):
            if not hasattr(part, "A") or (layer.bias is not None and position not in layer.biased):
                raise UserError(f"a tensor of {part.name} is in no shard; compress the model again")
        weight = next(layer.parts.parameters())
        if weight.device.type != "cpu" or core() is None or layer.params_dtype not in _CORE_DTYPES:
            return
        in_rows = layer.parts[0].split.inputs
        if layer.bias is None or layer.skip_bias_add or (in_rows and layer.tp_rank > 0):
            biases = [None] * len(layer.parts)
        else:
            layer.wide_bias = layer.bias.data.float()
            biases = layer.wide_bias.split(layer.part_sizes)
        weights = [_weights(part, bias) for part, bias in zip(layer.parts, biases, strict=True)]
        layer.described = describe(weights, layer.params_dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return y [tokens, sum of the parts' outputs] for x [tokens, in]."""
        if layer.described is not None:
            return torch.ops.neuronmm.linears(x, layer.described, sum(layer.part_sizes))
        y = linears(x, [part.factors or part.A.weight for part in layer.parts])
        return y if bias is None else y + bias


def _weights(part: Part, bias: Tensor | None) -> LinearWeights:
    A = part.A.weight
    return LinearWeights(A, None, bias) if part.factors is None else LinearWeights(*part.factors._replace(bias=bias))
