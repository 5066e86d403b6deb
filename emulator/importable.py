"""Modules that exist for the time of a ``with`` block."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def offers(module: str, attribute: str) -> bool:
    """Whether a module is here and is more than a stub: the SDK's names on the package index refuse to import.

    What was imported to find out that it is not stays out of ``sys.modules``.
    """
    before = dict(sys.modules)
    try:
        found = hasattr(importlib.import_module(module), attribute)
    except Exception:
        found = False
    if not found:
        remove({module.split(".")[0]})
        sys.modules.update({n: m for n, m in before.items() if n.split(".")[0] == module.split(".")[0]})
    return found


@contextmanager
def importable(surface: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Put modules of the given attributes in place of whatever has their top-level names; put that back afterwards."""
    roots = {name.split(".")[0] for name in surface}
    made: dict[str, ModuleType] = {}
    for name, attributes in surface.items():
        made[name] = ModuleType(name, "Emulated.")
        made[name].__spec__ = ModuleSpec(name, None, is_package=True)
        made[name].__dict__.update(attributes, __path__=[])
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    before = remove(roots)
    sys.modules.update(made)
    try:
        yield
    finally:
        remove(roots)
        sys.modules.update(before)


def remove(packages: Collection[str]) -> dict[str, ModuleType]:
    """Take packages, by dotted name, and all below them out of ``sys.modules``; what was taken."""
    below = tuple(f"{package}." for package in packages)
    taken = {n: sys.modules.pop(n) for n in list(sys.modules) if n in packages or n.startswith(below)}
    for package in packages:
        parent, _, child = package.rpartition(".")
        if parent in sys.modules:
            sys.modules[parent].__dict__.pop(child, None)
    return taken
