"""Low-rank modules, family tables, the patch verb, and the bridge to transformers.

The names that need torch are imported on first use. The verb ``patch`` is in the module of its name.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if "." not in __name__:
    from neuronmm_checkout import stand_back

    stand_back(__name__)
else:
    from neuronmm.models.errors import UserError
    from neuronmm.models.families import FAMILIES, Family, family_of
    from neuronmm.models.spec import CompressionSpec

if TYPE_CHECKING:  # for editors and type checkers; at run time __getattr__ imports them from _MODULES
    from neuronmm.models.low_bits import Int4Linear, Int8Embedding, Int8Linear, quantise_weights
    from neuronmm.models.lowrank import LowRankLinear, LowRankSwiGLU
    from neuronmm.models.patch import fuse

__all__ = [
    "FAMILIES",
    "CompressionSpec",
    "Family",
    "Int4Linear",
    "Int8Embedding",
    "Int8Linear",
    "LowRankLinear",
    "LowRankSwiGLU",
    "UserError",
    "family_of",
    "fuse",
    "quantise_weights",
]

_MODULES = {
    "Int4Linear": "low_bits",
    "Int8Embedding": "low_bits",
    "Int8Linear": "low_bits",
    "LowRankLinear": "lowrank",
    "LowRankSwiGLU": "lowrank",
    "fuse": "patch",
    "quantise_weights": "low_bits",
}


def __getattr__(name: str) -> Any:
    """Import a name that needs torch."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
