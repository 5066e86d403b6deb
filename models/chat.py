"""Render a checkpoint's chat template, a program of unknown origin, in a child process with limits.

The sandbox of transformers keeps a template from files and from Python's internals, but lets it loop without end and
write text of any size. Only another process can be stopped at any moment, so a child renders all chats. It is forked
from this process, which takes milliseconds because transformers is loaded already.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from neuronmm.models.errors import UserError

CPU_SECONDS = 5
"""Processor time of one rendering; published templates take milliseconds."""
MEMORY = 1 << 29
"""Bytes that the child may allocate."""
MAX_BYTES = 1 << 24
"""Longest text in UTF-8, enough for a context of four million tokens."""
_PATIENCE = 120  # seconds; the child is late only if the machine is
_ENDLESS = f"it takes more than {CPU_SECONDS} seconds, or its process was killed"
_LARGE = f"it needs more than {MEMORY >> 20} MB of memory"
_LONG = f"it writes more than {MAX_BYTES >> 20} MB of text"


class ChatTemplate:
    """The chat template of ``tokenizer``. The child starts with the first chat and ends with this object."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._turn = threading.Lock()
        self._child: _Child | None = None

    def __call__(self, messages: Sequence[dict[str, Any]], *, answer: bool, problem: str) -> str:
        """Return the text of a conversation; with ``answer``, up to where the model's answer begins.

        Raises:
            UserError: the template fails or exceeds a limit; ``problem``, with the reason in brackets.
        """
        request = json.dumps({"messages": list(messages), "answer": answer}).encode()
        reply = b""
        with self._turn:
            if self._child is None:
                self._child = _Child(self._tokenizer)
                self._end = weakref.finalize(self, self._child.end)
            try:
                reply = self._child.ask(request)
            finally:
                if not reply:
                    self._end()
                    self._child = None
        if reply[:1] != b"+":
            raise UserError(f"{problem} ({reply[1:].decode(errors='replace') or _ENDLESS})")
        return reply[1:].decode()


class _Child:
    """A process that renders; :meth:`end` may be called twice."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._connection, theirs = Pipe()
        self._parent = os.getpid()
        with _tokenizers_configured():
            self._process = os.fork()
        if not self._process:
            _render(tokenizer, theirs)
        theirs.close()

    def ask(self, request: bytes) -> bytes:
        """Return the reply: ``+`` and the text, or ``-`` and why there is none; nothing if the child has ended."""
        with suppress(EOFError, OSError):  # the system ends it at its limit
            self._connection.send_bytes(request)
            if any(self._connection.poll(1) for _ in range(_PATIENCE)):  # a pause of both processes counts as one
                return self._connection.recv_bytes(MAX_BYTES + 1)
        return b""

    def end(self) -> None:
        """End the process."""
        self._connection.close()
        if self._process and self._parent == os.getpid():
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._process, signal.SIGKILL)
                os.waitpid(self._process, 0)
        self._process = 0


@contextmanager
def _tokenizers_configured() -> Iterator[None]:
    """Keep the package tokenizers, which the child does not call, from warning of the fork on stderr."""
    name = "TOKENIZERS_PARALLELISM"
    configured = name in os.environ
    os.environ.setdefault(name, "true")
    try:
        yield
    finally:
        if not configured:
            del os.environ[name]


def _render(tokenizer: Any, connection: Any) -> None:
    """Answer requests until the parent closes the connection; never return."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for handle in map(int, os.listdir("/dev/fd")):  # they would keep the parent's locks and other pipes open
            if handle > 2 and handle != connection.fileno():
                with suppress(OSError):
                    os.close(handle)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        statm = Path("/proc/self/statm")
        if statm.exists():
            size = int(statm.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        while True:
            connection.send_bytes(_reply(tokenizer, connection.recv_bytes()))
    finally:
        os._exit(0)


def _reply(tokenizer: Any, request: bytes) -> bytes:
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + CPU_SECONDS + 1, hard))
    try:
        asked = json.loads(request)
        text = tokenizer.apply_chat_template(asked["messages"], tokenize=False, add_generation_prompt=asked["answer"])
        reply = b"+" + str(text).encode()
        return reply if len(reply) <= MAX_BYTES else b"-" + _LONG.encode()
    except MemoryError:
        return b"-" + _LARGE.encode()
    except Exception as error:
        return b"-" + (" ".join(str(error).split()) or type(error).__name__)[:1000].encode(errors="replace")
