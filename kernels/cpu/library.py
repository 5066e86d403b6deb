"""The ctypes binding of the C++ core: finds the shared object, mirrors its structs and reports how it was built.

The core is loaded after torch, so that both use the same OpenMP threads.
"""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from neuronmm.kernels.factors import Form, LowRank
from neuronmm.kernels.fp8 import Fp8
from neuronmm.kernels.int4_layout import int4_shape
from neuronmm.kernels.low_bits import Int4, Int8, Weight
from neuronmm.kernels.ops import KernelError

MAX_BATCH = 8
"""Most rows of one call of a decode step; a cache may have more."""

MAX_OUTPUTS = 1 << 22
"""Most outputs of a matrix: threads share the rows of up to three matrices as numbers of 24 bits."""

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Type numbers of matrices of floats."""

INT8, INT8_X16, INT4 = 2, 3, 4
"""Type numbers of matrices of few bits. Activations of X16 and of int4 are rounded to 16 bits."""

INT4_PIVOTED = "pivoted factors in int4, which lose too much (docs/results/low_bits.md); the core takes floats or int8"

FP8_FACTORS = "factors in fp8, which are Trainium's; the core takes floats or int8"

NO_RANK = "factors of rank 0"

FORMS = {Form.TWO: 0, Form.ROWS: 1, Form.COLUMNS: 2}
"""Form numbers of the core."""

NOT_BUILT = "the C++ core is not built from these sources; install a C++17 compiler and reinstall neuronmm"


class Matrix(ctypes.Structure):
    """Mirrors ``Matrix`` in core.h: a contiguous matrix [rows, cols]."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("cols", ctypes.c_int32),
        ("type", ctypes.c_int32),
    )

    @classmethod
    def of(cls, weight: Weight, activations: torch.dtype) -> Matrix:
        """Point at ``weight`` [rows, cols] and, for few bits, at its row scales. The caller keeps both alive.

        ``activations`` is the dtype of the model or op. In bfloat16 an int8 matrix multiplies activations of 16 bits,
        whose error is smaller than that of bfloat16; in float32 it multiplies them as they are.
        """
        if isinstance(weight, Tensor):
            return cls(weight.data_ptr(), None, *weight.shape, TYPES[weight.dtype])
        assert not isinstance(weight, Fp8)  # malformed() refuses it
        number = INT4 if isinstance(weight, Int4) else INT8_X16 if activations == torch.bfloat16 else INT8
        return cls(weight.values.data_ptr(), weight.scales.data_ptr(), *weight.shape, number)


def malformed(weight: Weight) -> str | None:
    """Return what the core does not take in a weight; None if it takes it."""
    if len(weight.shape) == 2 and weight.shape[0] > MAX_OUTPUTS:
        return f"{weight.shape[0]} outputs are more than {MAX_OUTPUTS}"
    if isinstance(weight, Tensor):
        taken = weight.ndim == 2 and weight.dtype in TYPES
        return None if taken else f"{list(weight.shape)} of {weight.dtype} is not a matrix of float32 or bfloat16"
    if isinstance(weight, Fp8):
        return FP8_FACTORS
    rows, columns = len(weight.scales), weight.shape[-1]
    if isinstance(weight, Int8):
        shape, dtype = (rows, columns), torch.int8
    else:
        shape, dtype = int4_shape(rows, columns), torch.uint8
    if weight.values.shape != shape or weight.values.dtype != dtype:
        return f"{list(weight.values.shape)} of {weight.values.dtype} where {list(shape)} of {dtype} belongs"
    if weight.scales.shape != (rows,) or weight.scales.dtype != torch.float32:
        return f"scales {list(weight.scales.shape)} of {weight.scales.dtype} where float32 [{rows}] belongs"
    return None


def pivoted_int4(factors: LowRank) -> bool:
    """Return whether a factor in a pivoted form is int4."""
    return factors.form is not Form.TWO and any(isinstance(factor, Int4) for factor in factors[:2])


class Linear(ctypes.Structure):
    """Mirrors ``Linear`` in core.h: ``a x + bias``, or a factorised linear where b is set."""

    _fields_ = (
        *(("a", Matrix), ("b", Matrix), ("bias", ctypes.c_void_p)),
        *(("pivots", ctypes.c_void_p), ("first", ctypes.c_int32), ("form", ctypes.c_int32)),
    )

    @classmethod
    def of(cls, factors: LowRank, bias: int | None, activations: torch.dtype) -> Linear:
        """Describe a factorised linear whose shapes fit. ``bias`` is the address of its bias in float32.

        ``activations`` is the dtype of the model or op.

        The caller keeps all tensors alive.

        Raises:
            KernelError: the pivots are not strictly increasing outputs of the linear, pivoted factors are int4, or the
                factors are fp8 or have rank 0.
        """
        if not factors.rank:
            raise KernelError(NO_RANK)
        if pivoted_int4(factors):
            raise KernelError(INT4_PIVOTED)
        if isinstance(factors.A, Fp8) or isinstance(factors.B, Fp8):
            raise KernelError(FP8_FACTORS)
        linear = cls(*(Matrix.of(m, activations) for m in factors[:2]), bias, form=FORMS[factors.form])
        if factors.form is Form.ROWS:
            if isinstance(factors.pivots, Tensor):
                linear.pivots = factors.pivots.data_ptr()
            else:
                linear.first = factors.pivots
            if not require().neuronmm_pivots_fit(ctypes.byref(linear)):
                raise KernelError(f"the pivots have to be strictly increasing, in [0, {factors.out_features})")
        return linear


class Layer(ctypes.Structure):
    """Mirrors ``Layer`` in core.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, Linear) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
    )


class Model(ctypes.Structure):
    """Mirrors ``Model`` in core.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        *((name, ctypes.c_int32) for name in ("batch", "max_len", "cache_type")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        ("embedding", Matrix),
        ("head", Linear),
        *((name, ctypes.c_void_p) for name in ("final_norm", "cos", "sin")),
        ("layer", ctypes.POINTER(Layer)),
    )


@cache
def core() -> ctypes.CDLL | None:
    """Return the loaded core, or None if it was not built, cannot be loaded or does not match this module."""
    for suffix in EXTENSION_SUFFIXES:  # a build for another Python may lie beside this one's
        try:
            library = ctypes.CDLL(str(Path(__file__).parent / f"_core{suffix}"))
        except OSError:
            continue
        if _matches(library):
            library.neuronmm_isa.restype = ctypes.c_char_p
            return library
    return None


def _matches(library: ctypes.CDLL) -> bool:
    """Return whether the core was built from the sources beside this module, with its types and sizes of structs."""
    structs = (Matrix, Linear, Layer, Model)
    sizes = (ctypes.c_int64 * len(structs))()
    try:
        library.neuronmm_struct_sizes(sizes)
        library.neuronmm_sources.restype = ctypes.c_char_p
        sources, types = library.neuronmm_sources().decode(), library.neuronmm_types()
    except AttributeError:  # built before the function existed
        return False
    right = types == INT4 + 1 and list(sizes) == [ctypes.sizeof(struct) for struct in structs]
    return right and _digest_of_sources() in (sources, None)


def _digest_of_sources() -> str | None:
    """Return the digest of the sources beside this module, as setup.py computes it; None where there are none."""
    folder = Path(__file__).parent
    files = sorted((*folder.glob("*.cpp"), *folder.glob("*.h")))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else None


def require() -> ctypes.CDLL:
    """Return the loaded core.

    Raises:
        RuntimeError: it is not built.
    """
    library = core()
    if library is None:
        raise RuntimeError(NOT_BUILT)
    return library


def isa() -> str | None:
    """Return the instruction set in use: ``avx512bf16``, ``avx512``, ``avx2`` or ``portable``; None without the core.

    On Intel's cores the first is ``avx512bf16+amx``, with prompts in the matrix unit, or, where there is none,
    ``avx512bf16+fp32``, with prompts in fp32.
    """
    library = core()
    return None if library is None else library.neuronmm_isa().decode()


def set_isa(name: str | None) -> bool:
    """Use the instruction set ``name`` from now on; None selects the best. Return False if the processor lacks it."""
    return require().neuronmm_set_isa(None if name is None else name.encode()) == 0
