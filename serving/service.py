"""The bridge between the requests, in the event loop, and the scheduler, in its thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from neuronmm.engine.engine import Engine
from neuronmm.engine.loop import Row, advance
from neuronmm.engine.sampling import SamplingParams
from neuronmm.engine.scheduler import Event, QueueFull, Scheduler, SchedulerEnded
from neuronmm.models.errors import UserError
from neuronmm.serving.errors import ApiError
from neuronmm.serving.logprobs import Logprobs
from neuronmm.serving.metrics import Metrics

BODY_BASE, BODY_PER_TOKEN = 64 * 1024, 32
"""Bytes of a request: a base, and a generous size per token of the context."""


@dataclass(frozen=True)
class Limits:
    """What one server takes: rows that run, rows that wait, tokens of an answer, and tokens of prompt and answer."""

    max_batch: int
    max_queue: int
    max_tokens: int
    context: int

    @property
    def body_bytes(self) -> int:
        """Most bytes of a request's body, which also bounds the time to tokenize it."""
        return BODY_BASE + BODY_PER_TOKEN * self.context


class Service:
    """An engine that serves many requests at once; its name is the id of the model. Create it in the event loop."""

    def __init__(self, engine: Engine, name: str, limits: Limits) -> None:
        self.engine, self.name, self.limits = engine, name, limits
        self._loop = asyncio.get_running_loop()
        self._inboxes: dict[Row, asyncio.Queue[Event]] = {}
        slots = engine.runner.slots(limits.max_batch, limits.context)
        self.scheduler = Scheduler(
            slots, engine.eos, engine.runner.device, limits.max_queue, self._deliver, engine.speculate(slots)
        )
        self.metrics = Metrics(self.scheduler)
        self.stopping = False
        self.scheduler.start()

    async def generate(
        self, rows: list[Row], params: SamplingParams, logprobs: list[Logprobs]
    ) -> AsyncGenerator[tuple[int, str], None]:
        """Run the rows of a request, and yield the index of a row with its next text; a row may end with no text.

        ``logprobs`` of the rows, if there are any, are told of each token before it is added to the text.
        Close the iterator to cancel the rows. The rows' results are complete when it is exhausted.

        Raises:
            ApiError: the queue is full, the server stops or the engine has failed.
        """
        start, inbox = time.perf_counter(), asyncio.Queue[Event]()
        eos = frozenset() if params.ignore_eos else self.engine.eos
        indexes = {row: index for index, row in enumerate(rows)}
        left = set(rows)
        self._submit(rows, params, inbox)
        try:
            while left:
                event = await inbox.get()
                row, result = event.row, event.row.result
                if row not in left:  # tokens that were under way when its stop string was found
                    continue
                if isinstance(event.token, Exception):
                    raise _failure(event.token)
                if logprobs:
                    logprobs[indexes[row]].note()
                text = "".join(advance(row, event.token, event.time - start, eos))
                self.metrics.token(result)
                if result.finish_reason:
                    left.remove(row)
                    self.metrics.end(result)
                if result.finish_reason == "stop":
                    self.scheduler.cancel([row])
                if text or result.finish_reason:
                    yield indexes[row], text
        finally:
            self.scheduler.cancel(left)
            for row in rows:
                del self._inboxes[row]
            for row in left:
                self.metrics.end(row.result)

    def stop(self) -> None:
        """End all requests with an error, and the scheduler."""
        self.stopping = True
        self.scheduler.close()
        for row, inbox in self._inboxes.items():
            inbox.put_nowait(Event(row, ApiError(503, "the server is shutting down"), time.perf_counter()))

    def _submit(self, rows: list[Row], params: SamplingParams, inbox: asyncio.Queue[Event]) -> None:
        try:
            self.scheduler.submit(rows, params)
        except QueueFull:
            raise ApiError(429, "the queue of this server is full; try again later", code="queue_full") from None
        except SchedulerEnded:
            reason = "the server is shutting down" if self.stopping else "the engine has failed; restart the server"
            raise ApiError(503, reason) from None
        self._inboxes.update(dict.fromkeys(rows, inbox))  # before the event loop sees their first tokens

    def _deliver(self, events: list[Event]) -> None:
        """Hand the tokens of a step to the event loop, from the scheduler's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            inbox = self._inboxes.get(event.row)
            if inbox is not None:
                inbox.put_nowait(event)


def _failure(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    return ApiError(500, str(error) if isinstance(error, UserError) else f"the engine has failed: {error}")
