"""The process: a socket, uvicorn, and an end that gives running requests some time."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from collections.abc import Callable

import uvicorn

from neuronmm.engine.engine import Engine
from neuronmm.serving.app import Api
from neuronmm.serving.service import Limits, Service


def serve(
    engine: Engine,
    name: str,
    reserved: socket.socket,
    limits: Limits,
    key: str | None,
    grace: float,
    ready: Callable[[], None],
) -> None:
    """Serve until SIGTERM or SIGINT. Requests that run then have ``grace`` seconds to end; a second SIGINT ends them.

    ``ready`` is called when the server accepts connections.
    """

    async def main() -> None:
        service = Service(engine, name, limits)
        # Clients that neither send the rest of a request nor read an answer end a second after the grace period.
        last = math.ceil(grace) + 1
        app = Api(service, key).app()
        config = uvicorn.Config(
            app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=last
        )
        await _Server(config, service, grace, ready).serve([reserved])

    # uvicorn catches the signals while it serves, and raises them again at the end, which was the purpose.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        asyncio.run(main())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service, grace: float, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._grace, self._ready = service, grace, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the running requests, but not for longer than the grace period."""
        end = asyncio.get_running_loop().call_later(self._grace, self._service.stop)
        await super().shutdown(sockets)
        end.cancel()
        self._service.stop()
