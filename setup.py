"""Packaging: the folders at the root install as ``neuronmm.<folder>``; the CPU core is built where a compiler is."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

ROOT = Path(__file__).parent
FOLDERS = ("measure", "engine", "models", "compression", "kernels", "emulator", "configs")

CORE = Path("kernels/cpu")
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"]
ISA_FLAGS = {
    "kernels_avx512bf16.cpp": [*AVX512, "-mavx512bf16"],
    "kernels_avx512.cpp": AVX512,
    "kernels_avx2.cpp": ["-mavx2", "-mfma"],
}
"""Sources compiled for one instruction set; which of them runs is decided at run time."""


def packages() -> tuple[list[str], dict[str, str]]:
    """Names of every package and the directory each one lives in.

    In a clone, links inside ``neuronmm`` lead to the folders, so that Python, editors and type checkers find
    ``neuronmm.engine`` and so on there. A distribution has no links: the folders are mapped to their names here.
    """
    inside = find_packages("neuronmm", exclude=[pattern for name in FOLDERS for pattern in (name, f"{name}.*")])
    names = ["neuronmm", *(f"neuronmm.{name}" for name in inside)]
    where = {"neuronmm": "neuronmm"}
    for folder in FOLDERS:
        if (ROOT / folder).is_dir():
            names += [f"neuronmm.{folder}", *(f"neuronmm.{folder}.{n}" for n in find_packages(folder))]
            where[f"neuronmm.{folder}"] = folder
    return names, where


class BuildCore(build_ext):
    """Gives each source its own flags, and leaves OpenMP out where the compiler has none (one thread then)."""

    def build_extensions(self) -> None:
        compile_one = self.compiler._compile
        x86 = platform.machine().lower() in ("x86_64", "amd64")

        def compile_with_flags(obj: str, src: str, ext: str, cc_args: Any, postargs: list[str], pp_opts: Any) -> None:
            compile_one(
                obj, src, ext, cc_args, [*postargs, *(ISA_FLAGS.get(Path(src).name, ()) if x86 else ())], pp_opts
            )

        self.compiler._compile = compile_with_flags
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CompileError, LinkError):
            ext.extra_compile_args.remove("-fopenmp")
            ext.extra_link_args.remove("-fopenmp")
            super().build_extension(ext)


core = Extension(
    "neuronmm.kernels.cpu._core",
    sources=sorted(map(str, CORE.glob("*.cpp"))),
    depends=sorted(map(str, CORE.glob("*.h"))),
    extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=fast", "-fvisibility=hidden", "-fopenmp"],
    extra_link_args=["-fopenmp"],
    optional=True,  # without a compiler the package installs all the same and runs on torch
)
names, where = packages()
setup(packages=names, package_dir=where, ext_modules=[core], cmdclass={"build_ext": BuildCore})
