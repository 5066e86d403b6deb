"""The two dialects as importable modules, inside a ``with`` block and only if the real packages are absent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from neuronmm.emulator.importable import importable, offers
from neuronmm.emulator.nki import index, language, neuronxcc_isa, neuronxcc_selection, nki_isa, stubs
from neuronmm.emulator.nki.contract import FIRST, SECOND, NKIObject
from neuronmm.emulator.nki.dtypes import NAMES
from neuronmm.emulator.nki.framework import FrameworkKernel
from neuronmm.emulator.nki.ops import OPS
from neuronmm.emulator.nki.run import jit, simulate_kernel
from neuronmm.emulator.nki.tile import Tile

COMPILER = "2.21.33363.0+emulated"
"""The compiler version the emulator reports: that of SDK 2.26.1, the last with transformers-neuronx."""
_LANGUAGE = (
    "sbuf", "psum", "hbm", "private_hbm", "shared_hbm", "tile_size", "ndarray", "zeros", "ones", "full", "load",
    "store", "copy", "matmul", "transpose", "sum", "max", "min", "prod", "mean", "softmax", "broadcast_to",
    "expand_dims", "program_id", "num_programs", "program_ndim", "affine_range", "sequential_range", "static_range",
)  # fmt: skip
DIALECTS = {FIRST: "neuronxcc.nki.isa", SECOND: "nki.isa"}
"""Dialect -> the module that has the instructions in the real package."""
_FIRST_DIALECT_ONLY = {
    "arange": index.arange,
    "mgrid": index.MGrid(),
    "par_dim": index.ParDim,
    "ndarray": language.top_level_ndarray,
    **{
        name: getattr(language, name)
        for name in (
            "loop_reduce", "load_transpose2d", "where", "empty_like", "zeros_like", "shared_constant", "static_cast",
            "shared_identity_matrix", "fp32", "nc", "spmd_dim", "rand",
        )
    },
}  # fmt: skip


def _isa(*modules: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for module in modules for name in module.__all__}


def _language(first: bool) -> dict[str, Any]:
    """Return the attributes of ``nki.language``.

    The second dialect unrolls every loop, so neither race rules nor loop scopes apply there.
    """
    names = {**NAMES, **OPS, **{n: getattr(language, n) for n in _LANGUAGE}, "ds": index.ds}
    if first:
        del names["float8_e4m3fn"]
        return {**names, **_FIRST_DIALECT_ONLY}
    loops = dict.fromkeys(("affine_range", "sequential_range"), language.static_range)
    return {**names, **loops, "NKIObject": NKIObject}


def surface(dialect: str) -> dict[str, dict[str, Any]]:
    """Return module name -> attributes of the dialect ``neuronxcc`` or ``nki``."""
    if dialect == FIRST:
        top = {
            "jit": partial(jit, dialect=FIRST),
            "trace": jit,  # no dialect: kernels of nki.trace may write their parameters
            "baremetal": partial(jit, dialect=FIRST),
            "simulate_kernel": simulate_kernel,
            "tensor": Tile,
            "FrameworkKernel": FrameworkKernel,
            "benchmark": stubs.timing_decorator("benchmark"),
            "profile": stubs.timing_decorator("profile"),
        }
        return {
            "neuronxcc": {"__version__": COMPILER},
            "neuronxcc.nki": top,
            "neuronxcc.nki.language": _language(first=True),
            "neuronxcc.nki.isa": _isa(neuronxcc_isa, neuronxcc_selection),
            "neuronxcc.nki.typing": stubs.typing(),
            "neuronxcc.nki.compiler": stubs.compiler(),
            "neuronxcc.nki.kernels": {},
            "neuronxcc.nki.kernels.attention": stubs.attention_kernels(),
        }
    return {
        "nki": {
            "jit": partial(jit, dialect=SECOND),
            "simulate": lambda kernel: lambda *a, **k: simulate_kernel(kernel, *a, **k),
        },
        "nki.language": _language(first=False),
        "nki.isa": _isa(nki_isa),
        "nki.typing": stubs.typing(),
    }


@contextmanager
def nki_modules(extra: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[None]:
    """Make ``neuronxcc.nki`` and ``nki`` importable inside the block; restore ``sys.modules`` afterwards.

    A dialect whose real package is installed stays the real one. Kernel files imported inside the block keep working
    after it. ``extra``: module name -> attributes that a host needs of the dialects besides; they replace the others.
    """
    modules: dict[str, dict[str, Any]] = {}
    for dialect, isa in DIALECTS.items():
        if not offers(isa, "nc_matmul"):
            modules.update(surface(dialect))
            for name, attributes in (extra or {}).items():
                if name.split(".")[0] == dialect:
                    modules[name] = {**modules.get(name, {}), **attributes}
    with importable(modules):
        yield
