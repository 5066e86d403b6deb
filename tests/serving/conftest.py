"""A tiny model with a long context, an engine of its own in this process, and a server on it in another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from neuronmm.engine.engine import Engine, load
from served import Server
from tiny_models import tiny_checkpoint
from word_tokenizer import word_tokenizer

CONTEXT = 16384
"""So long that a request without an end runs until a test cancels it."""


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "tiny"
    tiny_checkpoint(folder)
    word_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return folder


@pytest.fixture(scope="package")
def engine(folder: Path) -> Engine:
    return load(folder, dtype="bf16")


@pytest.fixture(scope="package", params=[(), ("--draft", "int4")], ids=["plain", "drafts"])
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """Four rows run, sixteen wait. A row that is alone has drafts, or not: the answers are the same."""
    options = ("--max-batch", "4", "--max-queue", "16", "--context", str(CONTEXT), "--dtype", "bf16", *request.param)
    with Server(folder, *options) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client
