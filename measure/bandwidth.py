"""How fast this machine reads memory now, and how many bytes a decode step has to read.

Decoding a few rows reads every weight once a step, so bytes a step over read bandwidth is the floor of TPOT.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from neuronmm.kernels.cpu.arena import gather
from neuronmm.models.lowrank import LowRankLinear

SMALLEST, LARGEST = 64 * 2**20, 2**30


class BandwidthProbe:
    """Times plain reads over one buffer, on the threads and device the model uses.

    The buffer has the size of the model's weights (64 MiB to 1 GiB): a model that fits into a cache is then compared
    with that cache's bandwidth, not with the memory's behind it.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._buffer = torch.ones(min(max(nbytes, SMALLEST), LARGEST) // 4, device=device)
        if device.type == "cpu":
            gather([self._buffer])  # on huge pages, as the weights are: small ones would set the limit too low
        self.nbytes = self._buffer.nbytes

    @torch.inference_mode()
    def __call__(self) -> float:
        """Read bandwidth in bytes a second: the best of three sums over the buffer."""
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            self._buffer.sum().item()  # .item() waits for the device
            seconds.append(time.perf_counter() - start)
        return self.nbytes / min(seconds)


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters; a tied embedding or a shared factor counts once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def factor_bytes(model: Any) -> dict[str, int]:
    """Bytes of the low-rank factors by the precision they are stored in, scales included; a shared one counts once."""
    found: dict[str, int] = {}
    for module in model.modules():
        for factor in module.children() if isinstance(module, LowRankLinear) else ():
            precision = str(factor.weight.dtype).removeprefix("torch.")
            stored = sum(p.nbytes for name, p in factor.named_parameters() if name != "bias")
            found[precision] = found.get(precision, 0) + stored
    return found


def weight_bytes_per_step(model: Any) -> int:
    """Bytes of the parameters that a decode step reads in full, whatever the batch.

    The output head counts, tied or not; of an embedding table that is no head only a few rows are read, so it does not.
    """
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    return weight_bytes(model) - (0 if tied else embedding.nbytes)
