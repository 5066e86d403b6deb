"""The fused low-rank ops: one signature, one fp32 reference, one implementation per target.

The names that need torch are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if "." not in __name__:
    from neuronmm_checkout import stand_back

    stand_back(__name__)
else:
    from neuronmm.kernels.errors import KernelError
    from neuronmm.kernels.form import Form

if TYPE_CHECKING:  # for editors and type checkers; at run time __getattr__ imports them from _MODULES
    from neuronmm.kernels.factors import LowRank
    from neuronmm.kernels.fp8 import Fp8, quantise_fp8
    from neuronmm.kernels.low_bits import Int4, Int8, quantise, quantise_int4
    from neuronmm.kernels.ops import Op, implementations, low_rank_linear, low_rank_swiglu

__all__ = [
    "Form",
    "Fp8",
    "Int4",
    "Int8",
    "KernelError",
    "LowRank",
    "Op",
    "implementations",
    "low_rank_linear",
    "low_rank_swiglu",
    "quantise",
    "quantise_fp8",
    "quantise_int4",
]

_MODULES = {
    "Fp8": "fp8",
    "Int4": "low_bits",
    "Int8": "low_bits",
    "LowRank": "factors",
    "Op": "ops",
    "implementations": "ops",
    "low_rank_linear": "ops",
    "low_rank_swiglu": "ops",
    "quantise": "low_bits",
    "quantise_fp8": "fp8",
    "quantise_int4": "low_bits",
}


def __getattr__(name: str) -> Any:
    """Import a name that needs torch."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
