"""Functions and commands in several processes that know each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from neuronmm.models import processes


def in_processes(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of a function in ``size`` new processes, by rank."""
    port = free_port()
    with ProcessPoolExecutor(size, mp_context=get_context("spawn")) as pool:
        results = [pool.submit(call, rank, size, port, function, args) for rank in range(size)]
        return [result.result(timeout=900) for result in results]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def call(rank: int, size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    try:
        with processes.joined():
            return function(*args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # or the other processes would wait for this one


def torchrun(size: int, *words: object) -> subprocess.CompletedProcess[str]:
    """Run ``neuronmm`` with torchrun."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command = [*start, "-m", "neuronmm", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=900)
