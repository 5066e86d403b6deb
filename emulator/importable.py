"""Install modules in ``sys.modules`` for the duration of a ``with`` block."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def offers(module: str, attribute: str) -> bool:
    """Return whether ``module`` can be imported and has ``attribute``.

    The package index has stubs under the SDK's names; importing one raises. If the answer is False, ``sys.modules`` is
    left as it was: the packages that the attempt imported are removed.
    """
    root = module.split(".")[0]
    before = dict(sys.modules)
    try:
        offered = hasattr(importlib.import_module(module), attribute)
    except Exception:
        offered = False
    if not offered:
        remove({root})
        sys.modules.update({name: value for name, value in before.items() if name.split(".")[0] == root})
    return offered


@contextmanager
def importable(surface: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Make modules importable inside the block; restore ``sys.modules`` afterwards.

    Args:
        surface: dotted module name -> attributes. All existing modules below the same top-level names are hidden.
    """
    roots = {name.split(".")[0] for name in surface}
    modules: dict[str, ModuleType] = {}
    for name, attributes in surface.items():
        modules[name] = ModuleType(name, "Emulated.")
        modules[name].__spec__ = ModuleSpec(name, None, is_package=True)
        modules[name].__dict__.update(attributes, __path__=[])
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    hidden = remove(roots)
    sys.modules.update(modules)
    try:
        yield
    finally:
        remove(roots)
        sys.modules.update(hidden)


def remove(packages: Collection[str]) -> dict[str, ModuleType]:
    """Remove packages, by dotted name, and their submodules from ``sys.modules``; return them by name."""
    prefixes = tuple(f"{package}." for package in packages)
    names = [name for name in sys.modules if name in packages or name.startswith(prefixes)]
    removed = {name: sys.modules.pop(name) for name in names}
    for package in packages:
        parent, _, child = package.rpartition(".")
        if parent in sys.modules:
            sys.modules[parent].__dict__.pop(child, None)
    return removed
