"""The process: how it starts, and how it ends while clients stream."""

from __future__ import annotations

import signal
import socket
import time
import urllib.error
import urllib.request
from importlib import util
from pathlib import Path
from typing import Any

import openai
import pytest

from neuronmm import cli
from neuronmm.commands.serve import KEY_VARIABLE, read_key
from neuronmm.models import UserError
from neuronmm.serving.address import bind, is_local, url
from served import KEY, Server

Capture = pytest.CaptureFixture[str]


def stream(client: openai.OpenAI, tokens: int) -> Any:
    chunks = client.completions.create(
        model="tiny", prompt="w9", max_tokens=tokens, stream=True, extra_body={"ignore_eos": True}
    )
    return iter(chunks)


def assert_refuses_connections(server: Server) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=10)
        except urllib.error.HTTPError:
            raise  # an answer
        except OSError:  # refused, or reset if the server was just closing
            break
    assert server.process.poll() is None, "refused only because it has ended"
    assert time.monotonic() < deadline


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_end(folder: Path, number: int) -> None:
    with Server(folder, "--context", "8000", "--grace", "100") as server, server.client() as client:
        chunks = stream(client, 3000)
        next(chunks)
        server.process.send_signal(number)
        assert_refuses_connections(server)
        *_, last = chunks
        assert last.choices[0].finish_reason == "length"
        assert server.end()[0] == 0


def test_after_the_grace_period_requests_end_with_an_error(folder: Path) -> None:
    with Server(folder, "--context", "16000", "--grace", "0", "--max-batch", "1") as server, server.client() as client:
        chunks = stream(client, 15000)
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(chunks)
        status, errors = server.end()
        assert status == 0 and "Traceback" not in errors


def test_a_client_that_never_ends_its_request_does_not_keep_the_server(folder: Path) -> None:
    with Server(folder, "--grace", "0") as server:
        address = server.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode())
            client.sendall(b"\r\nContent-Length: 100\r\n\r\n{")
            assert urllib.request.urlopen(f"{server.url}/health").status == 200, "the server has read the other part"
            server.process.send_signal(signal.SIGTERM)
            assert server.end()[0] == 0


def test_an_address_in_use_is_one_line(folder: Path, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["serve", str(folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "choose --host or --port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-batch", "0"], "--max-batch is 0"),
        (["--max-queue", "-1"], "--max-queue is -1"),
        (["--context", "99999"], "--context is 99999, but the model has 16384"),
        (["--grace", "nan"], "--grace is nan"),
        (["--port", "99999"], "--port is 99999"),
        (["--host", "no.such.host.invalid"], "cannot listen"),
        (["--host", "127.0..1"], "cannot listen"),
    ],
)
def test_a_wrong_option_is_one_line(folder: Path, capsys: Capture, arguments: list[str], message: str) -> None:
    assert cli.main(["serve", str(folder), "--port", "0", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("neuronmm serve: error:") and message in error


def test_a_missing_package_is_one_line(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    find = util.find_spec
    monkeypatch.setattr("neuronmm.commands.serve.find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert cli.main(["serve", str(folder)]) == 2
    assert 'pip install "neuronmm[serve]"' in capsys.readouterr().err


def test_one_warning_for_an_open_address(folder: Path, capsys: Capture, tmp_path: Path) -> None:
    """The context is wrong, so that nothing is served."""
    command = ["serve", str(folder), "--port", "0", "--context", "99999"]
    (tmp_path / "key").write_text("secret\n")
    for more, warns in (
        ([], False),
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-key-file", str(tmp_path / "key")], False),
    ):
        assert cli.main([*command, *more]) == 2
        assert capsys.readouterr().err.count("warning:") == warns


def test_addresses() -> None:
    for host, local in (("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)):
        with bind(host, 0) as reserved:
            assert is_local(reserved) is local
            assert url(reserved).startswith("http://")


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_key(None) is None
    monkeypatch.setenv(KEY_VARIABLE, "from-environment")
    assert read_key(None) == "from-environment"
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert read_key(file) == "from-file"
    for text in ("", "\n", "two words", "ümlaut"):
        file.write_text(text)
        with pytest.raises(UserError, match="one word"):
            read_key(file)
