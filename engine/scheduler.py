"""The scheduler of a server: requests of many clients share one continuous batch, which runs in a thread of its own.

A round reads one chunk of one prompt at most, so that running rows wait for a bounded number of prompt tokens. Then it
advances all rows whose prompts are read by one token, or a single row with drafts by several. Only token ids are
handled here. Text is made by the receiver of the tokens, in its own thread, while the next step runs in the core, which
releases Python's lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from neuronmm.engine.continuous import Batch, Slots
from neuronmm.engine.loop import Row
from neuronmm.engine.sampling import SamplingParams
from neuronmm.engine.speculation import Speculation
from neuronmm.models.errors import UserError


class QueueFull(Exception):
    """The rows of a request do not fit the queue."""


class SchedulerEnded(Exception):
    """The scheduler is closed or has failed, and takes no more rows."""


@dataclass(frozen=True)
class Event:
    """The next token of a row, or the error that ends it, at ``time`` (seconds of ``time.perf_counter``)."""

    row: Row
    token: int | Exception
    time: float


@dataclass(eq=False)
class _Job:
    row: Row
    params: SamplingParams
    ends: frozenset[int]
    left: int

    def ends_with(self, token: int | Exception) -> bool:
        """Count a token, and return whether it is the last one."""
        self.left -= 1
        return isinstance(token, Exception) or self.left == 0 or token in self.ends


class Scheduler:
    """A continuous batch with a bounded queue. All methods but :meth:`round` may be called from any thread.

    ``deliver`` is called after each prefill and each step, in the scheduler's thread, with the new tokens. A row ends
    by itself after its limit, an end-of-sequence token or an error, and at once when it is cancelled; a stop string is
    found by the receiver, which then cancels the row. Up to ``max_queue`` rows wait for a slot. ``speculate``: see
    :class:`~neuronmm.engine.continuous.Batch`.
    """

    def __init__(
        self,
        slots: Slots,
        eos: frozenset[int],
        device: torch.device,
        max_queue: int,
        deliver: Callable[[list[Event]], None],
        speculate: Callable[[int], Speculation] | None = None,
    ) -> None:
        self.batch, self._slots = Batch(slots, device, speculate), slots.batch
        self._eos, self._max_queue, self._deliver = eos, max_queue, deliver
        self._waiting: deque[_Job] = deque()
        self._jobs: dict[Row, _Job] = {}
        self._cancelled: set[Row] = set()
        self._changed = threading.Condition()
        self._closed = False
        self.failure: BaseException | None = None
        """The error that ended the scheduler's thread."""
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Rows in slots."""
        return len(self._jobs) - len(self._waiting)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, rows: Iterable[Row], params: SamplingParams) -> None:
        """Queue the rows of a request, all or none.

        Raises:
            QueueFull: they do not fit.
            SchedulerEnded: the scheduler is closed or has failed.
        """
        ends = frozenset() if params.ignore_eos else self._eos
        jobs = [_Job(row, params, ends, row.limit) for row in rows]
        with self._changed:
            if self._closed or self.failure:
                raise SchedulerEnded
            if len(self._jobs) + len(jobs) > self._slots + self._max_queue:
                raise QueueFull
            self._waiting.extend(jobs)
            self._jobs.update((job.row, job) for job in jobs)
            self._changed.notify()

    def cancel(self, rows: Iterable[Row]) -> None:
        """Drop rows from the queue and free their slots before the next step. Rows that have ended are ignored."""
        with self._changed:
            self._cancelled.update(row for row in rows if row in self._jobs)
            self._changed.notify()

    def close(self) -> None:
        """Drop all rows and end the thread; returns when it has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def round(self) -> None:
        """Drop cancelled rows, read a chunk of a prompt if there is one, and advance the rows that are ready.

        The next prompt takes a free slot when the one before it is read.
        """
        with self._changed:
            self._drop_cancelled()
            if self._waiting and self.batch.free and not self.batch.reading:
                job = self._waiting.popleft()
                self.batch.join(job.row, job.params, job.ends)
        row = self.batch.reading
        token = None if row is None else self.batch.read(row)
        if row is not None and token is not None:
            self._finish([(row, token)])
        if self.batch.ready:
            self._finish(self.batch.step())

    def _drop_cancelled(self) -> None:
        for row in self._cancelled & self._jobs.keys():
            job = self._jobs.pop(row)
            if job in self._waiting:
                self._waiting.remove(job)
            else:
                self.batch.leave(row)
        self._cancelled.clear()

    def _finish(self, tokens: list[tuple[Row, int | UserError]]) -> None:
        """Deliver tokens after freeing the slots of the rows that have ended."""
        now = time.perf_counter()
        with self._changed:
            for row, token in tokens:
                if self._jobs[row].ends_with(token):
                    del self._jobs[row]
                    self.batch.leave(row)
        self._deliver([Event(row, token, now) for row, token in tokens])

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
            try:
                self.round()
            except Exception as error:  # whatever it is, every waiting client has to hear of it
                logging.getLogger(__name__).exception("the engine has failed; restart the server")
                with self._changed:
                    self.failure = error
                    rows = list(self._jobs)
                self._deliver([Event(row, error, time.perf_counter()) for row in rows])
                return
