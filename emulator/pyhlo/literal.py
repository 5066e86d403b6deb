"""Constants: torch tensors as XLA literals, and back."""

from __future__ import annotations

from typing import Any

import torch

from neuronmm.emulator.pyhlo.messages import LiteralProto, PrimitiveType

DTYPES = {
    PrimitiveType.PRED: torch.bool,
    PrimitiveType.S8: torch.int8,
    PrimitiveType.S16: torch.int16,
    PrimitiveType.S32: torch.int32,
    PrimitiveType.S64: torch.int64,
    PrimitiveType.U8: torch.uint8,
    PrimitiveType.U16: torch.uint16,
    PrimitiveType.U32: torch.uint32,
    PrimitiveType.U64: torch.uint64,
    PrimitiveType.F16: torch.float16,
    PrimitiveType.F32: torch.float32,
    PrimitiveType.F64: torch.float64,
    PrimitiveType.BF16: torch.bfloat16,
}
"""XLA's element type -> the torch dtype of the same values."""


def serialize_torch(tensor: torch.Tensor) -> Any:
    """``tensor`` as a LiteralProto; half-width floats and 8- and 16-bit integers as little-endian bytes.

    Raises:
        KeyError: a dtype that XLA has no literal of.
    """
    element_type = {dtype: number for number, dtype in DTYPES.items()}[tensor.dtype]
    literal = LiteralProto()
    literal.shape.element_type = element_type
    literal.shape.dimensions.extend(tensor.shape)
    literal.shape.layout.minor_to_major.extend(reversed(range(tensor.ndim)))
    field = f"{PrimitiveType.Name(element_type).lower()}s"
    flat = tensor.contiguous().flatten()
    if isinstance(getattr(literal, field), bytes):
        setattr(literal, field, flat.view(torch.uint8).numpy().tobytes())
    else:
        getattr(literal, field).extend(flat.tolist())
    return literal


def tensor_of(literal: Any) -> torch.Tensor:
    """The values of a LiteralProto (not a tuple)."""
    element_type = literal.shape.element_type
    values = getattr(literal, f"{PrimitiveType.Name(element_type).lower()}s")
    dtype, dimensions = DTYPES[element_type], list(literal.shape.dimensions)
    if isinstance(values, bytes):
        flat = torch.frombuffer(bytearray(values), dtype=dtype) if values else torch.empty(0, dtype=dtype)
    else:
        flat = torch.tensor(list(values), dtype=torch.float64 if dtype.is_floating_point else torch.int64).to(dtype)
    return flat.reshape(dimensions)
