"""The rules on the dtypes of an instruction's operands, as far as the engines do not convert them.

An engine reads every dtype as float32 and rounds its result once, so most instructions accept all dtypes. The
exceptions are here. Each check raises NkiError at the kernel's line. Source: the reference of each instruction in the
SDK's documentation (2.32), whose rules SDK 2.33 (NKI 0.7) keeps as far as its documentation is public.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from neuronmm.emulator.nki.dtypes import BOOL, E4M3FN, FLOAT32, NAMES, is_float
from neuronmm.emulator.nki.machine import current
from neuronmm.emulator.nki.tile import Tile
from neuronmm.kernels.hardware import NeuronCore

_E4M3, _BF16 = NAMES["float8_e4m3"], NAMES["bfloat16"]
_WIDE_INTEGERS = frozenset((NAMES["int32"], NAMES["uint32"]))
INDICES = frozenset((NAMES["uint16"], NAMES["uint32"]))
"""The dtypes in which ``nc_find_index8`` writes positions."""
COPY_PREDICATES = frozenset((BOOL, NAMES["uint8"], NAMES["uint16"], NAMES["uint32"]))
"""The dtypes of the predicate of ``tensor_copy_predicated``; a boolean is stored as uint8."""
SELECT_PREDICATES = frozenset((BOOL, *(NAMES[name] for name in ("int8", "uint8", "int16", "uint16"))))
"""The dtypes of the predicate of ``select_reduce``."""


def check_one_of(tile: Any, allowed: frozenset[np.dtype], role: str) -> None:
    """Check the dtype of a tile; a number is accepted. ``role`` names the operand in the error."""
    if isinstance(tile, Tile) and tile.dtype not in allowed:
        names = ", ".join(sorted(dtype.name for dtype in allowed))
        current().fail("operand dtype", f"{role} has a dtype that the instruction does not take", names, tile.dtype)


def check_float(tile: Any, role: str) -> None:
    """Check that a tile has a floating-point dtype."""
    if isinstance(tile, Tile) and not is_float(tile.dtype):
        current().fail("operand dtype", f"{role} must have a floating-point dtype", "float", tile.dtype)


def check_narrow(tile: Tile, role: str) -> None:
    """Check that a tile has no 32-bit integers, which the vector engine would round to float32."""
    if tile.dtype in _WIDE_INTEGERS:
        current().fail("operand dtype", f"{role} takes no 32-bit integers", "another dtype", tile.dtype)


def check_same(dst: Tile, src: Any, what: str) -> None:
    """Check that an instruction that moves bits has one dtype on both sides; a number is accepted as source."""
    if isinstance(src, Tile) and src.dtype != dst.dtype:
        current().fail(
            "operand dtype", f"source and destination of {what} differ in dtype", dst.dtype.name, src.dtype.name
        )


def check_matmul_inputs(core: NeuronCore, stationary: np.dtype, moving: np.dtype) -> None:
    """Check the input dtypes of a matmul: floats, float32 only with float32, and the float8 formats of the core."""
    machine = current()
    for dtype in (stationary, moving):
        if not is_float(dtype):
            machine.fail("operand dtype", "the tensor engine multiplies floats only", "float", dtype.name)
    if (stationary == FLOAT32) != (moving == FLOAT32):
        machine.fail("operand dtype", "float32 multiplies only with float32", stationary.name, moving.name)
    if E4M3FN in (stationary, moving) and core.name in ("v2", "v3"):
        message = (
            f"NeuronCore-{core.name} has no float8_e4m3fn (NCC_EVRF051); up to 240 the bits are those of float8_e4m3"
        )
        machine.fail("operand dtype", message, "float8_e4m3", E4M3FN.name)
    if {stationary, moving} == {_E4M3, E4M3FN}:
        machine.fail("operand dtype", "float8_e4m3 does not multiply with float8_e4m3fn", stationary.name, moving.name)


def matmul_results(core: NeuronCore) -> tuple[np.dtype, ...]:
    """Return the dtypes in which the tensor engine writes a product: float32; from NeuronCore-v4 also bfloat16."""
    return (FLOAT32,) if core.name in ("v2", "v3") else (FLOAT32, _BF16)


def are_wide_integers(*operands: Any) -> bool:
    """Return whether all operands are tiles of 32-bit integers."""
    return all(isinstance(tile, Tile) and tile.dtype in _WIDE_INTEGERS for tile in operands)
