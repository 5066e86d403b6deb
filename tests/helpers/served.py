"""A server in a process of its own, on a free port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai

KEY = "a-secret"


class Server:
    """``neuronmm serve`` in a subprocess; a context manager, which kills the process if it still runs."""

    def __init__(self, folder: Path, *options: str) -> None:
        command = [sys.executable, "-m", "neuronmm", "serve", str(folder), "--port", "0", "--json", *options]
        environment = {**os.environ, "NEURONMM_API_KEY": KEY}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        try:
            line = self.process.stdout.readline()
        except BaseException:  # an interrupted test
            self.process.kill()
            raise
        if not line:
            raise RuntimeError(f"the server did not start: {self.process.communicate()[1]}")
        self.ready: dict[str, Any] = json.loads(line)
        self.url: str = self.ready["url"]
        self.model: str = self.ready["model"]

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def end(self) -> tuple[int, str]:
        """Wait for the end of the process, and return its status and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
