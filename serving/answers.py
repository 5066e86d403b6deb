"""The answers of the API, whole or as server-sent events. Both kinds of request differ only in how a choice looks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from neuronmm.engine.loop import Generation
from neuronmm.serving.logprobs import Logprobs

_FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


class Answer:
    """The documents that answer one request, by the objects and fields of OpenAI's API.

    ``prompt_tokens`` counts each prompt once, however many choices it has. ``logprobs`` has one entry per result, or
    none if the request does not ask for them.
    """

    def __init__(
        self, model: str, results: list[Generation], logprobs: list[Logprobs], prompt_tokens: int, chat: bool
    ) -> None:
        self._results, self._logprobs = results, logprobs
        self._prompt_tokens, self._chat = prompt_tokens, chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._begun: set[int] = set()

    def whole(self) -> dict[str, Any]:
        """Return the document of an answer that is complete."""
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [self._choice(index, "message", result.text) for index, result in enumerate(self._results)]
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage()}

    async def events(self, pieces: AsyncIterator[tuple[int, str]], usage: bool) -> AsyncIterator[bytes]:
        """Yield one event per piece of text, then one with the token counts if ``usage`` asks for it, then the end."""
        async for index, text in pieces:
            yield event(self._chunk([self._choice(index, "delta", text)]))
        if usage:
            yield event({**self._chunk([]), "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "choices": choices,
        }

    def _choice(self, index: int, name: str, text: str) -> dict[str, Any]:
        reason = self._results[index].finish_reason
        logprobs = self._logprobs[index].take() if self._logprobs else None
        head = {"index": index, "finish_reason": _FINISH[reason] if reason else None, "logprobs": logprobs}
        if not self._chat:
            return {**head, "text": text}
        role = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        return {**head, name: {**role, "content": text}}

    def _usage(self) -> dict[str, int]:
        prompt, completion = self._prompt_tokens, sum(len(result.token_ids) for result in self._results)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def event(document: dict[str, Any]) -> bytes:
    """Return a server-sent event with a JSON document."""
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n".encode()
