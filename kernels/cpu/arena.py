"""One contiguous memory arena for all weights, on huge pages if the system grants them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from neuronmm.kernels.pages import allocate

_LINE = 64


def gather(tensors: Iterable[Tensor]) -> Sequence[Tensor]:
    """Move the data of the tensors, in their order, into one new arena; the tensor objects stay the same.

    This is meant for parameters. Afterwards every tensor is contiguous, and neighbours in the given order are
    neighbours in memory; each begins on a cache line. The tensors must not share memory with each other. The arena
    lives as long as any of them.

    Returns:
        The tensors.
    """
    moved = list(tensors)
    sizes = [-(-tensor.nbytes // _LINE) * _LINE for tensor in moved]
    arena = torch.frombuffer(allocate(max(sum(sizes), _LINE)), dtype=torch.uint8)
    offsets = accumulate(sizes, initial=0)

    def move(tensor: Tensor, offset: int) -> None:
        target = arena[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = target.copy_(tensor.detach())

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # most of the time may go into new pages
        list(threads.map(move, moved, offsets))
    return moved


def huge_bytes(tensor: Tensor) -> int:
    """Return how many bytes of the mapping around ``tensor`` are on huge pages; 0 if the system does not report it."""
    maps = Path("/proc/self/smaps")
    if not maps.is_file():
        return 0
    address, inside = tensor.data_ptr(), False
    for line in maps.read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0
