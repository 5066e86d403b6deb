"""The processes of one run, which torchrun started: which one this is, and what they tell each other.

Without torchrun there is one process, and every exchange returns what it is given. All processes call the exchanges in
the same order. They use gloo on CPUs and NCCL between GPUs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from neuronmm.models.errors import UserError

PATIENCE = timedelta(days=2)
"""How long a process waits for another one that is alive: the first one alone samples texts and rounds large models.

The end of a process is noticed at once.
"""

_SAME_ERROR = timedelta(seconds=3)  # how long a process waits to learn whether the first one has its error too
_ERROR = "neuronmm/error"

_state = {"together": False}

K = TypeVar("K")
V = TypeVar("V")


class ProcessLost(UserError):
    """Another process of the run has ended, or all are told to."""


def started(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return rank and number of the processes that torchrun started; 0 and 1 without it.

    Raises:
        UserError: the variables of torchrun are not numbers that fit each other.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return 0, 1
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except ValueError:
        rank, size = -1, 0
    if not 0 <= rank < size:
        raise UserError(
            f"RANK={environment['RANK']}, WORLD_SIZE={environment['WORLD_SIZE']}: no process of a run; start the "
            "command with torchrun, or unset both"
        )
    return rank, size


@contextmanager
def joined() -> Iterator[None]:
    """Join the other processes for the duration of the block. Only the first one prints.

    An error of the first process is its error alone, if the others have the same one. An error that only another
    process has is printed by that process, and the first one then raises :class:`ProcessLost`.

    Raises:
        UserError: the processes do not find each other, or there are more of them than GPUs.
        ProcessLost: another process has ended.
    """
    rank, size = started()
    if size == 1:
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    store: Any = None
    try:
        store = _join(rank, size)
        with _silent(rank > 0), _together():
            yield
            with suppress(ProcessLost):  # the work is done
                meet()  # none leaves while another one still exchanges
        dist.destroy_process_group()
    except UserError as error:
        if rank == 0:
            if store is not None:
                store.set(_ERROR, str(error))
            raise
        if store is None or isinstance(error, ProcessLost) or _first_has(store, str(error)):
            raise SystemExit(2) from None
        raise UserError(f"process {rank} of {size}: {error}") from None
    except KeyboardInterrupt:
        if rank > 0:
            raise SystemExit(130) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def rank() -> int:
    """Return the number of this process, from 0 on; the first one writes and prints."""
    return dist.get_rank() if _several() else 0


def size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if _several() else 1


def on_this_machine() -> int:
    """Return the number of processes that share this machine's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size())) if _several() else 1


def add_up(*tensors: Tensor) -> None:
    """Add the tensors of all processes, in place; every process gets the same bits."""
    if _several():
        with _exchange():
            for tensor in tensors:
                dist.all_reduce(tensor)


def of_all(value: V) -> list[V]:
    """Return the values of all processes, by rank."""
    values: list[Any] = [value] * size()
    if _several():
        with _exchange():
            dist.all_gather_object(values, value)
    return values


def of_first(value: V, source: int = 0) -> V:
    """Return the value of the first process, or of process ``source``."""
    values: list[Any] = [value]
    if _several():
        with _exchange():
            dist.broadcast_object_list(values, source)
    return values[0]


def shared_out(items: Sequence[K], compute: Callable[[K], V]) -> dict[K, V]:
    """Return ``compute(item)`` of every item; each process computes its part of them."""
    mine = {item: compute(item) for item in items[rank() :: size()]}
    return {item: of_first(mine.get(item), number % size()) for number, item in enumerate(items)}  # type: ignore[misc]


def in_turn(compute: Callable[[], V]) -> V:
    """Return ``compute()``, which the first process calls before the others do."""
    if rank() > 0:
        meet()
        return compute()
    value = compute()
    meet()
    return value


def part(rows: Tensor) -> Tensor:
    """Return the rows that this process has: every ``size()``-th one."""
    return rows[rank() :: size()]


def total(value: float) -> float:
    """Return the sum of the values of all processes."""
    return sum(of_all(value))


def meet() -> None:
    """Return when all processes have come here."""
    of_all(None)


def _several() -> bool:
    """Return whether :func:`joined` made a group; one that a program made for itself is not used."""
    return _state["together"]


@contextmanager
def _together() -> Iterator[None]:
    _state["together"] = True
    try:
        yield
    finally:
        _state["together"] = False


def _join(rank: int, size: int) -> Any:
    """Make the group of all processes and return its store.

    Raises:
        UserError: the processes do not find each other, or there are more of them than GPUs.
    """
    backend, on_gpus = "gloo", torch.cuda.is_available()
    if on_gpus:
        local, gpus = int(os.environ.get("LOCAL_RANK", rank)), torch.cuda.device_count()
        if local >= gpus:
            raise UserError(f"process {local} of this machine has no GPU of its own, there are {gpus}; start fewer")
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timedelta(minutes=5))))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"the {size} processes do not find each other ({reason}); start them with torchrun") from None
    return store


@contextmanager
def _silent(yes: bool) -> Iterator[None]:
    """Discard what the block prints, if ``yes``."""
    if not yes:
        yield
        return
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        yield


@contextmanager
def _exchange() -> Iterator[None]:
    """Raise ProcessLost if the exchange in the block fails, which has no other cause."""
    try:
        yield
    except RuntimeError as error:
        late = "timed out" in str(error).lower()
        what = f"does not answer for {PATIENCE}" if late else "has ended; its message is above"
        raise ProcessLost(f"another process of this run {what}") from error


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Torchrun ends all processes when one has failed."""
    raise ProcessLost("the run was stopped, by a signal or because another process ended; its message is above")


def _first_has(store: Any, error: str) -> bool:
    """Return whether the first process ends with this error too."""
    with suppress(RuntimeError):
        store.wait([_ERROR], _SAME_ERROR)
        return bool(store.get(_ERROR).decode() == error)
    return False
