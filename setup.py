"""Packaging: the folders at the root install as ``neuronmm.<folder>``; the C++ core is built if there is a compiler."""

from __future__ import annotations

import hashlib
import os
import platform
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

ROOT = Path(__file__).parent
FOLDERS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "neuronmm")

CORE = Path("kernels/cpu")
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"]
ISA_FLAGS = {
    "kernels_avx512bf16.cpp": [*AVX512, "-mavx512bf16", "-mavx512vnni"],
    "kernels_avx512.cpp": AVX512,
    "kernels_avx2.cpp": ["-mavx2", "-mfma"],
}
"""Sources that are compiled for one instruction set; the choice between them is made at run time."""


def packages() -> tuple[list[str], dict[str, str]]:
    """Return the names of all packages, and the directory of each.

    In a clone, links inside ``neuronmm`` lead to the folders, so that Python, editors and type checkers find
    ``neuronmm.engine`` and so on there. A distribution has no links: this function maps the folders to their names.
    """
    inside = find_packages("neuronmm", exclude=[pattern for name in FOLDERS for pattern in (name, f"{name}.*")])
    names = ["neuronmm", *(f"neuronmm.{name}" for name in inside)]
    directories = {"neuronmm": "neuronmm"}
    for folder in FOLDERS:
        names += [f"neuronmm.{folder}", *(f"neuronmm.{folder}.{n}" for n in find_packages(folder))]
        directories[f"neuronmm.{folder}"] = folder
    return names, directories


class BuildCore(build_ext):
    """Adds the flags of each source, compiles the sources side by side, and builds without OpenMP (single-threaded) if
    the compiler lacks it.
    """

    def build_extensions(self) -> None:
        compile_one, compile_all = self.compiler._compile, self.compiler.compile
        x86 = platform.machine().lower() in ("x86_64", "amd64")

        def compile_with_flags(obj: str, src: str, ext: str, cc_args: Any, postargs: list[str], pp_opts: Any) -> None:
            compile_one(
                obj, src, ext, cc_args, [*postargs, *(ISA_FLAGS.get(Path(src).name, ()) if x86 else ())], pp_opts
            )

        def compile_together(*args: Any, **kwargs: Any) -> Any:
            jobs: list[Future[None]] = []
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                self.compiler._compile = lambda *one: jobs.append(pool.submit(compile_with_flags, *one))
                objects = compile_all(*args, **kwargs)
            for job in jobs:
                job.result()  # raises the compiler's error
            return objects

        self.compiler.compile = compile_together
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CompileError, LinkError):
            ext.extra_compile_args.remove("-fopenmp")
            ext.extra_link_args.remove("-fopenmp")
            super().build_extension(ext)


def digest_of_sources() -> str:
    """Return the digest by which kernels/cpu/library.py knows a core that was built from other sources."""
    files = sorted((*CORE.glob("*.cpp"), *CORE.glob("*.h")))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


core = Extension(
    "neuronmm.kernels.cpu._core",
    sources=sorted(map(str, CORE.glob("*.cpp"))),
    depends=sorted(map(str, CORE.glob("*.h"))),
    define_macros=[("NEURONMM_SOURCES", f'"{digest_of_sources()}"')],
    extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=fast", "-fvisibility=hidden", "-fopenmp"],
    extra_link_args=["-fopenmp"],
    optional=True,  # without a compiler the package still installs and runs on torch
)
names, directories = packages()
setup(packages=names, package_dir=directories, ext_modules=[core], cmdclass={"build_ext": BuildCore})
