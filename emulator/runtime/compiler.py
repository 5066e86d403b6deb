"""``libneuronxla``: the compiler, which only wraps the graph here, its file cache, and its command.

The cache is where the SDK's would be: the folder that ``--cache_dir`` of ``NEURON_CC_FLAGS`` or
``NEURON_COMPILE_CACHE_URL`` names, with one folder per compiler version and in it one per graph and flags. If neither
is set, it is a temporary folder, deleted with the session.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from neuronmm.emulator.nki.modules import COMPILER
from neuronmm.emulator.runtime import neuronx_cc

session_cache: list[str] = []
"""A stack of the sessions' temporary cache folders; the last one is in use."""


def module_bytes(neff: bytes) -> bytes:
    """Return the serialised HloModuleProto in a compiled program.

    Raises:
        ValueError: the program was compiled for a device.
    """
    if not neff.startswith(neuronx_cc.MAGIC):
        raise ValueError(
            "this program was compiled for a Neuron device; the emulated runtime runs only emulated programs"
        )
    return neff[len(neuronx_cc.MAGIC) :]


class CacheUrl:
    """The location of a cache."""

    def __init__(self, url: str, url_type: str = "fs") -> None:
        self.url, self.url_type = url, url_type

    @classmethod
    def get_cache_url(cls, cache_dir: str | None = None) -> CacheUrl:
        """Return ``cache_dir``, else the location that the environment sets, else the session's temporary folder."""
        flag = re.search(r"--cache_dir[= ](\S+)", os.environ.get("NEURON_CC_FLAGS", ""))
        return cls(
            cache_dir
            or (flag.group(1) if flag else "")
            or os.environ.get("NEURON_COMPILE_CACHE_URL", "")
            or session_cache[-1]
        )

    def is_s3(self) -> bool:
        """Return False: the emulated cache is a folder."""
        return False


class CompileCache:
    """A cache of compiled programs; hosts subclass it."""

    def __init__(self, cache_url: CacheUrl) -> None:
        self.cache_url = cache_url
        self.cache_path = str(Path(cache_url.url) / f"neuronxcc-{COMPILER}")

    def get_cache_dir(self, model_hash: str, compile_flags_str: str) -> tuple[str, str]:
        """Return the folder of a graph compiled with these flags, and the folder's name."""
        flags = hashlib.sha256(compile_flags_str.encode()).hexdigest()[:8]
        key = f"MODULE_{model_hash}+{flags}"
        return self.get_cache_dir_with_cache_key(key), key

    def get_cache_dir_with_cache_key(self, key: str) -> str:
        """Return the folder with that name."""
        return str(Path(self.cache_path) / key)

    def exists(self, path: str) -> bool:
        """Return whether ``path`` exists."""
        return Path(path).exists()

    def upload_string_to_file(self, cache_path: str, data: str) -> None:
        """Write a text file."""
        Path(cache_path).parent.mkdir(parents=True, exist_ok=True)
        Path(cache_path).write_text(data, encoding="utf-8")

    def download_file_to_string(self, filename: str, limit: int | None = None) -> str:
        """Read a text file."""
        return Path(filename).read_text(encoding="utf-8", errors="replace")[:limit]

    def remove(self, path: str) -> None:
        """Delete a folder."""
        shutil.rmtree(path, ignore_errors=True)

    def clean(self) -> None:
        """Delete the cache."""
        self.remove(self.cache_path)


class CompileCacheFs(CompileCache):
    """A cache in a folder."""


class CompileCacheS3(CompileCache):
    """A cache in an S3 bucket. It exists because hosts test for it; the emulator never creates one."""


def create_compile_cache(cache_url: CacheUrl) -> CompileCache:
    """Return the cache at a location."""
    return CompileCacheFs(cache_url)


def neuron_xla_compile(
    module: bytes, compiler_flags: str, input_format: str = "hlo", platform_target: str = "trn1",
    cache_key: str | None = None, retry_failed_compilation: bool = False, lazy: bool = True, use_cache: bool = True,
    cache_dir: str | None = None,
) -> bytes:  # fmt: skip
    """Compile a serialised HloModuleProto and, with ``use_cache``, store program, graph and flags in the cache.

    ``platform_target``, ``retry_failed_compilation`` and ``lazy`` have no effect.

    Raises:
        ValueError: ``input_format`` is not ``hlo``.
    """
    if input_format != "hlo":
        raise ValueError(f"input format {input_format}: the emulated compiler reads only hlo")
    neff = neuronx_cc.MAGIC + module
    if use_cache:
        key = cache_key or hashlib.sha256(module).hexdigest()[:20]
        folder = Path(CompileCacheFs(CacheUrl.get_cache_url(cache_dir)).get_cache_dir(key, compiler_flags)[0])
        if not (folder / "model.done").exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "model.hlo_module.pb").write_bytes(module)
            (folder / "compile_flags.json").write_text(json.dumps(compiler_flags.split()), encoding="utf-8")
            (folder / "model.neff").write_bytes(neff)
            (folder / "model.done").touch()
    return neff


def install_command(folder: Path) -> None:
    """Write the command ``neuronx-cc`` into ``folder`` and put the folder first on the PATH."""
    script = folder / "neuronx-cc"
    words = (sys.executable, neuronx_cc.__file__)
    script.write_text(f'#!/bin/sh\nexec {" ".join(map(shlex.quote, words))} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PATH")])])
