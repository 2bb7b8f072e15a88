"""Element types and reductions by number, as ``native/reduce/types.h`` knows them."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

from gradsync.errors import UsageError

__all__ = ["DTYPE_NAMES", "DTYPE_NUMBERS", "PremulSum", "ReduceOp", "reduce_op"]

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
    "complex32",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
"""torch's names of the types; the place in the tuple is the number."""

DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPE_NAMES)}


class PremulSum(NamedTuple):
    """A sum of what each rank has multiplied by its own factor: ``ReduceOp.PREMUL_SUM(factor)``."""

    factor: Any
    """A number, or a tensor with one element."""


class ReduceOp(IntEnum):
    """How the ranks' values are combined.

    >>> ReduceOp.SUM
    <ReduceOp.SUM: 0>
    >>> ReduceOp.PREMUL_SUM(0.5)
    PremulSum(factor=0.5)
    """

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8

    def __call__(self, factor: Any) -> PremulSum:
        """Return a sum in which this rank's tensor counts ``factor`` times; of PREMUL_SUM only."""
        if self is not ReduceOp.PREMUL_SUM:
            raise UsageError(f"only PREMUL_SUM takes a factor, {self.name} was given {factor!r}")
        return PremulSum(factor)


# torch's ReduceOp wraps an enumeration of that name; ours is one.
ReduceOp.RedOpType = ReduceOp  # type: ignore[attr-defined]

reduce_op = ReduceOp
"""An old name of torch's."""
