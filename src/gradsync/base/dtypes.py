"""Element types and reductions by number, as ``native/reduce/types.h`` knows them."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["DTYPE_NAMES", "DTYPE_NUMBERS", "ReduceOp"]

DTYPE_NAMES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
    "complex128",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)
"""torch's names of the types; the place in the tuple is the number."""

DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPE_NAMES)}


class ReduceOp(IntEnum):
    """How the ranks' values are combined.

    >>> ReduceOp.SUM
    <ReduceOp.SUM: 0>
    """

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
