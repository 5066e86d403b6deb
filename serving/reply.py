"""The sending of an answer, which ends at once when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from neuronmm.serving.answers import Answer, event
from neuronmm.serving.errors import ApiError

LEFT = "neuronmm.left"
"""Key of a request's scope that is set if its client left."""


class Reply(Response):
    """Runs a generation and sends its answer: as a stream if ``usage`` is True or False, as a whole if it is None.

    ``generate`` starts the generation. If the client leaves, the generation is closed, which cancels its rows.
    """

    def __init__(
        self, generate: Callable[[], AsyncGenerator[tuple[int, str], None]], answer: Answer, usage: bool | None
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._generate, self._answer, self._usage = generate, answer, usage
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        work = self._whole(scope, receive, send) if self._usage is None else self._stream(self._usage, send)
        scope[LEFT] = not await _unless_left(receive, work)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._generate()) as pieces:
            async for _ in pieces:
                pass
        await JSONResponse(self._answer.whole())(scope, receive, send)

    async def _stream(self, usage: bool, send: Send) -> None:
        """Send the events. The first one is awaited before the status, because the queue may be full."""
        begun = False
        async with aclosing(self._generate()) as pieces:
            try:
                async for data in self._answer.events(pieces, usage):
                    if not begun:
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    begun = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except ApiError as error:
                if not begun:
                    raise
                await send({"type": "http.response.body", "body": event(error.body), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _unless_left(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run ``work``; cancel it and return False if the client leaves first."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(work), asyncio.create_task(left())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            return False
        await tasks[0]
        return True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
