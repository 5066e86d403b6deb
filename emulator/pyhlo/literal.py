"""Convert constants between torch tensors and XLA literals."""

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
"""XLA's element type -> torch dtype."""


def serialize_torch(tensor: torch.Tensor) -> Any:
    """Return ``tensor`` as a LiteralProto; 16-bit floats and 8- and 16-bit integers become little-endian bytes.

    Raises:
        KeyError: XLA has no literal of the tensor's dtype.
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
    """Return the values of a LiteralProto; tuples are not supported."""
    element_type = literal.shape.element_type
    values = getattr(literal, f"{PrimitiveType.Name(element_type).lower()}s")
    dtype, dimensions = DTYPES[element_type], list(literal.shape.dimensions)
    if isinstance(values, bytes):
        flat = torch.frombuffer(bytearray(values), dtype=dtype) if values else torch.empty(0, dtype=dtype)
    else:
        flat = torch.tensor(list(values), dtype=torch.float64 if dtype.is_floating_point else torch.int64).to(dtype)
    return flat.reshape(dimensions)
