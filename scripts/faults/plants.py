"""Faults planted into the code, one for each study, to see that the study finds them."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from neuronmm.compression import tensor_files
from neuronmm.compression.workspace import Workspace
from neuronmm.engine import cpu_decoder
from neuronmm.models import chat, contents, gguf_header, load
from neuronmm.models.model_config import ModelConfig

_LEAK: list[mmap.mmap] = []


@contextmanager
def unchecked_config() -> Iterator[None]:
    """config.json is taken as it is."""
    with patch.object(ModelConfig, "parse", lambda config, where: ModelConfig.model_construct(**config)):
        yield


@contextmanager
def wrong_epsilon() -> Iterator[None]:
    """The core ignores rms_norm_eps."""
    describe = cpu_decoder.describe

    def wrong(*arguments: Any) -> Any:
        weights = describe(*arguments)
        object.__setattr__(weights, "eps", 1.0)
        return weights

    with patch.object(cpu_decoder, "describe", wrong):
        yield


@contextmanager
def unchecked_tensors() -> Iterator[None]:
    """The headers of the shards are not compared with config.json, and errors of transformers are not caught."""
    with (
        patch.object(contents, "check_tensors", lambda *arguments: None),
        patch.object(load, "reading", lambda problem: contextlib.nullcontext()),
    ):
        yield


@contextmanager
def uncaught_shard() -> Iterator[None]:
    """The error of a corrupt shard is not caught."""

    class Nothing(Exception):
        pass

    with patch.object(contents, "SafetensorError", Nothing):
        yield


@contextmanager
def any_index() -> Iterator[None]:
    """An index may name any file."""

    class Anything:
        fullmatch = staticmethod(lambda name: True)

    with patch.object(contents, "_PLAIN_NAME", Anything):
        yield


@contextmanager
def uncaught_gguf() -> Iterator[None]:
    """The error of a damaged header of a GGUF file reaches the user as a ValueError."""
    with patch.object(gguf_header, "UserError", ValueError):
        yield


@contextmanager
def unbounded_templates() -> Iterator[None]:
    """Chat templates run in this process."""

    def render(self: Any, messages: Any, *, answer: bool, problem: str) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer))

    with patch.object(chat.ChatTemplate, "__call__", render):
        yield


def write_in_place() -> None:
    """OUT is filled where it stands, instead of moved there when it is complete."""

    def finish(self: Any, fill: Callable[[Path], None]) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        fill(self.out)
        self._undo.pop_all()
        self._claim.remove()

    patch.object(Workspace, "finish", finish).start()
    patch.object(Workspace, "_check_out", lambda self: None).start()


def full_disk_is_success() -> None:
    """An error of the disk is swallowed, and the file stays as long as it got."""

    def write(path: Path, content: Any, metadata: Any = None) -> None:
        with contextlib.suppress(Exception):
            save(content, path, {"format": "pt", **(metadata or {})})

    save = tensor_files.save_file
    for module in ("tensor_files", "workspace", "checkpoint"):
        patch(f"neuronmm.compression.{module}.write_tensors", write).start()


def leak() -> None:
    """Every repetition keeps a megabyte and an open file."""
    block = mmap.mmap(-1, 1 << 20)  # new memory, whatever the process has freed before
    block.write(bytes(1 << 20))
    _LEAK.append(block)
    os.open(os.devnull, os.O_RDONLY)
