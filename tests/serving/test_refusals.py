"""What the server refuses: the status, and a message that names the field."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest

from served import KEY, Server

CHAT: Any = [{"role": "user", "content": "w9"}]


def post(server: Server, body: bytes, path: str = "completions", key: str = KEY) -> tuple[int, dict[str, Any]]:
    """Return the status and the error of a request with any body."""
    request = urllib.request.Request(f"{server.url}/v1/{path}", body, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, {}
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


def test_a_name_that_is_no_unicode_text(server: Server) -> None:
    status, error = post(server, b'{"model": "tiny", "prompt": "w9", "\\ud800": 1}')
    assert (status, error["param"]) == (400, None) and error["message"].startswith("the request: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 16384}, "max_tokens"),
        ({"max_tokens": 99999}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"prompt": ["w9"] * 3, "n": 2}, "n"),
        ({"prompt": []}, "n"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [["w9"]]}, "prompt"),
        ({"prompt": [9, 10**30]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"top_k": 10**30}, "top_k"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"surprise": 1}, "surprise"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"other": 1}}, "stream_options"),
    ],
)
def test_a_field_of_a_completion(server: Server, fields: dict[str, Any], param: str) -> None:
    status, error = post(server, json.dumps({"model": "tiny", "prompt": "w9", **fields}).encode())
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert param in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "w9"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "messages"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "w9"}, "prompt"),
    ],
)
def test_a_field_of_a_chat(server: Server, fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"model": "tiny", "messages": CHAT, **fields}).encode()
    status, error = post(server, body, "chat/completions")
    assert (status, error["param"]) == (400, param)


def test_fields_that_change_nothing_are_taken(client: openai.OpenAI) -> None:
    neutral: Any = {"presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "user": "me", "tools": []}
    message = {**CHAT[0], "tool_calls": None}
    body = {**neutral, "response_format": {"type": "text"}, "logprobs": False, "stop": None}
    answer = client.chat.completions.create(model="tiny", messages=[message], max_tokens=1, extra_body=body)
    assert answer.choices


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"model": NaN}', b"\xff", b"[" * 60000])
def test_a_body_that_is_no_json_object(server: Server, body: bytes) -> None:
    status, error = post(server, body)
    assert status == 400 and "JSON" in error["message"]


def test_a_prompt_beyond_the_context(server: Server) -> None:
    prompt = [9] * 16384
    for fields in ({}, {"stream": True}):
        status, error = post(server, json.dumps({"model": "tiny", "prompt": prompt, **fields}).encode())
        assert status == 400 and "16384 tokens" in error["message"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "w9 " * 16384}]}
    status, error = post(server, json.dumps(chat).encode(), "chat/completions")
    assert (status, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
    status, error = post(server, json.dumps({"model": "tiny", "prompt": [9, 64]}).encode())
    assert status == 400 and "no token 64" in error["message"] and error["param"] == "prompt"


def test_a_body_that_is_too_large(server: Server) -> None:
    status, error = post(server, json.dumps({"model": "tiny", "prompt": "w9 " * 300_000}).encode())
    assert status == 413 and "limit" in error["message"]


def test_another_model_path_or_method(server: Server) -> None:
    status, error = post(server, json.dumps({"model": "other", "prompt": "w9"}).encode())
    assert (status, error["code"]) == (404, "model_not_found")
    assert post(server, b"{}", "embeddings")[0] == 404
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(f"{server.url}/v1/completions")


@pytest.mark.parametrize("key", ["", "wrong", KEY + "x", "ümläut"])
def test_a_wrong_key(server: Server, key: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": "w9", "max_tokens": 1}).encode()
    assert post(server, body)[0] == 200
    request = urllib.request.Request(f"{server.url}/v1/completions", body)
    request.add_header("Authorization", f"Bearer {key}".encode().decode("latin-1"))
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == 401
    assert json.loads(caught.value.read())["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError), server.client("wrong") as client:
        client.models.list()


def test_health_and_metrics_need_no_key(server: Server) -> None:
    for path in ("health", "metrics"):
        assert urllib.request.urlopen(f"{server.url}/{path}").status == 200


def test_a_client_that_leaves_while_it_sends_is_no_defect(server: Server) -> None:
    def counted() -> tuple[float, float]:
        text = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
        lines = [line for line in text.splitlines() if "neuronmm_requests_total" in line and "/v1/completions" in line]
        found = {line.split('status="')[1][:3]: float(line.rpartition(" ")[2]) for line in lines}
        return found.get("499", 0.0), found.get("500", 0.0)

    left, failed = counted()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        lines = ("POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", "Content-Length: 100")
        connection.sendall("\r\n".join([*lines, "", "{"]).encode())
        counted()  # the server has read the other part
    deadline = time.monotonic() + 30
    while counted() == (left, failed) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert counted() == (left + 1, failed)
