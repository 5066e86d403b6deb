"""NKI's element types as NumPy dtypes; the narrow floats come from ml_dtypes."""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

import ml_dtypes
import numpy as np

NAMES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "tfloat32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "bool_": np.dtype(np.bool_),
}
"""Name in ``nki.language`` -> dtype. tfloat32 is computed as float32; the first dialect has no float8_e4m3fn."""

FLOAT32 = NAMES["float32"]
E4M3FN = NAMES["float8_e4m3fn"]
BOOL = NAMES["bool_"]
_FLOATS = frozenset(d for name, d in NAMES.items() if "float" in name)


def as_dtype(value: Any) -> np.dtype:
    """Return the NumPy dtype of ``value``: a dtype, a scalar type, or a name of ``NAMES``."""
    return NAMES[value] if isinstance(value, str) and value in NAMES else np.dtype(value)


def is_float(dtype: np.dtype) -> bool:
    """Return whether ``dtype`` is one of NKI's floating-point types."""
    return dtype in _FLOATS


def promoted(*operands: Any) -> np.dtype:
    """Return the dtype of an arithmetic result by NKI's type promotion; operands are dtypes or numbers.

    The wider of two floats wins; two different floats of one width give the next wider type that contains both; a float
    wins over an integer. A Python number has the widest type of its kind: ``bfloat16 * 1.5`` is float32.
    """
    return reduce(_promoted_pair, (o if isinstance(o, np.dtype) else _scalar_dtype(o) for o in operands))


def _scalar_dtype(number: Any) -> np.dtype:
    dtype = getattr(number, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype in NAMES.values():
        return dtype
    if isinstance(number, (bool, np.bool_)):
        return NAMES["uint8"]
    return NAMES["int32"] if isinstance(number, (int, np.integer)) else FLOAT32


def _promoted_pair(a: np.dtype, b: np.dtype) -> np.dtype:
    if a == b:
        return a
    if is_float(a) != is_float(b):
        return a if is_float(a) else b
    if is_float(a):
        if a.itemsize != b.itemsize:
            return max(a, b, key=lambda d: d.itemsize)
        return NAMES["bfloat16"] if a.itemsize == 1 else FLOAT32
    wider = np.promote_types(a, b)
    return FLOAT32 if wider.itemsize > 4 else wider


def stored(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return ``values`` as an engine stores them in ``dtype``.

    A float that becomes an integer is rounded to the nearest, ties to even, and saturates (release notes of NKI 0.6);
    NaN, whose result is not documented, becomes the smallest integer, as unwritten memory is.
    """
    if dtype.kind not in "iu" or not is_float(values.dtype):
        return values.astype(dtype, copy=False)
    limits = np.iinfo(dtype)
    exact = np.rint(values.astype(np.float64))  # float32 has no 2**31 - 1
    return np.where(np.isnan(exact), limits.min, np.clip(exact, limits.min, limits.max)).astype(dtype)


@cache
def dtype_name(dtype: np.dtype) -> str:
    """Return ``dtype.name``, cached: NumPy computes it on every access."""
    return dtype.name


def unwritten(count: int, dtype: np.dtype) -> np.ndarray:
    """Return ``count`` elements of unwritten memory: NaN, the smallest integer, or False, by the kind of ``dtype``."""
    if is_float(dtype):
        return np.full(count, np.nan, dtype)
    return np.full(count, False if dtype.kind == "b" else np.iinfo(dtype).min, dtype)
