"""Measure the read bandwidth of this machine, and count the bytes that a decode step reads.

Decoding a few rows reads every weight once per step, so bytes per step over read bandwidth is a lower bound of TPOT.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from neuronmm.kernels.cpu.arena import gather
from neuronmm.models.low_bits import Int4Linear
from neuronmm.models.lowrank import LowRankLinear

SMALLEST, LARGEST = 64 * 2**20, 2**30


class BandwidthProbe:
    """Measure plain reads of one buffer, with the threads and the device of the model.

    The buffer has the size of the model's weights (64 MiB to 1 GiB), so that a model that fits into a cache is compared
    with the bandwidth of the cache.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._buffer = torch.ones(min(max(nbytes, SMALLEST), LARGEST) // 4, device=device)
        if device.type == "cpu":
            gather([self._buffer])  # on huge pages like the weights; small pages would give too low a limit
        self.nbytes = self._buffer.nbytes

    @torch.inference_mode()
    def __call__(self) -> float:
        """Return the read bandwidth in bytes per second: the best of three sums over the buffer."""
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            self._buffer.sum().item()  # .item() waits for the device
            seconds.append(time.perf_counter() - start)
        return self.nbytes / min(seconds)


def weight_bytes(model: Any) -> int:
    """Return the bytes of all parameters of a module; a tied embedding or a shared factor counts once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def factor_bytes(model: Any) -> dict[str, int]:
    """Return the bytes of the low-rank factors by dtype, with their scales; a shared factor counts once."""
    totals: dict[str, int] = {}
    for module in model.modules():
        for factor in module.children() if isinstance(module, LowRankLinear) else ():
            packed = isinstance(factor, Int4Linear)
            precision = "int4" if packed else str(factor.weight.dtype).removeprefix("torch.")
            size = sum(p.nbytes for name, p in factor.named_parameters() if name != "bias")
            totals[precision] = totals.get(precision, 0) + size
    return totals


def weight_bytes_per_step(model: Any) -> int:
    """Return the bytes of the parameters that a decode step reads completely, for any batch size.

    The output head counts, tied or not. An embedding table that is not the head does not count, because a step reads
    only a few of its rows.
    """
    embedding = model.get_input_embeddings()
    tied = model.get_output_embeddings().weight is embedding.weight
    return weight_bytes(model) - (0 if tied else weight_bytes(embedding))
