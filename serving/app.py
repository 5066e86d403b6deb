"""The HTTP surface: routes, the API key, and the limits of a request."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neuronmm.engine.engine import PromptTooLong
from neuronmm.models.errors import UserError
from neuronmm.serving.answers import Answer
from neuronmm.serving.errors import ApiError
from neuronmm.serving.logprobs import Logprobs
from neuronmm.serving.reply import LEFT, Reply
from neuronmm.serving.requests import COMPLETION_TOKENS, ChatRequest, CompletionRequest, Request, parse
from neuronmm.serving.service import Service

_TOO_LONG = "context_length_exceeded"


class Api:
    """The routes of a service. ``key`` guards those below /v1; None leaves them open."""

    def __init__(self, service: Service, key: str | None) -> None:
        self._service, self._key = service, key

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
            Route("/v1/completions", self._posted(self._complete, "prompt"), methods=["POST"]),
            Route("/v1/chat/completions", self._posted(self._chat, "messages"), methods=["POST"]),
        ]
        handlers: Any = {ApiError: _answer_error, HTTPException: _answer_http_error, Exception: _answer_defect}
        return self._counted(Starlette(routes=routes, exception_handlers=handlers))

    async def _health(self, request: HttpRequest) -> Response:
        if self._service.stopping or self._service.scheduler.failure:
            return JSONResponse({"status": "ended"}, 503)
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: HttpRequest) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: HttpRequest) -> Response:
        self._authorize(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: HttpRequest) -> Response:
        if not request.path_params["model"]:
            return await self._models(request)
        self._authorize(request)
        self._check_model(request.path_params["model"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        model = {"id": self._service.name, "object": "model", "created": 0, "owned_by": "neuronmm"}
        return {**model, "max_model_len": self._service.limits.context}

    def _posted(self, answer: Callable[[bytes], Response], text: str) -> Callable[[HttpRequest], Any]:
        """Return the endpoint that checks the key and the size of a request before ``answer`` reads its body.

        ``text`` is the field with the prompt.
        """

        async def endpoint(request: HttpRequest) -> Response:
            self._authorize(request)
            body, most = bytearray(), self._service.limits.body_bytes
            try:
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise ApiError(413, f"the request has more than {most} bytes, the limit of this server")
            except ClientDisconnect:
                raise ApiError(499, "the client left before its request was complete") from None
            try:
                return answer(bytes(body))
            except PromptTooLong as error:
                raise ApiError(400, str(error), text, _TOO_LONG) from None
            except UserError as error:
                raise ApiError(400, str(error)) from None

        return endpoint

    def _complete(self, body: bytes) -> Response:
        request, engine = parse(CompletionRequest, body), self._service.engine
        self._check_model(request.model)
        self._check_choices(request, len(request.prompts))
        for token in (token for prompt in request.prompts if not isinstance(prompt, str) for token in prompt):
            if token >= engine.vocabulary:
                raise ApiError(400, f"the vocabulary has {engine.vocabulary} tokens, and no token {token}", "prompt")
        prompts = [engine.encode(p) if isinstance(p, str) else engine.check_prompt(p) for p in request.prompts]
        limit = self._limit(request.max_tokens, prompts)
        return self._reply(request, prompts, limit or COMPLETION_TOKENS, chat=False)

    def _chat(self, body: bytes) -> Response:
        request = parse(ChatRequest, body)
        self._check_model(request.model)
        self._check_choices(request, 1)
        prompts = [self._service.engine.encode_chat([message.plain() for message in request.messages])]
        limit = self._limit(request.max_completion_tokens or request.max_tokens, prompts)
        return self._reply(request, prompts, limit or self._service.limits.max_tokens, chat=True)

    def _reply(self, request: Request, prompts: list[list[int]], max_new_tokens: int, chat: bool) -> Response:
        """Prepare one row per choice. Choice i samples with ``seed + i``, a random seed by default."""
        service, params = self._service, request.sampling(min(max_new_tokens, self._service.limits.max_tokens))
        seed = secrets.randbits(32) if request.seed is None else request.seed
        choices = [ids for ids in prompts for _ in range(request.n)]
        engine, asked = service.engine, request.alternatives
        rows = [engine.row(ids, params, seed + index, alternatives=asked) for index, ids in enumerate(choices)]
        logprobs = [] if asked is None else [Logprobs(row, engine.tokenizer, chat) for row in rows]
        answer = Answer(service.name, [row.result for row in rows], logprobs, sum(map(len, prompts)), chat)
        usage = request.stream_options.include_usage if request.stream else None
        return Reply(lambda: service.generate(rows, params, logprobs), answer, usage)

    def _limit(self, asked: int | None, prompts: list[list[int]]) -> int | None:
        """Return the number of tokens that a request asks for, after checking it."""
        limits, longest = self._service.limits, max(map(len, prompts))
        if asked and asked > limits.max_tokens:
            raise ApiError(400, f"max_tokens is {asked}; this server allows {limits.max_tokens}", "max_tokens")
        if asked and longest + asked > limits.context:
            raise ApiError(
                400,
                f"the prompt has {longest} tokens and max_tokens is {asked}, but together they have to fit the context "
                f"of {limits.context} tokens",
                "max_tokens",
                _TOO_LONG,
            )
        return asked

    def _check_choices(self, request: Request, prompts: int) -> None:
        most = self._service.limits.max_batch
        if not 1 <= request.n * prompts <= most:
            raise ApiError(400, f"{prompts} prompts with n = {request.n}: a request has 1 to {most} choices here", "n")

    def _check_model(self, asked: str) -> None:
        name = self._service.name
        if asked != name:
            raise ApiError(404, f"there is no model {asked!r} here, only {name!r}", "model", "model_not_found")

    def _authorize(self, request: HttpRequest) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode()):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    def _counted(self, app: Starlette) -> ASGIApp:
        """Count the requests by path and status."""
        paths = {route.path for route in app.routes if isinstance(route, Route)}

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            status = 500

            async def noting(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, noting)
            finally:
                path = scope["path"] if scope["path"] in paths else "other"
                self._service.metrics.requests.labels(path, 499 if scope.get(LEFT) else status).inc()

        return counted


async def _answer_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status)


async def _answer_http_error(request: HttpRequest, error: Exception) -> Response:
    """A path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    return JSONResponse(ApiError(error.status_code, error.detail).body, error.status_code, error.headers)


async def _answer_defect(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "an internal error; the server's log has it").body, 500)
