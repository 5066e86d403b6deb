"""Low-rank modules, family tables, the patch verb, and the bridge to transformers."""

if "." not in __name__:
    from neuronmm_checkout import stand_back

    stand_back(__name__)
else:
    from neuronmm.models.errors import UserError
    from neuronmm.models.families import FAMILIES, Family, family_of
    from neuronmm.models.low_bits import Int4Linear, Int8Embedding, Int8Linear, quantise_weights
    from neuronmm.models.lowrank import LowRankLinear, LowRankSwiGLU
    from neuronmm.models.patch import fuse, patch
    from neuronmm.models.spec import CompressionSpec

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
    "patch",
    "quantise_weights",
]
