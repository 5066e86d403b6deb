"""Packaging: the folders at the root install as ``neuronmm.<folder>``."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
FOLDERS = ("engine", "models", "compression", "kernels", "emulator", "configs")


def packages() -> tuple[list[str], dict[str, str]]:
    """Names of every package and the directory each one lives in."""
    names = ["neuronmm", *(f"neuronmm.{name}" for name in find_packages("neuronmm"))]
    where = {"neuronmm": "neuronmm"}
    for folder in FOLDERS:
        if (ROOT / folder).is_dir():
            names += [f"neuronmm.{folder}", *(f"neuronmm.{folder}.{n}" for n in find_packages(folder))]
            where[f"neuronmm.{folder}"] = folder
    return names, where


names, where = packages()
setup(packages=names, package_dir=where)
