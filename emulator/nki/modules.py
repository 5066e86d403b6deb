"""The two dialects as importable modules, for the time of a ``with`` block and only where the real ones are absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from neuronmm.emulator.importable import importable, offers
from neuronmm.emulator.nki import index, language, neuronxcc_isa, neuronxcc_selection, nki_isa, nki_selection
from neuronmm.emulator.nki.compiler import compiler, measured
from neuronmm.emulator.nki.contract import FIRST, SECOND
from neuronmm.emulator.nki.dtypes import NAMES
from neuronmm.emulator.nki.framework import FrameworkKernel
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.ops import OPS
from neuronmm.emulator.nki.run import jit, simulate_kernel
from neuronmm.emulator.nki.tile import Tile
from neuronmm.emulator.nki.values import NKIObject

_LANGUAGE = (
    "sbuf", "psum", "hbm", "private_hbm", "shared_hbm", "tile_size", "ndarray", "zeros", "ones", "full", "load",
    "store", "copy", "matmul", "transpose", "sum", "max", "min", "prod", "mean", "softmax", "broadcast_to",
    "expand_dims", "program_id", "num_programs", "program_ndim", "affine_range", "sequential_range", "static_range",
)  # fmt: skip
DIALECTS = {"neuronxcc": "neuronxcc.nki.isa", "nki": "nki.isa"}
"""Each dialect and its module that, in the real package, has the instructions."""
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
    """``nki.language``: the second dialect unrolls every loop, so neither race rules nor loop scopes hold there."""
    names = {**NAMES, **OPS, **{n: getattr(language, n) for n in _LANGUAGE}, "ds": index.ds}
    if first:
        return {**names, **_FIRST_DIALECT_ONLY}
    loops = dict.fromkeys(("affine_range", "sequential_range"), language.static_range)
    return {**names, **loops, "NKIObject": NKIObject}


COMPILER = "2.21.33363.0+emulated"
"""What the compiler says its version is: that of SDK 2.26.1, the last with transformers-neuronx."""
_SDK_KERNELS = ("flash_fwd", "attention_isa_kernel")
"""The SDK's own kernels that hosts import before they know whether they need them."""


def _sdk_kernel(name: str) -> Callable[..., Any]:
    def kernel(*tensors: Any, **options: Any) -> None:
        current().fail("unsupported", f"the SDK's kernel {name} is not emulated: switch it off in the host")

    kernel.__name__ = name
    return kernel


class _Subscript:
    """``nki.typing.tensor[...]`` or ``mutable_tensor``: an annotation; its ``repr`` is its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"nki.typing.{self.name}"

    def __getitem__(self, key: Any) -> _Subscript:
        return self


def surface(dialect: str) -> dict[str, dict[str, Any]]:
    """Module name -> attributes, for ``neuronxcc`` or ``nki``."""
    if dialect == "neuronxcc":
        top = {
            "jit": partial(jit, dialect=FIRST),
            "trace": jit,  # its kernels may have their outputs as parameters
            "baremetal": partial(jit, dialect=FIRST), "simulate_kernel": simulate_kernel, "tensor": Tile,
            "FrameworkKernel": FrameworkKernel, "benchmark": measured("benchmark"), "profile": measured("profile"),
        }  # fmt: skip
        return {
            "neuronxcc": {"__version__": COMPILER},
            "neuronxcc.nki": top,
            "neuronxcc.nki.language": _language(first=True),
            "neuronxcc.nki.isa": _isa(neuronxcc_isa, neuronxcc_selection),
            "neuronxcc.nki.typing": {name: _Subscript(name) for name in ("tensor", "mutable_tensor")},
            **compiler("neuronxcc.nki.compiler"),
            "neuronxcc.nki.kernels": {},
            "neuronxcc.nki.kernels.attention": {name: _sdk_kernel(name) for name in _SDK_KERNELS},
        }
    return {
        "nki": {
            "jit": partial(jit, dialect=SECOND),
            "simulate": lambda kernel: lambda *a, **k: simulate_kernel(kernel, *a, **k),
        },
        "nki.language": _language(first=False),
        "nki.isa": _isa(nki_isa, nki_selection),
        "nki.typing": {name: _Subscript(name) for name in ("tensor", "mutable_tensor")},
    }


@contextmanager
def nki_modules() -> Iterator[None]:
    """Make ``neuronxcc.nki`` and ``nki`` importable inside the block; leave ``sys.modules`` as it was.

    A dialect whose real package is installed is left alone. Kernel files imported inside keep working afterwards.
    """
    absent = [d for d, isa in DIALECTS.items() if not offers(isa, "nc_matmul")]
    with importable({name: attributes for d in absent for name, attributes in surface(d).items()}):
        yield
