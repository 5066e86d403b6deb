"""The requests of the API. Whatever would change the result and is not supported is refused, not ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from neuronmm.engine.sampling import SamplingParams
from neuronmm.serving.errors import ApiError

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Parameter of the API that the server lacks -> the values that change nothing."""

IGNORED = {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "store", "user"}
"""Parameters that never change the result here."""

STOP_STRINGS = 16
"""Most stop strings of a request."""

COMPLETION_TOKENS = 16
"""Length of a completion without ``max_tokens``, which is OpenAI's."""

_WHAT = {
    "prompt": "has to be a text, a list of token ids, or a list of either",
    "stop": f"has to be a text that is not empty, or a list of at most {STOP_STRINGS} of them",
}
"""What is said of a field whose types have no simple message."""


def _encodable(text: str) -> str:
    """Refuse half of a surrogate pair, which JSON can express but no tokenizer takes."""
    text.encode()
    return text


_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Text = Annotated[str, AfterValidator(_encodable)]
_Stop = Annotated[_Text, Field(min_length=1)]


class StreamOptions(BaseModel):
    """``include_usage`` adds a last chunk with the token counts. ``include_obfuscation`` pads chunks, never here."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Request(BaseModel):
    """What both kinds of request have in common. ``top_k``, ``repetition_penalty`` and ``ignore_eos`` are extensions.

    The defaults are OpenAI's, so that sampling is on unless ``temperature`` is 0.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    n: int = Field(1, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**63 - 2**32)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=STOP_STRINGS)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens come with each token; None if the request asks for no log-probabilities."""
        raise NotImplementedError

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """Return the parameters for the engine.

        Raises:
            UserError: a value is out of the engine's range.
        """
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(Request):
    """A request to /v1/completions. A prompt is a text or its token ids; there may be several."""

    prompt: _Text | list[_Token] | list[_Text] | list[list[_Token]]
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if self.prompt and isinstance(self.prompt[0], int) else self.prompt  # type: ignore[list-item, return-value]


class Part(BaseModel):
    """A part of a message; there are only texts."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: _Text


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: _Text | list[Part]

    def plain(self) -> dict[str, str]:
        """Return role and text, as chat templates take them; ``developer`` is a newer name of ``system``."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Request):
    """A request to /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @property
    def alternatives(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs", "invalid_parameter")
        return self.top_logprobs if self.logprobs else None


R = TypeVar("R", bound=Request)


def parse(kind: type[R], body: bytes) -> R:
    """Read a request.

    Raises:
        ApiError: the body is not JSON, or a field is unknown, unsupported or out of range.
    """
    try:
        data = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body of the request is not valid JSON") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body of the request has to be a JSON object")
    data = _without_nulls(data)
    if isinstance(data.get("stream_options"), dict):
        data["stream_options"] = _without_nulls(data["stream_options"])
    if isinstance(data.get("messages"), list):
        data["messages"] = [_without_nulls(m) if isinstance(m, dict) else m for m in data["messages"]]
    for name in data.keys() & NEUTRAL.keys():
        value = data.pop(name)
        if (value, isinstance(value, bool)) not in [(neutral, isinstance(neutral, bool)) for neutral in NEUTRAL[name]]:
            raise ApiError(400, f"{name} is not supported by this server; leave it out", name, "unsupported_parameter")
    for name in data.keys() & IGNORED:
        del data[name]
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        loc = [str(part) for part in first["loc"]]
        field = loc[0] if loc else None  # a name that is no Unicode text has no place
        path = field if field in _WHAT else ".".join(loc) or "the request"
        unknown = "is not a parameter of this server" if first["type"] == "extra_forbidden" else None
        raise ApiError(
            400, f"{path}: {unknown or _WHAT.get(field or '', first['msg'])}", field, "invalid_parameter"
        ) from None


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
