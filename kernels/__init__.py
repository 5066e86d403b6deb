"""The fused low-rank ops: one signature, one fp32 reference, one implementation per target.

Importing this package imports the modules that register implementations in the dispatch table.
"""

if "." not in __name__:
    from neuronmm_checkout import stand_back

    stand_back(__name__)
else:
    from neuronmm.kernels import cpu, plain, reference  # noqa: F401 (they register implementations)
    from neuronmm.kernels.factors import Form, LowRank
    from neuronmm.kernels.low_bits import Int4, Int8, quantise, quantise_int4
    from neuronmm.kernels.ops import (
        KernelError,
        Op,
        implementations,
        low_rank_linear,
        low_rank_swiglu,
    )

__all__ = [
    "Form",
    "Int4",
    "Int8",
    "KernelError",
    "LowRank",
    "Op",
    "implementations",
    "low_rank_linear",
    "low_rank_swiglu",
    "quantise",
    "quantise_int4",
]
